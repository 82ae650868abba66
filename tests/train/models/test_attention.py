# SPDX-License-Identifier: Apache-2.0
"""Attention is causal over the row or its segment, shares keys among queries, refuses what it would drop."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lora_suite.train.batch import Segments
from lora_suite.train.models.attention import causal_attention

ROWS, HEADS, KV_HEADS, LENGTH, CHANNELS = 2, 4, 2, 5, 8


def random_states(heads, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, heads, LENGTH, CHANNELS, dtype=torch.float64, generator=generator)


def test_equals_softmax_over_the_past_by_hand():
    query, key, value = (random_states(h, s) for s, h in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    output, _ = causal_attention(nn.Module(), query, key, value, None, scaling=0.3)
    assert output.shape == (ROWS, LENGTH, HEADS, CHANNELS)
    for row in range(ROWS):
        for head in range(HEADS):
            shared = head // (HEADS // KV_HEADS)
            for position in range(LENGTH):
                past = slice(0, position + 1)
                scores = [
                    math.exp(0.3 * float(query[row, head, position] @ each))
                    for each in key[row, shared, past]
                ]
                weights = torch.tensor(scores, dtype=torch.float64) / sum(scores)
                expected = weights @ value[row, shared, past]
                torch.testing.assert_close(output[row, position, head], expected)


@pytest.mark.parametrize("kwargs", [{"attention_mask": torch.ones(1)}, {"sliding_window": 4}])
def test_refuses_what_it_would_drop(kwargs):
    states = random_states(HEADS, 0)
    with pytest.raises(ValueError, match="no mask, no sliding window"):
        causal_attention(nn.Module(), states, states, states, **{"attention_mask": None, **kwargs})


def test_packed_rows_attend_to_themselves_alone():
    lengths = (2, 3)
    states = [random_states(heads, seed)[:1] for seed, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))]
    packed, _ = causal_attention(nn.Module(), *states, None, scaling=0.3, segments=Segments.of(lengths))
    assert packed.shape == (1, LENGTH, HEADS, CHANNELS)
    # By hand: one block-diagonal, causal mask over the whole.
    segment = torch.repeat_interleave(torch.arange(2), torch.tensor(lengths))
    allowed = (segment[:, None] == segment).tril()
    query, key, value = states
    key, value = (shared.repeat_interleave(HEADS // KV_HEADS, dim=1) for shared in (key, value))
    scores = (0.3 * query @ key.mT).masked_fill(~allowed, -math.inf)
    torch.testing.assert_close(packed, (scores.softmax(-1) @ value).transpose(1, 2))


def test_packed_rows_with_dropout_are_refused():
    states = random_states(HEADS, 0)[:1]
    with pytest.raises(ValueError, match="no dropout"):
        causal_attention(nn.Module(), states, states, states, None, 0.1, segments=Segments.of((5,)))


def test_segments():
    segments = Segments.of((3, 5, 8))
    assert (segments.boundaries.tolist(), segments.longest) == ([0, 3, 8, 16], 8)
    assert segments.boundaries.dtype == torch.int32
