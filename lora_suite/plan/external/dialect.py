# SPDX-License-Identifier: Apache-2.0
"""Dialects: how a trainer's metrics are read and named, each a small YAML file.

description: what it is for
format: common            # common, auto, tensorboard, jsonl, trainer-state or megatron-golden
step_key: null            # jsonl: the key of the step, where it has no usual name
trainer: null             # what the trainer is called when arms are compared
reader: null              # a function of this package that reads the trainer's own files while planning
names:                    # our name: theirs, in order of preference; the original stays as well
  validation/loss: [validation/val_loss]
derive:                   # our name: a series less others, at the steps of the first
  timing/train/step_time: {of: timing/train/total_step_time, less: [timing/train/checkpointing]}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lora_suite.config.errors import ConfigError
from lora_suite.config.nearest import nearest
from lora_suite.config.yaml_source import read_yaml

FOLDER = Path(__file__).parent / "dialects"
Series = Mapping[str, float | None]


class _Part(BaseModel):
    """Strict, closed to unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Difference(_Part):
    """A series less others. A step that one of the others lacks counts as 0 there."""

    of: str
    less: tuple[str, ...] = ()


class Dialect(_Part):
    """One dialect, as its file says it."""

    name: str
    description: str
    format: Literal["common", "auto", "tensorboard", "jsonl", "trainer-state", "megatron-golden"]
    step_key: str | None = None
    trainer: str | None = None
    reader: Literal["nemo-rl"] | None = None
    names: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    derive: dict[str, Difference] = Field(default_factory=dict)

    def translated(self, metrics: Mapping[str, Series]) -> dict[str, dict[str, float | None]]:
        """Metrics with our names and derived series added; what is there under a name of ours stays.

        A derived value is null where one that it is made of is.
        """
        made = {name: dict(series) for name, series in metrics.items()}
        for ours, theirs in self.names.items():
            found = next((name for name in theirs if name in made), None)
            if found is not None:
                made.setdefault(ours, dict(made[found]))
        for ours, difference in self.derive.items():
            if ours not in made and difference.of in made:
                made[ours] = _derived(difference, made)
        return made


def _derived(difference: Difference, metrics: Mapping[str, Series]) -> dict[str, float | None]:
    """One derived series."""
    less = [metrics[name] for name in difference.less if name in metrics]
    made: dict[str, float | None] = {}
    for step, whole in metrics[difference.of].items():
        parts = [series.get(step, 0.0) for series in less]
        known = [part for part in parts if part is not None]
        made[step] = None if whole is None or len(known) < len(parts) else whole - sum(known)
    return made


def load_dialect(name: str, suite: Path) -> Dialect:
    """Return a built-in dialect by name, or one of a file (``mine.yaml``, as seen from the suite's folder).

    Raises ConfigError naming the file and key, or the nearest name.
    """
    path = suite.parent / name if name.endswith(".yaml") else FOLDER / f"{name}.yaml"
    if not path.is_file():
        known = [file.stem for file in sorted(FOLDER.glob("*.yaml"))]
        close = nearest(name, known)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
        what = f"there is no file {path}" if name.endswith(".yaml") else f"no dialect {name!r}"
        raise ConfigError(f"{suite}: {what}; {hint}")
    source = read_yaml(path)
    try:
        return Dialect.model_validate({"name": path.stem, **source.tree})
    except ValidationError as error:
        detail: Any = error.errors()[0]
        key = ".".join(str(part) for part in detail["loc"])
        line = source.lines.get(key) or source.lines.get(str(detail["loc"][0]), 0)
        raise ConfigError(f"{path}{f':{line}' if line else ''}: {key}: {detail['msg']}") from error
