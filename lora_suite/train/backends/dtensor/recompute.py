# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing: a layer's activations are computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def recompute_layers(model: PreTrainedModel, dropout: torch.Generator | None) -> None:
    """Checkpoint every decoder layer of `model` in training mode; the module tree stays as it is.

    Without reentrance, so that adapters get their gradients though the embedding is frozen
    (https://github.com/huggingface/transformers/issues/26221). dropout: the adapters' generator, whose masks
    the second pass must draw again; torch itself takes care of the default generators alone.
    """
    kwargs: dict[str, Any] = {"use_reentrant": False}
    if dropout is not None:
        kwargs["context_fn"] = lambda: _passes(dropout)
    model.gradient_checkpointing_enable(kwargs)  # type: ignore[no-untyped-call]


def _passes(
    generator: torch.Generator,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of a layer's first and second pass, made just before the first."""
    return nullcontext(), _drawing_from(generator, generator.get_state())


@contextmanager
def _drawing_from(generator: torch.Generator, state: torch.Tensor) -> Iterator[None]:
    """Within it the generator draws from `state` on; afterwards it goes on where it was."""
    now = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(now)
