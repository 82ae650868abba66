# SPDX-License-Identifier: Apache-2.0
"""What stands outside quotes in a bash script."""

from __future__ import annotations

import pytest

from lora_suite.plan.lint.shell import unquoted_lines


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train $@", ["train $@"]),
        ('train "$@"', ["train"]),
        ("train '$@'", ["train"]),
        ("train \\$@", ["train  @"]),
        ('a "b $(c $@ | d) e" f', ["a c $@ | d) f"]),
        ("a # $@ | b", ["a"]),
        ("a#b", ["a#b"]),
        ("check 'x\ny | z' | w", ["check", "| w"]),
        ('check "it\'s | fine" | w', ["check | w"]),
        ("cat <<EOF\na | b $@\nEOF\nc | d", ["cat <<EOF", "", "", "c | d"]),
        ('jq . <<< "$x" | y', ["jq . <<<  | y"]),
        ("case $x in a) b ;; esac | c", ["case $x in a) b ;; esac | c"]),
    ],
)
def test_code_of_each_line(text: str, expected: list[str]) -> None:
    found = [" ".join(code.split()) for _, code in unquoted_lines(text)]
    assert found == [" ".join(line.split()) for line in expected]
