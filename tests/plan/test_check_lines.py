# SPDX-License-Identifier: Apache-2.0
"""Lines of checks in a suite file, counted by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_suite.plan.check_lines import pair_check_lines

SUITE = """name: s
pairs:
  - name: first
    arms: {full: a, lora: b}
    checks:
      - ratio(lora["x"], full["x"]) < 1

      - >-
        max_rel_diff(lora["y"], full["y"])
        < 2
  - arms: {full: a, lora: b}
    name: second
cases:
  - a
"""


def test_lines(tmp_path):
    file = tmp_path / "s.yaml"
    file.write_text(SUITE, encoding="utf-8")
    assert pair_check_lines(file) == {
        ("first", ""): 3,
        ("first", 'ratio(lora["x"], full["x"]) < 1'): 6,
        ("first", 'max_rel_diff(lora["y"], full["y"]) < 2'): 8,
        ("second", ""): 12,
    }


@pytest.mark.parametrize("text", ["", "a: 1\n", "pairs: x\n", "pairs: [x, {checks: y, name: n}]\n", "{"])
def test_whatever_stands_there(tmp_path, text):
    file = tmp_path / "s.yaml"
    file.write_text(text, encoding="utf-8")
    assert set(pair_check_lines(file)) <= {("n", "")}


def test_a_file_that_has_gone(tmp_path):
    assert pair_check_lines(tmp_path / "none.yaml") == {}


def test_the_smoke_suite():
    suite = Path(__file__).parents[2] / "suites" / "smoke.yaml"
    rows = suite.read_text(encoding="utf-8").splitlines()
    found = pair_check_lines(suite)
    assert len([check for _, check in found if check]) == 4
    assert all(check in rows[line - 1] for (_, check), line in found.items() if check)
