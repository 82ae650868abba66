# SPDX-License-Identifier: Apache-2.0
"""`lora-suite lint`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import click

from lora_suite.cli.common import FINDINGS


@click.command(short_help="Find what is wrong in suites without running them.")
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print findings as JSON.")
def lint(paths: tuple[Path, ...], as_json: bool) -> None:
    """Find what is wrong in recipes, drivers and suites without running them.

    PATH is a file or folder; without any, recipes/, scripts/ and suites/ here.
    Exit: 0 nothing found, 1 findings, 2 unreadable input.

    \b
    Example:
      lora-suite lint suites/smoke.yaml
    """
    from lora_suite.plan.lint import lint as find

    findings = find(paths)
    if as_json:
        click.echo(
            json.dumps([asdict(finding) | {"file": str(finding.file)} for finding in findings], indent=1)
        )
    else:
        for finding in findings:
            click.echo(finding)
    sys.exit(FINDINGS if findings else 0)
