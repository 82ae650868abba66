# SPDX-License-Identifier: Apache-2.0
"""Labels by hand: shifted, prompt ignored, closing EOS supervised, cut rows dropped and counted."""

from __future__ import annotations

import numpy as np

from lora_suite.train.batch import IGNORED
from lora_suite.train.data.examples import Encoding, Example, ExamplePool
from lora_suite.train.data.rows import Row
from lora_suite.train.data.tokenizer import ByteTokenizer

BOS, EOS = 256, 257


def encoding(max_length: int = 64, add_bos: bool = True, add_eos: bool = True) -> Encoding:
    return Encoding(ByteTokenizer(), add_bos, add_eos, max_length)


def only(row: Row, how: Encoding) -> tuple[list[int], list[int]]:
    (example,) = ExamplePool([row], how).usable([0])
    return example.tokens.tolist(), example.labels.tolist()


def test_labels_are_the_next_tokens_of_the_response_and_the_end() -> None:
    tokens, labels = only(Row("ab", "cd"), encoding())
    assert tokens == [BOS, 97, 98, 99, 100, EOS]
    assert labels == [IGNORED, IGNORED, 99, 100, EOS, IGNORED]


def test_without_special_tokens() -> None:
    tokens, labels = only(Row("a", "bc"), encoding(add_bos=False, add_eos=False))
    assert tokens == [97, 98, 99]
    assert labels == [98, 99, IGNORED]


def test_nothing_predicts_the_very_first_token() -> None:
    tokens, labels = only(Row("", "ab"), encoding(add_bos=False, add_eos=False))
    assert (tokens, labels) == ([97, 98], [98, IGNORED])


def test_a_pad_id_equal_to_the_end_does_not_hide_the_end() -> None:
    # https://github.com/huggingface/transformers/issues/23530
    example = Example(np.array([5, 6, 7, 7], dtype=np.int32), first_target=1)
    assert example.labels.tolist() == [6, 7, 7, IGNORED]
    assert example.supervised == 3


def test_cut_rows_are_counted_and_rows_without_target_dropped() -> None:
    rows = [
        Row("abc", "de"),  # BOS a b c | d e EOS: seven tokens, cut to BOS a b c d
        Row("abcd", "ef"),  # cut to BOS a b c d: no response left
        Row("a", "b"),  # fits
        Row("ab", "c"),  # fits exactly
    ]
    pool = ExamplePool(rows, encoding(max_length=5))
    kept = [example.tokens.tolist() for example in pool.usable(range(4))]
    assert kept == [[BOS, 97, 98, 99, 100], [BOS, 97, 98, EOS], [BOS, 97, 98, 99, EOS]]
    assert pool.counts == {"rows": 4, "examined": 4, "truncated": 2, "dropped_no_target": 1}


def test_an_empty_response_without_end_has_no_target() -> None:
    pool = ExamplePool([Row("abc", "")], encoding(add_eos=False))
    assert list(pool.usable([0])) == []
    pool = ExamplePool([Row("abc", "")], encoding(add_eos=True))
    assert [example.supervised for example in pool.usable([0])] == [1]


def test_rows_are_tokenized_once_and_only_when_needed() -> None:
    class Counting(ByteTokenizer):
        texts = 0

        def encode(self, texts):
            Counting.texts += len(texts)
            return super().encode(texts)

    pool = ExamplePool([Row("a", "b")] * 1000, Encoding(Counting(), True, True, 64))
    examples = pool.usable(range(1000))
    next(examples)
    assert pool.counts["examined"] == 256
    list(pool.usable([5, 6, 7]))
    assert Counting.texts == 2 * 256
