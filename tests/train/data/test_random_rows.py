# SPDX-License-Identifier: Apache-2.0
"""Rows of random tokens: full, spread over the vocabulary, the same whenever they are asked for."""

from __future__ import annotations

import numpy as np
import pytest

from lora_suite.config import ConfigError
from lora_suite.train.data.load import load_data
from lora_suite.train.data.random_rows import RandomPool
from tests.train.conftest import RECIPE, small_recipe

ROWS = ("data.train.data_path=null", "data.train.dataset_name=random")


def test_rows_are_full_and_spread_evenly() -> None:
    pool = RandomPool(4096, 1000, seed=7)
    rows = list(pool.usable(range(64)))
    assert {(row.length, row.supervised) for row in rows} == {(4096, 4095)}
    counts = np.bincount(np.concatenate([row.tokens for row in rows]), minlength=1000)
    # 262 of each id, with a deviation of sqrt(262) = 16: none of 1000 is six deviations off.
    assert counts.shape == (1000,)
    assert abs(counts - 64 * 4096 / 1000).max() < 6 * 16.2
    assert pool.counts == {"rows": 65_536, "examined": 64, "truncated": 0, "dropped_no_target": 0}


def test_a_row_is_its_index_and_seed() -> None:
    (first,) = RandomPool(8, 100, seed=7).usable([5])
    again, other = RandomPool(8, 100, seed=7).usable([5, 6])
    (elsewhere,) = RandomPool(8, 100, seed=8).usable([5])
    assert first.tokens.tolist() == again.tokens.tolist()
    assert first.tokens.tolist() not in (other.tokens.tolist(), elsewhere.tokens.tolist())


def test_a_recipe_trains_on_them() -> None:
    data = load_data(small_recipe(*ROWS), RECIPE, vocabulary=11)
    recipe = small_recipe()
    length = recipe.data.max_input_seq_length
    rows = [row for batch in data.steps for row in batch.examples]
    assert {row.length for row in rows} == {length}
    assert max(int(row.tokens.max()) for row in rows) == 10
    assert len({row.tokens.tobytes() for row in rows}) == len(rows)


def test_an_unknown_vocabulary_is_named() -> None:
    with pytest.raises(ConfigError, match=r"data\.train\.dataset_name: random rows need the model's vocab"):
        load_data(small_recipe(*ROWS), RECIPE)
