# SPDX-License-Identifier: Apache-2.0
"""The Megatron backend compiled and captured in bfloat16: no further from float64 than its plain path."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lora_suite.blueprint import preflight
from lora_suite.config import load_recipe
from lora_suite.train.batch import MicroBatch
from tests.train.megatron.ranks import FULL, LORA, RECIPES, layout

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore"),
]

SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 2048,
    "max_position_embeddings": 256,
    "initializer_range": 0.02,
}
LENGTH, ROWS, STEPS = 256, 2, 3
AWAKE = layout(**{"lora_cfg.lora_B_init_method": "normal"})
ARMS = {
    "canonical": (LORA, AWAKE),
    "fused": (LORA, (*AWAKE, *layout(**{"lora_cfg.fused": "true"}))),
    "full": (FULL, ()),
}


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """This process as the only rank."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def build(folder: Path, arm: str, precision: str, fast: bool) -> Any:
    """A backend whose weights and factors, whatever its precision, are bfloat16 numbers."""
    from megatron.core import parallel_state

    from lora_suite.train.backends.megatron.construct import build_backend

    model = folder / "model.json"
    model.write_text(json.dumps(json.loads((RECIPES / "models" / "tiny-llama.json").read_text()) | SHAPE))
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    recipe, more = ARMS[arm]
    words = (
        f"policy.model_name={model}",
        f"policy.precision={precision}",
        f"policy.max_total_sequence_length={LENGTH}",
        "data.pad_to_max_length=true",
        "cluster.gpus_per_node=1",
        *layout(tensor_model_parallel_size=1),
        *more,
    )
    resolved = load_recipe(recipe, words)
    blueprint = preflight(resolved.recipe, resolved.path)
    backend: Any = build_backend(resolved.recipe, resolved.path, blueprint, torch.device("cuda", 0), fast)
    assert backend.slow_path_reason is None or not fast
    with torch.no_grad():
        for parameter in backend.model.parameters():
            parameter.copy_(parameter.bfloat16())
    if backend.bank is not None:
        backend.bank.master.copy_(backend.bank.master.bfloat16())
        backend.bank.publish()
    return backend


def batch(seed: int) -> MicroBatch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, SHAPE["vocab_size"], (ROWS, LENGTH + 1), generator=generator).cuda()
    return MicroBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def gradients(backend: Any) -> list[torch.Tensor]:
    """Of every factor or weight, of the last of a few different batches: a graph's second replay, too."""
    for seed in range(STEPS):
        backend.forward_backward([batch(seed)], ROWS * LENGTH)
        backend.sync_gradients()
        if seed < STEPS - 1:
            backend.optimizer_step(0.0)
    if backend.bank is not None:
        bank = backend.bank
        return [bank.master_gradient[slot.start : slot.stop].double() for slot in bank.slots]
    found = (each.grad if each.grad is not None else each.main_grad for each in backend.model.parameters())
    return [gradient.double().flatten() for gradient in found]


@pytest.mark.parametrize("arm", ARMS)
def test_gradients_are_as_close_to_float64_as_the_plain_path_s(tmp_path: Path, alone: None, arm: str) -> None:
    exact = gradients(build(tmp_path, arm, "float64", fast=False))
    plain = gradients(build(tmp_path, arm, "bfloat16", fast=False))
    quick = gradients(build(tmp_path, arm, "bfloat16", fast=True))
    whole = torch.cat(exact)
    errors = [float((torch.cat(each) - whole).norm() / whole.norm()) for each in (plain, quick)]
    print(f"{arm}: plain {errors[0]:.2e}, fast {errors[1]:.2e}")
    assert 0.0 < errors[1] < 2 * errors[0] < 0.2
    for ours, theirs, true in zip(quick, plain, exact, strict=True):
        assert float((ours - true).norm()) <= 2 * float((theirs - true).norm())
