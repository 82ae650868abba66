# SPDX-License-Identifier: Apache-2.0
"""Whether damaged input can pass: a suite of two arms and two repeats, with one thing wrong, judged for real.

Each fault is done to one run of each arm in turn. Contents that a trainer itself would write wrongly come
with a right hash of the metrics; files that are damaged afterwards are tried with a hash and without one.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lora_suite.campaign.selftest.row import Row
from lora_suite.campaign.selftest.runs import DONE, FULL, LORA, STEPS, Damage, make_case, write_run
from lora_suite.judge.suite import Execution, judge_suite, run_directory
from lora_suite.judge.verdict import worst
from lora_suite.launch.record import Ended, RunDir
from lora_suite.plan.metric_names import LOSS, STEP_TIME, TOTAL_STEP_TIME, VALID_TOKENS, VALIDATION_LOSS
from lora_suite.plan.model import Pair, Plan, PlannedRun

PAIR = Pair(
    name="fsdp2",
    arms={"full": FULL, "lora": LORA},
    checks=(f'ratio(lora["{STEP_TIME}"], full["{STEP_TIME}"]) < 0.8',),
    repeats=2,
    reuse=False,
)
_REPEAT = 2
_PEAK = "memory/peak_allocated_gib"
_PER_STEP = (LOSS, "train/grad_norm", "train/lr", VALID_TOKENS, TOTAL_STEP_TIME, STEP_TIME, _PEAK)
_REQUIRED = (LOSS, VALID_TOKENS, TOTAL_STEP_TIME, STEP_TIME)
_STEP_TIMES = {"full": 0.1, "lora": 0.07}

Spoil = Callable[[Path, Path], None]
"""Damages the files of a run; the second folder is the same repeat of the other arm."""


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with one run. arms: those that can have it."""

    kind: str
    name: str
    contents: Damage | None = None
    files: Spoil | None = None
    ended: Ended = field(default_factory=lambda: DONE)
    steps: int = STEPS
    needs_hash: bool = False
    arms: tuple[str, ...] = ("full", "lora")


def silent_pass_row() -> Row:
    """The row that counts what got through; without damage, the suite must pass."""
    tried: Counter[str] = Counter()
    silent: list[str] = []
    with tempfile.TemporaryDirectory(prefix="lora-suite-selftest-") as folder:
        root = Path(folder)
        sound = all(_passes(root / f"sound{sealed}", None, "lora", sealed) for sealed in (False, True))
        for number, (fault, arm, sealed) in enumerate(_inputs()):
            tried[fault.kind] += 1
            if _passes(root / str(number), fault, arm, sealed):
                silent.append(f"{fault.name} ({arm})")
    kinds = ", ".join(f"{kind} {count}" for kind, count in tried.items())
    notes = [kinds, *(["the undamaged suite does not pass"] if not sound else []), *silent[:5]]
    return Row(
        "corrupt, short, empty, NaN, stale, swapped input: silent passes",
        "0",
        f"{len(silent)} of {tried.total()}",
        "; ".join(notes),
        sound and not silent,
    )


def _inputs() -> Iterator[tuple[Fault, str, bool]]:
    for fault in faults():
        for arm in fault.arms:
            if fault.files is not None and not fault.needs_hash:
                yield fault, arm, False
            yield fault, arm, True


def _passes(results: Path, fault: Fault | None, arm: str, sealed: bool) -> bool:
    """Write a suite, do the damage, judge it; whether every verdict is PASS."""
    cases = {stem: make_case(stem) for stem in PAIR.arms.values()}
    runs = tuple(
        PlannedRun(case=stem, repeat=repeat, pair=PAIR.name, arm=name)
        for repeat in range(1, PAIR.repeats + 1)
        for name, stem in PAIR.arms.items()
    )
    plan = Plan(
        suite="selftest",
        path=Path("selftest.yaml"),
        cases=dict(cases),
        pairs=(PAIR,),
        runs=runs,
        budget_gpu_hours=None,
    )
    launched = datetime.now(UTC)
    executions = {}
    for run in runs:
        hit = fault if fault is not None and (run.arm, run.repeat) == (arm, _REPEAT) else None
        write_run(
            run_directory(results, run),
            cases[run.case],
            run.repeat,
            step_time=_STEP_TIMES[str(run.arm)] * (1 + 0.01 * run.repeat),
            steps=hit.steps if hit else STEPS,
            damage=hit.contents if hit else None,
            sealed=sealed,
        )
        executions[run] = Execution(hit.ended if hit else DONE, launched, 1.0)
    if fault is not None and fault.files is not None:
        folders = {name: results / stem / str(_REPEAT) for name, stem in PAIR.arms.items()}
        other = next(folder for name, folder in folders.items() if name != arm)
        fault.files(folders[arm], other)
    judged, pairs = judge_suite(plan, results, executions)
    states = [*(run.state for run in judged), *(pair.state for pair in pairs)]
    return worst(states) == "PASS"


