# SPDX-License-Identifier: Apache-2.0
"""Text to token ids: the built-in byte tokenizer, or one of the hub or of a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from lora_suite.config import ConfigError

BYTES = "bytes"
"""The value of ``policy.tokenizer.name`` that means the built-in tokenizer."""

PASSTHROUGH = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""The chat template that joins the texts of all messages."""


class TextTokenizer(Protocol):
    """What the data side needs of a tokenizer.

    bos_id, eos_id: None where the vocabulary has no such token. pad_id fills rows on the right; what it is
    never matters, because padded positions are ignored by position, not by value. chat_template: its own,
    None where it has none. special_tokens: variables of a template (``bos_token``, …). special_texts: how
    special tokens are written.
    """

    chat_template: str | None
    special_tokens: Mapping[str, str]
    special_texts: Sequence[str]

    @property
    def bos_id(self) -> int | None:
        """Begin of sequence."""
        ...

    @property
    def eos_id(self) -> int | None:
        """End of sequence."""
        ...

    @property
    def pad_id(self) -> int:
        """What fills rows on the right."""
        ...

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without any special token added."""
        ...


class ByteTokenizer:
    """One token a UTF-8 byte (ids 0 to 255), and three special tokens; needs no files and no network.

    Special tokens cannot be written in a text, so that no text can contain one; its own chat template joins
    the messages' texts.
    """

    chat_template: str | None = PASSTHROUGH
    special_tokens: Mapping[str, str] = MappingProxyType({"bos_token": "", "eos_token": "", "pad_token": ""})
    special_texts: Sequence[str] = ()

    bos_id = 256
    eos_id = 257
    pad_id = 258
    vocabulary_size = 259

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The bytes of each text."""
        return [list(text.encode("utf-8")) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; special tokens vanish, broken UTF-8 becomes the replacement character."""
        return bytes(token for token in ids if token < 256).decode("utf-8", errors="replace")


class TransformersTokenizer:
    """A tokenizer of the transformers library."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.bos_id: int | None = tokenizer.bos_token_id
        self.eos_id: int | None = tokenizer.eos_token_id
        known = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        self.pad_id: int = next(token for token in known if token is not None)
        self.chat_template: str | None = tokenizer.get_chat_template() if tokenizer.chat_template else None
        self.special_tokens: Mapping[str, str] = {
            name: text for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)
        }
        self.special_texts: Sequence[str] = tuple(tokenizer.all_special_tokens)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without any special token added."""
        encoded = self._tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)
        ids: list[list[int]] = encoded["input_ids"]
        return ids


def load_tokenizer(name: str, recipe_path: Path) -> TextTokenizer:
    """Return the tokenizer that a recipe names: `BYTES`, a folder (relative to the recipe), or a hub name.

    Raises ConfigError if it cannot be loaded.
    """
    if name == BYTES:
        return ByteTokenizer()
    from transformers import AutoTokenizer

    from lora_suite.config.paths import locate

    folder = locate(name, recipe_path)
    try:
        return TransformersTokenizer(AutoTokenizer.from_pretrained(str(folder) if folder else name))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"policy.tokenizer.name: no tokenizer {name!r} ({reason}); name a folder, a model of the hub "
            f"that this machine can reach, or {BYTES!r}"
        ) from error
