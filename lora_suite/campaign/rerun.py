# SPDX-License-Identifier: Apache-2.0
"""`lora-suite run --rerun-failed`: of a suite only what did not pass in an earlier run of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from lora_suite.config.errors import ConfigError
from lora_suite.judge.verdict import SuiteVerdict
from lora_suite.plan.model import Pair, Plan, PlannedRun


def only_failed(plan: Plan, results: Path) -> Plan:
    """The part of a plan that did not pass in `results`: pairs whole, cases outside pairs with all repeats.

    A pair that is judged on others' runs brings those along. What has no verdict there did not pass. Raises
    ConfigError where there is no verdict of this suite, or everything passed.
    """
    verdict = _read(results)
    if verdict.suite != plan.suite:
        raise ConfigError(f"--rerun-failed {results}: is of the suite {verdict.suite}, not {plan.suite}")
    passed = _passed(verdict)
    bad = [pair for pair in plan.pairs if ("pair", pair.name) not in passed]
    needed = {case for pair in bad if pair.reuse for case in pair.arms.values()}
    makers = [pair for pair in plan.pairs if not pair.reuse and needed & {*pair.arms.values()}]
    pairs = [pair for pair in plan.pairs if pair in bad or pair in makers]
    runs = [run for run in plan.runs if _wanted(run, pairs, passed, needed)]
    if not runs:
        raise ConfigError(f"--rerun-failed {results}: everything passed there, so there is nothing to run")
    return replace(plan, pairs=tuple(pairs), runs=tuple(runs))


def _wanted(run: PlannedRun, pairs: list[Pair], passed: set[tuple[str, str]], needed: set[str]) -> bool:
    if run.pair is not None:
        return any(pair.name == run.pair for pair in pairs)
    return ("case", run.case) not in passed or run.case in needed


def _passed(verdict: SuiteVerdict) -> set[tuple[str, str]]:
    """What passed: pairs with all their runs, and cases outside pairs."""
    states: dict[tuple[str, str], list[str]] = {}
    for run in verdict.runs:
        key = ("pair", run.pair) if run.pair is not None else ("case", run.case)
        states.setdefault(key, []).append(run.state)
    for pair in verdict.pairs:
        states.setdefault(("pair", pair.name), []).append(pair.state)
    return {key for key, found in states.items() if set(found) == {"PASS"}}


def _read(results: Path) -> SuiteVerdict:
    path = results / "verdict.json"
    try:
        return SuiteVerdict.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError) as error:
        first = str(error).splitlines()[0]
        raise ConfigError(f"--rerun-failed {results}: no verdict can be read there: {first}") from error
