# SPDX-License-Identifier: Apache-2.0
"""`lora-suite audit`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from lora_suite.cli.common import FINDINGS, leave, write


@click.command(short_help="Find what lets a regression pass in other repositories.")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--baseline",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Findings recorded there are known: only new ones are shown and count.",
)
@click.option(
    "--write-baseline",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Record today's findings there, and exit with 0.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the audit as JSON.")
@click.option(
    "--markdown",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write every finding as Markdown, too.",
)
def audit(
    directory: Path, baseline: Path | None, write_baseline: Path | None, as_json: bool, markdown: Path | None
) -> None:
    """Find what lets a regression pass in the scripts and recipes of another repository. Nothing is run.

    DIRECTORY is a repository in the shape of NeMo-RL, with tests/test_suites/ and examples/configs/recipes/,
    or any folder of such scripts.
    Exit: 0 nothing (new) found, 1 findings, 2 unreadable input.

    \b
    Example:
      lora-suite audit ../RL --write-baseline audit.json
      lora-suite audit ../RL --baseline audit.json --markdown audit.md
    """
    from lora_suite.plan.audit import audit as look
    from lora_suite.plan.audit import baseline as known
    from lora_suite.report import audit as shown

    report = look(directory)
    compared = known.compare(baseline, report.findings) if baseline else known.Compared(report.findings, 0, 0)
    if as_json:
        click.echo(json.dumps(shown.as_json(report, compared), indent=1))
    else:
        for line in shown.text_lines(report, compared):
            click.echo(line)
    if markdown is not None:
        write(markdown, shown.markdown(report, compared))
    if write_baseline is not None:
        known.write_baseline(write_baseline, report.findings)
    leave(FINDINGS if compared.new and write_baseline is None else 0)