def faults() -> Iterator[Fault]:
    """Everything that is tried."""
    yield from _corrupt()
    yield from _short()
    yield from _empty()
    yield from _not_finite()
    yield from _stale()
    yield from _swapped()
    yield from _broken()


def _corrupt() -> Iterator[Fault]:
    for name in ("metrics.json", "run.json"):
        for what, text in (
            ("no JSON", b"{"),
            ("bytes that are no text", b"\xff\xfe\x00\x01"),
            ("a list", b"[]"),
            ("null", b"null"),
            ("a number for a series", b'{"train/loss": 3}'),
        ):
            yield Fault("corrupt", f"{name} is {what}", files=_overwrite(name, text))
        for share in (0.25, 0.5, 0.99):
            yield Fault("corrupt", f"{name} ends after {share:.0%}", files=_truncate(name, share))
        yield Fault("corrupt", f"{name} is a folder", files=_folder(name))
    yield Fault("corrupt", "a step twice", files=_twice)
    yield Fault("corrupt", "a text for a value", contents=_value(LOSS, "7", "low"))
    yield Fault("corrupt", "a time of zero", contents=_value(STEP_TIME, "7", 0.0))
    yield Fault("corrupt", "a negative time", contents=_value(STEP_TIME, "7", -0.1))
    yield Fault("corrupt", "an unknown key in run.json", contents=_record(surprise=1))


