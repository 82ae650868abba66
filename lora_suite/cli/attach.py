# SPDX-License-Identifier: Apache-2.0
"""`lora-suite attach`."""

from __future__ import annotations

from pathlib import Path

import click

from lora_suite.cli.common import leave


@click.command(short_help="Follow the jobs of a suite run again, and judge.")
@click.argument("results", type=click.Path(path_type=Path))
def attach(results: Path) -> None:
    """Follow the jobs of RESULTS again, after `run --launcher slurm` was ended, and judge.

    Jobs that were not submitted yet are. Where it is judged already, the verdict is printed.

    \b
    Exit: as lora-suite run.

    \b
    Example:
      lora-suite attach results/nano_v3_2n8g/20260703-020000-4be1f2
    """
    from lora_suite.campaign.jobs import follow

    leave(follow.attach(results))
