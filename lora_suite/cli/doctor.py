# SPDX-License-Identifier: Apache-2.0
"""`lora-suite doctor`."""

from __future__ import annotations

from pathlib import Path

import click

from lora_suite.cli.common import RESULTS, leave


@click.command(short_help="Say which effect this machine can tell from its noise.")
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    default=2.0,
    show_default=True,
    help="Time to take, at least that of five runs.",
)
@RESULTS
def doctor(minutes: float, results: Path) -> None:
    """Say which effect this machine can tell from its own noise, and whether timing gates make sense on it.

    Runs one small case of the starter set against itself, and prints versions and the health of the machine.

    \b
    Exit: 0 timing gates make sense, 5 they don't, 3 a run broke, 130 interrupted.

    \b
    Example:
      lora-suite doctor --minutes 5
    """
    from lora_suite.campaign.doctor import doctor as examine

    leave(examine(minutes, results))
