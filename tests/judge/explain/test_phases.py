# SPDX-License-Identifier: Apache-2.0
"""A step's change as a sum over its phases, of runs whose every number is known."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from check_metrics import Series
from lora_suite.judge.evidence import Evidence
from lora_suite.judge.explain.model import Part
from lora_suite.judge.explain.phases import Decomposition, decompose
from lora_suite.judge.explain.steps import NothingTimed
from tests.judge.explain.sides import STEPS, run, side

BASE = {"data": 0.01, "forward_backward": 0.7, "grad_sync": 0.04, "optimizer": 0.2}


def parts(found: Decomposition) -> dict[str, Part]:
    return {part.phase: part for part in found.parts}


def test_the_phase_that_was_slowed_has_the_slowdown() -> None:
    notes: list[str] = []
    found = decompose(
        side("a", run(BASE)), side("b", run(BASE | {"optimizer": 0.231, "data": 0.0093})), notes
    )
    assert found.changed
    assert found.step.delta == pytest.approx(0.0303)
    by_name = parts(found)
    assert by_name["optimizer"].delta == pytest.approx(0.031)
    assert by_name["optimizer"].share == pytest.approx(0.031 / 0.0303)
    assert by_name["data"].share == pytest.approx(-0.0007 / 0.0303)
    assert found.parts[0].phase == "optimizer"
    assert found.parts[-1].phase == "data"
    assert notes == []


times = st.floats(1e-5, 10.0)


@given(
    st.lists(st.tuples(times, times, times, times), min_size=8, max_size=30),
    st.lists(st.tuples(times, times, times, times), min_size=8, max_size=30),
    st.booleans(),
)
def test_phase_deltas_sum_to_the_step_delta(
    left: list[tuple[float, ...]], right: list[tuple[float, ...]], same_batches: bool
) -> None:
    def timed(rows: list[tuple[float, ...]], batches: str) -> Evidence:
        def at(place: int) -> Callable[[int], float]:
            return lambda step: rows[step - 1][place]

        return run(
            {"data": at(0), "forward_backward": at(1), "optimizer": at(2)},
            other=at(3),
            steps=len(rows),
            batches=batches,
        )

    try:
        found = decompose(
            side("a", timed(left, "b")), side("b", timed(right, "b" if same_batches else "c")), []
        )
    except NothingTimed:
        return
    total = math.fsum(part.delta for part in found.parts)
    assert math.isclose(total, found.step.delta, rel_tol=0.0, abs_tol=1e-12)
    for attribute in ("left", "right"):
        whole = math.fsum(getattr(part, attribute) for part in found.parts)
        assert math.isclose(whole, getattr(found.step, attribute), abs_tol=1e-12)
    if found.step.share is not None:
        assert math.isclose(sum(part.share or 0.0 for part in found.parts), 1.0, rel_tol=1e-6)


def test_medians_would_not_have_summed_up() -> None:
    """Three kinds of steps in turn: each phase is slow in one of them, so no phase's median moves."""
    slow = {
        name: lambda step, turn=turn: 0.1 + 0.3 * (step % 3 == turn)
        for turn, name in enumerate(("data", "grad_sync", "optimizer"))
    }
    found = decompose(side("a", run(dict.fromkeys(slow, 0.1))), side("b", run(slow)), [])
    assert statistics.median([slow["data"](step) for step in range(4, STEPS + 1)]) == 0.1
    assert found.step.delta == pytest.approx(0.3)
    assert sum(part.delta for part in found.parts) == pytest.approx(0.3)
    assert all(part.delta > 0.05 for part in found.parts if part.phase != "other")


def test_warm_up_and_the_extreme_tenth_at_either_end_are_left_out() -> None:
    def optimizer(step: int) -> float:
        return {1: 60.0, 2: 9.0, 3: 9.0, 10: 5.0, 11: 4.0, 12: 0.001, 13: 0.002}.get(step, 0.3)

    notes: list[str] = []
    found = decompose(side("a", run(BASE)), side("b", run(BASE | {"optimizer": optimizer})), notes)
    assert found.step.delta == pytest.approx(0.1)
    assert found.chosen.trimmed == 4
    assert not {1, 2, 3, 10, 11, 12, 13} & set(found.chosen.left[0])
    # (5 + 4 + 0.003 + 16 · 0.3) / 20 less 0.2
    assert notes == [
        "over all steps, the 4 that are left out here included, the step's difference is +0.49 s"
    ]


