# SPDX-License-Identifier: Apache-2.0
"""The site file: how jobs are submitted here. Recipes and suites say nothing of it, so they run anywhere."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lora_suite.config.errors import ConfigError
from lora_suite.config.nearest import nearest
from lora_suite.config.yaml_source import read_yaml

DEFAULT_PATH = Path("~/.config/lora-suite/site.yaml")

Name = Annotated[str, Field(min_length=1)]


class _Part(BaseModel):
    """Strict, closed to unknown keys."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Container(_Part):
    """A container in which trainings run, by Slurm's pyxis plugin. mounts: as ``--container-mounts``."""

    image: Name
    mounts: list[Name] = []

    def words(self) -> list[str]:
        """Options of srun."""
        mounts = [f"--container-mounts={','.join(self.mounts)}"] if self.mounts else []
        return [f"--container-image={self.image}", *mounts]


class Site(_Part):
    """What a cluster wants to know of every job.

    account, partition, qos, constraint, reservation: as Slurm calls them. exclusive: whole nodes, so that no
    other job disturbs a measurement. sbatch, srun: further options. gpus: how GPUs are asked for, with
    ``{gpus}`` for those of a node; recipes of CPU processes ask for
    none, and with an empty text nothing does. environment: variables of every
    job. setup: lines of shell before anything else (modules, an environment). container: where trainings run.
    template: a file (Jinja2) in place of the job script of ours, for a wrapper of the site's own. submit: the
    words that submit a script; they print the job's id. max_minutes: the longest job that the partition
    takes. overhead_minutes: added to what the runs of a job may take, for start and judgement. retries: how
    often a job is repeated after a fault of the machines. poll_seconds: between two looks at the queue.
    """

    account: Name | None = None
    partition: Name | None = None
    qos: Name | None = None
    constraint: Name | None = None
    reservation: Name | None = None
    exclusive: bool = True
    sbatch: list[Name] = []
    srun: list[Name] = []
    gpus: str = "--gpus-per-node={gpus}"
    environment: dict[Name, str] = {}
    setup: str = ""
    container: Container | None = None
    template: Path | None = None
    submit: list[Name] = ["sbatch", "--parsable"]
    max_minutes: Annotated[float, Field(gt=0)] | None = None
    overhead_minutes: Annotated[float, Field(ge=0)] = 5.0
    retries: Annotated[int, Field(ge=0)] = 2
    poll_seconds: Annotated[float, Field(gt=0)] = 10.0

    @property
    def srun_words(self) -> str:
        """The options of every training's step, quoted as a shell reads them."""
        return shlex.join([*(self.container.words() if self.container else ()), *self.srun])


def load_site(path: Path | None) -> Site:
    """Read a site file; None is the user's own, or without one a site that asks for nothing.

    A template's path counts from the file's folder. Raises ConfigError naming file, line and key.
    """
    found = path or DEFAULT_PATH.expanduser()
    if path is None and not found.is_file():
        return Site()
    if not found.is_file():
        raise ConfigError(f"{found}: there is no such site file; name one with --site")
    source = read_yaml(found)
    tree: dict[str, Any] = dict(source.tree)
    if isinstance(template := tree.get("template"), str):
        tree["template"] = (found.resolve().parent / template).resolve()
    try:
        site = Site.model_validate(tree)
    except ValidationError as error:
        lines = [_message(found, source.lines, each) for each in error.errors()]
        raise ConfigError("\n".join(lines)) from error
    if site.template is not None and not site.template.is_file():
        raise ConfigError(f"{found}: template: there is no {site.template}")
    return site


def _message(path: Path, lines: dict[str, int], detail: Any) -> str:
    """One line for one thing that pydantic found."""
    key = ".".join(str(part) for part in detail["loc"])
    line = lines.get(str(detail["loc"][0]) if detail["loc"] else "", 0)
    where = f"{path}:{line}" if line else f"{path}"
    if detail["type"] == "extra_forbidden":
        block = Container if len(detail["loc"]) > 1 else Site
        close = nearest(str(detail["loc"][-1]), list(block.model_fields))
        hint = f"; did you mean {close[0]}?" if close else f"; known are {', '.join(block.model_fields)}"
        return f"{where}: unknown key {key}{hint}"
    return f"{where}: {key}: {detail['msg']}"
