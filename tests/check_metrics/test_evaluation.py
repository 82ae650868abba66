# SPDX-License-Identifier: Apache-2.0
"""Verdicts on data: windows, segments, damage, several arms, and what a comparison shows."""

import pytest

from check_metrics import ExpressionError, evaluate, parse
from tests.check_metrics.helpers import Steps, judge, judge_arms, series

# Twenty steps of one second; the first step of each of the two segments takes ten.
RESUMED = {step: 10.0 if step in (1, 11) else 1.0 for step in range(1, 21)}


def test_both_sides_and_the_margin() -> None:
    result = judge('mean(data["x"]) < 4', {"x": [1.0, 2.0, 6.0]})
    assert (result.status, result.value, result.message) == ("PASS", 3.0, "")
    (comparison,) = result.comparisons
    assert (comparison.left, comparison.op, comparison.right, comparison.holds) == (3.0, "<", 4.0, True)
    assert comparison.margin_percent == pytest.approx(25.0)


@pytest.mark.parametrize(
    ("check", "status", "value", "margin"),
    [
        ('data["x"]["1"] < 10', "PASS", 8.0, 20.0),
        ('data["x"]["1"] <= 8', "PASS", 8.0, 0.0),
        ('data["x"]["1"] > 10', "FAIL", 8.0, -20.0),
        ('10 > data["x"]["1"]', "PASS", 8.0, 20.0),
        ('10 <= data["x"]["1"]', "FAIL", 8.0, -20.0),
        ('data["x"]["1"] > -10', "PASS", 8.0, 180.0),
        ('data["x"]["1"] > 0', "PASS", 8.0, None),
        ('data["x"]["1"] == 8', "PASS", 8.0, None),
        ('data["x"]["1"] != 8', "FAIL", 8.0, None),
        ('data["x"]["1"] < data["y"]["1"]', "PASS", 8.0, 20.0),
        ('not data["x"]["1"] > 10', "PASS", 8.0, 20.0),
        ('0 < data["x"]["1"] < 10', "PASS", 8.0, 20.0),
        ('7 < data["x"]["1"] < 10', "PASS", 8.0, 100 / 7),
        ('data["x"]["1"] < 5 or data["x"]["1"] < 10', "PASS", 8.0, 20.0),
        ('data["x"]["1"] < 5 and data["x"]["1"] < 10', "FAIL", 8.0, -60.0),
        ('data["x"]["1"] < 1e-320', "FAIL", 8.0, None),
    ],
)
def test_value_and_margin(check: str, status: str, value: float, margin: float | None) -> None:
    result = judge(check, {"x": [8.0], "y": [10.0]})
    assert (result.status, result.value) == (status, value)
    assert result.margin_percent == (None if margin is None else pytest.approx(margin))


@pytest.mark.parametrize(("limit", "narrow"), [(100.0, False), (99.0, True), (95.0, True), (90.0, False)])
def test_narrow_margins(limit: float, narrow: bool) -> None:
    # 95 under 100 is exactly 5 %; 95 under 95 fails; a failure is never narrow
    result = judge(f'data["x"]["1"] <= {limit}', {"x": [95.0]})
    assert result.is_narrow is narrow


def test_every_operand_of_and_or_is_judged() -> None:
    check = 'data["x"]["1"] < 3 or data["gone"]["1"] < 3'
    result = judge(check, {"x": [1.0]})
    assert result.status == "FAIL"
    assert "gone" in result.message


def test_not_does_not_turn_missing_data_into_a_pass() -> None:
    for check in ('not mean(data["x"]) < 3', 'not data["y"]["1"] < 3', 'not all_finite(data["z"])'):
        assert judge(check, {"x": {1: None}}).status == "FAIL"


def test_de_morgan() -> None:
    # not (a < 1 or b > 5) is a >= 1 and b <= 5
    check = 'not (data["a"]["1"] < 1 or data["b"]["1"] > 5)'
    assert judge(check, {"a": [1.0], "b": [5.0]}).status == "PASS"
    assert judge(check, {"a": [0.5], "b": [5.0]}).status == "FAIL"
    assert judge(check, {"a": [1.0], "b": [6.0]}).status == "FAIL"
    assert judge('not (0 < data["a"]["1"] < 2)', {"a": [2.0]}).status == "PASS"
    assert judge('not not data["a"]["1"] < 2', {"a": [1.0]}).status == "PASS"