def test_what_no_phase_accounts_for_is_other() -> None:
    found = decompose(side("a", run(BASE)), side("b", run(BASE, other=0.05)), [])
    assert found.parts[0].phase == "other"
    assert found.parts[0].share == pytest.approx(1.0)


def test_a_change_below_half_a_percent_is_none() -> None:
    found = decompose(side("a", run(BASE)), side("b", run(BASE | {"optimizer": 0.204})), [])
    assert not found.changed
    assert {part.share for part in found.parts} == {None}
    assert decompose(side("a", run(BASE)), side("b", run(BASE | {"optimizer": 0.206})), []).changed


def test_nothing_different_at_all() -> None:
    found = decompose(side("a", run(BASE)), side("b", run(BASE)), [])
    assert found.step.delta == 0.0
    assert not found.changed


def test_a_speed_up_is_shared_out_too() -> None:
    found = decompose(side("a", run(BASE)), side("b", run(BASE | {"grad_sync": 0.01})), [])
    assert found.step.delta == pytest.approx(-0.03)
    assert (found.parts[0].phase, round(found.parts[0].share or 0.0, 6)) == ("grad_sync", 1.0)


def repeats(*optimizer: float) -> list[Evidence]:
    return [run(BASE | {"optimizer": seconds}) for seconds in optimizer]


def test_repeats_give_an_interval() -> None:
    """Four pairs whose differences are 0.02, 0.03, 0.03, 0.04: mean 0.03, s = 0.00816, t(3) = 3.18245."""
    found = decompose(
        side("a", *repeats(0.20, 0.21, 0.20, 0.20)), side("b", *repeats(0.22, 0.24, 0.23, 0.24)), []
    )
    width = 3.182446305284263 * math.sqrt(2e-4 / 3) / 2
    optimizer = parts(found)["optimizer"]
    assert optimizer.delta == pytest.approx(0.03)
    assert (optimizer.low, optimizer.high) == pytest.approx((0.03 - width, 0.03 + width))
    assert found.changed
    assert parts(found)["data"].low == pytest.approx(0.0, abs=1e-12)


def test_an_interval_that_holds_zero_leaves_the_change_uncertain() -> None:
    found = decompose(side("a", *repeats(0.2, 0.2)), side("b", *repeats(0.2, 0.26)), [])
    assert found.step.low is not None
    assert found.step.low < 0 < found.step.delta
    assert not found.changed
    # What was seen is shared out all the same.
    assert parts(found)["optimizer"].share == pytest.approx(1.0)


def test_unequal_numbers_of_runs_are_compared_by_welch() -> None:
    from scipy.stats import ttest_ind

    left, right = [0.20, 0.21, 0.22], [0.25, 0.26]
    notes: list[str] = []
    found = decompose(side("a", *repeats(*left)), side("b", *repeats(*right)), notes)
    interval = ttest_ind(right, left, equal_var=False).confidence_interval(0.95)
    optimizer = parts(found)["optimizer"]
    assert (optimizer.low, optimizer.high) == pytest.approx((interval.low, interval.high))
    assert notes == ["steps are not matched: 3 and 2 runs"]
    # A phase that never varies has an interval without width.
    assert parts(found)["grad_sync"].low == pytest.approx(0.0, abs=1e-12)


def test_runs_with_other_batches_are_trimmed_each_by_its_own_steps() -> None:
    spiked = run(BASE | {"data": lambda step: 3.0 if step == 8 else 0.01}, batches="b")
    notes: list[str] = []
    found = decompose(side("a", spiked), side("b", run(BASE | {"optimizer": 0.3}, batches="c")), notes)
    assert not found.chosen.matched
    assert found.step.delta == pytest.approx(0.1)
    assert notes[0] == "steps are not matched: step 1 had different batches"


@pytest.mark.parametrize(
    ("left", "right", "matched"),
    [(100.0, 100.0, True), (100.0, 101.0, False), (100.0, None, False), (None, None, False)],
)
def test_runs_of_other_trainers_are_matched_by_their_tokens(
    left: float | None, right: float | None, matched: bool
) -> None:
    name = "train/global_valid_toks"
    ours, theirs = (
        run(BASE, batches=None, more={} if tokens is None else {name: tokens}) for tokens in (left, right)
    )
    assert decompose(side("a", ours), side("b", theirs), []).chosen.matched is matched


