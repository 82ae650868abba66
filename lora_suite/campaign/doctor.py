# SPDX-License-Identifier: Apache-2.0
"""`lora-suite doctor`: which effect this machine can tell from its own noise, and whether it is in order.

One case of the starter set is paired with itself. Whatever difference then shows is the machine's, and the
scatter of that difference from repeat to repeat says how small a real one could still be seen.
"""

from __future__ import annotations

import math
import platform
import shutil
import statistics
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.text import Text

from lora_suite.campaign.conclude import PatientConsole, results_folder
from lora_suite.campaign.execute import Launcher, execute
from lora_suite.judge.evidence import NoEvidence, read_evidence
from lora_suite.judge.statistics import detectable_log_effect
from lora_suite.judge.verdict import EXIT_CODES, Effect, RunVerdict, SuiteVerdict
from lora_suite.launch.local import LocalLauncher
from lora_suite.launch.starter import root
from lora_suite.plan.load import load_plan
from lora_suite.plan.metric_names import STEP_TIME
from lora_suite.plan.model import Pair, Plan, PlannedRun
from lora_suite.plan.order import LOOKS, ordered_runs

LARGEST_EFFECT = 0.02
"""A machine that cannot tell so much is no place for timing gates: nightly ones are to see 2 %."""

_PAIR = "machine"
_ARMS = ("one", "other")
_CHECK = f'ratio(other["{STEP_TIME}"], one["{STEP_TIME}"]) < 1.00'
# A case of a few seconds for a CPU. For a GPU one that needs no weights, with steps so large that they wait
# for the GPU: those of one row wait for the host that launches its kernels. Each with its suite.
_ON_GPU = (
    "llama_1b_1n1g.yaml",
    "sft-llama3.2-1b-1n1g-fsdp2",
    ("policy.init=random", "policy.train_global_batch_size=4", "policy.train_micro_batch_size=4"),
)
_ON_CPU = ("smoke.yaml", "sft-tiny-llama-1n2c-fsdp2", ())
_PROGRAMS = ("bash", "jq", "git")
_PACKAGES = ("torch", "transformers", "megatron-core", "nvidia-ml-py")


def doctor(
    minutes: float, results: Path, launcher: Launcher | None = None, console: Console | None = None
) -> int:
    """Examine this machine for about so many minutes and print what was found.

    Returns 0 where timing gates make sense, 5 where they don't, the suite's own code where a run broke or was
    interrupted. Raises ConfigError where nothing can be planned.
    """
    console = console or PatientConsole()
    launcher = launcher or LocalLauncher()
    _say(console, _tools())
    plan = _plan()
    folder = results_folder(results, plan.suite)
    warm = execute(_warming(plan), folder, launcher, console, keep=False)
    if warm.runs or warm.interrupted:
        _say(console, [f"{run.case}: {run.state} {run.message}" for run in warm.runs])
        return warm.exit_code
    plan = _measuring(plan, _repeats(60.0 * minutes, _seconds_of_a_run(warm)))
    verdict = execute(plan, folder, launcher, console, keep=False)
    _say(console, _machine(verdict.runs))
    (pair,) = verdict.pairs
    effect = pair.checks[0].effect if pair.checks else None
    if effect is None or pair.own_state != "PASS" or verdict.interrupted:
        reasons = [pair.message, *(check.message for check in pair.checks if effect is None)]
        _say(console, [f"not measured: {'; '.join(filter(None, reasons))}", f"results: {folder}"])
        return verdict.exit_code
    _say(console, [*_findings(verdict, effect), f"results: {folder}"])
    return 0 if _gates_make_sense(effect) else EXIT_CODES["INCONCLUSIVE"]


def smallest_effect(effect: Effect, repeats: int) -> float:
    """The smallest change, as a share, that so many repeats show with 80 % power on a machine like this."""
    spread = statistics.stdev(math.log(ratio) for ratio in effect.ratios)
    return math.expm1(detectable_log_effect(spread, repeats))


def _gates_make_sense(effect: Effect) -> bool:
    """Whether as many repeats as a suite may make tell what gates are for, and equal arms look equal."""
    return smallest_effect(effect, LOOKS[-1]) <= LARGEST_EFFECT and not _biased(effect)