def test_message_of_a_failed_conjunction_names_what_failed() -> None:
    result = judge('data["x"]["1"] < 3 and data["x"]["1"] < 1', {"x": [2.0]})
    assert result.message == "does not hold: 2 < 1"


def test_message_of_a_missed_limit() -> None:
    assert judge('data["x"]["1"] < 50', {"x": [52.07]}).message == "misses its limit by 4.1 %"
    assert judge('data["x"]["1"] == 50', {"x": [52.07]}).message == "does not hold"
    assert judge('data["x"]["1"] < 50', {"x": [50.0]}).message == "does not hold"


def test_all_finite() -> None:
    check = 'all_finite(data["x"])'
    good = judge(check, {"x": [1.0, 2.0]})
    bad = judge(check, {"x": {1: 1.0, 2: None}})
    assert (good.status, good.value, good.comparisons) == ("PASS", True, ())
    assert (bad.status, bad.value) == ("FAIL", False)
    assert bad.message == 'does not hold; data["x"] is not finite at step 2'
    assert judge('not all_finite(data["x"])', {"x": {1: 1.0, 2: None}}).status == "PASS"
    assert judge('not all_finite(data["x"])', {"x": [1.0]}).message == "does not hold"
    assert judge('all_finite(data["x"], 1, 2)', {"x": {1: 1.0, 2: None}}).status == "PASS"
    assert judge(check, {"x": {}}).status == "FAIL"


def test_a_step_in_a_series() -> None:
    data: dict[str, Steps] = {"validation/accuracy": {0: 0.5, 50: 0.6, 60: None}}
    assert judge('"50" in data["validation/accuracy"]', data).value is True
    absent = judge('"10" in data["validation/accuracy"]', data)
    assert (absent.status, absent.value) == ("FAIL", False)
    assert absent.message == 'does not hold; data["validation/accuracy"] has no step 10; it has 0, 50, 60'
    assert judge('"10" not in data["validation/accuracy"]', data).status == "PASS"
    assert judge('not "50" not in data["validation/accuracy"]', data).status == "PASS"
    for check in ('"1" in data["none"]', '"1" not in data["none"]', '"60" in data["validation/accuracy"]'):
        assert judge(check, data).status == "FAIL"
        assert judge(check, data).value is None


# Missing data


def test_missing_metric_names_the_nearest() -> None:
    data: dict[str, Steps] = {"train/loss": [1.0], "train/lr": [1.0], "timing/train/data": [1.0]}
    result = judge('mean(data["train/los"]) < 3', data)
    assert result.status == "FAIL"
    assert result.message.startswith('no metric data["train/los"]; nearest: "train/loss"')


def test_missing_metric_without_a_near_name() -> None:
    result = judge('mean(data["zzz"]) < 3', {f"m{number}/q": [1.0] for number in range(7)})
    assert '"m0/q", "m1/q", "m2/q", "m3/q", "m4/q" and 2 more' in result.message
    assert "no metric at all" in judge('mean(data["zzz"]) < 3', {}).message
    assert 'there are "abc"' in judge('mean(data["zzz"]) < 3', {"abc": [1.0]}).message


def test_missing_step_says_which_there_are() -> None:
    result = judge('data["x"]["51"] < 3', {"x": dict.fromkeys(range(1, 51), 1.0)})
    assert result.message == 'data["x"] has no step 51; it has 1-50'


def test_not_finite_step() -> None:
    assert judge('data["x"]["1"] < 3', {"x": {1: None}}).message == 'data["x"] is not finite at step 1'


def test_empty_series_and_empty_window() -> None:
    assert judge('count(data["x"]) == 0', {"x": {}}).message == 'data["x"] is empty'
    result = judge('mean(data["validation/loss"], 11, 20) < 3', {"validation/loss": {10: 1.0, 20: 1.0}})
    assert result.message == 'data["validation/loss"] has no value in the window; it has step 10, 20'
    assert judge('mean(data["x"], 5, 5) < 3', {"x": dict.fromkeys(range(1, 9), 1.0)}).status == "FAIL"


