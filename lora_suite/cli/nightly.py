# SPDX-License-Identifier: Apache-2.0
"""`lora-suite nightly`."""

from __future__ import annotations

from pathlib import Path

import click

from lora_suite.cli.common import leave


@click.command(short_help="Run several suites within a window and GPU-hours.")
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--plan", "plan_only", is_flag=True, help="Print what would run and its cost; run nothing.")
def nightly(config: Path, plan_only: bool) -> None:
    """Run the suites of CONFIG in order, within its window and its GPU-hours; sum the night up.

    The results, `summary.md` and `night.json` go into a folder of this night. The exit code is the worst of
    its suites': 130, 2, 3, 4, 1, 5, 0. What the window or the cap left no room for is missing: 4.

    \b
    Examples:
      lora-suite nightly nightly/nightly.yaml --plan
      lora-suite nightly nightly/nightly.yaml
    """
    from lora_suite.campaign.conclude import PatientConsole
    from lora_suite.campaign.nightly import preview_night, run_night

    leave(preview_night(config, PatientConsole()) if plan_only else run_night(config))
