# SPDX-License-Identifier: Apache-2.0
"""Runs functions on a few gloo ranks, and builds what they train: tiny recipes, batches, a reference.

The reference shares nothing with the backend but the first weights: a plain transformers model in one
process, torch's own cross-entropy, clipping and optimizer, and adapters merged into the weights.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn import functional

from lora_suite.blueprint.preflight import preflight
from lora_suite.config.recipe import load_recipe
from lora_suite.train.backends.base import Backend
from lora_suite.train.backends.dtensor import build
from lora_suite.train.backends.dtensor.backend import DTensorBackend
from lora_suite.train.batch import IGNORED, MicroBatch
from lora_suite.train.lora.spec import DTYPES
from lora_suite.train.models.initialise import Weight, draw
from lora_suite.train.topology import Axis

RECIPES = Path(__file__).parents[3] / "recipes"
TINY = RECIPES / "models" / "tiny-llama.json"
TINY_HYBRID = RECIPES / "models" / "tiny-nemotron-h.json"
CONTEXT = multiprocessing.get_context("forkserver")
# The server imports torch and transformers once; ranks are forked off it.
CONTEXT.set_forkserver_preload([__name__, "transformers.models.llama.modeling_llama"])


LONGEST = {"gloo": 120, "nccl": 600}
"""Seconds that ranks may take; on GPUs they compile."""


def run_ranks(
    world: int, folder: Path, function: Callable[..., Any], *args: Any, backend: str = "gloo"
) -> list[Any]:
    """Call function(*args) on `world` ranks and return what each rank returned.

    backend: of the collectives; with nccl each rank has the GPU of its number.
    """
    folder.mkdir()
    ranks = [
        CONTEXT.Process(target=_rank, args=(rank, world, folder, backend, function, args))
        for rank in range(world)
    ]
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(LONGEST[backend])
    finally:
        for process in ranks:
            process.kill()
    errors = [path.read_text() for path in sorted(folder.glob("*.error"))]
    assert not errors, "\n".join(errors)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


def _rank(
    rank: int, world: int, folder: Path, backend: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=LONGEST[backend] / 2),
    )
    try:
        torch.save(function(*args), folder / f"{rank}.pt")
    except Exception:
        (folder / f"{rank}.error").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Setting:
    """A recipe beside the defaults: overrides, the model's JSON, and the precision."""

    overrides: tuple[str, ...] = ()
    model: Path = TINY
    precision: str = "float32"
    world: int = 1

    @functools.cached_property
    def recipe(self) -> Any:
        """The typed recipe."""
        fixed = (
            f"policy.model_name={self.model}",
            "policy.init=random",
            "policy.train_global_batch_size=4",
            "policy.max_total_sequence_length=16",
            f"policy.precision={self.precision}",
            "policy.optimizer.kwargs.lr=1e-2",
            # Far above the gradients, so that Adam's first update shows their size, not just their sign.
            "policy.optimizer.kwargs.eps=1.0",
            f"cluster.gpus_per_node={self.world}",
        )
        return load_recipe(RECIPES / "sft.yaml", (*fixed, *self.overrides)).recipe

    def build(self) -> DTensorBackend:
        """The backend on this rank."""
        path = RECIPES / "sft.yaml"
        backend = build(self.recipe, path, preflight(self.recipe, path), torch.device("cpu"))
        assert isinstance(backend, DTensorBackend)
        return backend


LORA = "policy.dtensor_cfg.lora_cfg.enabled=true"


def rows(count: int = 4, length: int = 16, seed: int = 0) -> MicroBatch:
    """A global batch with prompts and padding of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 256, (count, length + 1), generator=generator)
    labels = ids[:, 1:].clone()
    for row in range(count):
        labels[row, : 3 * row + 1] = IGNORED
        labels[row, length - row :] = IGNORED
    return MicroBatch(ids[:, :-1], labels)


def supervised(batch: MicroBatch) -> int:
    """Tokens of a batch that carry loss."""
    return int((batch.labels != IGNORED).sum())


def share(batch: MicroBatch, index: int, size: int, micro: int) -> list[MicroBatch]:
    """The micro batches of a data-parallel rank: every size-th row, so that ranks' token counts differ."""
    ids, labels = batch.input_ids[index::size], batch.labels[index::size]
    return [
        MicroBatch(*pair) for pair in zip(torch.split(ids, micro), torch.split(labels, micro), strict=True)
    ]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A whole copy of a tensor, by DTensor's own collectives."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def wake_adapters(backend: Backend) -> None:
    """Give B values, so that A gets gradients and the adapters change what the model computes."""
    assert backend.bank is not None
    for slot in backend.bank.slots:
        if slot.factor == "b":
            value = awake(f"{slot.key}", slot.adapter.full_shape("b"))
            backend.bank.master[slot.start : slot.stop] = slot.adapter.local_part("b", value).flatten()
    backend.bank.compute.copy_(backend.bank.master)


