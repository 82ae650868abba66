# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: bytes, and one of the transformers library made on the spot."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_suite.config import ConfigError
from lora_suite.train.data.tokenizer import ByteTokenizer, load_tokenizer


def test_bytes_are_utf8_and_specials_lie_above_them() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode(["aé", ""]) == [[97, 195, 169], []]
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (256, 257, 258)
    assert tokenizer.decode([256, 97, 195, 169, 257, 258]) == "aé"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe, from whose folder relative paths count."""
    path = tmp_path / "recipe.yaml"
    path.write_text("{}")
    return path


def test_a_folder_beside_the_recipe_is_loaded(recipe: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "one": 2, "two": 3, "?": 4}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="?"
    ).save_pretrained(recipe.with_name("words"))
    tokenizer = load_tokenizer("words", recipe)
    assert tokenizer.encode(["two one", "three"]) == [[3, 2], [4]]
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
    # Without a padding token of its own it pads with the end token: positions decide what is ignored.
    assert tokenizer.pad_id == 1


def test_a_missing_tokenizer_is_one_clear_error(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    recipe.with_name("empty").mkdir()
    with pytest.raises(ConfigError, match=r"policy\.tokenizer\.name: no tokenizer 'empty'"):
        load_tokenizer("empty", recipe)
