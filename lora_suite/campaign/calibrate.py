# SPDX-License-Identifier: Apache-2.0
"""`lora-suite calibrate`: run a suite several times, and propose limits for this machine as a patch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import cast

from check_metrics import Expression, ExpressionError, evaluate, parse
from check_metrics.syntax import Compare, Constant
from check_metrics.text import number_text
from lora_suite.campaign.driver_edit import Machine, patch, put_limits
from lora_suite.judge.checks import device_of
from lora_suite.judge.evidence import Evidence, read_evidence
from lora_suite.judge.limits import LARGEST_DRIFT, Limit, Unsteady, drift, propose_limit
from lora_suite.judge.statistics import Operator
from lora_suite.judge.verdict import EXIT_CODES, RunVerdict, State, SuiteVerdict, worst
from lora_suite.plan.metric_names import STEP_TIME
from lora_suite.plan.model import Case, Plan

# What depends on the machine; what is learned does not, and its limits are nobody's to measure.
_MACHINE = ("timing/*", "performance/*", "memory/*", "ray/*")
_WARMUP = 3
# Limits that a driver gets if it has none of their kind, and the metrics of that kind.
_DEFAULTS = (
    (f'median(data["{STEP_TIME}"], {_WARMUP + 1}) < 1', ("timing/*",)),
    ('max(data["memory/peak_allocated_gib"]) < 1', ("memory/*", "ray/*")),
)
# NVML's reasons for lower clocks than asked for: slowdown by hardware, by heat (software, hardware), by the
# power brake (nvml.h, nvmlClocksEventReason*). Its power cap is no such: a busy GPU is always near it.
_THROTTLED = 0x08 | 0x20 | 0x40 | 0x80
_GPU_MODEL = re.compile(r"\b(?:GB|GH|[ABHLTV])\d{2,4}[A-Z]?\b")


@dataclass(frozen=True)
class Proposal:
    """What the runs of a suite support.

    lines: one for each limit, and what was left out, for people. patches: one for each driver that changes.
    refusals: why nothing is proposed, if so; `exit_code` is then not 0.
    """

    lines: tuple[str, ...]
    patches: tuple[str, ...]
    refusals: tuple[str, ...]
    exit_code: int


def calibrate(plan: Plan, verdict: SuiteVerdict) -> Proposal:
    """Propose limits from the runs of a judged suite.

    Everything is refused if one run broke, fell short, was throttled or drifted, if a series or an invariant
    of it is not what it should be, or if a value spreads too much: limits measured in a bad hour hide what
    they are for. That a check of today fails is no reason: its limit is what is looked for.
    """
    lines: list[str] = []
    patches: list[str] = []
    refusals: list[str] = []
    for stem, case in plan.cases.items():
        if not isinstance(case, Case):
            lines.append(f"{stem}: limits of another trainer's script are not proposed")
            continue
        if case.driver_path.stem != stem:
            lines.append(f"{stem}: runs the driver of {case.driver_path.stem}; its limits stand in the suite")
            continue
        runs = [run for run in verdict.runs if run.case == stem]
        refused = [f"{run.case} run {run.repeat}: {each}" for run in runs for each in _run_problems(run)]
        if not refused:
            try:
                said, made = _calibrate_case(case, runs)
                lines += said
                patches += made
            except Unsteady as error:
                refused.append(f"{stem}: {error}")
        refusals += refused
    if refusals:
        return Proposal((), (), tuple(refusals), _exit_code(verdict))
    return Proposal(tuple(lines), tuple(patches), (), 0)


def _exit_code(verdict: SuiteVerdict) -> int:
    """The exit code of a refusal: the worst of what went wrong, else that nothing can be told."""
    if verdict.interrupted:
        return verdict.exit_code
    states: list[State] = [run.own_state for run in verdict.runs]
    states += [check.state for run in verdict.runs for check in run.checks if check.kind != "check"]
    return EXIT_CODES[worst(states)] or EXIT_CODES["INCONCLUSIVE"]


def _run_problems(run: RunVerdict) -> Iterator[str]:
    """Why a run cannot be calibrated on."""
    if run.own_state != "PASS":
        first, _, _ = run.message.partition("\n")
        yield f"{run.own_state} {first}"
        return
    for check in run.checks:
        if check.state == "ERROR" or (check.kind != "check" and check.state != "PASS"):
            yield f"{check.name}: {check.state} {check.message}"
    evidence = read_evidence(Path(run.directory))
    if _throttled(evidence.record.health):
        yield "a GPU was throttled (health in run.json): by heat, by the power brake, or by its hardware"
    try:
        change = drift(list(evidence.measured(STEP_TIME, _WARMUP).values()))
    except Unsteady as error:
        yield str(error)
        return
    if abs(change) > LARGEST_DRIFT:
        yield (
            f"not steady: its last third's step time is {100 * change:+.0f} % from its first third's, "
            f"more than {100 * LARGEST_DRIFT:.0f} %"
        )


def _throttled(health: Mapping[str, object]) -> bool:
    """Whether any GPU was throttled before or after the run."""
    return any(reasons & _THROTTLED for reasons in _throttle_reasons(health))


def _throttle_reasons(health: Mapping[str, object]) -> list[int]:
    """The bit masks of all GPUs, before and after the run, that are known."""
    looks = [look for look in health.values() if isinstance(look, Mapping)]
    masks = [gpu.get("throttle_reasons") for look in looks for gpu in look.get("gpus") or []]
    return [mask for mask in masks if isinstance(mask, int)]


def _calibrate_case(case: Case, runs: Sequence[RunVerdict]) -> tuple[list[str], list[str]]:
    """Lines for people and the patch of one driver, if it changes; raises Unsteady."""
    evidences = [read_evidence(Path(run.directory)) for run in runs]
    machine = _machine(evidences)
    applied = {
        text
        for run in runs
        for check in run.checks
        if check.kind == "check"
        for text in check.name.split(" | ")
    }
    lines: list[str] = []
    if _GPU_MODEL.search(machine.device) and not all(
        _throttle_reasons(each.record.health) for each in evidences
    ):
        lines.append(f"{case.stem}: whether a GPU was throttled is not known: run.json has no health of GPUs")
    limits: dict[str, str] = {}
    read: list[str] = []
    for check in case.checks:
        expression = _limiting(check.expression)
        if expression is None:
            continue
        read += [metric for _, metric in expression.metrics]
        if check.file != case.driver_path:
            lines.append(f"{case.stem}: {check.expression}: stands in the suite, and stays")
        elif check.waiver is not None:
            lines.append(f"{case.stem}: {check.expression}: has a waiver, and stays")
        elif check.expression in applied:
            limits[check.expression], said = _proposed(expression, evidences)
            lines.append(f"{case.stem}: {said}")
    added = []
    for text, kinds in _DEFAULTS:
        if not any(fnmatchcase(metric, kind) for metric in read for kind in kinds):
            new, said = _proposed(parse(text), evidences)
            added.append(new)
            lines.append(f"{case.stem}: new: {said}")
    before = case.driver_path.read_text(encoding="utf-8")
    after = put_limits(case.driver_path, before, machine, limits, added)
    return lines, [patch(case.driver_path, before, after)] if after != before else []


def _machine(evidences: Sequence[Evidence]) -> Machine:
    """The machine that all runs were made on; raises Unsteady."""
    strict = [
        evidence.record.environment.strict if evidence.record.environment else {} for evidence in evidences
    ]
    if not all(each.get("device") for each in strict):
        raise Unsteady("run.json does not name the device, by which limits are keyed")
    devices = sorted({device_of(evidence.record) for evidence in evidences})
    if len(devices) > 1:
        raise Unsteady(f"its runs were made on different devices: {', '.join(devices)}")
    model = _GPU_MODEL.search(devices[0])
    return Machine(model[0] if model else devices[0], devices[0])


def _limiting(text: str) -> Expression | None:
    """The check if it holds what a machine does against a number, as in `mean(…) < 30`; else None."""
    try:
        expression = parse(text)
    except ExpressionError:
        return None
    tree = expression.tree
    if not isinstance(tree, Compare) or tree.op[0] not in "<>" or not isinstance(tree.right, Constant):
        return None
    names = [metric for _, metric in expression.metrics]
    measured = all(any(fnmatchcase(name, kind) for kind in _MACHINE) for name in names)
    return expression if names and measured else None


def _proposed(expression: Expression, evidences: Sequence[Evidence]) -> tuple[str, str]:
    """The check with its new limit, and a line that says where that comes from; raises Unsteady."""
    tree = expression.tree
    assert isinstance(tree, Compare)
    values = []
    for evidence in evidences:
        result = evaluate(expression, {"data": evidence.metrics}, segments=evidence.record.segments)
        if result.value is None:
            raise Unsteady(f"{expression.text}: {result.message}")
        values.append(float(result.value))
    try:
        limit = propose_limit(values, cast(Operator, tree.op))
    except Unsteady as error:
        raise Unsteady(f"{expression.text}: {error}") from error
    measured = expression.text[: expression.text.rindex(tree.op)].rstrip()
    new = f"{measured} {tree.op} {number_text(limit.value)}"
    return new, f"{new} ({_derivation(limit)})"


def _derivation(limit: Limit) -> str:
    spread = 100 * limit.spread / limit.median
    return (
        f"median {limit.median:.4g} of {limit.repeats} runs, spread {spread:.2g} %, "
        f"margin {100 * limit.margin:.1f} %, smallest effect {100 * limit.resolvable:.2g} %"
    )
