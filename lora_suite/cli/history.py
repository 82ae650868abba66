# SPDX-License-Identifier: Apache-2.0
"""`lora-suite history`: what the store holds, and how it gets there."""

from __future__ import annotations

import getpass
import os
from pathlib import Path

import click

from lora_suite.cli.common import leave, write

DATABASE = click.option(
    "--db",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path(".lora-suite/history.db"),
    show_default=True,
    envvar="LORA_SUITE_HISTORY",
    show_envvar=True,
    help="The store.",
)
_INCOMPLETE = 4


def who() -> str:
    """The user that asks; in a container it may have no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


@click.group(short_help="Keep suite runs in a store, for trends and priors.")
def history() -> None:
    """Keep suite runs in a store, from which trends, baselines and priors come.

    \b
    Example:
      lora-suite history import results
      lora-suite history list
    """


@history.command("import")
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@DATABASE
def import_(paths: tuple[Path, ...], db: Path) -> None:
    """Add the suite runs in PATHS: folders of results, or exports. What is there already is left alone.

    Several processes may import at once.
    Exit: 0 all read, 2 wrong input, 4 something is damaged and was left out.

    \b
    Example:
      lora-suite history import results
    """
    from lora_suite.history.exchange import import_paths
    from lora_suite.history.store import Store

    with Store(db, create=True) as store:
        done = import_paths(store, paths)
    for problem in done.problems:
        click.echo(f"not imported: {problem}", err=True)
    click.echo(f"{db}: {done.new} new, {done.known} known already, {len(done.problems)} damaged")
    leave(_INCOMPLETE if done.problems else 0)


@history.command("list")
@click.option("--last", type=click.IntRange(min=1), help="Only so many, the latest.")
@DATABASE
def list_(last: int | None, db: Path) -> None:
    """List the suite runs, oldest first.

    \b
    Example:
      lora-suite history list --last 10
    """
    from lora_suite.history.answers import false_alarms
    from lora_suite.history.store import Store

    with Store(db) as store:
        rows, alarms = store.sessions(), false_alarms(store.all_acks())
    for row in rows[-(last or len(rows)) :]:
        what = f"{row.suite}  {row.runs} runs  exit {row.exit_code}  {row.folder}"
        click.echo(f"{row.id}  {row.started}  {what}")
    click.echo(f"{len(rows)} suite runs; {alarms}")


@history.command(short_help="Show one suite run: each run's figures and its steps.")
@click.argument("session", metavar="ID")
@DATABASE
def show(session: str, db: Path) -> None:
    """Show one suite run, by its id or the beginning of it: each run's figures, and its steps as a line.

    \b
    Example:
      lora-suite history show 4f1c
    """
    from lora_suite.history.store import Store
    from lora_suite.report.history import session_lines

    with Store(db) as store:
        fact = store.session(session)
    for line in session_lines(fact):
        click.echo(line)


@history.command()
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), help="File (*.jsonl); else it is printed."
)
@DATABASE
def export(output: Path | None, db: Path) -> None:
    """Write everything as lines of JSON, which `history import` reads.

    \b
    Example:
      lora-suite history export --output history.jsonl
    """
    from lora_suite.history.exchange import export_lines
    from lora_suite.history.store import Store

    with Store(db) as store:
        lines = "".join(f"{line}\n" for line in export_lines(store))
    if output is None:
        click.echo(lines, nl=False)
    else:
        write(output, lines)


@history.command()
@click.option("--keep-days", type=click.IntRange(min=0), required=True, help="Keep steps of so many days.")
@DATABASE
def prune(keep_days: int, db: Path) -> None:
    """Drop the single steps of old runs. Figures, verdicts, baselines and acks stay, so trends do too.

    \b
    Example:
      lora-suite history prune --keep-days 90
    """
    from lora_suite.history.store import Store

    with Store(db) as store:
        gone = store.prune(keep_days)
    click.echo(f"{db}: dropped {gone} series of steps, {db.stat().st_size / 1e6:.1f} MB are left")
