# SPDX-License-Identifier: Apache-2.0
"""What the commands share: exit codes, options, how a file is written and the program left."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import NoReturn

import click

FINDINGS = 1
USAGE_ERROR = 2
INTERRUPTED = 130
_UNITS = {"s": 1 / 60, "m": 1.0, "h": 60.0}

SELECT = click.option("-k", "select", metavar="EXPR", help="Only cases and pairs whose name matches EXPR.")
TIERS = click.option(
    "-m",
    "tiers",
    metavar="TIER",
    help="Only what is due in TIER: pr, nightly or release; also `pr or nightly`.",
)
SITE = click.option(
    "--site",
    type=click.Path(dir_okay=False, path_type=Path),
    help="How jobs are submitted here. Without it ~/.config/lora-suite/site.yaml, where that exists.",
)
RESULTS = click.option(
    "--results",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("results"),
    show_default=True,
    help="Folder for results.",
)


def minutes(text: str) -> float:
    """Minutes of a time as people write it: `90s`, `20m` or `1.5h`; raises click.BadParameter."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    found = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if found <= 0.0:
        raise click.BadParameter(f"{text!r} is no time above 0, as 90s, 20m or 1.5h")
    return found


BUDGET = click.option(
    "--budget", type=minutes, metavar="TIME", help="Repeat pairs until they are decided or this is over."
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