def awake(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A value of a factor B, from its name."""
    return draw(Weight(f"{name}.weight", shape), 0.05, 1, torch.float64, "cpu")


def one_step(
    backend: DTensorBackend, batch: MicroBatch, micro: int, max_norm: float | None
) -> dict[str, Any]:
    """Train one step on this rank's rows; return loss, norm, whole gradients and whole updates."""
    dp = backend.topology.dp
    before = values_of(backend)
    loss = backend.forward_backward(share(batch, dp.index, dp.size, micro), supervised(batch))
    backend.sync_gradients()
    gradients = gradients_of(backend)
    norm = backend.clip_gradients(max_norm)
    backend.optimizer_step(1e-2)
    loss = dp.sum(loss.clone()) / supervised(batch)
    updates = {name: value - before[name] for name, value in values_of(backend).items()}
    return {"loss": loss.item(), "norm": norm.item(), "gradients": gradients, "updates": updates}


def gradients_of(backend: DTensorBackend) -> dict[str, torch.Tensor]:
    """Whole gradients of what trains, by name."""
    if backend.bank is not None:
        return factors_of(backend, backend.bank.master_gradient)
    return {
        name: of_all_experts(backend, name, whole(p.grad))
        for name, p in backend.model.named_parameters()
        if p.grad is not None
    }


def values_of(backend: DTensorBackend) -> dict[str, torch.Tensor]:
    """Whole values of what trains, by name."""
    if backend.bank is not None:
        return factors_of(backend, backend.bank.master)
    return {
        name: of_all_experts(backend, name, whole(p))
        for name, p in backend.model.named_parameters()
        if p.requires_grad
    }


def of_all_experts(backend: DTensorBackend, name: str, part: torch.Tensor) -> torch.Tensor:
    """A stack of experts with those of all expert parallel ranks; anything else as it is."""
    ep = backend.topology.ep
    return gathered(part, ep, 0) if ".experts." in name and ep.size > 1 else part


def gathered(part: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """The parts of an axis' ranks, together."""
    parts = [torch.empty_like(part) for _ in range(axis.size)]
    dist.all_gather(parts, part, group=axis.group)
    return torch.cat(parts, dim)


def factors_of(backend: Backend, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """Whole factors from one of the bank's flat buffers, gathered over the ranks that hold parts."""
    assert backend.bank is not None
    factors = {}
    for slot in backend.bank.slots:
        part = flat[slot.start : slot.stop].view_as(getattr(slot.adapter, slot.factor)).contiguous()
        dim = slot.adapter.sharded_dim(slot.factor)
        axis = slot.adapter.shard_axis
        if dim is not None and axis.size > 1:
            part = gathered(part, axis, dim)
        factors[slot.key] = part.clone()
    return factors


def plain_model(setting: Setting) -> Any:
    """transformers' own model with the first weights of the setting's seed."""
    from transformers import AutoConfig, AutoModelForCausalLM

    keys = json.loads(setting.model.read_text())
    config = AutoConfig.for_model(**keys)
    config.use_cache = False
    dtype = DTYPES[setting.precision]
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            std, seed = keys["initializer_range"], setting.recipe.sft.seed
            parameter.copy_(draw(Weight(name, tuple(parameter.shape)), std, seed, dtype, "cpu"))
    return model.train()


def reference_step(
    setting: Setting, batch: MicroBatch, max_norm: float | None, factors: dict[str, torch.Tensor] | None
) -> dict[str, Any]:
    """What `one_step` must return; factors: first values of the adapters, or None for full SFT."""
    model = plain_model(setting)
    weights = dict(model.named_parameters())
    if factors is None:
        trained = {name: weight for name, weight in weights.items() if ".gate." not in name}
    else:
        trained = {key: value.clone().requires_grad_() for key, value in factors.items()}
        lora = setting.recipe.policy.dtensor_cfg.lora_cfg
        weights = dict(weights)
        for site in {key.rpartition(".")[0] for key in factors}:
            update = trained[f"{site}.b"] @ trained[f"{site}.a"] * (lora.alpha / lora.dim)
            weight = site if site in weights else f"{site}.weight"  # a stack of experts is no module
            weights[weight] = weights[weight].detach() + update
    logits = torch.func.functional_call(model, weights, kwargs={"input_ids": batch.input_ids}).logits
    total = functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
    loss = total / supervised(batch)
    torch.autograd.backward(loss)
    gradients = {name: parameter.grad.clone() for name, parameter in trained.items()}
    parameters = list(trained.values())
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm if max_norm is not None else 1e30)
    kwargs = setting.recipe.policy.optimizer.kwargs
    optimizer = torch.optim.AdamW(
        parameters, lr=1e-2, betas=kwargs.betas, eps=kwargs.eps, weight_decay=kwargs.weight_decay
    )
    before = {name: parameter.detach().clone() for name, parameter in trained.items()}
    optimizer.step()
    updates = {name: parameter.detach() - before[name] for name, parameter in trained.items()}
    return {"loss": loss.item(), "norm": norm.item(), "gradients": gradients, "updates": updates}