def _biased(effect: Effect) -> bool:
    """Whether a case differs from itself by more than gates are to see."""
    return effect.low > 1 + LARGEST_EFFECT or effect.high < 1 - LARGEST_EFFECT


def _findings(verdict: SuiteVerdict, effect: Effect) -> Iterator[str]:
    steps = verdict.runs[0].steps_planned
    yield (
        f"one case against itself, {effect.repeats} repeats of {steps} steps: "
        f"ratio {effect.estimate:.4f} [{effect.low:.4f}, {effect.high:.4f}]"
    )
    if effect.repeats < LOOKS[1]:
        yield "so few repeats hardly tell their own scatter: --minutes 5 tells it better"
    told = [f"{smallest_effect(effect, repeats):.1%} with {repeats}" for repeats in LOOKS[1:]]
    yield f"smallest effect that repeats show (80 % power): {', '.join(told)}"
    best = smallest_effect(effect, LOOKS[-1])
    if _biased(effect):
        yield "timing gates make no sense here: a case differs from itself"
    elif _gates_make_sense(effect):
        yield f"timing gates make sense here, for effects above {best:.1%}"
    else:
        yield f"timing gates below {best:.1%} make no sense here: the same case scatters that much"


def _tools() -> Iterator[str]:
    """Versions of what a suite needs."""
    yield f"Python {platform.python_version()} on {platform.platform()}"
    for name in _PROGRAMS:
        yield f"{name}: {_program(name)}"
    yield ", ".join(f"{name} {_package(name)}" for name in _PACKAGES)


def _program(name: str) -> str:
    """First line of what a program says of its version."""
    path = shutil.which(name)
    if path is None:
        return "MISSING"
    done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False)
    return next(iter(done.stdout.splitlines()), "present")


def _package(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def _has_gpu() -> bool:
    """Whether the driver knows a GPU; one that cannot be watched does not count."""
    try:
        import pynvml
    except ImportError:
        return False
    try:
        pynvml.nvmlInit()
        return bool(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return False


def _plan() -> Plan:
    """The case for this machine, alone; everything else of its suite is left out."""
    suite, stem, overrides = _ON_GPU if _has_gpu() else _ON_CPU
    found = load_plan(root() / "suites" / suite, select=stem, overrides=overrides)
    # Its limits are for other steps, and none of them is asked about.
    case = replace(found.cases[stem], checks=(), driver_judges=False)
    return Plan(
        suite="doctor",
        path=found.path,
        cases={stem: case},
        pairs=(),
        runs=(),
        budget_gpu_hours=None,
        name="This machine",
    )


def _warming(plan: Plan) -> Plan:
    """A first run, which is discarded and tells how long one takes."""
    (stem,) = plan.cases
    return replace(plan, runs=(PlannedRun(stem, 0, _PAIR, _ARMS[0]),))


def _measuring(plan: Plan, repeats: int) -> Plan:
    (stem,) = plan.cases
    pair = Pair(_PAIR, dict.fromkeys(_ARMS, stem), (_CHECK,), repeats, reuse=False)
    return replace(plan, pairs=(pair,), runs=tuple(ordered_runs([pair], [], 1)))


def _seconds_of_a_run(warming: SuiteVerdict) -> float:
    return warming.seconds


def _repeats(seconds: float, of_a_run: float) -> int:
    """Repeats of two runs that fit in what is left after the first: an even number, as looks are."""
    fitting = int((seconds - of_a_run) // (2 * of_a_run))
    return min(max(fitting - fitting % 2, LOOKS[0]), LOOKS[-1])


def _machine(runs: Sequence[RunVerdict]) -> Iterator[str]:
    """Device and health, as the runs recorded them."""
    for run in runs[:1]:
        try:
            environment = read_evidence(Path(run.directory)).record.environment
        except NoEvidence:
            continue
        if environment is not None:
            facts = {key: environment.strict.get(key) for key in ("device", "driver", "cuda", "torch")}
            yield ", ".join(f"{key} {value}" for key, value in facts.items() if value is not None)
    flags = [f"health, run {number}: {flag}" for number, run in enumerate(runs, 1) for flag in run.health]
    yield from flags or ["health: nothing to report"]


def _say(console: Console, lines: Iterable[str]) -> None:
    for line in lines:
        console.print(Text(line), soft_wrap=True, highlight=False)