def test_a_shorter_run_is_compared_over_the_steps_that_both_have() -> None:
    found = decompose(side("a", run(BASE)), side("b", run(BASE | {"optimizer": 0.3}, steps=12)), [])
    assert found.chosen.matched
    assert max(found.chosen.left[0]) <= 12
    assert found.step.delta == pytest.approx(0.1)


def test_runs_that_overlap_in_no_step_are_refused() -> None:
    whole = run(BASE)
    late = Evidence(
        {
            name: Series(name, tuple(step + 100 for step in each.steps), each.values)
            for name, each in run(BASE, batches=None).metrics.items()
        },
        run(BASE).record.model_copy(update={"segments": [101]}),
    )
    with pytest.raises(NothingTimed, match="no step in common"):
        decompose(side("a", whole), side("b", late), [])


def test_phases_that_one_side_lacks_are_other() -> None:
    notes: list[str] = []
    found = decompose(
        side("a", run(BASE)), side("b", run({"data": 0.01, "forward_backward": 0.8}, other=0.24)), notes
    )
    assert parts(found).keys() == {"data", "forward_backward", "other"}
    assert notes == ["not timed in every run, and so part of `other`: grad_sync, optimizer"]
    assert parts(found)["forward_backward"].delta == pytest.approx(0.1)


def test_without_any_common_phase_only_the_step_is_told() -> None:
    notes: list[str] = []
    found = decompose(side("a", run(BASE)), side("b", run({"policy_training": 1.0})), notes)
    assert [part.phase for part in found.parts] == ["other"]
    assert any("no phase is timed on both sides" in note for note in notes)


def test_a_phase_with_a_hole_is_other() -> None:
    holed = run(BASE)
    metrics = dict(holed.metrics)
    series = metrics["timing/train/data"]
    metrics["timing/train/data"] = series.without([range(12, 13)])
    found = decompose(side("a", run(BASE)), side("b", Evidence(metrics, holed.record)), [])
    assert "data" not in parts(found)


def test_phases_that_overlap_are_named() -> None:
    notes: list[str] = []
    nested = run({"forward_backward": 0.7, "forward": 0.3}, other=-0.3)
    found = decompose(side("a", nested), side("b", nested), notes)
    assert parts(found)["other"].left == pytest.approx(-0.3)
    assert any("the phases overlap" in note for note in notes)


def test_validation_belongs_to_the_total_alone() -> None:
    """A run that only knows its total has validation in it; one with a step time has not."""
    whole = run(BASE, more={"timing/train/validation": 0.5, "timing/train/invariants": 0.001})
    assert "validation" not in parts(decompose(side("a", whole), side("b", whole), []))
    total = dict(whole.metrics)
    step = total.pop("timing/train/step_time")
    total["timing/train/total_step_time"] = Series(
        "t", step.steps, tuple(value + 0.5 for value in step.values)
    )
    both = Evidence(total, whole.record)
    notes: list[str] = []
    found = parts(decompose(side("a", both), side("b", both), notes))
    assert any("validation and checkpointing are parts of the step" in note for note in notes)
    assert found["validation"].left == pytest.approx(0.5)
    assert found["other"].left == pytest.approx(0.0, abs=1e-9)
    assert "invariants" not in found
    with pytest.raises(NothingTimed, match=r"b/1: metrics\.json has no timing/train/step_time"):
        decompose(side("a", whole), side("b", both), [])


def test_a_run_that_never_settles_is_compared_and_named() -> None:
    def slow_start(step: int) -> float:
        return 0.9 if step < 17 else 0.2

    notes: list[str] = []
    found = decompose(side("a", run(BASE)), side("b", run(BASE | {"optimizer": slow_start})), notes)
    assert found.step.delta > 0.1
    assert any("more than half of the run would be warm-up" in note for note in notes)


def test_steps_without_a_time_are_left_out_and_a_run_of_none_is_refused() -> None:
    broken = run(BASE | {"optimizer": lambda step: math.nan if step == 9 else 0.3})
    found = decompose(side("a", run(BASE)), side("b", broken), [])
    assert 9 not in found.chosen.right[0]
    assert found.step.delta == pytest.approx(0.1)
    with pytest.raises(NothingTimed, match="no step time is left"):
        decompose(side("a", run(BASE)), side("b", run(BASE | {"optimizer": math.nan})), [])
