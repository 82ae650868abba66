# SPDX-License-Identifier: Apache-2.0
"""Small examples and pools, for tests of what is done with them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lora_suite.train.data.examples import Encoding, Example, ExamplePool
from lora_suite.train.data.rows import Row
from lora_suite.train.data.template import Passthrough, Template
from lora_suite.train.data.tokenizer import ByteTokenizer, TextTokenizer


def example(*tokens: int, first: int = 1) -> Example:
    """An example whose tokens are learnt from index `first` on."""
    return Example(np.array(tokens, dtype=np.int32), np.arange(len(tokens)) >= first)


def encoding(
    max_length: int = 64,
    *,
    add_bos: bool = True,
    add_eos: bool = True,
    template: Template | None = None,
    tokenizer: TextTokenizer | None = None,
) -> Encoding:
    """Bytes, texts as they are."""
    template = template or Passthrough(only_final=False)
    return Encoding(tokenizer or ByteTokenizer(), template, add_bos, add_eos, max_length)


def pool_of(rows: Sequence[Row], how: Encoding | None = None) -> ExamplePool:
    """A pool of these rows."""
    return ExamplePool(rows, how or encoding())
