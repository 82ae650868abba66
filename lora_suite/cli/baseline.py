# SPDX-License-Identifier: Apache-2.0
"""`lora-suite baseline`."""

from __future__ import annotations

from pathlib import Path

import click

from lora_suite.cli.common import leave
from lora_suite.cli.history import DATABASE, who

_RESULTS = click.argument("results", type=click.Path(path_type=Path))


@click.group(short_help="Hold suite runs against one that was given a name.")
def baseline() -> None:
    """Name a suite run as the point of reference, and hold others against it.

    \b
    Example:
      lora-suite baseline set release-1.4 results/smoke/20260301-021000-4f1c2a
      lora-suite baseline diff release-1.4 results/smoke/20260302-021000-9a0b1c
    """


@baseline.command("set")
@click.argument("name")
@_RESULTS
@click.option("--why", default="", help="Why this one, for those who come later.")
@DATABASE
def set_(name: str, results: Path, why: str, db: Path) -> None:
    """Make the suite run in RESULTS the baseline NAME. Earlier ones of that name stay in the history.

    \b
    Example:
      lora-suite baseline set release-1.4 results/smoke/20260301-021000-4f1c2a --why "as released"
    """
    from lora_suite.history.baselines import set_baseline
    from lora_suite.history.store import Store

    with Store(db, create=True) as store:
        fact = set_baseline(store, name, results, why, who())
    click.echo(f"{name}: {len(fact.session.runs)} runs of {fact.session.suite}, {fact.session.started}")


@baseline.command(short_help="Hold times and memory of a suite run against a baseline.")
@click.argument("name")
@_RESULTS
@DATABASE
def diff(name: str, results: Path, db: Path) -> None:
    """Hold step times and memory of the suite run in RESULTS against the baseline NAME.

    Exit: 0 nothing is worse, 1 something is, 2 wrong input, 4 a case is missing, 5 it cannot be told.

    \b
    Example:
      lora-suite baseline diff release-1.4 results/smoke/20260302-021000-9a0b1c
    """
    from lora_suite.history.baselines import diff_baseline
    from lora_suite.history.store import Store
    from lora_suite.judge.verdict import EXIT_CODES, worst
    from lora_suite.report.history import difference_lines

    with Store(db) as store:
        found = diff_baseline(store, name, results)
    for line in difference_lines(found):
        click.echo(line)
    leave(EXIT_CODES[worst([each.state for each in found])])