def test_step_0_is_no_part_of_a_mean() -> None:
    data: dict[str, Steps] = {"validation/loss": {0: 100.0, 10: 1.0, 20: 3.0}}
    assert judge('mean(data["validation/loss"]) < 3', data).value == 2.0
    assert judge('median(data["validation/loss"]) < 3', data).value == 2.0
    assert judge('max(data["validation/loss"]) < 300', data).value == 100.0
    assert judge('mean(data["validation/loss"], 0) < 300', data).value == pytest.approx(104 / 3)


# Holes in a per-step series


HOLED = {step: 1.0 for step in range(1, 21) if step not in (5, 9, 10)}


@pytest.mark.parametrize(
    ("window", "missing"),
    [
        ("", "5, 9-10"),
        (", 6", "9-10"),
        (", 11", None),
        (", -10", None),
        (", -12, -5", "9-10"),
        (", 6, 9", None),
        (", 15, 21", None),
        (", 15, 24", "21-23"),
        (", 0, 4", None),
    ],
)
def test_holes(window: str, missing: str | None) -> None:
    result = judge(f'mean(data["train/loss"]{window}) < 3', {"train/loss": HOLED})
    if missing is None:
        assert result.status == "PASS"
    else:
        assert result.message == f'data["train/loss"] misses step {missing}, inside the window'


def test_occasional_series_have_no_holes() -> None:
    for name in ("validation/loss", "ray/node.0.gpu.0.mem_gb", "timing/train/checkpointing"):
        assert judge(f'mean(data["{name}"], 2, 90) < 3', {name: {10: 1.0, 20: 1.0}}).status == "PASS"


def test_a_logging_interval_is_its_own_grid() -> None:
    logged: Steps = dict.fromkeys((1, *range(5, 101, 5)), 1.0)
    assert judge('mean(data["lm loss"]) < 3', {"lm loss": logged}).status == "PASS"
    holed = {step: value for step, value in dict(logged).items() if step not in (15, 20)}
    assert "misses step 15-20 by 5" in judge('mean(data["lm loss"]) < 3', {"lm loss": holed}).message


def test_a_window_closed_on_both_sides_must_be_there() -> None:
    late = {"x": dict.fromkeys(range(31, 51), 1.0)}
    assert judge('mean(data["x"], 2) < 3', late).status == "PASS"
    assert "misses step 2-30" in judge('mean(data["x"], 2, 40) < 3', late).message
    assert judge('mean(data["x"], range_end=40) < 3', late).status == "PASS"
    assert "misses step 2-30" in judge('max(data["x"], 2, 40) < 3', late).message


def test_known_segments_say_where_a_named_start_must_be() -> None:
    late = {"x": dict.fromkeys(range(31, 51), 1.0)}
    assert "misses step 2-30" in judge('mean(data["x"], 2) < 3', late, segments=(1,)).message
    assert judge('mean(data["x"], 2) < 3', late, segments=(1, 31)).status == "PASS"
    assert judge('mean(data["x"], 35) < 3', late, segments=(1,)).status == "PASS"
    assert judge('mean(data["x"], -6) < 3', late, segments=(1,)).status == "PASS"
    # a metric may begin late; its whole is then what there is
    assert judge('len(data["x"]) == 20', late, segments=(1,)).status == "PASS"
    assert judge('mean(data["x"]) < 3', late, segments=(1,)).status == "PASS"
    assert judge('max(data["x"], 1) < 3', {"x": [1.0, 2.0]}, segments=(31,)).status == "PASS"


# Segments


def test_warmup_of_each_segment() -> None:
    check = 'mean(data["t"]) < 2'
    assert judge(check, {"t": RESUMED}).value == pytest.approx(38 / 20)
    first_only = judge(check, {"t": RESUMED}, warmup=1)
    assert first_only.value == pytest.approx(28 / 19)
    both = judge(check, {"t": RESUMED}, warmup=1, segments=(1, 11))
    assert both.value == 1.0
    assert both.message == 'data["t"]: warm-up step 1, 11 left out'


def test_field_windows_do_not_know_segments() -> None:
    # steps 2 to 20 hold the slow step 11
    assert judge('mean(data["t"], 2) < 2', {"t": RESUMED}, segments=(1, 11)).value == pytest.approx(28 / 19)


