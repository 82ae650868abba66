# SPDX-License-Identifier: Apache-2.0
"""`lora-suite run --plan`: what would run, what would be judged, and what it costs. Runs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap

from rich.console import Console
from rich.text import Text

from lora_suite.blueprint import preflight
from lora_suite.blueprint.sharding import named_sharding, plan_memory
from lora_suite.campaign.jobs.units import Unit, job_lines, refuse_too_large, units_of
from lora_suite.campaign.reference import against
from lora_suite.campaign.request import Request
from lora_suite.campaign.run import refuse_errors
from lora_suite.judge.invariants import REQUIRED_INVARIANTS
from lora_suite.judge.pair import difference_text
from lora_suite.judge.verdict import EXIT_CODES
from lora_suite.launch.site import Site, load_site
from lora_suite.plan.comparability import compare_cases
from lora_suite.plan.model import AnyCase, Case, DeclaredCheck, ExternalCase, Pair, Plan, UnreadableCase

# Bytes a rank below which nobody asks whether a training fits.
_WORTH_TELLING = 2**30


def preview(request: Request, console: Console | None = None) -> int:
    """Print the plan; return 0, or 5 where arms cannot be compared, or 4 where a case's files cannot be read.

    Raises ConfigError for a plan that does not resolve and, after printing it, for errors that lint finds.
    """
    console = console or Console()
    asked = request.plan()
    with against(request, asked) as (plan, _):
        lines = [*plan_lines(plan)]
    units: list[Unit] = []
    site = Site()
    if request.queued(plan):
        units, site = units_of(plan), load_site(request.site)
        lines += job_lines(units, site)
    for line in lines:
        for part in _folded(line, console.width) if console.is_terminal else [line]:
            console.print(Text(part), soft_wrap=True, highlight=False)
    for warning in refuse_errors(asked):
        console.print(Text(str(warning)), soft_wrap=True, highlight=False)
    refuse_too_large(plan, units, site)
    if any(isinstance(case, UnreadableCase) for case in plan.cases.values()):
        return EXIT_CODES["MISSING"]
    return EXIT_CODES["INCOMPARABLE"] if any(pair.not_comparable for pair in plan.pairs) else 0


def _folded(line: str, width: int) -> list[str]:
    """A line of the plan between its words, further in from the second part on; words are left whole."""
    text = line.lstrip()
    indent = line[: len(line) - len(text)]
    return wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=f"{indent}    ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def plan_lines(plan: Plan) -> Iterator[str]:
    """The plan as text: runs in order, cases with their checks, pairs with their arms' differences."""
    yield f"{plan.suite}: {plan.name}" if plan.name else plan.suite
    yield "runs, in this order:"
    for number, run in enumerate(plan.runs, 1):
        place = f"  {run.pair}, arm {run.arm}" if run.pair else ""
        name = f"{run.case} run {run.repeat}" if not run.discarded else f"{run.case} warm-up, discarded"
        yield f"  {number:3} {name}{place}"
    yield "cases:"
    for case in plan.cases.values():
        yield from _case_lines(case, sum(run.case == case.stem for run in plan.runs))
    if plan.pairs:
        yield "pairs:"
    for pair in plan.pairs:
        yield from _pair_lines(pair, plan)
    budget = f" of {plan.budget_gpu_hours:g} allowed" if plan.budget_gpu_hours is not None else ""
    cost = f"{plan.minutes:g} minutes and {plan.gpu_hours:.4g} GPU-hours{budget}"
    yield f"at most {cost}, in {len(plan.runs)} runs"
    if any(pair.looks for pair in plan.pairs):
        yield (
            f"that is the worst case: a pair ends at the first look that decides it, and after "
            f"{plan.budget_minutes:g} minutes nothing is begun"
        )


def _case_lines(case: AnyCase, runs: int) -> Iterator[str]:
    if isinstance(case, UnreadableCase):
        yield f"  {case.stem}: CANNOT BE READ, its runs are MISSING: {case.problem}"
        return
    cost = f"{case.gpus} processes, at most {case.minutes:g} minutes a run"
    yield f"  {case.stem}: {runs} runs of {case.steps} steps, {cost}"
    if case.overrides:
        yield f"    overrides: {' '.join(case.overrides)}"
    if isinstance(case, Case):
        yield from _memory_lines(case)
    for check in case.checks:
        yield f"    {check.expression}{_conditions(check)}"
    if isinstance(case, ExternalCase):
        yield f"    runs {' '.join(case.command)} in {case.cwd}, read as {case.dialect.name}"
    if case.lora:
        measured = ", ".join(REQUIRED_INVARIANTS) if isinstance(case, Case) else "not measured"
        yield f"    LoRA invariants: {measured}"


def _memory_lines(case: Case) -> Iterator[str]:
    """What the memory model expects of a model that is not small, on the path that the recipe is sure of."""
    fast = case.recipe.policy.require_fast_path
    plan = plan_memory(case.recipe, preflight(case.recipe, case.recipe_path), memory=None, fast=fast)
    if plan.estimate is not None and plan.estimate.total >= _WORTH_TELLING:
        free = plan.sharding != "replicate" and named_sharding(case.recipe) is None
        less = "; sharding: auto shards less where the GPU has room" if free else ""
        yield f"    {plan} on the {'fast' if fast else 'plain'} path{less}"


def _conditions(check: DeclaredCheck) -> str:
    conditions = [f"when {check.when}"] if check.when else []
    conditions += [f"on {check.on}"] if check.on else []
    if check.waiver is not None:
        conditions.append(f"waived until {check.waiver.until}, {check.waiver.issue}")
    return f"  ({', '.join(conditions)})" if conditions else ""


def _pair_lines(pair: Pair, plan: Plan) -> Iterator[str]:
    arms = ", ".join(f"{arm} = {case}" for arm, case in pair.arms.items())
    number = f"{pair.repeats} repeats"
    if pair.looks:
        number = f"looks after {', '.join(map(str, pair.looks))} repeats"
    yield f"  {pair.name}: {arms}; {number}{', reusing runs' if pair.reuse else ''}"
    if pair.different_batches:
        yield "    different batches: medians of whole runs are compared"
    for check in pair.checks:
        yield f"    {check}"
    first, *others = pair.arms
    refused = {difference.key for difference in pair.not_comparable}
    for other in others:
        left, right = plan.cases[pair.arms[first]], plan.cases[pair.arms[other]]
        for found in compare_cases(left, right, pair.allow).all:
            mark = "NOT ALLOWED" if found.key in refused else "differs"
            whom = f" ({first}, {other})" if len(others) > 1 else ""
            yield f"    {mark}{whom}: {difference_text(found)}"
    if pair.not_comparable:
        remedy = "make the arms equal in these keys, or allow them in the suite"
        yield f"    INCOMPARABLE: {remedy if pair.comparable else 'the suite shows this pair for that'}"
