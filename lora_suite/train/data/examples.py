# SPDX-License-Identifier: Apache-2.0
"""Rows become examples: token ids, and the label that each position must predict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lora_suite.train.batch import IGNORED
from lora_suite.train.data.rows import Row
from lora_suite.train.data.tokenizer import TextTokenizer

Ids = npt.NDArray[np.int64]

_CHUNK = 1024


@dataclass(frozen=True)
class Example:
    """One tokenized row, without padding.

    tokens: [length]. labels: [length], already shifted: labels[t] is the token after position t where that
    token is the response's (its closing EOS included), IGNORED elsewhere.
    """

    tokens: Ids
    labels: Ids

    @property
    def length(self) -> int:
        """Tokens of the row."""
        return len(self.tokens)

    @property
    def supervised(self) -> int:
        """Positions that carry loss."""
        return int(np.count_nonzero(self.labels != IGNORED))


@dataclass(frozen=True)
class Encoding:
    """How a row becomes tokens: the tokenizer, its special tokens, and the longest row."""

    tokenizer: TextTokenizer
    add_bos: bool
    add_eos: bool
    max_length: int

    def join(self, prompt: Sequence[int], response: Sequence[int]) -> tuple[Ids, int]:
        """All tokens of a row, and the index of the first one that is to be learnt.

        The parts are tokenized apart, so the border between them is a border between tokens.
        """
        bos = [self.tokenizer.bos_id] if self.add_bos and self.tokenizer.bos_id is not None else []
        eos = [self.tokenizer.eos_id] if self.add_eos and self.tokenizer.eos_id is not None else []
        return np.array([*bos, *prompt, *response, *eos], dtype=np.int64), len(bos) + len(prompt)


def label(tokens: Ids, first_target: int) -> Example:
    """An example that learns every token from `first_target` on (nothing can predict the very first)."""
    labels = np.full_like(tokens, IGNORED)
    start = max(first_target - 1, 0)
    labels[start:-1] = tokens[start + 1 :]
    return Example(tokens, labels)


@dataclass(frozen=True)
class Examples:
    """The usable rows of a data set, and what became of the others.

    rows: all rows read. truncated: rows cut at the longest length. dropped_no_target: rows left without a
    supervised token, which would only dilute a batch (https://github.com/huggingface/trl/issues/3927).
    """

    kept: tuple[Example, ...]
    rows: int
    truncated: int
    dropped_no_target: int


def encode_rows(rows: Sequence[Row], encoding: Encoding) -> Examples:
    """Tokenize all rows; keep those that have something to learn."""
    kept: list[Example] = []
    truncated = 0
    for start in range(0, len(rows), _CHUNK):
        chunk = rows[start : start + _CHUNK]
        prompts = encoding.tokenizer.encode([row.prompt for row in chunk])
        responses = encoding.tokenizer.encode([row.response for row in chunk])
        for prompt, response in zip(prompts, responses, strict=True):
            tokens, first_target = encoding.join(prompt, response)
            truncated += len(tokens) > encoding.max_length
            example = label(tokens[: encoding.max_length], first_target)
            if example.supervised:
                kept.append(example)
    return Examples(tuple(kept), len(rows), truncated, len(rows) - len(kept))
