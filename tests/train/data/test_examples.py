# SPDX-License-Identifier: Apache-2.0
"""Labels by hand: shifted, only answers learnt, closing EOS supervised, cut rows dropped and counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_suite.config import ConfigError
from lora_suite.train.batch import IGNORED
from lora_suite.train.data.examples import Encoding
from lora_suite.train.data.rows import Message, Row
from lora_suite.train.data.template import ChatTemplate
from lora_suite.train.data.tokenizer import ByteTokenizer, TextTokenizer, load_tokenizer
from tests.train.data.examples_of import encoding, example, pool_of

BOS, EOS = 256, 257

CHAT = Row(
    (
        Message("user", "u"),
        Message("assistant", "ab"),
        Message("user", "v"),
        Message("assistant", "c"),
    ),
    "rows.jsonl:3",
)
TURNS = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ m.role[0] }}:{% if m.role == 'assistant' %}{% generation %}{{ m.content }};"
    "{% endgeneration %}{% else %}{{ m.content }};{% endif %}{% endfor %}"
)


def chat(
    source: str, tokenizer: TextTokenizer | None = None, *, header: bool = True, final: bool = False
) -> Encoding:
    tokenizer = tokenizer or ByteTokenizer()
    template = ChatTemplate(source, tokenizer, {}, add_generation_prompt=header, only_final=final)
    return encoding(template=template, tokenizer=tokenizer)


def only(row: Row, how: Encoding) -> tuple[list[int], list[int]]:
    (made,) = pool_of([row], how).usable([0])
    return made.tokens.tolist(), made.labels.tolist()


def masks(row: Row, how: Encoding) -> str:
    """For each token of a row of bytes: its character where it is learnt, else a dot; E: the closing EOS."""
    (made,) = how.encode([row])
    letters = {BOS: "B", EOS: "E"}
    return "".join(
        letters.get(token) or chr(token) if learnt else "."
        for token, learnt in zip(made.tokens.tolist(), made.learnt.tolist(), strict=True)
    )


def test_labels_are_the_next_tokens_of_the_response_and_the_end() -> None:
    tokens, labels = only(Row.of_pair("ab", "cd"), encoding())
    assert tokens == [BOS, 97, 98, 99, 100, EOS]
    assert labels == [IGNORED, IGNORED, 99, 100, EOS, IGNORED]


def test_without_special_tokens() -> None:
    tokens, labels = only(Row.of_pair("a", "bc"), encoding(add_bos=False, add_eos=False))
    assert tokens == [97, 98, 99]
    assert labels == [98, 99, IGNORED]


def test_nothing_predicts_the_very_first_token() -> None:
    made = example(97, 98, first=0)
    assert (made.labels.tolist(), made.supervised) == ([98, IGNORED], 1)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        # B u : u ; a : a b ; u : v ; a : c ; E
        (chat(TURNS), ".......ab;......" + "c;E"),
        (chat(MARKED), ".......ab;......" + "c;E"),
        (chat(TURNS, header=False), ".....a:ab;....a:c;E"),
        (chat(TURNS, final=True), "................c;E"),
        (chat(MARKED, final=True), "................c;E"),
    ],
)
def test_only_answers_of_a_conversation_are_learnt(how: Encoding, expected: str) -> None:
    assert masks(CHAT, how) == expected
    tokens, labels = only(CHAT, how)
    assert bytes(tokens[1:-1]) == b"u:u;a:ab;u:v;a:c;"
    assert [label for label in labels if label != IGNORED] == [
        EOS if letter == "E" else ord(letter) for letter in expected if letter != "."
    ]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    """A tokenizer of words whose padding token is its end token, as many models have it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder: Path = tmp_path_factory.mktemp("words")
    vocabulary = {
        name: index for index, name in enumerate(("<s>", "</s>", "<user>", "<assistant>", "one", "two"))
    }
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="one"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=inner,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        additional_special_tokens=["<user>", "<assistant>"],
    ).save_pretrained(folder)
    return load_tokenizer(str(folder), folder / "recipe.yaml")


WORDS = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{{ eos_token }}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}"
)


def test_the_token_that_ends_a_turn_is_learnt_though_it_also_pads(words: TextTokenizer) -> None:
    # https://github.com/huggingface/transformers/issues/23530
    assert words.pad_id == words.eos_id == 1
    turns = (("user", "one"), ("assistant", "two"), ("user", "two"), ("assistant", "one"))
    (made,) = chat(WORDS, words).encode([Row(tuple(Message(*turn) for turn in turns))])
    # The template wrote <s> and </s>, so neither is added once more.
    assert made.tokens.tolist() == [0, 2, 4, 3, 5, 1, 2, 5, 3, 4, 1]
    assert made.learnt.astype(int).tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1]
    plain = WORDS.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    header = plain.replace("{% endfor %}", "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}")
    (compared,) = chat(header, words).encode([Row(tuple(Message(*turn) for turn in turns))])
    assert compared.tokens.tolist() == made.tokens.tolist()
    assert compared.learnt.tolist() == made.learnt.tolist()


@pytest.mark.parametrize(
    ("source", "what"),
    [
        # https://github.com/marin-community/marin/issues/7237
        ("{% for m in messages %}{{ m.content }}{% endfor %}{% generation %}{% endgeneration %}", "no"),
        # https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/3359
        ("{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}", "every"),
    ],
)
def test_a_row_that_is_all_learnt_or_all_given_is_refused_by_file_and_row(source: str, what: str) -> None:
    how = Encoding(ByteTokenizer(), chat(source).template, False, False, 64)
    with pytest.raises(ConfigError, match=rf"^rows\.jsonl:3: {what} token of the row would be learnt"):
        how.encode([CHAT])


def test_a_response_alone_is_refused() -> None:
    row = Row.of_pair("", "ab", "rows.jsonl:5")
    with pytest.raises(ConfigError, match=r"^rows\.jsonl:5: every token"):
        encoding(add_bos=False).encode([row])
    assert masks(row, encoding()) == ".abE"


def test_cut_rows_are_counted_and_rows_without_target_dropped() -> None:
    # https://github.com/huggingface/trl/issues/3927
    rows = [
        Row.of_pair("abc", "de"),  # BOS a b c | d e EOS: seven tokens, cut to BOS a b c d
        Row.of_pair("abcd", "ef"),  # cut to BOS a b c d: no response left
        Row.of_pair("a", "b"),  # fits
        Row.of_pair("ab", "c"),  # fits exactly
    ]
    pool = pool_of(rows, encoding(max_length=5))
    kept = [made.tokens.tolist() for made in pool.usable(range(4))]
    assert kept == [[BOS, 97, 98, 99, 100], [BOS, 97, 98, EOS], [BOS, 97, 98, 99, EOS]]
    assert pool.counts == {"rows": 4, "examined": 4, "truncated": 2, "dropped_no_target": 1}


def test_rows_are_tokenized_once_and_only_when_needed() -> None:
    class Counting(ByteTokenizer):
        texts = 0

        def encode(self, texts):
            Counting.texts += len(texts)
            return super().encode(texts)

    pool = pool_of([Row.of_pair("a", "b")] * 1000, encoding(tokenizer=Counting()))
    examples = pool.usable(range(1000))
    next(examples)
    assert pool.counts["examined"] == 256
    list(pool.usable([5, 6, 7]))
    assert Counting.texts == 2 * 256
