# SPDX-License-Identifier: Apache-2.0
"""Rows become examples: token ids, and the label that each position must predict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lora_suite.config import ConfigError
from lora_suite.train.batch import IGNORED
from lora_suite.train.data.rows import Row
from lora_suite.train.data.sources import Rows
from lora_suite.train.data.template import Template
from lora_suite.train.data.tokenizer import TextTokenizer

# Rows that are tokenized together.
_CHUNK = 256


@dataclass(frozen=True)
class Example:
    """One tokenized row, without padding.

    tokens: [length], 32 bits each, because all rows of a training are kept. learnt: bool [length], the tokens
    that are to be learnt.
    """

    tokens: npt.NDArray[np.int32]
    learnt: npt.NDArray[np.bool_]

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
        labels[:-1] = np.where(self.learnt[1:], self.tokens[1:], IGNORED)
        return labels

    @property
    def supervised(self) -> int:
        """Positions that carry loss."""
        return int(self.learnt[1:].sum())

    def cut(self, length: int) -> Example:
        """The first `length` tokens."""
        return Example(self.tokens[:length], self.learnt[:length])


@dataclass(frozen=True)
class Encoding:
    """How a row becomes tokens: template, tokenizer, its special tokens, and the longest row."""

    tokenizer: TextTokenizer
    template: Template
    add_bos: bool
    add_eos: bool
    max_length: int

    def encode(self, rows: Sequence[Row]) -> list[Example]:
        """The whole rows, however long. All their pieces are tokenized at once.

        Raises ConfigError for a row of which nothing or everything would be learnt.
        """
        pieces = [[piece for piece in self.template.pieces(row) if piece.text] for row in rows]
        ids = iter(self.tokenizer.encode([piece.text for of_row in pieces for piece in of_row]))
        examples = []
        for row, of_row in zip(rows, pieces, strict=True):
            parts = [(next(ids), piece.learnt) for piece in of_row]
            examples.append(self._join(parts, row.place))
        return examples

    def _join(self, parts: Sequence[tuple[list[int], bool]], place: str) -> Example:
        """Tokens of all parts, with bos in front and eos behind where they are not there already.

        The closing eos is learnt, whatever id fills padded positions
        (https://github.com/huggingface/transformers/issues/23530).
        """
        tokens = [token for part, _ in parts for token in part]
        learnt = [of_part for part, of_part in parts for _ in part]
        bos, eos = self.tokenizer.bos_id, self.tokenizer.eos_id
        if self.add_bos and bos is not None and tokens[:1] != [bos]:
            tokens, learnt = [bos, *tokens], [False, *learnt]
        if self.add_eos and eos is not None:
            if tokens[-1:] != [eos]:
                tokens, learnt = [*tokens, eos], [*learnt, True]
            learnt[-1] = True
        if not any(learnt) or all(learnt):
            what = "every" if all(learnt) else "no"
            raise ConfigError(
                f"{place}: {what} token of the row would be learnt ({len(tokens)} tokens); a row has "
                "a prompt that is given and a response that is learnt, and its template must tell them apart"
            )
        return Example(np.array(tokens, dtype=np.int32), np.array(learnt, dtype=np.bool_))


class Pool(Protocol):
    """The examples of a data set, by index from 0. See `ExamplePool`."""

    def __len__(self) -> int: ...

    @property
    def counts(self) -> dict[str, int]:
        """What has become of the rows that were asked for so far."""
        ...

    def usable(self, indices: Sequence[int]) -> Iterator[Example]:
        """Examples of these rows in this order, less those that have nothing to learn."""
        ...


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
        longest = self._encoding.max_length
        examples = self._encoding.encode([self._rows[index] for index in indices])
        for index, whole in zip(indices, examples, strict=True):
            self._truncated += whole.length > longest
            self._known[index] = whole.cut(longest)
