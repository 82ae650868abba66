# SPDX-License-Identifier: Apache-2.0
"""`lora-suite selftest`."""

from __future__ import annotations

from pathlib import Path

import click

from lora_suite.cli.common import leave


@click.command(short_help="Test the verdicts themselves: false alarms, power.")
@click.option("--full", is_flag=True, help="More situations and more seeds: minutes in place of a minute.")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    envvar="LORA_SUITE_DATA",
    show_envvar=True,
    help="Folder with recorded trainings (docs/statistics.md says which); without it their rows are skipped.",
)
def selftest(full: bool, data: Path | None) -> None:
    """Test the verdicts themselves, on a CPU: false alarms, what is found, which arm is named, silent passes.

    Seeded traces and recorded trainings go through the same judge as a suite's runs, with and without changes
    planted in them.

    \b
    Exit: 0 every requirement is met (skipped ones are named), 1 one is missed, 2 wrong input.

    \b
    Examples:
      lora-suite selftest
      lora-suite selftest --full --data recordings/
    """
    from rich.console import Console

    from lora_suite.campaign.selftest.run import run_selftest

    leave(run_selftest(full, data, Console()))
