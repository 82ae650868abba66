# SPDX-License-Identifier: Apache-2.0
"""Inheritance through `defaults:`."""

from __future__ import annotations

import pytest

from lora_suite.config.errors import ConfigError
from lora_suite.config.layers import inherited_folders, read_layers


def write(folder, files):
    """Write `{name: text}` and return the folder."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_blocks_merge_key_by_key_and_lists_replace_lists(tmp_path):
    write(
        tmp_path,
        {
            "base.yaml": "a: {x: 1, y: {p: 1, q: 2}}\nl: [1, 2, 3]\n",
            "top.yaml": "defaults: base.yaml\na: {y: {q: 5}}\nl: [9]\n",
        },
    )
    assert read_layers(tmp_path / "top.yaml").tree == {"a": {"x": 1, "y": {"p": 1, "q": 5}}, "l": [9]}


def test_later_parents_win_and_the_file_itself_wins_over_all(tmp_path):
    write(
        tmp_path,
        {
            "one.yaml": "a: 1\nb: 1\nc: 1\n",
            "two.yaml": "b: 2\nc: 2\n",
            "top.yaml": "defaults: [one.yaml, two.yaml]\nc: 3\n",
        },
    )
    assert read_layers(tmp_path / "top.yaml").tree == {"a": 1, "b": 2, "c": 3}


def test_paths_count_from_the_file_that_names_them(tmp_path):
    write(
        tmp_path,
        {
            "shared/base.yaml": "a: 1\n",
            "shared/middle.yaml": "defaults: base.yaml\nb: 2\n",
            "mine/top.yaml": "defaults: ../shared/middle.yaml\nc: 3\n",
        },
    )
    layered = read_layers(tmp_path / "mine/top.yaml")
    assert layered.tree == {"a": 1, "b": 2, "c": 3}
    assert inherited_folders(tmp_path / "mine/top.yaml") == [
        (tmp_path / "mine").resolve(),
        (tmp_path / "shared").resolve(),
    ]


def test_a_parent_may_be_reached_twice_but_not_in_a_circle(tmp_path):
    write(
        tmp_path,
        {
            "base.yaml": "a: 1\n",
            "left.yaml": "defaults: base.yaml\nb: 1\n",
            "right.yaml": "defaults: base.yaml\nc: 1\n",
            "top.yaml": "defaults: [left.yaml, right.yaml]\n",
            "circle.yaml": "defaults: back.yaml\n",
            "back.yaml": "defaults: circle.yaml\n",
            "self.yaml": "defaults: self.yaml\n",
        },
    )
    assert read_layers(tmp_path / "top.yaml").tree == {"a": 1, "b": 1, "c": 1}
    for name in ("circle.yaml", "self.yaml"):
        with pytest.raises(ConfigError, match="goes round in a circle"):
            read_layers(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\ndefaults: gone.yaml\n", "top.yaml:2: `defaults` names gone.yaml, but there is no file"),
        ("defaults: 3\n", "top.yaml:1: `defaults` must be a file name or a list"),
        ("defaults: {a: b}\n", "`defaults` must be a file name or a list"),
        ("defaults: [1]\n", "`defaults` must be a file name or a list"),
    ],
)
def test_bad_defaults_are_refused(tmp_path, text, message):
    write(tmp_path, {"top.yaml": text})
    with pytest.raises(ConfigError) as caught:
        read_layers(tmp_path / "top.yaml")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("child", "expected"),
    [
        ("a: {_override_: true, z: 1}", {"a": {"z": 1}, "k": 1}),
        ("a: {y: {_override_: true, r: 1}}", {"a": {"x": 1, "y": {"r": 1}}, "k": 1}),
        ("a: {y: {_override_: false, r: 1}}", {"a": {"x": 1, "y": {"p": 1, "q": 2, "r": 1}}, "k": 1}),
        (
            "new: {deep: {_override_: true, r: 1}}",
            {"a": {"x": 1, "y": {"p": 1, "q": 2}}, "k": 1, "new": {"deep": {"r": 1}}},
        ),
        ("_override_: true\nk: 2", {"k": 2}),
    ],
)
def test_override_marker_replaces_a_block_at_any_depth_and_leaves_no_trace(tmp_path, child, expected):
    write(
        tmp_path,
        {
            "base.yaml": "a: {x: 1, y: {p: 1, q: 2}}\nk: 1\n",
            "top.yaml": f"defaults: base.yaml\n{child}\n",
        },
    )
    layered = read_layers(tmp_path / "top.yaml")
    assert layered.tree == expected
    assert not [key for key in layered.origins if "_override_" in key]


def test_a_grandchild_sees_what_the_marker_left(tmp_path):
    write(
        tmp_path,
        {
            "base.yaml": "a: {x: 1}\n",
            "middle.yaml": "defaults: base.yaml\na: {_override_: true, y: 2}\n",
            "top.yaml": "defaults: middle.yaml\na: {z: 3}\n",
        },
    )
    assert read_layers(tmp_path / "top.yaml").tree == {"a": {"y": 2, "z": 3}}


def test_the_marker_must_be_true_or_false(tmp_path):
    write(tmp_path, {"top.yaml": "a:\n  _override_: 'yes'\n"})
    with pytest.raises(ConfigError, match=r"top.yaml:2: a._override_ must be true or false"):
        read_layers(tmp_path / "top.yaml")


def test_origins_name_the_last_file_and_line(tmp_path):
    base, top = tmp_path / "base.yaml", tmp_path / "top.yaml"
    base.write_text("a:\n  x: 1\n  y: 2\nb: {p: 1}\n")
    top.write_text("defaults: base.yaml\na:\n  x: 5\nb: 3\n")
    origins = read_layers(top).origins
    assert origins["a.x"] == f"{top}:3"
    assert origins["a.y"] == f"{base}:3"
    assert origins["b"] == f"{top}:4"
    assert "b.p" not in origins


def test_peft_is_another_name_of_lora_cfg_in_any_file(tmp_path):
    write(
        tmp_path,
        {
            "base.yaml": "policy: {megatron_cfg: {lora_cfg: {dim: 8, alpha: 32}}}\n",
            "top.yaml": "defaults: base.yaml\npolicy:\n  megatron_cfg:\n    peft:\n      dim: 16\n",
        },
    )
    layered = read_layers(tmp_path / "top.yaml")
    assert layered.tree == {"policy": {"megatron_cfg": {"lora_cfg": {"dim": 16, "alpha": 32}}}}
    assert layered.origins["policy.megatron_cfg.lora_cfg.dim"].endswith("top.yaml:5")


def test_both_names_in_one_file_are_refused(tmp_path):
    write(tmp_path, {"top.yaml": "policy: {megatron_cfg: {lora_cfg: {dim: 8}, peft: {dim: 8}}}\n"})
    with pytest.raises(ConfigError, match="another name of"):
        read_layers(tmp_path / "top.yaml")


def test_a_broken_interpolation_names_its_file(tmp_path):
    write(tmp_path, {"top.yaml": "a: ${b\n"})
    with pytest.raises(ConfigError, match=r"top\.yaml"):
        read_layers(tmp_path / "top.yaml")