def test_damage_in_the_warmup_does_not_count() -> None:
    broken = {**RESUMED, 1: None}
    del broken[11]
    result = judge('max(data["t"]) < 2', {"t": broken}, warmup=1, segments=(1, 11))
    assert (result.status, result.value) == ("PASS", 1.0)
    assert judge('max(data["t"]) < 2', {"t": broken}, segments=(1, 11)).status == "FAIL"


def test_warmup_that_leaves_nothing_fails() -> None:
    result = judge('mean(data["t"]) < 2', {"t": [1.0, 1.0]}, warmup=2)
    assert "no value in the window" in result.message


def test_warmup_is_for_per_step_series() -> None:
    data: dict[str, Steps] = {"validation/loss": {1: 5.0, 10: 1.0}, "ray/x": {0: 5.0, 1: 1.0}}
    assert judge('max(data["validation/loss"]) < 6', data, warmup=5).value == 5.0
    assert judge('mean(data["ray/x"], 0) < 6', data, warmup=5).value == 3.0


# Values that are not finite


@pytest.mark.parametrize("bad", [None, float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "call",
    [
        'max(data["x"])',
        'min(data["x"])',
        'mean(data["x"])',
        'median(data["x"])',
        'ratio_above(data["x"], 1.05)',
        'percentile(data["x"], 5)',
        'count(data["x"])',
        'first(data["x"])',
        'last(data["x"])',
        'slope(data["x"])',
        'std(data["x"])',
        'worst("x")',
        'ratio(data["x"], data["y"])',
        'max_rel_diff(data["y"], data["x"])',
    ],
)
def test_finite_by_default(call: str, bad: float | None) -> None:
    data: dict[str, Steps] = {"x": {1: 1.0, 2: bad, 3: 0.5}, "y": [1.0, 1.0, 0.5]}
    for check in (f"{call} < 1000", f"not {call} > 1000"):
        result = judge(check, data)
        assert result.status == "FAIL"
        assert "not finite at step 2" in result.message


def test_not_finite_outside_the_window() -> None:
    assert judge('mean(data["x"], 2) < 3', {"x": {1: None, 2: 1.0, 3: 2.0}}).status == "PASS"


def test_a_name_with_glob_characters_means_itself() -> None:
    data: dict[str, Steps] = {"x[0]": {1: 1.0, 2: None}}
    assert judge('mean(data["x[0]"]) < 3', data, allow_nonfinite=["x[0]"]).status == "PASS"
    assert judge('worst("x[0]") < 3', data, allow_nonfinite=["x*"]).status == "PASS"


def test_allowed_non_finite_values_are_left_out() -> None:
    data: dict[str, Steps] = {"train/x": {1: 1.0, 2: None, 3: 3.0}}
    result = judge('mean(data["train/x"]) < 3', data, allow_nonfinite=["train/x"])
    assert (result.status, result.value) == ("PASS", 2.0)
    assert result.message == 'data["train/x"]: not finite at step 2, left out'
    assert judge('mean(data["train/x"]) < 3', data, allow_nonfinite=["train/*"]).status == "PASS"
    assert judge('mean(data["train/x"]) < 3', data, allow_nonfinite=["train"]).status == "FAIL"
    assert judge('data["train/x"]["2"] < 3', data, allow_nonfinite=["train/x"]).status == "FAIL"
    nothing = judge('mean(data["train/x"], 2, 3) < 3', data, allow_nonfinite=["train/x"])
    assert "no finite value in the window" in nothing.message


# Two arms


def test_steps_of_two_series_must_match() -> None:
    arms: dict[str, dict[str, Steps]] = {"a": {"t": [1.0, 2.0]}, "b": {"t": [1.0, 2.0, 3.0]}}
    assert judge_arms('ratio(a["t"], b["t"]) < 2', arms).message == 'step 3 of b["t"] is not in a["t"]'
    assert judge_arms('max_rel_diff(b["t"], a["t"]) < 2', arms).message == 'step 3 of b["t"] is not in a["t"]'
    assert judge_arms('ratio(a["t"], b["t"], 1, 3) < 2', arms).value == 1.0


def test_validation_curves_must_match_too() -> None:
    arms: dict[str, dict[str, Steps]] = {
        "a": {"validation/loss": {10: 1.0, 20: 1.0}},
        "b": {"validation/loss": {10: 1.0, 30: 1.0}},
    }
    result = judge_arms('max_rel_diff(a["validation/loss"], b["validation/loss"]) < 2', arms)
    assert "step 20 of a" in result.message


def test_allowed_non_finite_values_leave_both_arms() -> None:
    arms: dict[str, dict[str, Steps]] = {"a": {"t": {1: None, 2: 4.0}}, "b": {"t": [1.0, 2.0]}}
    result = judge_arms('ratio(a["t"], b["t"]) < 3', arms, allow_nonfinite=["t"])
    assert (result.status, result.value) == ("PASS", pytest.approx(2.0))
    nothing: dict[str, dict[str, Steps]] = {"a": {"t": {1: None, 2: 4.0}}, "b": {"t": {1: 1.0, 2: None}}}
    result = judge_arms('ratio(a["t"], b["t"]) < 3', nothing, allow_nonfinite=["t"])
    assert "share no finite step" in result.message


def test_unknown_arm_is_a_usage_error() -> None:
    with pytest.raises(ExpressionError) as caught:
        judge('mean(data["x"]) < mean(ful["x"])', {"x": [1.0]})
    assert (caught.value.token, caught.value.column) == ("ful", 24)
    assert "there are data" in caught.value.reason


# worst


GPUS: dict[str, Steps] = {
    "ray/node.0.gpu.0.mem_gb": {0: 5.0, 10: 50.0},
    "ray/node.0.gpu.1.mem_gb": {0: 5.0, 10: 61.0},
    "ray/node.1.gpu.0.mem_gb": {0: 4.0, 20: 55.0},
    "ray/node.1.mem_gb": {0: 900.0},
}


def test_worst_looks_at_every_gpu() -> None:
    assert judge('max(data["ray/node.0.gpu.0.mem_gb"]) < 60', GPUS).status == "PASS"
    result = judge('worst("ray/node.*.gpu.*.mem_gb") < 60', GPUS)
    assert (result.status, result.value) == ("FAIL", 61.0)
    assert 'worst of 3: "ray/node.0.gpu.1.mem_gb" at step 10' in result.message


@pytest.mark.parametrize(
    ("check", "value"),
    [
        ('worst("ray/*.gpu.*") > 1', 4.0),
        ('1 < worst("ray/*.gpu.*")', 4.0),
        ('not worst("ray/*.gpu.*") <= 1', 4.0),
        ('not worst("ray/*.gpu.*") >= 99', 61.0),
        ('99 >= worst(data["ray/*.gpu.*"])', 61.0),
        ('-worst("ray/*.gpu.*") > -99', -61.0),
        ('100 - worst("ray/*.gpu.*") > 1', 39.0),
        ('2 * worst("ray/*.gpu.*") / 2 < 99', 61.0),
        ('worst("ray/*.gpu.*", 15) < 99', 55.0),
        ('max(1, worst("ray/*.gpu.*")) < 99', 61.0),
    ],
)
def test_worst_follows_the_comparison(check: str, value: float) -> None:
    data = {name: steps for name, steps in GPUS.items() if "gpu" in name}
    if "15" in check:
        data = {"ray/node.1.gpu.0.mem_gb": GPUS["ray/node.1.gpu.0.mem_gb"]}
    result = judge(check, data)
    assert (result.status, result.value) == ("PASS", value)


def test_worst_with_two_limits_uses_both_ends() -> None:
    result = judge('1 < worst("ray/*.gpu.*") < 60', GPUS)
    assert [each.left if each.right != 4.0 else each.right for each in result.comparisons] == [4.0, 61.0]
    assert result.status == "FAIL"


def test_worst_without_a_match_fails() -> None:
    assert "no metric matches" in judge('worst("ray/*.tpu.*") < 60', GPUS).message
    assert judge('worst("ray/*.gpu.*", 15) < 60', GPUS).status == "FAIL"


def test_worst_judges_each_series() -> None:
    assert (
        "misses step 2"
        in judge('worst("x*", 1, 4) < 9', {"x1": [1.0, 2.0, 3.0], "x2": {1: 1.0, 3: 1.0}}).message
    )


def test_series_may_come_from_any_mapping() -> None:
    result = evaluate(parse('last(a["x"]) == 2'), {"a": {"x": series("x", [1.0, 2.0])}})
    assert result.status == "PASS"
