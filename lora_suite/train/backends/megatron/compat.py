# SPDX-License-Identifier: Apache-2.0
"""What megatron-core does differently without CUDA and between releases (0.16 to 0.19): one small place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import random as megatron_random
from torch.overrides import TorchFunctionMode


def mlp_submodules(layer_submodules: Any) -> Any:
    """The MLP's submodules in a layer's spec: held by a ModuleSpec in 0.16, by a partial in 0.19."""
    mlp = layer_submodules.mlp
    return mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules


class _CudaIsCpu(TorchFunctionMode):
    """Sends what is asked of the device "cuda" to the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if kwargs.get("device") == "cuda":
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


class _Stream:
    """The one stream of a CPU, and the event of having come so far in it: nothing is ever waited for."""

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None:
        pass


_THE_STREAM = _Stream()


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def without_cuda() -> Iterator[None]:
    """Let megatron-core run on the CPU.

    It asks for the device "cuda" in its schedules, buffers and backward functions, with no way to say
    otherwise, and saves CUDA's random state when it recomputes. Active only around calls into it, so that
    nothing else is deceived.
    """
    with ExitStack() as stack:
        stack.enter_context(_CudaIsCpu())
        for owner, name, value in (
            (torch.cuda, "current_device", lambda: torch.device("cpu")),
            (torch.cuda, "current_stream", lambda: _THE_STREAM),
            (torch.cuda, "Stream", lambda: _THE_STREAM),
            (torch.cuda, "stream", nullcontext),
            (torch.cuda, "synchronize", lambda: None),
            (megatron_random, "_get_cuda_rng_state", lambda **_: torch.empty(0)),
            (megatron_random, "_set_cuda_rng_state", lambda *_, **__: None),
        ):
            stack.enter_context(_replaced(owner, name, value))
        yield


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """What calls into megatron-core need on this device: nothing on a GPU, `without_cuda` on the CPU."""
    return without_cuda() if device.type == "cpu" else nullcontext()
