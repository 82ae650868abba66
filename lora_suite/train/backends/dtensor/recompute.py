# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing: a layer's activations are computed again in the backward pass, all or the cheap.

Selective, what products and attention give is kept, and all between them is computed again: norms, rotary
embedding, activations, sums. An adapter's part is added into its linear's product (`lora.operation`), so a
product may change after it was kept. It is kept as it is at last, and the addition is not made again: it is
taken for a product, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from lora_suite.train.backends.dtensor.parallel import decoder_layers

if TYPE_CHECKING:
    from torch.utils.checkpoint import CheckpointPolicy
    from transformers import PreTrainedModel

Passes = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""Contexts of a layer's first and second pass."""

_PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "baddbmm")
_ATTENTION = ("attention", "attn")


def recompute_layers(
    model: PreTrainedModel, dropout: torch.Generator | None, selective: bool = False, whole: int = 0
) -> None:
    """Checkpoint every decoder layer of `model` in training mode; the module tree stays as it is.

    Without reentrance, so that adapters get their gradients though the embedding is frozen
    (https://github.com/huggingface/transformers/issues/26221). dropout: the adapters' generator, whose masks
    the second pass must draw again; torch itself takes care of the default generators alone. selective:
    compute again only what is no product, but of the first `whole` layers all.
    """
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    makers: list[Callable[[], Passes]] = []
    if dropout is not None:
        makers.append(partial(_drawing_alike, dropout))
    of_all = _arguments(makers)
    if selective:
        makers.append(partial(create_selective_checkpoint_contexts, _policy, allow_cache_entry_mutation=True))
    model.gradient_checkpointing_enable(_arguments(makers))  # type: ignore[no-untyped-call]
    for _, layer in islice(decoder_layers(model), whole):
        assert hasattr(layer, "_gradient_checkpointing_func"), "where transformers keeps it"
        layer._gradient_checkpointing_func = partial(checkpoint, **of_all)  # type: ignore[assignment]


def _arguments(makers: Sequence[Callable[[], Passes]]) -> dict[str, Any]:
    """Of torch's `checkpoint`."""
    contexts = {"context_fn": partial(_all_of, tuple(makers))} if makers else {}
    return {"use_reentrant": False, **contexts}


def _policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Whether what an operation gives is kept."""
    from torch.utils.checkpoint import CheckpointPolicy

    name = operation.name().partition("::")[2].partition(".")[0]
    kept = name in _PRODUCTS or any(part in name for part in _ATTENTION)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _all_of(makers: Sequence[Callable[[], Passes]]) -> Passes:
    """The contexts that each of `makers` makes, as one for each pass; made just before the first."""
    first, second = zip(*(make() for make in makers), strict=True)
    return _entered(first), _entered(second)


@contextmanager
def _entered(contexts: tuple[AbstractContextManager[Any], ...]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _drawing_alike(generator: torch.Generator) -> Passes:
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
