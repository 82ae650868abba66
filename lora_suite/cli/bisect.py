# SPDX-License-Identifier: Apache-2.0
"""`lora-suite bisect`."""

from __future__ import annotations

from pathlib import Path

import click

from lora_suite.cli.common import RESULTS, SELECT, leave, minutes


@click.command(short_help="Find the commit from which on an arm is slower.")
@click.argument("suite", type=click.Path(path_type=Path))
@click.option("--good", required=True, metavar="COMMIT", help="A commit whose arm was fast.")
@click.option("--bad", required=True, metavar="COMMIT", help="A later one whose arm is slow.")
@SELECT
@click.option("--budget", type=minutes, metavar="TIME", help="Begin no probe after this time.")
@RESULTS
def bisect(suite: Path, good: str, bad: str, select: str | None, budget: float | None, results: Path) -> None:
    """Find the commit from which on an arm of a pair of SUITE is slower.

    The arm is the first one that the pair's first ratio check names. Each commit's arm is paired with the
    good commit's on this machine, interleaved, until the noise lets it be told. Commits that don't run are
    skipped. The working tree stays as it is.

    \b
    Exit: 0 the first bad commit is found, 5 it cannot be told, 2 wrong input, 130 interrupted.

    \b
    Example:
      lora-suite bisect suites/llama_1b_1n1g.yaml -k fsdp2 --good v0.1.0 --bad HEAD --budget 2h
    """
    from lora_suite.campaign.search import BisectRequest, run_bisect

    leave(run_bisect(BisectRequest(suite, good, bad, select, budget, results)))
