# SPDX-License-Identifier: Apache-2.0
"""Trainings over two processes: what each rank does, and what it tells the test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from lora_suite.blueprint import preflight
from lora_suite.config import load_recipe
from lora_suite.train.backends.megatron import build
from lora_suite.train.batch import IGNORED, MicroBatch
from lora_suite.train.topology import Axis

RECIPES = Path(__file__).resolve().parents[3] / "recipes"
FULL = RECIPES / "sft-tiny-llama-1n2c-megatron-tp2.yaml"
LORA = RECIPES / "sft-tiny-llama-1n2c-megatron-tp2-lora.yaml"
LEARNING_RATE, MAX_NORM = 1e-2, 1.0
STEPS, FULL_STEPS = 10, 3
# Float64, so that differences are no rounding of sums (rotary tables stay float32 everywhere).
# A large eps, so that Adam's first step is no mere sign: it would make noise of the smallest gradients.
OPTIMIZER = (
    "policy.precision=float64",
    "policy.optimizer.kwargs.eps=1e-3",
    "policy.optimizer.kwargs.weight_decay=0.1",
)
# Adapters whose B is zero would leave every gradient of A zero.
ADAPTERS = (*OPTIMIZER, "policy.megatron_cfg.lora_cfg.lora_B_init_method=normal")


def layout(**values: object) -> tuple[str, ...]:
    """Overrides of `policy.megatron_cfg`."""
    return tuple(f"policy.megatron_cfg.{key}={value}" for key, value in values.items())


LAYOUTS = {
    "tp2": (),
    "tp2 sp": layout(sequence_parallel="true"),
    "tp2 recompute": layout(activation_checkpointing="true"),
    "tp2 sp recompute": layout(sequence_parallel="true", activation_checkpointing="true"),
    "pp2": layout(tensor_model_parallel_size=1, pipeline_model_parallel_size=2),
    "pp2 recompute": layout(
        tensor_model_parallel_size=1, pipeline_model_parallel_size=2, activation_checkpointing="true"
    ),
    "dp2": layout(tensor_model_parallel_size=1),
}


def global_batch() -> list[MicroBatch]:
    """Four micro batches of different lengths and numbers of supervised tokens."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for length, prompt in ((16, 3), (12, 5), (16, 9), (12, 1)):
        tokens = torch.randint(0, 256, (2, length + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        labels[:, :prompt] = IGNORED
        labels[1, -2:] = IGNORED
        batches.append(MicroBatch(tokens[:, :-1].contiguous(), labels))
    return batches


def supervised(batches: Sequence[MicroBatch]) -> int:
    """Supervised tokens of some micro batches."""
    return sum(int((batch.labels != IGNORED).sum()) for batch in batches)


def run_ranks(job: Callable[..., Any], folder: Path, *args: Any) -> list[Any]:
    """Run a job on two ranks; returns what each of them returned."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.multiprocessing.spawn(_rank, args=(store.port, job, folder, args), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def _rank(rank: int, port: int, job: Callable[..., Any], folder: Path, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    _start_groups(store, rank, 0)
    torch.save(job(*args), folder / f"{rank}.pt")
    dist.destroy_process_group()


_started: list[tuple[dist.Store, int, int]] = []


def _start_groups(store: dist.Store, rank: int, count: int) -> None:
    """Start the world, for the `count`-th time on this store."""
    dist.init_process_group("gloo", store=dist.PrefixStore(str(count), store), rank=rank, world_size=2)
    _started[:] = [(store, rank, count)]


def restart_groups() -> None:
    """End all groups and start the world anew.

    megatron-core starts dozens of groups, each with threads of its own, and never ends them.
    """
    if "megatron.core" not in sys.modules:
        return
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    ((store, rank, count),) = _started
    _start_groups(store, rank, count + 1)


def build_layout(recipe: Path, *overrides: str, known: bool = True, fast: bool = False) -> Any:
    """The backend of a recipe, with megatron-core's groups started anew.

    known: whether the model's architecture was on this machine before its weights were. fast: whether it
    takes the fast path, as it would on a GPU.
    """
    restart_groups()
    resolved = load_recipe(recipe, overrides)
    blueprint = preflight(resolved.recipe, resolved.path)
    if not known:
        blueprint = replace(blueprint, model=None, linears=(), adapters=())
    device = torch.device("cpu")
    if not fast:
        return build(resolved.recipe, resolved.path, blueprint, device)
    from lora_suite.train.backends.megatron.construct import build_backend

    return build_backend(resolved.recipe, resolved.path, blueprint, device, fast=True)


def own_batches(backend: Any) -> list[MicroBatch]:
    """This data parallel rank's share of the global batch."""
    dp = backend.topology.dp
    return global_batch()[dp.index :: dp.size]


def one_step(backend: Any) -> tuple[float, float]:
    """A training step; returns the mean loss of the global batch and the gradient norm."""
    tokens = supervised(global_batch())
    loss = backend.topology.dp.sum(backend.forward_backward(own_batches(backend), tokens))
    backend.sync_gradients()
    norm = backend.clip_gradients(MAX_NORM)
    backend.optimizer_step(LEARNING_RATE)
    return float(loss) / tokens, float(norm)


def logits(backend: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """Whole logits [rows, length, vocabulary] of a model with one stage."""
    from lora_suite.train.backends.megatron.compat import without_cuda

    backend.model.eval()
    with without_cuda(), torch.no_grad():
        whole: torch.Tensor = backend.model(input_ids, None, None, runtime_gather_output=True)
    return whole


def factors(backend: Any, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """Each factor's part of one of the bank's buffers, in its own shape."""
    return {
        slot.key: buffer[slot.start : slot.stop].view_as(getattr(slot.adapter, slot.factor)).clone()
        for slot in backend.bank.slots
    }


def whole(ranks: Sequence[dict[str, Any]], what: str) -> dict[str, torch.Tensor]:
    """Factors over tensor parallel ranks, joined along the dim in which their shapes are cut.

    ranks: what each rank says of one layout, with `tp` (index and size) and the keys that are `replicated`.
    """
    if ranks[0]["tp"][1] == 1:
        return {key: value for rank in ranks for key, value in rank[what].items()}
    joined = {}
    for key, value in ranks[0][what].items():
        dim = 0 if key.endswith(".b") else 1
        if key not in ranks[0]["replicated"]:
            value = torch.cat([rank[what][key] for rank in ranks], dim)
            if key.endswith("linear_fc1.b"):  # gate and up of rank 0, gate and up of rank 1
                value = value.view(2, 2, -1, value.shape[1]).transpose(0, 1).reshape(value.shape)
        joined[key] = value
    return joined


def placement(backend: Any) -> dict[str, Any]:
    """What `whole` must know of this rank."""
    bank, tp = backend.bank, backend.topology.tp
    replicated = [slot.key for slot in bank.slots if slot.stop <= bank.replicated]
    return {"tp": (tp.index, tp.size), "replicated": replicated}


def train_adapters(layouts: dict[str, tuple[str, ...]]) -> dict[str, dict[str, Any]]:
    """A few steps of LoRA in each layout, with everything that could differ."""
    results = {}
    for name, overrides in layouts.items():
        backend = build_layout(LORA, *ADAPTERS, *overrides)
        frozen, bank = backend.frozen_fingerprint(), backend.bank
        first = factors(backend, bank.master)
        before = float(backend.topology.dp.sum(backend.evaluate(own_batches(backend))))
        with backend.adapters_off():
            off = float(backend.topology.dp.sum(backend.evaluate(own_batches(backend))))
        tokens = supervised(global_batch())
        loss = backend.topology.dp.sum(backend.forward_backward(own_batches(backend), tokens))
        backend.sync_gradients()
        gradients = factors(backend, bank.master_gradient)
        norm = backend.clip_gradients(MAX_NORM)
        backend.optimizer_step(LEARNING_RATE)
        updated = factors(backend, bank.master)
        curve = [(float(loss) / tokens, float(norm)), *(one_step(backend) for _ in range(STEPS - 1))]
        results[name] = {
            **placement(backend),
            "count": backend.trainable_parameters(),
            "frozen equal": backend.frozen_fingerprint() == frozen,
            "first": first,
            "before": before,
            "off": off,
            "gradients": gradients,
            "updated": updated,
            "curve": curve,
            "last": factors(backend, bank.master),
        }
    return results


def replicas_without_a_sum() -> dict[str, dict[str, tuple[bool | None, str]]]:
    """What the invariants say after two steps, with all sums of gradients and without one of them."""
    from lora_suite.train.lora.invariants import InvariantChecks

    results = {}
    for missing in ("none", "tp", "dp"):
        overrides = (
            layout(sequence_parallel="true") if missing != "dp" else layout(tensor_model_parallel_size=1)
        )
        backend = build_layout(LORA, *ADAPTERS, *overrides)
        checks = InvariantChecks(backend, backend.bank, None, 1, None)
        if missing != "none":
            # As of a rank that is alone on the axis.
            alone = replace(backend.topology, **{missing: Axis(0, 1)})
            backend.bank.topology = alone
        for _ in range(2):
            one_step(backend)
        checks.after_training(2, own_batches(backend))
        results[missing] = {each.name: (each.ok, each.message) for each in checks.results}
    return results


def micro_batches_in_half() -> dict[str, list[torch.Tensor]]:
    """bfloat16 gradients of all micro batches together, and then of each alone, in each layout."""
    results = {}
    for name in ("tp2", "pp2", "pp2 recompute"):
        backend = build_layout(LORA, *ADAPTERS, "policy.precision=bfloat16", *LAYOUTS[name])
        batches, gradients = global_batch(), []
        for some in (batches, *([batch] for batch in batches)):
            backend.forward_backward(some, supervised(batches))
            backend.sync_gradients()
            gradients.append(backend.bank.master_gradient.clone())
            backend.optimizer_step(0.0)
        results[name] = gradients
    return results


def train_weights(layouts: dict[str, tuple[str, ...]]) -> dict[str, dict[str, Any]]:
    """A few steps of full SFT in each layout."""
    results = {}
    for name, overrides in layouts.items():
        backend = build_layout(FULL, *OPTIMIZER, *overrides)
        curve = [one_step(backend) for _ in range(FULL_STEPS)]
        results[name] = {
            "tp": (backend.topology.tp.index, backend.topology.tp.size),
            "first layer": backend.model.decoder.layers[0].layer_number - 1,
            "count": backend.trainable_parameters(),
            "curve": curve,
            "weights": {key: value.detach().clone() for key, value in backend.model.named_parameters()},
            "classes": {key: type(module) for key, module in backend.model.named_modules()},
            "validation": float(backend.topology.dp.sum(backend.evaluate(own_batches(backend)))),
        }
    return results
