# SPDX-License-Identifier: Apache-2.0
"""Recipes of another trainer, merged and evaluated without being run."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_suite.config import ConfigError
from lora_suite.plan.external.recipe import opaque_recipe

BASE = """
policy:
  max_total_sequence_length: 1024
  train_micro_batch_size: 2
  mb_tokens: ${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}
  half: ${div:${policy.max_total_sequence_length},2}
  optimizer: {_target_: os.system, command: "echo hi"}
  extra: {a: 1}
"""


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    write(tmp_path, "base.yaml", BASE)
    return write(
        tmp_path,
        "child.yaml",
        "defaults: base.yaml\npolicy:\n  max_total_sequence_length: 2048\n"
        "  extra: {_override_: true, b: 2}\n",
    )


def test_defaults_merge_and_arithmetic_counts(recipe: Path) -> None:
    policy = opaque_recipe(recipe)["policy"]
    assert policy["mb_tokens"] == 4096
    assert policy["half"] == 1024
    assert policy["extra"] == {"b": 2}


def test_target_stays_a_text(recipe: Path) -> None:
    assert opaque_recipe(recipe)["policy"]["optimizer"] == {"_target_": "os.system", "command": "echo hi"}


def test_overrides_count_and_the_value_of_an_unknown_variable_is_a_text(recipe: Path) -> None:
    policy = opaque_recipe(
        recipe, ["policy.train_micro_batch_size=4", "+policy.model_name=$CKPT/hf", "~policy.half"]
    )["policy"]
    assert policy["mb_tokens"] == 8192
    assert policy["model_name"] == "$CKPT/hf"
    assert "half" not in policy


@pytest.mark.parametrize(
    "text",
    [
        "${oc.env:HOME}",
        "${oc.env:HOME}/x",
        "${eval:1+1}",
        "${now:%Y}",
        "${mul:${oc.env:N},2}",
        "${nowhere}",
        "???",
    ],
)
def test_everything_else_stays_as_it_is_written(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, "a.yaml", f"a: {{b: '{text}', c: '${{a.b}}', l: ['{text}']}}\n")
    found = opaque_recipe(path)["a"]
    assert found["b"] == text
    assert found["l"] == [text]
    assert found["c"] in (text, "${a.b}")


def test_the_environment_has_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "42")
    path = write(tmp_path, "a.yaml", "a: ${oc.env:SECRET}\nb: ${add:${a},1}\nc: x-${a}\n")
    assert "42" not in str(opaque_recipe(path))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("a: [1\n", r"bad\.yaml:2: not valid YAML"),
        ("a: 1\na: 2\n", r"bad\.yaml:2: the key a stands twice"),
        ("defaults: gone.yaml\n", r"bad\.yaml:1: `defaults` names gone\.yaml"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_line(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        opaque_recipe(write(tmp_path, "bad.yaml", text))


def test_missing_recipe_and_unknown_override_are_named(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.yaml: there is no such recipe"):
        opaque_recipe(tmp_path / "gone.yaml")
    with pytest.raises(ConfigError, match=r"policy\.nowhere=1"):
        opaque_recipe(recipe, ["policy.nowhere=1"])
