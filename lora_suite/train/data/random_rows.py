# SPDX-License-Identifier: Apache-2.0
"""Rows of random tokens that fill their sequence: what to measure speed on.

How fast a step is depends on what is in its rows. Padding is one token again and again: the GPU draws less
power on it and clocks higher, a mixture of experts sends all of it to the same few, and one row of the
embedding gets all gradients. Tokens drawn evenly from the vocabulary do none of that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from lora_suite.train.data.examples import Example

RANDOM = "random"
"""The value of ``data.train.dataset_name`` that means these rows."""

_ROWS = 65_536


class RandomPool:
    """As many rows as any measurement takes, each of `length` tokens, all but the first to be learnt.

    seed: of the tokens. vocabulary: ids are below it. A row is the same whenever it is asked for.
    """

    def __init__(self, length: int, vocabulary: int, seed: int) -> None:
        self._length = length
        self._vocabulary = vocabulary
        self._seed = seed
        self._asked: set[int] = set()

    def __len__(self) -> int:
        return _ROWS

    @property
    def counts(self) -> dict[str, int]:
        """As of `ExamplePool`; none is cut or dropped."""
        return {"rows": _ROWS, "examined": len(self._asked), "truncated": 0, "dropped_no_target": 0}

    def usable(self, indices: Sequence[int]) -> Iterator[Example]:
        """Examples of these rows in this order."""
        for index in indices:
            self._asked.add(index)
            generator = np.random.Generator(np.random.PCG64([self._seed, index]))
            tokens = generator.integers(self._vocabulary, size=self._length, dtype=np.int32)
            learnt = np.ones(self._length, dtype=np.bool_)
            learnt[0] = False
            yield Example(tokens, learnt)
