# SPDX-License-Identifier: Apache-2.0
"""`lora-suite selftest`: measure what the verdicts are worth, print it, and say whether it is enough."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lora_suite.campaign.selftest.damaged import silent_pass_row
from lora_suite.campaign.selftest.nights import night_rows
from lora_suite.campaign.selftest.pairs import pair_rows
from lora_suite.campaign.selftest.recorded import recorded_rows
from lora_suite.campaign.selftest.references import reference_rows
from lora_suite.campaign.selftest.row import Row
from lora_suite.judge.verdict import EXIT_CODES

_STATES = {True: ("yes", "green"), False: ("NO", "bold red"), None: ("skipped", "yellow")}


def run_selftest(full: bool, data: Path | None, console: Console) -> int:
    """Measure everything, print the table, and return the exit code: 1 where a requirement is missed.

    full: more situations and more seeds. data: folder with recordings; without it their rows are skipped,
    with the reason. Raises ConfigError for recordings that cannot be read.
    """
    parts: Sequence[tuple[str, Callable[[], list[Row]]]] = (
        ("recorded trainings", lambda: recorded_rows(data)),
        ("pairs", lambda: pair_rows(full)),
        ("references", lambda: reference_rows(full)),
        ("nights", lambda: night_rows(full, data)),
        ("damaged input", lambda: [silent_pass_row()]),
    )
    began = time.monotonic()
    rows: list[Row] = []
    with console.status("") as status:
        for number, (name, make) in enumerate(parts, 1):
            status.update(f"{name} ({number} of {len(parts)})")
            rows += make()
    console.print(table_of(rows))
    missed = [row for row in rows if row.ok is False]
    skipped = [row for row in rows if row.ok is None]
    met = len(rows) - len(missed) - len(skipped)
    summary = f"{met} of {len(rows)} requirements met, {len(missed)} missed, {len(skipped)} skipped"
    console.print(Text(f"{summary} ({time.monotonic() - began:.0f} s)"), soft_wrap=True)
    return EXIT_CODES["FAIL"] if missed else EXIT_CODES["PASS"]


def table_of(rows: Sequence[Row]) -> Table:
    """The rows as people read them."""
    table = Table(title="What the verdicts are worth", title_justify="left", expand=True, show_lines=True)
    table.add_column("what", ratio=1)
    table.add_column("required", max_width=22)
    table.add_column("measured", no_wrap=True)
    table.add_column("met", no_wrap=True)
    for row in rows:
        word, style = _STATES[row.ok]
        what = Text(row.what).append(f"\n{row.notes}" if row.notes else "", style="dim")
        table.add_row(what, Text(row.required), Text(row.measured), Text(word, style=style))
    return table
