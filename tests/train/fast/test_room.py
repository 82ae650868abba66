# SPDX-License-Identifier: Apache-2.0
"""Room for packs: a kind for each length that rows fit into, a quarter more rows than the fullest needs."""

from __future__ import annotations

import torch

from lora_suite.train.batch import Extent, MicroBatch, Segments
from lora_suite.train.fast.room import Room


def pack(*lengths: int) -> MicroBatch:
    slots = torch.zeros(1, sum(lengths), dtype=torch.int64)
    return MicroBatch(slots, slots, slots, Segments.of(lengths))


def test_packs_of_long_and_of_short_rows_have_rooms_of_their_own() -> None:
    room = Room()
    assert room.grow([pack(2000, 48), pack(3000), pack(*[100] * 20), pack(512, 1), pack(513)]) == {}
    # 20 · 1.25 = 25, then the next multiple of 8; the others need less than 8.
    assert room.rows == {512: 32, 1024: 8, 2048: 8, 4096: 8}
    assert [Room.length(Segments.of((n,))) for n in (1, 512, 513, 2048, 2049)] == [512, 512, 1024, 2048, 4096]


def test_what_is_too_small_is_told_and_a_new_kind_is_not() -> None:
    room = Room()
    assert room.grow([pack(*[10] * 6)]) == {}
    assert room.grow([pack(*[10] * 8), pack(600)]) == {}
    assert room.grow([pack(*[10] * 9), pack(700)]) == {
        512: "a pack has 9 rows of up to 512 tokens, there was room for 8, there is for 16 from here on"
    }
    assert room.grow([pack(*[10] * 16)]) == {}


def test_what_other_ranks_have_at_once_counts() -> None:
    lengths = (100, 28)
    slots = torch.zeros(1, 128, dtype=torch.int64)
    mine = MicroBatch(slots, slots, slots, Segments.of(lengths, Extent(segments=20, longest=700)))
    room = Room()
    room.grow([mine])
    assert room.rows == {1024: 32}
    fitted = room.fit(mine).segments
    assert fitted is not None
    assert fitted.lengths == (*lengths, *[0] * 30)
    assert Room.length(fitted) == 1024


def test_rows_of_no_length_fill_up() -> None:
    room, batch = Room(), pack(3, 2)
    room.grow([batch])
    fitted = room.fit(batch).segments
    assert fitted is not None
    assert fitted.lengths == (3, 2, 0, 0, 0, 0, 0, 0)
    assert fitted.boundaries.tolist() == [0, 3, 5, 5, 5, 5, 5, 5, 5]
    assert fitted.boundaries.dtype == torch.int32
    padded = MicroBatch(batch.input_ids, batch.labels)
    assert room.fit(padded) is padded
