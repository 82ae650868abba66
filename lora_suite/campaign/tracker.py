# SPDX-License-Identifier: Apache-2.0
"""The verdict of a suite run at Weights & Biases, beside the runs that it judges."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lora_suite.judge.verdict import SuiteVerdict
from lora_suite.launch.local import tracker_group
from lora_suite.plan.model import Case, Plan
from lora_suite.report.words import outcome


def publish(plan: Plan, verdict: SuiteVerdict) -> None:
    """Give the verdict to Weights & Biases where a case of the plan is logged there; to others nothing.

    It is the summary of a run of its own, named `verdict`, in the group of the suite run: the trainings' runs
    have ended, and offline none of them could be opened again. Whatever fails there is a warning.
    """
    logged = [
        case for case in plan.cases.values() if isinstance(case, Case) and case.recipe.logger.wandb_enabled
    ]
    if not logged:
        return
    from lora_suite.train.sinks import WandbSink

    folder = Path(verdict.directory)
    config = logged[0].recipe.logger.wandb.model_copy(update={"name": f"verdict {folder.name}"})
    sink = WandbSink(config, folder, {}, group=tracker_group(folder), arm="verdict")
    sink.summarise(dict(figures(verdict)))
    sink.close()


def figures(verdict: SuiteVerdict) -> Iterator[tuple[str, str | float]]:
    """The verdict as a summary: state and exit code, the state of each run and pair, each pair's ratio."""
    yield "verdict", outcome(verdict)
    yield "exit_code", verdict.exit_code
    for run in verdict.runs:
        yield f"run/{run.case}/{run.repeat}", run.state
    for pair in verdict.pairs:
        yield f"pair/{pair.name}", pair.state
        for number, check in enumerate(pair.checks, 1):
            if check.effect is not None:
                yield f"pair/{pair.name}/ratio_{number}", check.effect.estimate
