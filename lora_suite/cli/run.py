# SPDX-License-Identifier: Apache-2.0
"""`lora-suite run`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from lora_suite.cli.common import BUDGET, PROFILE, PROFILING, RESULTS, SELECT, SITE, TIERS, leave


@click.command(short_help="Run a suite, judge it, print and store the verdict.")
@click.argument("suite", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[OVERRIDE]...")
@SELECT
@TIERS
@click.option("--plan", "plan_only", is_flag=True, help="Print what would run and its cost; run nothing.")
@click.option("--repeats", type=click.IntRange(min=1), help="Runs of every arm, in place of the suite's.")
@BUDGET
@RESULTS
@click.option("--keep", is_flag=True, help="Keep checkpoints of runs that passed.")
@click.option(
    "--slots",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Runs of cases outside pairs that may be under way at once, each on GPUs of its own.",
)
@PROFILE
@click.option(
    "--history",
    type=click.Path(dir_okay=False, path_type=Path),
    envvar="LORA_SUITE_HISTORY",
    help="Store to record to, made if need be. Without it .lora-suite/history.db, where that exists.",
)
@click.option(
    "--arm", "arms", metavar="NAME:KEY=VALUE", multiple=True, help="Override one arm. May be repeated."
)
@click.option(
    "--launcher",
    type=click.Choice(["local", "slurm"]),
    help="What runs it, in place of what the suite says: this machine, or jobs of a Slurm cluster.",
)
@SITE
@click.option("--inside-allocation", is_flag=True, help="Run everything in the Slurm job that this is in.")
@click.option("--ref", metavar="COMMIT", help="Compare every case with itself as COMMIT has it.")
@click.option(
    "--rerun-failed",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="RESULTS",
    help="Only what did not pass in an earlier run's folder.",
)
def run(
    suite: Path,
    overrides: tuple[str, ...],
    select: str | None,
    tiers: str | None,
    plan_only: bool,
    repeats: int | None,
    budget: float | None,
    results: Path,
    keep: bool,
    slots: int,
    profile: bool,
    history: Path | None,
    arms: tuple[str, ...],
    launcher: Literal["local", "slurm"] | None,
    site: Path | None,
    inside_allocation: bool,
    ref: str | None,
    rerun_failed: Path | None,
) -> None:
    """Run SUITE: train every case in turn, judge the runs and their pairs, print and store the verdict.

    OVERRIDE is Hydra's (key=value, +new=value, ~key) and goes to every case.

    \b
    Exit: 0 all passed, 1 a check or pair failed, 2 wrong input (nothing ran),
    3 a run broke, 4 incomplete, 5 inconclusive or not comparable, 130 interrupted.

    \b
    Examples:
      lora-suite run suites/smoke.yaml
      lora-suite run suites/llama_8b_1n8g.yaml --plan
      lora-suite run suites/llama_1b_1n1g.yaml --budget 20m
      lora-suite run suites/nano_v3_2n8g.yaml --launcher slurm
      lora-suite run suites/smoke.yaml -k fsdp2 --arm lora:debug.faults.slow_step=3.0
    """
    from lora_suite.campaign.request import Request
    from lora_suite.campaign.run import run_suite

    request = Request(
        suite=suite,
        overrides=(*overrides, PROFILING) if profile else overrides,
        arm_overrides=arms,
        select=select,
        tiers=tiers,
        repeats=repeats,
        results=results,
        keep=keep,
        slots=slots,
        budget_minutes=budget,
        history=history,
        launcher=launcher,
        site=site,
        inside_allocation=inside_allocation,
        ref=ref,
        rerun_failed=rerun_failed,
    )
    if plan_only:
        from lora_suite.campaign.preview import preview

        leave(preview(request))
    leave(run_suite(request))
