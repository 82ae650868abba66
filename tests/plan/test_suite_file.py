# SPDX-License-Identifier: Apache-2.0
"""Suite YAML: what is accepted, and what is said about the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_suite.config import ConfigError
from lora_suite.plan.suite_file import STEP_TIME_BELOW_FULL, pair_checks, read_suite

PAIR = "pairs:\n- {name: p, arms: {full: a, lora: b}}\n"


def read(tmp_path: Path, text: str) -> object:
    path = tmp_path / "s.yaml"
    path.write_text(text)
    return read_suite(path)


def test_defaults_and_bare_stems(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("name: x\ncases: [a, {case: b, checks: ['1 < 2'], overrides: [k=v]}]\n" + PAIR)
    suite = read_suite(path)
    assert (suite.repeats, suite.warmup, suite.budget_gpu_hours) == (1, 3, None)
    assert [(case.case, case.checks, case.overrides) for case in suite.cases] == [
        ("a", [], []),
        ("b", ["1 < 2"], ["k=v"]),
    ]
    assert pair_checks(suite.pairs[0]) == (STEP_TIME_BELOW_FULL,)
    assert STEP_TIME_BELOW_FULL.endswith("< 1.00")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: x\nrepeat: 4\n" + PAIR, r"s\.yaml:2: unknown key repeat; did you mean repeats\?"),
        ("name: x\npairs:\n- {name: p, arm: {a: b, c: d}}\n", r"pairs\.0\.arm; did you mean arms\?"),
        ("name: x\ncases:\n- {case: a, override: []}\n", r"cases\.0\.override; did you mean overrides\?"),
        ("name: x\nrepeats: '4'\n" + PAIR, r"s\.yaml:2: repeats: .*integer"),
        ("name: x\nrepeats: 0\n" + PAIR, r"repeats: .*greater than or equal to 1"),
        ("name: x\nbudget_gpu_hours: 0\n" + PAIR, "budget_gpu_hours"),
        ("repeats: 4\n" + PAIR, "name: Field required"),
        ("name: x\n", "neither cases nor pairs"),
        ("name: x\npairs:\n- {name: p, arms: {a: s, b: t}}\n", "pair p: checks are missing"),
        ("name: x\npairs:\n- {name: p, arms: {full: s}}\n", "at least 2"),
        ("name: x\npairs:\n- {name: p, arms: {full: s, lora: s}}\n", "two arms are the same case"),
        (
            "name: x\npairs:\n- {name: p, arms: {a-b: s, c: t}, checks: [x]}\n",
            "'a-b' cannot be used in a check",
        ),
        ("name: x\npairs:\n- {name: p, arms: {data: s, c: t}, checks: [x]}\n", "'data' cannot be used"),
        ("name: x\npairs:\n- {name: p, arms: {is: s, c: t}, checks: [x]}\n", "'is' cannot be used"),
        ("name: x\npairs:\n- {name: p, arms: {first: s, c: t}, checks: [x]}\n", "'first' is a function of"),
        ("name: x\n" + PAIR + "- {name: p, arms: {full: c, lora: d}}\n", "the pair p stands twice"),
        ("name: x\ncases: [a, a]\n", "the case a stands twice"),
        (
            "name: x\ncases:\n- {case: a, recipe: b, external: {command: [c], steps: 1, minutes: 1}}\n",
            "cases.0: recipe and external stand together; keep one",
        ),
        ("name: x\ncases:\n- {case: a, limits: {H200: 1 < 2}}\n", "cases.0.limits.H200: .*list"),
        ("name: x\ncases:\n- {case: a, limits: {H200: []}}\n", "cases.0.limits.H200: .*at least 1"),
        ("name: x\ncases:\n- {case: ../a, recipe: b}\n", "the name '../a' becomes a folder"),
        (
            "name: x\npairs:\n- {name: p, arms: {full: s, lora: t}, batches: other}\n",
            "pairs.0.batches: .*'equal' or 'different'",
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, text)


def test_a_missing_suite_names_the_nearest_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "smoke.yaml").write_text("name: x\n" + PAIR)
    with pytest.raises(
        ConfigError, match=r"smok\.yaml: there is no such suite; the nearest is .*smoke\.yaml"
    ):
        read_suite(tmp_path / "smok.yaml")
