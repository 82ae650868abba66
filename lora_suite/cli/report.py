# SPDX-License-Identifier: Apache-2.0
"""`lora-suite report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from lora_suite.cli.common import leave, write

if TYPE_CHECKING:
    from lora_suite.judge.verdict import SuiteVerdict

_NAMES = ("terminal", "html", "markdown", "junit", "github")


@click.command(short_help="Render the verdict of a suite run once more.")
@click.argument("results", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "names",
    type=click.Choice(_NAMES),
    multiple=True,
    help="Form of the report; terminal if none is named. May be repeated, with -o FOLDER.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File, or folder, to write to.")
def report(results: Path, names: tuple[str, ...], output: Path | None) -> None:
    """Render the verdict in RESULTS, the folder of one suite run, once more.

    The exit code is the verdict's, as `lora-suite run` gave it; 2 where RESULTS holds none.

    \b
    Examples:
      lora-suite report results/smoke/20261130-141227-15c08f
      lora-suite report results/smoke/20261130-141227-15c08f --format html -o report.html
      lora-suite report results/smoke/20261130-141227-15c08f --format markdown --format junit -o reports
    """
    from lora_suite.config.errors import ConfigError
    from lora_suite.history.artefacts import VERDICT, read_verdict
    from lora_suite.report.formats import FORMATS

    verdict = read_verdict(results.parent if results.name == VERDICT else results)
    chosen = tuple(dict.fromkeys(names)) or ("terminal",)
    if output is None:
        if len(chosen) > 1:
            raise ConfigError("several formats at once go into a folder: name one with -o")
        _show(chosen[0], verdict)
    else:
        into_folder = len(chosen) > 1 or output.is_dir()
        for name in chosen:
            path = _in_folder(output, FORMATS[name].file) if into_folder else output
            write(path, FORMATS[name].render(verdict))
            click.echo(str(path))
    leave(verdict.exit_code)


def _show(name: str, verdict: SuiteVerdict) -> None:
    from lora_suite.report.formats import FORMATS

    if name == "terminal":
        from rich.console import Console

        from lora_suite.report import terminal

        terminal.render(verdict, Console())
        return
    click.echo(FORMATS[name].render(verdict), nl=False)


def _in_folder(folder: Path, name: str) -> Path:
    from lora_suite.config.errors import ConfigError

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be made a folder: {error.strerror}") from error
    return folder / name
