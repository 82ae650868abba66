# SPDX-License-Identifier: Apache-2.0
"""What of a conversation is learnt: by markers, by comparison, and rows for which neither can tell."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import pytest

from lora_suite.config import ConfigError
from lora_suite.train.data.rows import Message, Row
from lora_suite.train.data.template import ChatTemplate, Passthrough, template_of
from lora_suite.train.data.tokenizer import ByteTokenizer
from tests.train.conftest import RECIPE, small_recipe

TALK = Row(
    tuple(
        Message(role, text)
        for role, text in (
            ("system", "S"),
            ("user", "U1"),
            ("assistant", "A1"),
            ("user", "U2"),
            ("assistant", "A2"),
        )
    ),
    "rows.jsonl:7",
)

# The shape of Qwen's: a header, the text, an end of turn, a line break.
PLAIN = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{% for message in messages %}<{{ message.role }}>{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}</>{% endgeneration %}"
    "{% else %}{{ message.content }}</>{% endif %}{{ '\n' }}{% endfor %}"
)
# An end token behind the whole conversation alone.
ENDING = "{% for message in messages %}{{ message.role[0] }}:{{ message.content }}{% endfor %}{{ eos_token }}"
# Qwen3's way with thoughts: only the last answer has its empty thought.
FORGETFUL = (
    "{% for message in messages %}<{{ message.role }}>"
    "{% if message.role == 'assistant' and loop.last %}(){% endif %}{{ message.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class Specials(ByteTokenizer):
    """Special tokens that can be written, as other tokenizers have them."""

    special_tokens = MappingProxyType({"eos_token": "[E]"})
    special_texts = ("[E]", "</>")


def template(
    source: str, *, header: bool = True, final: bool = False, tokenizer: ByteTokenizer | None = None
) -> ChatTemplate:
    return ChatTemplate(
        source, tokenizer or ByteTokenizer(), {}, add_generation_prompt=header, only_final=final
    )


def shown(made: ChatTemplate | Passthrough, row: Row = TALK) -> str:
    """The text, with what is learnt in braces."""
    pieces = [each for each in made.pieces(row) if each.text]
    return "".join(f"{{{each.text}}}" if each.learnt else each.text for each in pieces)


def test_passthrough_joins_the_texts() -> None:
    assert shown(Passthrough(only_final=False)) == "SU1{A1}U2{A2}"
    assert shown(Passthrough(only_final=True)) == "SU1A1U2{A2}"


def test_markers_say_what_is_learnt() -> None:
    text = "<system>S</>\n<user>U1</>\n<assistant>{A1</>}\n<user>U2</>\n<assistant>{A2</>}"
    assert shown(template(MARKED)) == text
    assert shown(template(MARKED, header=False)) == text
    assert shown(template(MARKED, final=True)) == text.replace("{A1</>}", "A1</>")


def test_a_special_token_that_closes_a_turn_is_learnt_though_the_markers_leave_it_out() -> None:
    source = MARKED.replace("</>{% endgeneration %}", "{% endgeneration %}</>")
    learnt = "<user>U2</>\n<assistant>{A2</>}"
    assert shown(template(source, tokenizer=Specials())).endswith(learnt)
    # As mere text it is the template's own affair.
    assert shown(template(source)).endswith("<assistant>{A2}</>")


def test_without_markers_a_turn_is_what_the_conversation_gains_by_it() -> None:
    assert shown(template(PLAIN)) == (
        "<system>S</>\n<user>U1</>\n<assistant>{A1</>\n}<user>U2</>\n<assistant>{A2</>}"
    )


def test_without_generation_prompt_the_header_is_learnt_too() -> None:
    assert shown(template(PLAIN, header=False)) == (
        "<system>S</>\n<user>U1</>\n{<assistant>A1</>\n}<user>U2</>\n{<assistant>A2</>}"
    )


def test_only_the_final_answer() -> None:
    assert shown(template(PLAIN, final=True)) == (
        "<system>S</>\n<user>U1</>\n<assistant>A1</>\n<user>U2</>\n<assistant>{A2</>}"
    )


def test_what_only_ends_a_conversation_does_not_count() -> None:
    made = template(ENDING, tokenizer=Specials())
    assert shown(made) == "s:Su:U1{a:A1}u:U2{a:A2[E]}"


def test_a_template_that_rewrites_earlier_turns_is_refused_naming_the_row() -> None:
    made = template(FORGETFUL)
    single = Row(TALK.messages[:3], "x")
    assert shown(made, single) == "<system>S</><user>U1</><assistant>{()A1</>}"
    with pytest.raises(ConfigError, match=r"^rows\.jsonl:7: .*messages\[2\] differently once more .*markers"):
        made.pieces(TALK)
    assert shown(template(FORGETFUL, final=True)).endswith("A1</><user>U2</><assistant>{()A2</>}")


def test_an_answer_without_a_question_needs_markers() -> None:
    row = Row(TALK.messages[2:], "rows.jsonl:9")
    assert shown(template(MARKED), row) == "<assistant>{A1</>}\n<user>U2</>\n<assistant>{A2</>}"
    with pytest.raises(ConfigError, match=r"^rows\.jsonl:9: the first message is the assistant's"):
        template(PLAIN).pieces(row)


@pytest.mark.parametrize(
    "source", ["{{ raise_exception('no system role') }}", "{% for %}", "{{ 1 + messages[0].content }}"]
)
def test_a_template_that_fails_names_the_row(source: str) -> None:
    with pytest.raises(ConfigError, match=r"^rows\.jsonl:7: the chat template cannot render the row"):
        template(source).pieces(TALK)


def of_recipe(*overrides: str, tokenizer: ByteTokenizer | None = None) -> ChatTemplate | Passthrough:
    made = template_of(small_recipe(*overrides), tokenizer or ByteTokenizer(), RECIPE)
    assert isinstance(made, ChatTemplate | Passthrough)
    return made


class WithTemplate(ByteTokenizer):
    """A tokenizer with a template of its own."""

    chat_template = PLAIN


class Without(ByteTokenizer):
    """A tokenizer of a base model, which has no template."""

    chat_template = None


def test_null_joins_and_deleting_the_key_means_the_tokenizers_own() -> None:
    # https://github.com/NVIDIA-NeMo/RL/issues/1003
    assert shown(of_recipe(tokenizer=WithTemplate())) == "SU1{A1}U2{A2}"
    for overrides in ("~policy.tokenizer.chat_template", "policy.tokenizer.chat_template=default"):
        assert shown(of_recipe(overrides, tokenizer=WithTemplate())) == shown(template(PLAIN))
    assert shown(of_recipe("~policy.tokenizer.chat_template")) == "SU1{A1}U2{A2}"


def test_a_file_or_a_text(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text(MARKED)
    assert shown(of_recipe(f"policy.tokenizer.chat_template={path}")) == shown(template(MARKED))
    text = "{% for m in messages %}{{ before }}{{ m.content }}{% endfor %}"
    made = of_recipe(
        f'policy.tokenizer.chat_template="{text}"', "policy.tokenizer.chat_template_kwargs={before: '-'}"
    )
    assert shown(made) == "-S-U1{-A1}-U2{-A2}"
    final = (f'policy.tokenizer.chat_template="{text}"', "data.only_unmask_final=true")
    assert shown(of_recipe(*final)) == "SU1A1U2{A2}"


def test_a_tail_that_every_part_has_cannot_be_compared() -> None:
    with pytest.raises(ConfigError, match=r"^rows\.jsonl:7: .*differently once more messages follow"):
        template("{% for m in messages %}{{ m.content }}{% endfor %}tail").pieces(TALK)


def test_what_is_missing_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"has no template of its own; give one .* or set .*=null"):
        of_recipe("~policy.tokenizer.chat_template", tokenizer=Without())
    with pytest.raises(ConfigError, match=r"policy\.tokenizer\.chat_template: there is no file gone\.jinja"):
        of_recipe("policy.tokenizer.chat_template=gone.jinja")


def test_the_shipped_template() -> None:
    made = of_recipe("policy.tokenizer.chat_template=templates/turns.jinja")
    assert shown(made) == ("[system] S\n[user] U1\n[assistant] {A1 [end]}\n[user] U2\n[assistant] {A2 [end]}")
