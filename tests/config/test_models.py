# SPDX-License-Identifier: Apache-2.0
"""Where files and architectures are found."""

from __future__ import annotations

import json

import pytest

from lora_suite.config.errors import ConfigError
from lora_suite.config.models import find_config, known_models, read_config
from lora_suite.config.paths import locate, search_folders
from tests.config.helpers import RECIPES, SFT, TINY, child


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("meta-llama/Llama-3.2-1B", "llama-3.2-1b.json"),
        ("meta-llama/Llama-3.2-1B-Instruct", "llama-3.2-1b.json"),
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b.json"),
        ("Qwen/Qwen3-0.6B", "qwen3-0.6b.json"),
        ("Qwen/Qwen3-0.6B-Base", "qwen3-0.6b.json"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "nemotron-3-nano-30b-a3b.json"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-Base-BF16", "nemotron-3-nano-30b-a3b.json"),
        ("models/tiny-llama.json", "tiny-llama.json"),
        (str(RECIPES / "models/tiny-llama.json"), "tiny-llama.json"),
    ],
)
def test_shipped_architectures_are_found_by_path_or_hub_name(name, file):
    assert find_config(name, TINY) == RECIPES / "models" / file


@pytest.mark.parametrize(
    "name", ["meta-llama/Llama-3.2-11B", "Qwen/Qwen3-6B", "models/gone.json", "Llama-3.2-1B"]
)
def test_what_is_not_here_is_not_guessed(name):
    assert find_config(name, TINY) is None


def test_a_folder_means_its_config_json(tmp_path):
    (tmp_path / "model").mkdir()
    recipe = child(tmp_path, "")
    assert find_config("model", recipe) is None
    (tmp_path / "model/config.json").write_text("{}")
    assert find_config("model", recipe) == (tmp_path / "model/config.json").resolve()


def test_a_recipe_elsewhere_sees_the_models_of_what_it_inherits(tmp_path):
    recipe = child(tmp_path, "")
    assert find_config("Qwen/Qwen3-0.6B", recipe) == RECIPES / "models/qwen3-0.6b.json"
    assert "Qwen/Qwen3-0.6B" in known_models(recipe)
    assert "models/tiny-llama.json" in known_models(recipe)


def test_relative_paths_count_from_the_recipe_then_its_parents_then_here(tmp_path, monkeypatch):
    here, mine = tmp_path / "here", tmp_path / "mine"
    here.mkdir()
    mine.mkdir()
    monkeypatch.chdir(here)
    recipe = child(mine, "")
    assert search_folders(recipe) == [mine.resolve(), RECIPES, here]
    assert locate("data/quickstart.jsonl", recipe) == RECIPES / "data/quickstart.jsonl"
    (here / "rows.jsonl").write_text("")
    assert locate("rows.jsonl", recipe) == (here / "rows.jsonl").resolve()
    (mine / "rows.jsonl").write_text("")
    assert locate("rows.jsonl", recipe) == (mine / "rows.jsonl").resolve()
    assert locate("gone.jsonl", recipe) is None
    assert locate(str(here / "gone.jsonl"), recipe) is None
    assert locate(str(here / "rows.jsonl"), SFT) == here / "rows.jsonl"


@pytest.mark.parametrize("text", ["{", "[]", "3"])
def test_a_broken_model_file_is_named(tmp_path, text):
    path = tmp_path / "model.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"model\.json"):
        read_config(path)


def test_every_shipped_architecture_states_a_name_of_its_own():
    names = [json.loads(path.read_text())["_name_or_path"] for path in (RECIPES / "models").glob("*.json")]
    assert names
    assert len(names) == len({name.lower() for name in names})
