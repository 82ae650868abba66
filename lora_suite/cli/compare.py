# SPDX-License-Identifier: Apache-2.0
"""`lora-suite compare`."""

from __future__ import annotations

from pathlib import Path

import click

from lora_suite.cli.common import leave

_FOLDER = click.Path(path_type=Path)


@click.command(short_help="Hold one run, or run of a suite, against another.")
@click.argument("left", type=_FOLDER)
@click.argument("right", type=_FOLDER)
@click.option("--lenient", is_flag=True, help="Compare although recipe or strict environment differ.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def compare(left: Path, right: Path, lenient: bool, as_json: bool) -> None:
    """Hold RIGHT against LEFT: step time, memory and loss of each case, and which arm of each pair moved.

    LEFT and RIGHT are folders of runs, or of runs of a suite.

    \b
    Exit: 0 nothing is worse, 1 something is, 2 wrong input, 4 a case was not measured,
    5 not comparable, or too few repeats to tell.

    \b
    Examples:
      lora-suite compare results/smoke/LAST_NIGHT results/smoke/TONIGHT
      lora-suite compare before/sft-tiny-llama-1n2c-fsdp2/1 after/sft-tiny-llama-1n2c-fsdp2/1 --lenient
    """
    from lora_suite.campaign.compare import compare_paths

    found = compare_paths(left, right, lenient=lenient)
    if as_json:
        click.echo(found.model_dump_json(indent=1))
    else:
        from rich.console import Console

        from lora_suite.report.compare import render

        render(found, Console())
    leave(found.exit_code)
