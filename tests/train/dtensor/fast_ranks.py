# SPDX-License-Identifier: Apache-2.0
"""Trains some steps on the fast path of several ranks, on any device, and gathers what tells them apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lora_suite.blueprint.preflight import preflight
from lora_suite.train.backends.dtensor import fast
from lora_suite.train.backends.dtensor.fast.backend import FastBackend
from lora_suite.train.backends.dtensor.fast.decoder import Decoder, split_dim
from lora_suite.train.backends.dtensor.fast.hybrid import HybridDecoder
from lora_suite.train.batch import MicroBatch
from lora_suite.train.data.batches import GlobalBatch
from lora_suite.train.data.examples import Example
from lora_suite.train.data.slicing import PackedRows
from tests.train.dtensor.ranks import (
    RECIPES,
    Setting,
    factors_of,
    gathered,
    rows,
    share,
    supervised,
    wake_adapters,
)

STEPS = 3
MAX_NORM = 0.1  # far below the first gradient's norm, so that clipping matters
TP = "policy.dtensor_cfg.tensor_parallel_size=2"
CPU = torch.device("cpu")


def build(setting: Setting, device: torch.device = CPU) -> FastBackend:
    """The fast backend on this rank, with adapters that change what the model computes."""
    path = RECIPES / "sft.yaml"
    blueprint = preflight(setting.recipe, path)
    backend = fast.build(setting.recipe, path, blueprint, device, gpu=device.type == "cuda")
    assert isinstance(backend, FastBackend)
    if backend.bank is not None:
        wake_adapters(backend)
        backend.bank.publish()
    return backend


def train(backend: FastBackend, micro: int, steps: int = STEPS, first: int = 0) -> dict[str, Any]:
    """Losses and norms of some steps, the last one's gradients of adapters, and what is trained after it."""
    dp, seen, gradients = backend.topology.dp, [], {}
    for step in range(first, first + steps):
        batch = rows(seed=step)
        mine = [_on(each, backend.topology.device) for each in share(batch, dp.index, dp.size, micro)]
        loss = dp.sum(backend.forward_backward(mine, supervised(batch)).clone())
        backend.sync_gradients()
        if backend.bank is not None:
            gradients = factors_of(backend, backend.bank.master_gradient)
        norm = backend.clip_gradients(MAX_NORM)
        backend.optimizer_step(1e-2)
        seen += [loss.item(), norm.item(), dp.sum(backend.evaluate(mine).clone()).item()]
    bank = backend.bank
    values = factors_of(backend, bank.master) if bank is not None else whole_weights(backend)
    return {
        "seen": seen,
        "gradients": {name: value.cpu() for name, value in gradients.items()},
        "values": {name: value.cpu() for name, value in values.items()},
        "trainable": backend.trainable_parameters(),
    }


def packed_steps(capacity: int) -> Iterator[GlobalBatch]:
    """Batches of random rows: short ones alone, then with some that are longer than half of a pack."""
    generator = np.random.Generator(np.random.PCG64(3))
    for longest in (capacity // 4, capacity - 1, capacity // 4, capacity - 1):
        lengths = generator.integers(2, longest, size=12)
        tokens = [generator.integers(256, size=length, dtype=np.int32) for length in lengths]
        yield GlobalBatch(tuple(Example(row, np.arange(len(row)) > 0) for row in tokens))


def train_packed(setting: Setting, capacity: int, kind: str = "cpu") -> list[tuple[float, float]]:
    """Losses and norms of steps whose packs are of several kinds, on this rank's own device of that kind."""
    device = CPU if kind == "cpu" else torch.device(kind, dist.get_rank())
    backend, seen = build(setting, device), []
    dp, slicing = backend.topology.dp, PackedRows(capacity, 0, capacity)
    for batch in packed_steps(capacity):
        mine = [_on(each, device) for each in slicing.micro_batches(batch, dp)]
        loss = dp.sum(backend.forward_backward(mine, batch.supervised).clone())
        backend.sync_gradients()
        norm = backend.clip_gradients(MAX_NORM)
        backend.optimizer_step(1e-3)
        seen.append((loss.item() / batch.supervised, norm.item()))
    return seen


def train_each(
    settings: list[Setting], micro: int, kind: str = "cpu", steps: int = STEPS
) -> list[dict[str, Any]]:
    """Build and train each setting on this rank, on its own device of that kind."""
    device = CPU if kind == "cpu" else torch.device(kind, dist.get_rank())
    return [train(build(setting, device), micro, steps) for setting in settings]


def whole_weights(backend: FastBackend) -> dict[str, torch.Tensor]:
    """Every weight, gathered over the ranks that hold parts of it."""
    assert isinstance(backend.model, Decoder | HybridDecoder)
    tp, ep, weights = backend.topology.tp, backend.topology.ep, {}
    for name, part in backend.model.named_tensors():
        if ".experts." in name and ep.size > 1:
            weights[name] = gathered(part.contiguous(), ep, 0)
            continue
        dim = split_dim(name)
        whole = dim is None or tp.size == 1
        weights[name] = part.clone() if whole else gathered(part.contiguous(), tp, dim or 0)
    return weights


def different(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that are not equal bit for bit."""
    assert ours.keys() == theirs.keys()
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]


def _on(batch: MicroBatch, device: torch.device) -> MicroBatch:
    return MicroBatch(batch.input_ids.to(device), batch.labels.to(device))
