# SPDX-License-Identifier: Apache-2.0
"""The job script: what a job asks for, and the one command that it runs."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_suite.config.errors import ConfigError
from lora_suite.launch.site import Site
from lora_suite.launch.slurm.step import SRUN_WORDS

_TEMPLATE = """\
#!/usr/bin/env bash
{% for option in options -%}
#SBATCH {{ option }}
{% endfor -%}
set -euo pipefail
{% for name, value in environment.items() -%}
export {{ name }}={{ value | quote }}
{% endfor -%}
{{ setup }}
cd {{ folder | quote }}
# The shell makes place for the command, so that Slurm's signals reach it.
exec {{ command }}
"""


@dataclass(frozen=True)
class Resources:
    """What a job asks for. processes: a node's; gpus: whether they need one each. minutes: at most."""

    nodes: int
    processes: int
    gpus: bool
    minutes: float

    @property
    def whole_minutes(self) -> int:
        """Slurm counts whole minutes."""
        return max(1, math.ceil(self.minutes))


@dataclass(frozen=True)
class JobScript:
    """One job to be submitted. log: its stdout and stderr. folder: its working directory."""

    name: str
    resources: Resources
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    folder: Path

    def render(self, site: Site) -> str:
        """The script for a site; raises ConfigError for a template of the site that cannot be rendered.

        A template sees `name`, `nodes`, `processes` (a node), `gpus` (a node, 0 without), `minutes`, `log`,
        `folder`, `account`, `partition`, `options` (those of sbatch that our own script has), `environment`,
        `setup` and `command` (quoted), and the filter `quote`.
        """
        import jinja2

        environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
        environment.filters["quote"] = lambda text: shlex.quote(str(text))
        wanted = self.resources
        try:
            text = site.template.read_text(encoding="utf-8") if site.template else _TEMPLATE
            return environment.from_string(text).render(
                name=self.name,
                nodes=wanted.nodes,
                processes=wanted.processes,
                gpus=wanted.processes if wanted.gpus else 0,
                minutes=wanted.whole_minutes,
                log=str(self.log),
                folder=str(self.folder),
                account=site.account,
                partition=site.partition,
                options=self._options(site),
                environment={**site.environment, **self.environment, SRUN_WORDS: site.srun_words},
                setup=site.setup,
                command=shlex.join(self.command),
            )
        except (OSError, jinja2.TemplateError) as error:
            raise ConfigError(f"{site.template}: cannot be rendered: {error}") from error

    def _options(self, site: Site) -> list[str]:
        wanted = self.resources
        named = {
            name: value
            for name in ("account", "partition", "qos", "constraint", "reservation")
            if (value := getattr(site, name)) is not None
        }
        size = [site.gpus.format(gpus=wanted.processes)] if wanted.gpus and site.gpus else []
        # CPU processes need a core each; with whole nodes they have them all.
        size += [] if wanted.gpus or site.exclusive else [f"--cpus-per-task={wanted.processes}"]
        return [
            f"--job-name={self.name}",
            f"--nodes={wanted.nodes}",
            "--ntasks-per-node=1",
            *size,
            f"--time={wanted.whole_minutes}",
            f"--output={self.log}",
            # A job that Slurm repeats after a fault of a node goes on in the same log.
            "--open-mode=append",
            "--requeue",
            *(f"--{name}={value}" for name, value in named.items()),
            *(["--exclusive"] if site.exclusive else []),
            *site.sbatch,
        ]
