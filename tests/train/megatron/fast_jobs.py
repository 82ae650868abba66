# SPDX-License-Identifier: Apache-2.0
"""What two ranks do on the fast path and on the plain one, for `test_fast`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from lora_suite.train.batch import IGNORED, MicroBatch, Segments
from lora_suite.train.fast.linears import FramedLinear
from lora_suite.train.lora.invariants import InvariantChecks
from lora_suite.train.lora.probes import drawn_b, scale_found
from tests.train.megatron.model_jobs import pretrained
from tests.train.megatron.ranks import (
    ADAPTERS,
    FULL,
    LORA,
    OPTIMIZER,
    build_layout,
    factors,
    global_batch,
    layout,
    one_step,
    own_batches,
    supervised,
)

ALONE, FUSED = layout(tensor_model_parallel_size=1), layout(**{"lora_cfg.fused": "true"})
SOME = layout(**{"lora_cfg.target_modules": "[k_proj,o_proj,up_proj]", "lora_cfg.dim": 3})
# The family, the layout, and what is trained.
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "llama dp2": ("llama", ALONE),
    "llama dp2 fused": ("llama", ALONE + FUSED),
    "llama tp2": ("llama", ()),
    "llama tp2 fused": ("llama", FUSED),
    "llama tp2 some": ("llama", SOME),
    "qwen2 dp2": ("qwen2", ALONE),
    "qwen2 tp2": ("qwen2", ()),
    "qwen3 tp2": ("qwen3", ()),
}
FULL_CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "full llama tp2": ("llama", ()),
    "full qwen2 tp2": ("qwen2", ()),
    "full qwen3 tp2": ("qwen3", ()),
    "full qwen3 dp2": ("qwen3", ALONE),
}


def packed_batch() -> MicroBatch:
    """The rows of the global batch's first two micro batches behind each other, and two slots of padding."""
    rows = [row for batch in global_batch()[:2] for row in zip(batch.input_ids, batch.labels, strict=True)]
    lengths = [len(ids) for ids, _ in rows] + [2]
    ids = torch.cat([*(ids for ids, _ in rows), torch.zeros(2, dtype=torch.int64)])
    labels = torch.cat([*(labels for _, labels in rows), torch.full((2,), IGNORED)])
    positions = torch.cat([torch.arange(length) for length in lengths])
    return MicroBatch(ids[None], labels[None], positions[None], Segments.of(tuple(lengths)))


def traced(backend: Any) -> dict[str, Any]:
    """Three steps of the global batch and one of packed rows, and everything that could differ."""
    bank, dp = backend.bank, backend.topology.dp
    seen: dict[str, Any] = {"count": backend.trainable_parameters()}
    seen["before"] = float(dp.sum(backend.evaluate(own_batches(backend))))
    seen["curve"] = [one_step(backend) for _ in range(3)]
    if bank is not None:
        seen["gradients"], seen["last"] = (
            factors(backend, bank.master_gradient),
            factors(backend, bank.master),
        )
        with backend.adapters_off():
            seen["off"] = float(dp.sum(backend.evaluate(own_batches(backend))))
    else:
        seen["last"] = {name: each.detach().clone() for name, each in backend.model.named_parameters()}
    packed = packed_batch()
    seen["packed"] = float(backend.evaluate([packed]))
    loss = backend.forward_backward([packed], supervised([packed]))
    backend.sync_gradients()
    seen["curve"].append((float(loss), float(backend.clip_gradients(None))))
    return seen


def both(recipe: Path, *overrides: str) -> list[dict[str, Any]]:
    """The plain path's and the fast one's."""
    return [traced(build_layout(recipe, *overrides, fast=fast)) for fast in (False, True)]


def resumed(folder: Path) -> dict[str, Any]:
    """Two steps that follow two others, straight on and from a state that was loaded into a new backend.

    And what each path says of the other's state of full SFT.
    """
    results: dict[str, Any] = {}
    for name, recipe in (("lora", LORA), ("full", FULL)):
        words = (*pretrained(folder / "llama"), *OPTIMIZER)
        backend = build_layout(recipe, *words, fast=True)
        for _ in range(2):
            one_step(backend)
        state = copy.deepcopy(backend.state_dict())
        straight = [one_step(backend) for _ in range(2)]
        backend = build_layout(recipe, *words, fast=True)
        backend.load_state_dict(state)
        results[name] = [*straight, *(one_step(backend) for _ in range(2))]
    plain = build_layout(FULL, *words)
    results["refused"] = []
    for one, other in ((plain, backend), (backend, plain)):
        try:
            one.load_state_dict(other.state_dict())
        except KeyError as error:
            results["refused"].append(str(error))
    return results


def checked(folder: Path) -> dict[str, Any]:
    """What invariants and probes say of adapters on the fast path, and what they say of spoiled frames."""
    backend = build_layout(LORA, *pretrained(folder / "qwen2"), *ADAPTERS, fast=True)
    bank = backend.bank
    checks = InvariantChecks(backend, bank, None, 1, None)
    for step in (1, 2):
        backend.forward_backward(own_batches(backend), supervised(global_batch()))
        checks.after_backward(step)
        backend.sync_gradients()
        backend.optimizer_step(1e-2)
    checks.after_training(2, own_batches(backend))
    with drawn_b(bank):
        found = scale_found(backend, bank, own_batches(backend))
        frames = [module for module in backend.model.modules() if isinstance(module, FramedLinear)]
        for frame in frames:
            for part in frame.frame_parts()[1]:
                part.mul_(2.0)
        doubled = scale_found(backend, bank, own_batches(backend))
    before = backend.frozen_fingerprint()
    frames[0].matrix[0, 0] += 1.0
    return {
        "invariants": {each.name: (each.ok, each.message) for each in checks.results},
        "found": found,
        "doubled": doubled,
        "sees a weight in its frame": backend.frozen_fingerprint() != before,
    }


def job(folder: Path) -> dict[str, Any]:
    """Everything in one start of the processes."""
    results: dict[str, Any] = {}
    for name, (family, overrides) in CASES.items():
        results[name] = both(LORA, *pretrained(folder / family), *ADAPTERS, *overrides)
    for name, (family, overrides) in FULL_CASES.items():
        results[name] = both(FULL, *pretrained(folder / family), *OPTIMIZER, *overrides)
    return {**results, "resumed": resumed(folder), "checked": checked(folder)}
