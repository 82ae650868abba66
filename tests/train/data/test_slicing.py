# SPDX-License-Identifier: Apache-2.0
"""Padded or packed: every row once, in one place, whatever the layout; micro batches and counts by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lora_suite.config.schema import Recipe
from lora_suite.train.batch import IGNORED, MicroBatch
from lora_suite.train.data.batches import GlobalBatch, plan_steps
from lora_suite.train.data.rows import Row
from lora_suite.train.data.slicing import PackedRows, PaddedRows, first_fit_decreasing, slicing_of
from lora_suite.train.topology import Axis
from tests.train.conftest import small_recipe
from tests.train.data.examples_of import example, pool_of

PAD = 258
ALONE = Axis(0, 1)


def padded(micro: int = 2, multiple: int = 1, fixed: int | None = None) -> PaddedRows:
    return PaddedRows(micro, multiple, fixed, PAD)


def rows(count: int) -> GlobalBatch:
    pool = pool_of([Row.of_pair(f"{number:03d}", "x" * (1 + number % 5)) for number in range(count)])
    (batch,) = plan_steps(pool, range(count), count, steps=1, epochs=1, seed=3)
    return batch


# -- padded -------------------------------------------------------------------------------------------------


def test_micro_batches_are_padded_on_the_right_to_their_longest_row() -> None:
    batch = GlobalBatch((example(1, 2, 3), example(4, 5), example(6, 7), example(8, 9, 10, 11, 12)))
    first, second = padded(multiple=4).micro_batches(batch, ALONE)
    assert first.input_ids.tolist() == [[1, 2, 3, PAD], [4, 5, PAD, PAD]]
    assert first.labels.tolist() == [[2, 3, IGNORED, IGNORED], [5, IGNORED, IGNORED, IGNORED]]
    assert first.segments is None
    assert first.positions is None
    assert list(second.input_ids.shape) == [2, 8]
    assert first.slots + second.slots == padded(multiple=4).slots(batch, 1) == 24
    assert (batch.tokens, batch.supervised) == (12, 8)


def test_fixed_length() -> None:
    batch = GlobalBatch((example(1, 2), example(3, 4)))
    (micro,) = padded(fixed=6).micro_batches(batch, ALONE)
    assert list(micro.input_ids.shape) == [2, 6]


def test_three_counts_of_one_batch() -> None:
    # Two rows of three and seven tokens in eight slots each, six of them supervised:
    # https://github.com/huggingface/transformers/issues/29889
    batch = GlobalBatch((example(1, 2, 3, first=2), example(*range(10, 17), first=2)))
    assert padded(multiple=8).slots(batch, 1) == 16
    assert (batch.tokens, batch.supervised) == (10, 6)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("micro", [1, 2])
def test_ranks_together_have_every_row_once_and_in_order(size: int, micro: int) -> None:
    batch = rows(8)
    seen = [
        [token for token in row if token != PAD]
        for index in range(size)
        for each in padded(micro).micro_batches(batch, Axis(index, size))
        for row in each.input_ids.tolist()
    ]
    assert seen == [each.tokens.tolist() for each in batch.examples]


def test_slots_are_those_of_all_ranks() -> None:
    batch = rows(8)
    for size in (1, 2, 4):
        made = [padded(2, 8).micro_batches(batch, Axis(index, size)) for index in range(size)]
        assert padded(2, 8).slots(batch, size) == sum(each.slots for rank in made for each in rank)


# -- packed -------------------------------------------------------------------------------------------------


def test_longest_first_into_the_first_that_has_room() -> None:
    # By hand, capacity 10: 7 | 6 | 4 beside 6 | 3 beside 7 | 3 alone | 1 beside 3.
    assert first_fit_decreasing([3, 7, 4, 6, 3, 1], 10) == [[1, 0], [3, 2], [4, 5]]
    assert first_fit_decreasing([], 10) == []
    with pytest.raises(ValueError, match="11 tokens does not fit into 10 slots"):
        first_fit_decreasing([1, 11], 10)


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(40, 90))
def test_every_row_is_packed_once_and_within_the_capacity(lengths: list[int], capacity: int) -> None:
    bins = first_fit_decreasing(lengths, capacity)
    assert sorted(index for each in bins for index in each) == list(range(len(lengths)))
    loads = [sum(lengths[index] for index in each) for each in bins]
    assert all(0 < load <= capacity for load in loads)
    # No two bins could have been one: the first row of a later one did not fit into an earlier one.
    for later in range(1, len(bins)):
        first = lengths[bins[later][0]]
        for earlier in range(later):
            before = sum(lengths[index] for index in bins[earlier] if lengths[index] >= first)
            assert before + first > capacity


def test_packed_rows_by_hand() -> None:
    batch = GlobalBatch((example(1, 2, 3), example(4, 5, 6, 7, 8, first=2), example(9, 10)))
    (micro, second) = PackedRows(8, PAD, 8).micro_batches(batch, ALONE)
    assert micro.input_ids.tolist() == [[4, 5, 6, 7, 8, 1, 2, 3]]
    # No row's last position predicts the first token of the next.
    assert micro.labels.tolist() == [[IGNORED, 6, 7, 8, IGNORED, 2, 3, IGNORED]]
    assert micro.positions is not None
    assert micro.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert micro.segments is not None
    assert micro.segments.lengths == (5, 3)
    assert second.input_ids.tolist() == [[9, 10] + [PAD] * 6]
    assert second.labels.tolist() == [[10] + [IGNORED] * 7]
    assert second.segments is not None
    assert second.segments.lengths == (2, 6)
    assert second.positions is not None
    assert second.positions.tolist() == [[0, 1, 0, 1, 2, 3, 4, 5]]
    assert PackedRows(8, PAD, 8).slots(batch, 1) == 16


def test_no_segment_of_padding_is_longer_than_a_row() -> None:
    (micro,) = PackedRows(12, PAD, 5).micro_batches(GlobalBatch((example(1, 2),)), ALONE)
    assert micro.segments is not None
    assert micro.positions is not None
    assert micro.segments.lengths == (2, 5, 5)
    assert micro.positions.tolist() == [[0, 1, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4]]
    (long,) = PackedRows(1500, PAD, 1500).micro_batches(GlobalBatch((example(1, 2),)), ALONE)
    assert long.segments is not None
    assert long.segments.lengths == (2, 512, 512, 474)


def contents(micro: MicroBatch) -> list[tuple[list[int], list[int]]]:
    """Tokens and labels of each segment that is not padding."""
    assert micro.segments is not None
    lengths = list(micro.segments.lengths)
    parts = zip(torch.split(micro.input_ids[0], lengths), torch.split(micro.labels[0], lengths), strict=True)
    return [(ids.tolist(), labels.tolist()) for ids, labels in parts if set(ids.tolist()) != {PAD}]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_packed_ranks_have_every_row_once_and_equally_many_micro_batches(size: int) -> None:
    batch, packed = rows(10), PackedRows(24, PAD, 24)
    ranks = [packed.micro_batches(batch, Axis(index, size)) for index in range(size)]
    assert len({len(rank) for rank in ranks}) == 1
    seen = sorted(row for rank in ranks for micro in rank for row in contents(micro))
    assert seen == sorted((each.tokens.tolist(), each.labels.tolist()) for each in batch.examples)
    assert packed.slots(batch, size) == sum(micro.slots for rank in ranks for micro in rank)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_know_the_most_that_any_of_them_has_at_once(size: int) -> None:
    batch, packed = rows(10), PackedRows(24, PAD, 24)
    ranks = [packed.micro_batches(batch, Axis(index, size)) for index in range(size)]
    for beside in zip(*ranks, strict=True):
        segments = [micro.segments for micro in beside if micro.segments is not None]
        assert len(segments) == size
        most = max(len(each.lengths) for each in segments)
        longest = max(length for each in segments for length in each.lengths)
        assert {(each.of_ranks.segments, each.of_ranks.longest) for each in segments} == {(most, longest)}


def test_a_sequence_of_padding_alone_counts_nothing() -> None:
    batch = GlobalBatch((example(1, 2, 3),))
    (mine,) = PackedRows(4, PAD, 4).micro_batches(batch, Axis(1, 2))
    assert mine.input_ids.tolist() == [[PAD] * 4]
    assert set(mine.labels.flatten().tolist()) == {IGNORED}
    assert mine.segments is not None
    assert mine.segments.lengths == (4,)
    assert PackedRows(4, PAD, 4).slots(batch, 2) == 8


# -- of a recipe --------------------------------------------------------------------------------------------


def packing(*overrides: str) -> Recipe:
    return small_recipe(
        "policy.sequence_packing.enabled=true", "policy.max_total_sequence_length=50", *overrides
    )


def test_a_packed_sequence_has_room_for_a_micro_batch_of_the_longest_rows() -> None:
    assert slicing_of(packing(), 1, PAD) == PackedRows(50, PAD, 50)
    assert slicing_of(packing(), 2, PAD) == PackedRows(100, PAD, 50)
    divisible = packing("policy.make_sequence_length_divisible_by=8")
    assert slicing_of(divisible, 1, PAD) == PackedRows(56, PAD, 50)


def test_without_packing() -> None:
    assert slicing_of(small_recipe("data.pad_to_max_length=false"), 2, PAD) == padded(2, 1)
    assert slicing_of(small_recipe("data.pad_to_max_length=true"), 2, PAD) == padded(2, 1, 64)
