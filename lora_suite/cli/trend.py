# SPDX-License-Identifier: Apache-2.0
"""`lora-suite trend`."""

from __future__ import annotations

from pathlib import Path

import click

from lora_suite.cli.common import leave
from lora_suite.cli.history import DATABASE


@click.command(short_help="Show a case over the nights, and since when it is worse.")
@click.argument("case")
@click.option("--metric", default="", help="By default the step time, or a pair's first ratio.")
@click.option(
    "--last",
    type=click.IntRange(min=2),
    default=60,
    show_default=True,
    help="Nights to draw.",
)
@DATABASE
@click.option("--json", "as_json", is_flag=True, help="Print the nights and what was found as JSON.")
def trend(case: str, metric: str, last: int, db: Path, as_json: bool) -> None:
    """Show CASE (or a pair) over the nights, and say whether the last one is worse, and since when.

    Only nights of one recipe in one strict environment are compared.
    Exit: 0 nothing is worse, 1 worse and not acknowledged, 2 wrong input, 5 too few nights to say.

    \b
    Examples:
      lora-suite trend sft-tiny-llama-1n2c-fsdp2-lora
      lora-suite trend fsdp2 --last 30
    """
    from lora_suite.history.answers import false_alarms
    from lora_suite.history.series import load_series
    from lora_suite.history.store import Store
    from lora_suite.history.trend import judge_series
    from lora_suite.judge.verdict import EXIT_CODES

    with Store(db) as store:
        series = load_series(store, case, metric)
        found = judge_series(series, store.acks(case, series.metric))
        alarms = false_alarms(store.all_acks())
    if as_json:
        import json

        document = found.history(last).model_dump(mode="json")
        tonight = found.tonight.model_dump(mode="json") if found.tonight else None
        document |= {"state": found.state, "message": found.message, "tonight": tonight}
        document |= {"nights_judged": len(series.nights), "nights_elsewhere": len(series.elsewhere)}
        click.echo(json.dumps(document, indent=1))
    else:
        from rich.console import Console

        from lora_suite.report.trend import render

        render(found, alarms, Console(), last)
    leave(EXIT_CODES[found.state])