def _short() -> Iterator[Fault]:
    for steps in (1, STEPS // 2, STEPS - 1):
        yield Fault("short", f"{steps} of {STEPS} steps", steps=steps)
    for name in _PER_STEP:
        yield Fault("short", f"{name} without its last step", contents=_without(name, str(STEPS)))
        yield Fault("short", f"{name} with a hole", contents=_without(name, "5"))
    yield Fault("short", "run.json counts fewer steps", contents=_record(steps_done=STEPS - 1))
    yield Fault("short", "run.json counts more steps", contents=_record(steps_done=STEPS + 1))


def _empty() -> Iterator[Fault]:
    for name in ("metrics.json", "run.json"):
        yield Fault("empty", f"{name} is empty", files=_overwrite(name, b""))
        yield Fault("empty", f"{name} is an empty object", files=_overwrite(name, b"{}"))
        yield Fault("empty", f"no {name}", files=_delete(name))
    yield Fault("empty", "no run folder", files=lambda run, _: shutil.rmtree(run))
    for name in _REQUIRED:
        yield Fault("empty", f"no {name}", contents=_no_series(name))
    for name in (*_PER_STEP, VALIDATION_LOSS):
        yield Fault("empty", f"{name} is empty", contents=_empty_series(name))


def _not_finite() -> Iterator[Fault]:
    for name in _PER_STEP:
        for value in (None, "nan", float("nan"), float("inf")):
            yield Fault("NaN", f"{name} is {value!r} at a step", contents=_value(name, "6", value))
    yield Fault("NaN", "validation is null", contents=_value(VALIDATION_LOSS, str(STEPS), None))
    yield Fault("NaN", "run.json names a bad step", contents=_record(nonfinite={LOSS: [3]}))
    yield Fault("NaN", "first loss is null", contents=_value(LOSS, "1", None))
    yield Fault("NaN", "last loss is null", contents=_value(LOSS, str(STEPS), None))


def _stale() -> Iterator[Fault]:
    yield Fault("stale", "started before its launch", contents=_record(started="2020-01-01T00:00:00+00:00"))
    yield Fault("stale", "no start time", contents=_record(started="yesterday"))
    yield Fault("stale", "the run before, copied", files=_copied_from_the_run_before)
    yield Fault("stale", "metrics of the run before", files=_metrics_of_the_run_before, needs_hash=True)
    yield Fault("stale", "another case", contents=_record(case="sft-other"))
    yield Fault("stale", "another seed", contents=_recipe)
    yield Fault("stale", "a resume of one arm alone", contents=_record(segments=[1, 6]))


def _swapped() -> Iterator[Fault]:
    yield Fault("swapped", "metrics of both arms", files=_swap("metrics.json"), needs_hash=True)
    yield Fault("swapped", "records of both arms", files=_swap("run.json"))
    yield Fault("swapped", "folders of both arms", files=_swap(""))
    yield Fault("swapped", "metrics with an earlier repeat", files=_swap_with_the_run_before, needs_hash=True)
    yield Fault("swapped", "two batches", contents=_swapped_batches)
    yield Fault("swapped", "no batches", contents=_record(batches={}))
    strict = {"strict": {"device": None, "torch": "2.11.0"}, "soft": {}}
    yield Fault("swapped", "another environment", contents=_record(environment=strict))


def _broken() -> Iterator[Fault]:
    for how in ("failed", "killed", "oom", "timeout", "interrupted"):
        ended = Ended.model_validate({"how": how, "status": 1, "message": how})
        yield Fault("broken", f"{how}, with files that look whole", ended=ended)
    for status in (1, 2, 4, 5, 77):
        ended = Ended(how="done", status=status)
        yield Fault("broken", f"the driver ended with {status}", ended=ended)
    yield Fault("broken", "an invariant failed", contents=_invariant(ok=False), arms=("lora",))
    yield Fault("broken", "an invariant not measured", contents=_invariant(ok=None), arms=("lora",))
    yield Fault("broken", "no invariants", contents=_record(invariants=[]), arms=("lora",))


def _value(name: str, step: str, value: Any) -> Damage:
    return lambda metrics, _: metrics[name].update({step: value})


def _without(name: str, step: str) -> Damage:
    return lambda metrics, _: metrics[name].pop(step)


def _no_series(name: str) -> Damage:
    return lambda metrics, _: metrics.pop(name)


def _empty_series(name: str) -> Damage:
    return lambda metrics, _: metrics.update({name: {}})


def _record(**changes: Any) -> Damage:
    return lambda _, record: record.update(changes)


def _recipe(_: dict[str, Any], record: dict[str, Any]) -> None:
    recipe = json.loads(json.dumps(record["recipe"]))
    recipe["sft"]["seed"] += 1
    record["recipe"] = recipe


def _swapped_batches(_: dict[str, Any], record: dict[str, Any]) -> None:
    batches = record["batches"]
    batches["4"], batches["5"] = batches["5"], batches["4"]


def _invariant(ok: bool | None) -> Damage:
    return lambda _, record: record["invariants"][0].update(ok=ok)


def _overwrite(name: str, content: bytes) -> Spoil:
    def spoil(run: Path, _: Path) -> None:
        (run / name).write_bytes(content)

    return spoil


def _truncate(name: str, share: float) -> Spoil:
    def spoil(run: Path, _: Path) -> None:
        content = (run / name).read_bytes()
        (run / name).write_bytes(content[: int(share * len(content))])

    return spoil


def _delete(name: str) -> Spoil:
    return lambda run, _: (run / name).unlink()


def _folder(name: str) -> Spoil:
    def spoil(run: Path, _: Path) -> None:
        (run / name).unlink()
        (run / name).mkdir()

    return spoil


def _twice(run: Path, _: Path) -> None:
    metrics = RunDir(run).metrics
    metrics.write_text(metrics.read_text().replace('"7":', '"7": 0.1, "7":', 1))


def _copied_from_the_run_before(run: Path, _: Path) -> None:
    shutil.rmtree(run)
    shutil.copytree(run.with_name(str(_REPEAT - 1)), run)


def _metrics_of_the_run_before(run: Path, _: Path) -> None:
    shutil.copy(RunDir(run.with_name(str(_REPEAT - 1))).metrics, RunDir(run).metrics)


def _swap(name: str) -> Spoil:
    return lambda run, other: _exchange(run / name, other / name)


def _swap_with_the_run_before(run: Path, _: Path) -> None:
    _exchange(RunDir(run).metrics, RunDir(run.with_name(str(_REPEAT - 1))).metrics)


def _exchange(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)
