# SPDX-License-Identifier: Apache-2.0
"""`-k EXPR`."""

from __future__ import annotations

import pytest

from lora_suite.config import ConfigError
from lora_suite.plan.select import parse_selection

NAMES = ["fsdp2-pair", "sft-Llama3.1-8b-1n8g-fsdp2tp1-lora"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lora", True),
        ("LLAMA3.1", True),
        ("megatron", False),
        ("not megatron", True),
        ("lora and megatron", False),
        ("lora and not megatron", True),
        ("megatron or pair", True),
        # `and` binds tighter than `or`, as in Python.
        ("pair or lora and megatron", True),
        ("(pair or lora) and megatron", False),
        ("not (megatron or lora)", False),
        ("not not lora", True),
        # A word is part of one name; it does not reach from one into the next.
        ("pair-sft", False),
        ("android", False),
    ],
)
def test_expression(text: str, expected: bool) -> None:
    assert parse_selection(text)(NAMES) is expected


@pytest.mark.parametrize("text", ["", "and lora", "lora and", "lora megatron", "(lora", "lora)", "not", "()"])
def test_unusable_expression_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=r"-k .*write names with and, or, not"):
        parse_selection(text)
