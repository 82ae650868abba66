# SPDX-License-Identifier: Apache-2.0
"""Global batches: their order, their fingerprint, and what fills the last one of a validation."""

from __future__ import annotations

import hashlib
import struct
from itertools import chain

from lora_suite.train.batch import IGNORED
from lora_suite.train.data.batches import GlobalBatch, plan_steps, plan_validation
from lora_suite.train.data.examples import ExamplePool
from lora_suite.train.data.rows import Row
from tests.train.data.examples_of import example
from tests.train.data.examples_of import pool_of as pool_of_rows

PAD = 258


def pool_of(count: int) -> ExamplePool:
    return pool_of_rows([Row.of_pair(f"{number:03d}", "x" * (1 + number % 5)) for number in range(count)])


def prompts(batches: list[GlobalBatch]) -> list[list[str]]:
    return [["".join(map(chr, each.tokens[1:4].tolist())) for each in batch.examples] for batch in batches]


def test_every_epoch_has_every_row_in_an_order_of_its_own() -> None:
    batches = plan_steps(pool_of(10), range(10), 5, steps=100, epochs=2, seed=7)
    assert len(batches) == 4
    rows = list(chain.from_iterable(prompts(batches)))
    first, second = rows[:10], rows[10:]
    assert sorted(first) == sorted(second) == [f"{number:03d}" for number in range(10)]
    assert first != second
    assert prompts(plan_steps(pool_of(10), range(10), 5, 100, 2, 7)) == prompts(batches)
    assert prompts(plan_steps(pool_of(10), range(10), 5, 100, 2, 8)) != prompts(batches)


def test_without_seed_rows_keep_their_order_and_the_rest_of_an_epoch_is_left_out() -> None:
    batches = plan_steps(pool_of(7), range(7), 3, steps=3, epochs=5, seed=None)
    assert prompts(batches) == [["000", "001", "002"], ["003", "004", "005"], ["000", "001", "002"]]


def test_too_few_rows_give_no_batch() -> None:
    assert plan_steps(pool_of(2), range(2), 3, steps=3, epochs=5, seed=1) == []


def test_dropped_rows_shift_none_of_the_others() -> None:
    pairs = (("aaa", "b"), ("x" * 90, "b"), ("ccc", "d"), ("eee", "f"))
    pool = pool_of_rows([Row.of_pair(*pair) for pair in pairs])
    assert prompts(plan_steps(pool, range(4), 3, 1, 1, None)) == [["aaa", "ccc", "eee"]]


def test_validation_fills_its_last_batch_with_rows_that_count_nothing() -> None:
    pool = pool_of(5)
    batches = plan_validation(pool, range(5), 2, limit=0, pad_id=PAD)
    assert [len(batch.examples) for batch in batches] == [2, 2, 2]
    filler = batches[-1].examples[-1]
    assert (filler.tokens.tolist(), filler.labels.tolist()) == ([PAD], [IGNORED])
    assert sum(batch.supervised for batch in batches) == sum(e.supervised for e in pool.usable(range(5)))
    assert len(plan_validation(pool, range(5), 2, limit=2, pad_id=PAD)) == 2


def test_the_fingerprint_is_of_tokens_and_labels_alone() -> None:
    batch = GlobalBatch((example(1, 2, 3), example(4, 5)))
    # By hand: for each row its length, tokens, labels, as little-endian 64-bit words.
    words = [3, 1, 2, 3, 2, 3, IGNORED, 2, 4, 5, 5, IGNORED]
    assert batch.fingerprint == hashlib.sha256(struct.pack(f"<{len(words)}q", *words)).hexdigest()[:16]
    assert GlobalBatch((example(4, 5), example(1, 2, 3))).fingerprint != batch.fingerprint
    assert GlobalBatch((example(1, 2, 3, first=2), example(4, 5))).fingerprint != batch.fingerprint
    assert GlobalBatch((example(1, 2), example(3, 4, 5))).fingerprint != batch.fingerprint
