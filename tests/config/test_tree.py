# SPDX-License-Identifier: Apache-2.0
"""Flat view, differences and fingerprint of resolved trees."""

from __future__ import annotations

import copy

from hypothesis import given, settings
from hypothesis import strategies as st

from lora_suite.config import ABSENT, differences, flatten, recipe_hash
from tests.config.helpers import load

LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(max_size=3), st.lists(st.integers(), max_size=2)
)
TREES = st.recursive(
    st.dictionaries(st.text("abc", min_size=1, max_size=2), LEAVES, max_size=3),
    lambda below: st.dictionaries(st.text("abc", min_size=1, max_size=2), below | LEAVES, max_size=3),
    max_leaves=8,
)


def test_flatten_keeps_lists_and_empty_blocks_whole():
    assert flatten({"a": {"b": [1, {"c": 2}], "d": {}}, "e": None}) == {
        "a.b": [1, {"c": 2}],
        "a.d": {},
        "e": None,
    }


def test_differences_name_key_and_both_values():
    left = {"a": {"x": 1, "y": 2}, "b": [1]}
    right = {"a": {"x": 1.0, "y": 3}, "b": [1], "c": None}
    assert differences(left, right) == [("a.y", 2, 3), ("c", ABSENT, None)]


def test_true_is_not_one():
    assert differences({"a": 1}, {"a": True}) == [("a", 1, True)]


@settings(deadline=None)
@given(tree=TREES)
def test_a_tree_does_not_differ_from_its_copy(tree):
    assert differences(tree, copy.deepcopy(tree)) == []
    assert recipe_hash(tree) == recipe_hash(dict(reversed(list(copy.deepcopy(tree).items()))))


@settings(deadline=None)
@given(left=TREES, right=TREES)
def test_differences_are_symmetric(left, right):
    there, back = differences(left, right), differences(right, left)
    assert [(key, b, a) for key, a, b in there] == back


def test_the_hash_sees_every_value_and_no_spelling():
    base = load().tree
    assert len(recipe_hash(base)) == 16
    assert recipe_hash(load("policy.optimizer.kwargs.lr=0.000005").tree) == recipe_hash(base)
    assert recipe_hash(load("policy.optimizer.kwargs.lr=6e-6").tree) != recipe_hash(base)
    deleted = recipe_hash(load("~policy.tokenizer.chat_template").tree)
    assert deleted == recipe_hash(load("policy.tokenizer.chat_template=default").tree) != recipe_hash(base)


def test_lora_block_and_name_are_all_that_flipping_lora_changes():
    names = [
        key for key, _, _ in differences(load().tree, load("policy.dtensor_cfg.lora_cfg.enabled=true").tree)
    ]
    assert names == ["policy.dtensor_cfg.lora_cfg.enabled"]
