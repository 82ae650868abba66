# SPDX-License-Identifier: Apache-2.0
"""Global batches do not depend on the layout; padding, micro batches and counts by hand."""

from __future__ import annotations

import hashlib
import struct
from itertools import chain

import numpy as np
import pytest

from lora_suite.train.batch import IGNORED
from lora_suite.train.data.batches import GlobalBatch, Slicing, plan_steps, plan_validation
from lora_suite.train.data.examples import Encoding, Example, ExamplePool
from lora_suite.train.data.rows import Row
from lora_suite.train.data.tokenizer import ByteTokenizer
from lora_suite.train.topology import Axis

PAD = 258


def example(*tokens: int, first_target: int = 1) -> Example:
    return Example(np.array(tokens, dtype=np.int32), first_target)


def pool_of(count: int) -> ExamplePool:
    rows = [Row(f"{number:03d}", "x" * (1 + number % 5)) for number in range(count)]
    return ExamplePool(rows, Encoding(ByteTokenizer(), True, True, 64))


def prompts(batches: list[GlobalBatch]) -> list[list[str]]:
    return [["".join(map(chr, each.tokens[1:4].tolist())) for each in batch.examples] for batch in batches]


def slicing(micro: int = 2, multiple: int = 1, fixed: int | None = None) -> Slicing:
    return Slicing(micro, multiple, fixed, PAD)


def test_micro_batches_are_padded_on_the_right_to_their_longest_row() -> None:
    batch = GlobalBatch((example(1, 2, 3), example(4, 5), example(6, 7), example(8, 9, 10, 11, 12)))
    first, second = slicing(multiple=4).micro_batches(batch, Axis(0, 1))
    assert first.input_ids.tolist() == [[1, 2, 3, PAD], [4, 5, PAD, PAD]]
    assert first.labels.tolist() == [[2, 3, IGNORED, IGNORED], [5, IGNORED, IGNORED, IGNORED]]
    assert list(second.input_ids.shape) == [2, 8]
    assert first.slots + second.slots == slicing(multiple=4).slots(batch, 1) == 24
    assert (batch.tokens, batch.supervised) == (12, 8)


def test_fixed_length() -> None:
    batch = GlobalBatch((example(1, 2), example(3, 4)))
    (micro,) = slicing(fixed=6).micro_batches(batch, Axis(0, 1))
    assert list(micro.input_ids.shape) == [2, 6]


def test_three_counts_of_one_batch() -> None:
    # Two rows of three and seven tokens in eight slots each, six of them supervised:
    # https://github.com/huggingface/transformers/issues/29889
    rows = (example(1, 2, 3, first_target=2), example(*range(10, 17), first_target=2))
    batch = GlobalBatch(rows)
    assert slicing(multiple=8).slots(batch, 1) == 16
    assert (batch.tokens, batch.supervised) == (10, 6)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("micro", [1, 2])
def test_ranks_together_have_every_row_once_and_in_order(size: int, micro: int) -> None:
    (batch,) = plan_steps(pool_of(8), range(8), 8, steps=1, epochs=1, seed=3)
    rows = [
        [token for token in row if token != PAD]
        for index in range(size)
        for each in slicing(micro).micro_batches(batch, Axis(index, size))
        for row in each.input_ids.tolist()
    ]
    assert rows == [each.tokens.tolist() for each in batch.examples]


def test_slots_are_those_of_all_ranks() -> None:
    (batch,) = plan_steps(pool_of(8), range(8), 8, steps=1, epochs=1, seed=3)
    for size in (1, 2, 4):
        made = [slicing(2, 8).micro_batches(batch, Axis(index, size)) for index in range(size)]
        assert slicing(2, 8).slots(batch, size) == sum(each.slots for rank in made for each in rank)


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
    rows = [Row("aaa", "b"), Row("x" * 90, "b"), Row("ccc", "d"), Row("eee", "f")]
    pool = ExamplePool(rows, Encoding(ByteTokenizer(), True, True, 64))
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
    assert GlobalBatch((example(1, 2, 3, first_target=2), example(4, 5))).fingerprint != batch.fingerprint
    assert GlobalBatch((example(1, 2), example(3, 4, 5))).fingerprint != batch.fingerprint
