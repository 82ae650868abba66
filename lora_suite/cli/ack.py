# SPDX-License-Identifier: Apache-2.0
"""`lora-suite ack`."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import get_args

import click

from lora_suite.cli.history import DATABASE, who

_LABELS = ("real", "noise", "expected")


@click.command(short_help="Answer open alerts: real, expected or noise.")
@click.argument("targets", nargs=-1, required=True, metavar="CASE[:METRIC]...")
@click.option("--label", type=click.Choice(_LABELS), required=True, help="What the alert was.")
@click.option("--until", type=click.DateTime(["%Y-%m-%d"]), help="Last day on which this counts.")
@click.option("--note", default="", help="Why, for those who come later.")
@DATABASE
def ack(targets: tuple[str, ...], label: str, until: datetime | None, note: str, db: Path) -> None:
    """Answer the open alerts of cases: real (known, to be fixed), expected (meant), or noise.

    Real and expected begin a new level at the first bad run. Noise counts as a false alarm. A real one needs
    --until: when that day is over, the alert is back.

    \b
    Examples:
      lora-suite ack sft-tiny-llama-1n2c-fsdp2-lora --label real --until 2026-12-24 --note "issue 12"
      lora-suite ack fsdp2 --label noise
    """
    from lora_suite.config.errors import ConfigError
    from lora_suite.history.answers import Answer, acknowledge, false_alarms
    from lora_suite.history.facts import Label
    from lora_suite.history.store import Store

    chosen: Label = next(each for each in get_args(Label) if each == label)
    if chosen == "real" and until is None:
        raise ConfigError(
            "--label real needs --until: a known regression that is never looked at again is hidden"
        )
    answer = Answer(chosen, note, who(), until.date() if until else None)
    with Store(db) as store:
        for target in targets:
            for each in acknowledge(store, target, answer):
                click.echo(f"{each.case} {each.metric}: {label}, from {each.started} on")
        click.echo(str(false_alarms(store.all_acks())))
