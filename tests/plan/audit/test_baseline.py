# SPDX-License-Identifier: Apache-2.0
"""A baseline keeps old findings quiet, and only those."""

from __future__ import annotations

import json

import pytest

from lora_suite.config.errors import ConfigError
from lora_suite.plan.audit.baseline import compare, write_baseline
from tests.plan.audit.conftest import TRAIN

UNQUOTED = TRAIN.replace('"$@"', "$@")


@pytest.fixture
def recorded(family, tmp_path):
    """A repository with one finding, and its baseline."""
    family.case(train=UNQUOTED)
    path = tmp_path / "baseline.json"
    write_baseline(path, family.findings())
    return path


def test_nothing_is_new_at_first(family, recorded):
    compared = compare(recorded, family.findings())
    assert (compared.new, compared.known, compared.gone) == ((), 1, 0)


def test_a_finding_that_moves_is_the_same(family, recorded):
    family.case(train=f"\n\n# a comment\n{UNQUOTED}")
    assert compare(recorded, family.findings()).new == ()


def test_another_kind_in_the_same_file_is_new(family, recorded):
    family.case(train=f"{UNQUOTED}uv run convert.py || true\n")
    assert [each.kind for each in compare(recorded, family.findings()).new] == ["swallowed-failure"]


def test_a_second_one_of_the_same_is_new(family, recorded):
    family.case(train=f"{UNQUOTED}{UNQUOTED}")
    compared = compare(recorded, family.findings())
    assert (len(compared.new), compared.known) == (1, 1)


def test_what_was_mended_is_counted(family, recorded):
    family.case()
    compared = compare(recorded, family.findings())
    assert (compared.new, compared.known, compared.gone) == ((), 0, 1)


@pytest.mark.parametrize("content", ["{", "[]", json.dumps({"findings": [{"kind": "x"}]}), "\xff"])
def test_what_is_no_baseline(tmp_path, content):
    path = tmp_path / "baseline.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"baseline\.json: (is no baseline|cannot be read)"):
        compare(path, [])


def test_an_absent_baseline_says_how_to_make_one(tmp_path):
    with pytest.raises(ConfigError, match="record one with --write-baseline"):
        compare(tmp_path / "absent.json", [])


def test_a_baseline_that_cannot_be_written(tmp_path):
    with pytest.raises(ConfigError, match="cannot be written"):
        write_baseline(tmp_path / "absent" / "baseline.json", [])
