# SPDX-License-Identifier: Apache-2.0
"""`lora-suite calibrate`."""

from __future__ import annotations

from pathlib import Path

import click

from lora_suite.cli.common import RESULTS, SELECT, leave, write


@click.command(short_help="Propose limits from the noise of repeated runs.")
@click.argument("suite", type=click.Path(path_type=Path))
@click.option("--repeats", type=click.IntRange(min=3), required=True, help="Runs of every case, 5 or more.")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File for the patch; else it is printed.",
)
@SELECT
@RESULTS
def calibrate(suite: Path, repeats: int, output: Path | None, select: str | None, results: Path) -> None:
    """Run SUITE several times, and propose limits of time and memory for this machine's GPU model.

    The proposal is a patch of the drivers, for `git apply`. Nothing is proposed from runs that broke, were
    throttled or not steady.
    Exit: 0 proposed, 1 a run is wrong, 2 wrong input, 3 a run broke, 4 incomplete, 5 refused,
    130 interrupted.

    \b
    Example:
      lora-suite calibrate suites/llama_8b_1n8g.yaml --repeats 5 --output limits.diff
      git apply limits.diff
    """
    from lora_suite.campaign.calibrate import calibrate as propose
    from lora_suite.campaign.request import Request
    from lora_suite.campaign.run import run_campaign

    done = run_campaign(Request(suite=suite, select=select, repeats=repeats, results=results))
    proposal = propose(done.plan, done.verdict)
    for line in proposal.lines:
        click.echo(line)
    for refusal in proposal.refusals:
        click.echo(f"refused: {refusal}", err=True)
    patch = "".join(proposal.patches)
    if output is None:
        click.echo(patch, nl=False)
    elif patch:
        write(output, patch)
        click.echo(f"{output}: apply it with `git apply`")
    leave(proposal.exit_code)
