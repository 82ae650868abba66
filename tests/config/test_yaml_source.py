# SPDX-License-Identifier: Apache-2.0
"""YAML values by the core schema of YAML 1.2, and the lines of keys."""

from __future__ import annotations

import math

import pytest

from lora_suite.config.errors import ConfigError
from lora_suite.config.yaml_source import read_yaml

# From https://yaml.org/spec/1.2.2/#1032-tag-resolution; the comments say what YAML 1.1 made of it.
SCALARS = [
    ("1e-5", 0.00001),  # a text
    ("1E5", 100000.0),  # a text
    ("2e5", 200000.0),  # a text
    ("5.0e-6", 0.000005),
    ("1.", 1.0),
    (".5", 0.5),
    ("-3", -3),
    ("+4", 4),
    ("010", 10),  # eight
    ("0o10", 8),  # a text
    ("0x1F", 31),
    ("no", "no"),  # false
    ("on", "on"),  # true
    ("12:30", "12:30"),  # 750
    ("1_000", "1_000"),  # 1000
    ("2024-01-01", "2024-01-01"),  # a date
    ("True", True),
    ("FALSE", False),
    ("null", None),
    ("~", None),
    ("", None),
    ("None", "None"),
    ("'1e-5'", "1e-5"),
    (".inf", math.inf),
]


@pytest.mark.parametrize(("text", "value"), SCALARS)
def test_scalars_follow_yaml_1_2(tmp_path, text, value):
    path = tmp_path / "a.yaml"
    path.write_text(f"key: {text}\n")
    read = read_yaml(path).tree["key"]
    assert read == value
    assert type(read) is type(value)


def test_lines_of_nested_keys(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("# comment\na:\n  b: 1\n\n  c:\n    d: [1,\n      2]\ne: x\n")
    file = read_yaml(path)
    assert file.lines == {"a": 2, "a.b": 3, "a.c": 5, "a.c.d": 6, "e": 8}
    assert file.tree == {"a": {"b": 1, "c": {"d": [1, 2]}}, "e": "x"}


def test_merge_keys_work(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("one: &one {x: 1, y: 2}\ntwo:\n  <<: *one\n  y: 3\n")
    assert read_yaml(path).tree["two"] == {"x": 1, "y": 3}


def test_empty_file_is_an_empty_recipe(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("# nothing\n")
    assert read_yaml(path).tree == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: 1\nb: 2\na: 3\n", "a.yaml:3: the key a stands twice (first in line 1)"),
        (b"x:\n  a: 1\n  a: 1\n", "a.yaml:3: the key x.a stands twice"),
        (b"- 1\n", "must hold `key: value` pairs"),
        (b"a: [1\n", "a.yaml:2: not valid YAML"),
        (b"1: x\n", "a.yaml:1: the key '1' must be a word"),
        (b"a.b: x\n", "a.yaml:1: the key 'a.b' has a dot"),
        (b"a: \xff\n", "cannot be read"),
        (b"a: \x01\n", "a.yaml: not valid YAML"),
        (b"a: !!python/object:os.system x\n", "a.yaml:1: not valid YAML"),
    ],
)
def test_bad_files_are_refused_with_their_line(tmp_path, content, message):
    path = tmp_path / "a.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_yaml(path)
    assert message in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.yaml: cannot be read"):
        read_yaml(tmp_path / "gone.yaml")
