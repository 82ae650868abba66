# SPDX-License-Identifier: Apache-2.0
"""Rows become examples: token ids, and the label that each position must predict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lora_suite.train.batch import IGNORED
from lora_suite.train.data.rows import Rows
from lora_suite.train.data.tokenizer import TextTokenizer

# Rows that are tokenized together.
_CHUNK = 256


@dataclass(frozen=True)
class Example:
    """One tokenized row, without padding.

    tokens: [length], 32 bits each, because all rows of a training are kept. first_target: index of the first
    token that is to be learnt; all tokens from there on are.
    """

    tokens: npt.NDArray[np.int32]
    first_target: int

    @property
    def length(self) -> int:
        """Tokens of the row."""
        return len(self.tokens)

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """[length], already shifted: labels[t] is token t + 1 where that is to be learnt, else IGNORED.

        Nothing predicts the very first token, and the last position predicts nothing.
        """
        labels = np.full(self.length, IGNORED, dtype=np.int64)
        start = max(self.first_target - 1, 0)
        labels[start:-1] = self.tokens[start + 1 :]
        return labels

    @property
    def supervised(self) -> int:
        """Positions that carry loss."""
        return max(self.length - max(self.first_target, 1), 0)


@dataclass(frozen=True)
class Encoding:
    """How a row becomes tokens: the tokenizer, its special tokens, and the longest row."""

    tokenizer: TextTokenizer
    add_bos: bool
    add_eos: bool
    max_length: int

    def join(self, prompt: Sequence[int], response: Sequence[int]) -> Example:
        """The whole row, however long: ``bos prompt response eos``, of which response and eos are learnt.

        The parts are tokenized apart, so the border between them is a border between tokens.
        """
        bos = [self.tokenizer.bos_id] if self.add_bos and self.tokenizer.bos_id is not None else []
        eos = [self.tokenizer.eos_id] if self.add_eos and self.tokenizer.eos_id is not None else []
        tokens = np.array([*bos, *prompt, *response, *eos], dtype=np.int32)
        return Example(tokens, first_target=len(bos) + len(prompt))


class ExamplePool:
    """Examples of a data set, each tokenized when it is first asked for.

    A training of 50 steps of 16 rows needs 800 of a data set's million rows. counts: what has become of the
    rows that were asked for so far.
    """

    def __init__(self, rows: Rows, encoding: Encoding) -> None:
        self._rows = rows
        self._encoding = encoding
        self._known: dict[int, Example] = {}
        self._truncated = 0

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def counts(self) -> dict[str, int]:
        """rows: of the data set. examined: those asked for. Of these, truncated: cut at the longest length;
        dropped_no_target: left without a token to learn (https://github.com/huggingface/trl/issues/3927).
        """
        dropped = sum(1 for example in self._known.values() if not example.supervised)
        return {
            "rows": len(self._rows),
            "examined": len(self._known),
            "truncated": self._truncated,
            "dropped_no_target": dropped,
        }

    def usable(self, indices: Sequence[int]) -> Iterator[Example]:
        """Examples of these rows in this order, less those that have nothing to learn."""
        for start in range(0, len(indices), _CHUNK):
            chunk = indices[start : start + _CHUNK]
            self._encode([index for index in chunk if index not in self._known])
            yield from (self._known[index] for index in chunk if self._known[index].supervised)

    def _encode(self, indices: Sequence[int]) -> None:
        if not indices:
            return
        rows = [self._rows[index] for index in indices]
        encode, longest = self._encoding.tokenizer.encode, self._encoding.max_length
        prompts, responses = encode([row.prompt for row in rows]), encode([row.response for row in rows])
        for index, prompt, response in zip(indices, prompts, responses, strict=True):
            whole = self._encoding.join(prompt, response)
            self._truncated += whole.length > longest
            self._known[index] = replace(whole, tokens=whole.tokens[:longest])
