# SPDX-License-Identifier: Apache-2.0
"""`lora-suite cancel`."""

from __future__ import annotations

from pathlib import Path

import click

from lora_suite.cli.common import leave


@click.command(short_help="End the jobs that a suite run submitted.")
@click.argument("results", type=click.Path(path_type=Path))
def cancel(results: Path) -> None:
    """End the jobs that `run --launcher slurm` submitted from RESULTS, and no others.

    \b
    Example:
      lora-suite cancel results/nano_v3_2n8g/20260703-020000-4be1f2
    """
    from lora_suite.campaign.jobs import follow

    leave(follow.cancel(results))
