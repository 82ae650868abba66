# SPDX-License-Identifier: Apache-2.0
"""What the commands share: exit codes, options, how a file is written and the program left."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import click

FINDINGS = 1
USAGE_ERROR = 2
INTERRUPTED = 130

SELECT = click.option("-k", "select", metavar="EXPR", help="Only cases and pairs whose name matches EXPR.")
RESULTS = click.option(
    "--results",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("results"),
    show_default=True,
    help="Folder for results.",
)


class Minutes(click.ParamType):
    """A time as people write it, `90s`, `20m` or `1.5h`, in minutes."""

    name = "time"
    _UNITS: ClassVar[dict[str, float]] = {"s": 1 / 60, "m": 1.0, "h": 60.0}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return minutes; fails for what is no time above 0."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", str(value))
        minutes = float(match[1]) * self._UNITS[match[2]] if match else 0.0
        if minutes <= 0.0:
            self.fail(f"{value!r} is no time above 0, as 90s, 20m or 1.5h", param, ctx)
        return minutes


BUDGET = click.option(
    "--budget", type=Minutes(), metavar="TIME", help="Repeat pairs until they are decided or this is over."
)
PROFILE = click.option(
    "--profile", is_flag=True, help="Repeat the last step under torch's profiler, for `explain`."
)
PROFILING = "logger.profile_steps=3"
"""The override that `--profile` stands for."""


def leave(code: int) -> NoReturn:
    """Exit with `code`, also where the reader of the output has gone and it cannot be flushed any more."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def write(path: Path, text: str) -> None:
    """Write a file that was asked for; raises ConfigError."""
    from lora_suite.config.errors import ConfigError

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
