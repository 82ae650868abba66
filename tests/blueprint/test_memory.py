# SPDX-License-Identifier: Apache-2.0
"""The memory model against figures worked out by hand, and against peaks measured on an H200."""

from __future__ import annotations

from typing import Any

import pytest

from lora_suite.blueprint import preflight
from lora_suite.blueprint.layout import rank_layout
from lora_suite.blueprint.memory import MemoryEstimate, estimate_memory
from lora_suite.config import load_recipe
from tests.config.helpers import MEGATRON, RECIPES, TINY, TINY_LORA, TINY_MEGATRON_LORA

GIB = 2**30
BILLION, EIGHT = RECIPES / "sft-llama3.2-1b-1n1g-fsdp2.yaml", RECIPES / "sft-llama3.1-8b-1n8g-fsdp2tp1.yaml"
QUIET = ("policy.init=random", "sft.val_period=0", "sft.val_at_start=false", "sft.val_at_end=false")
LORA = ("policy.dtensor_cfg.lora_cfg.enabled=true", "policy.dtensor_cfg.lora_cfg.dim=8")


def estimate(path: Any, *overrides: str, replicas: int = 1, fast: bool = False) -> MemoryEstimate:
    """The model's answer for a shipped recipe with overrides."""
    recipe = load_recipe(path, [*QUIET, *overrides]).recipe
    return estimate_memory(recipe, preflight(recipe, path), rank_layout(recipe, replicas), fast)


def rows(micro: int, length: int, steps: int = 1, gpus: int = 1) -> list[str]:
    """Overrides for `steps` micro batches of `micro` rows on each of so many GPUs."""
    return [
        f"cluster.gpus_per_node={gpus}",
        f"policy.max_total_sequence_length={length}",
        f"policy.train_micro_batch_size={micro}",
        f"policy.train_global_batch_size={micro * steps * gpus}",
    ]


# Peaks of `torch.cuda.max_memory_allocated` in GiB that docs/backend_dtensor.md and docs/performance.md note.
# The fast path's are of steps after the one that captures: activations then lie in the graph's own pool.


@pytest.mark.parametrize(
    ("path", "overrides", "measured"),
    [
        (BILLION, [*LORA, *rows(1, 2048)], 7.3),
        (BILLION, rows(1, 2048), 21.3),
        (EIGHT, [*LORA, *rows(1, 4096)], 40.7),
    ],
)
def test_the_plain_path_needs_what_was_measured(path: Any, overrides: list[str], measured: float) -> None:
    assert estimate(path, *overrides).total / GIB == pytest.approx(measured, rel=0.06)


@pytest.mark.parametrize(
    ("path", "overrides", "measured"),
    [
        (BILLION, [*LORA, *rows(1, 2048)], 2.6),
        (BILLION, [*LORA, *rows(4, 2048)], 2.8),
        (EIGHT, [*LORA, *rows(1, 4096)], 15.7),
    ],
)
def test_what_the_fast_path_holds_between_passes_is_a_little_less_than_was_measured(
    path: Any, overrides: list[str], measured: float
) -> None:
    found = estimate(path, *overrides, fast=True)
    held = (found.weights + found.adapters + found.gradients) / GIB
    assert 0.85 * measured < held < measured


def test_full_sft_of_a_known_model_by_hand() -> None:
    params, layers, tokens = 1_235_814_400, 16, 2048
    found = estimate(BILLION, *rows(1, 2048))
    assert (found.weights, found.optimizer, found.fresh) == (4 * params, 8 * params, 4 * params)
    assert found.gathered == 2 * params  # one rank gathers everything, and nothing again
    norms = 2 * 2048 * (4 + 2)
    attention = 2 * (2048 + 2048 + 2 * 512 + 2048) + 4 * 32
    mlp = 2 * (2048 + 4 * 8192)
    assert found.activations == layers * tokens * (norms + attention + mlp)
    assert found.logits == 2 * 2 * tokens * 128_256 + 2 * 4 * 2**26
    assert found.total == 12 * params + 2 * params + found.activations + found.logits
    assert found.gradients == found.adapters == 0


def test_several_micro_batches_keep_whole_sums() -> None:
    params = 1_235_814_400
    several = estimate(BILLION, *rows(1, 2048, steps=2))
    assert (several.gradients, several.fresh) == (4 * params, 0)
    assert estimate(BILLION, *rows(1, 2048, steps=2), fast=True).gradients == 4 * params


def test_the_fast_path_keeps_weights_and_what_they_lack_of_masters() -> None:
    params = 1_235_814_400
    found = estimate(BILLION, *rows(1, 2048), fast=True)
    assert (found.weights, found.optimizer, found.fresh) == (2 * params, 10 * params, 2 * params)
    token = 2 * (2 * 2048 + 2048 + (2 * 2048 + 2 * 512) + 2048 + 3 * 8192) + 4 * 32
    assert found.activations == 16 * 2048 * token
    assert found.logits == 2048 * 128_256 * 6 + 2 * 2048 * 2048
    lora = estimate(BILLION, *LORA, *rows(1, 2048), fast=True)
    assert lora.logits == 512 * 128_256 * 6 + 2 * 2048 * 2048


def test_adapters_by_hand() -> None:
    # The tiny model: 16,384 parameters of adapters; a bank of two copies in bfloat16, four in float32.
    plain = estimate(TINY_LORA, "policy.precision=bfloat16")
    assert plain.adapters == 16_384 * (2 * 2 + 4 * 4)
    # Frames of rank 24 (q, k, v), 8 (o), 16 (gate, up) and 8 (down), in each of two layers.
    qkv, o = 24 * (128 + 64 + 24), 8 * (64 + 64 + 8)
    gate_up, down = 16 * (256 + 64 + 16), 8 * (64 + 128 + 8)
    framed = estimate(TINY_LORA, "policy.precision=bfloat16", fast=True)
    assert framed.adapters - plain.adapters == 2 * 2 * (qkv + o + gate_up + down)


def test_frames_of_fused_linears_have_one_adapter_each() -> None:
    keys = ["policy.megatron_cfg.lora_cfg.fused=true", "policy.precision=bfloat16", "cluster.gpus_per_node=1"]
    keys.append("policy.megatron_cfg.tensor_model_parallel_size=1")
    plain, framed = (estimate(TINY_MEGATRON_LORA, *keys, fast=fast) for fast in (False, True))
    assert plain.adapters == 13_312 * 20
    frames = 8 * ((128 + 64 + 8) + (64 + 64 + 8) + (256 + 64 + 8) + (64 + 128 + 8))
    assert framed.adapters - plain.adapters == 2 * 2 * frames


def test_nothing_is_kept_for_linears_without_an_adapter() -> None:
    whole = estimate(TINY_LORA, "policy.precision=bfloat16")
    some = estimate(
        TINY_LORA, "policy.precision=bfloat16", "policy.dtensor_cfg.lora_cfg.target_modules=[q_proj]"
    )
    slots = 64 * load_recipe(TINY_LORA).recipe.policy.train_micro_batch_size
    # The MLP's input (64 channels) and down's (128), in two layers.
    assert whole.activations - some.activations == 2 * slots * 2 * (64 + 128)


def test_shards_hold_their_part_and_two_whole_layers() -> None:
    params, ends = 8_030_261_248, 2 * 128_256 * 4096
    found = estimate(EIGHT, *LORA, *rows(1, 4096, gpus=8))
    assert found.weights == 2 * params // 8
    layer = (params - ends) / 32
    assert found.gathered == pytest.approx(2 * (2 * layer + ends), rel=1e-4)
    hsdp = estimate(EIGHT, *LORA, *rows(1, 4096, gpus=8), replicas=2)
    assert (hsdp.weights, hsdp.gathered) == (2 * params // 4, found.gathered)
    whole = estimate(EIGHT, *LORA, *rows(1, 4096, gpus=8), replicas=8)
    assert (whole.weights, whole.gathered) == (2 * params, 0)


def test_tensor_parallelism_splits_layers_but_not_the_ends() -> None:
    sizes = ["policy.dtensor_cfg.tensor_parallel_size=2", *rows(1, 4096, gpus=2)]
    sizes[-1] = "policy.train_global_batch_size=1"
    found = estimate(EIGHT, *LORA, *sizes)
    ends, norms = 2 * 128_256 * 4096, (1 + 2 * 32) * 4096
    linears = 8_030_261_248 - ends - norms
    assert found.weights == 2 * (linears // 2 + norms + ends)
    # A of q, k, v, gate, up and B of o, down are whole on both ranks; the others are halves.
    q, kv, mlp = 4096, 1024, 14336
    whole = 4096 * 3 + 4096 * 2 + 4096 + 4096
    split = (q + 2 * kv) + 2 * mlp + q + mlp
    assert found.adapters == 32 * 8 * (whole + split // 2) * 20


def test_checkpointing_keeps_inputs_and_one_layer() -> None:
    keys = [*LORA, *rows(1, 4096)]
    whole = estimate(EIGHT, *keys)
    found = estimate(EIGHT, *keys, "policy.dtensor_cfg.activation_checkpointing=true")
    assert found.activations == 32 * 2 * 4096 * 4096 + whole.activations // 32


LAYERS = "policy.dtensor_cfg.recompute_mlp_layers=3"


def test_selective_checkpointing_of_the_fast_path_by_hand() -> None:
    keys = "policy.dtensor_cfg.activation_checkpointing=selective"
    # Both sums; queries, keys, values, context; gate and up. Norms and activations are made anew.
    token = 2 * (2 * 4096 + 2 * 4096 + 2 * 1024 + 2 * 14336) + 4 * 32
    full = estimate(EIGHT, *rows(1, 4096), keys, fast=True)
    assert full.activations == 32 * 4096 * token
    # Nothing trains before the first layer's norm, so its result is kept.
    lora = estimate(EIGHT, *LORA, *rows(1, 4096), keys, fast=True)
    assert lora.activations == 4096 * (32 * token + 2 * 4096)
    whole = estimate(EIGHT, *LORA, *rows(1, 4096), fast=True)
    assert whole.activations == 32 * 4096 * (token + 2 * (2 * 4096 + 14336))
    # Of three layers gate and up are made anew, too.
    anew = estimate(EIGHT, *LORA, *rows(1, 4096), keys, LAYERS, fast=True)
    assert lora.activations - anew.activations == 3 * 4096 * 2 * 2 * 14336
    # Of an MLP whose second linear alone has an adapter the activation is kept.
    down = "policy.dtensor_cfg.lora_cfg.target_modules=['*down_proj']"
    some = estimate(EIGHT, *LORA, *rows(1, 4096), keys, down, fast=True)
    assert some.activations == 4096 * 32 * (token + 2 * 14336)


def test_norms_of_queries_and_keys_keep_what_they_read() -> None:
    path = RECIPES / "sft-qwen3-0.6b-1n2g-fsdp2-lora.yaml"
    found = estimate(path, "checkpointing.enabled=false", *rows(1, 2048), fast=True)
    # Both sums, both norms' results; queries and keys before and after, values, context; gate, up, product.
    token = 2 * (4 * 1024 + 2 * (2048 + 1024) + 1024 + 2048 + 3 * 3072) + 4 * 16
    assert found.activations == 28 * 2048 * token


def test_selective_checkpointing_keeps_products_on_the_plain_path() -> None:
    keys = "policy.dtensor_cfg.activation_checkpointing=selective"
    found = estimate(EIGHT, *LORA, *rows(1, 4096), keys)
    # The layer's input, what o and down give; queries, keys, values, context; what gate and up give.
    token = 2 * (3 * 4096 + (4096 + 2 * 1024 + 4096) + 2 * 14336) + 4 * 32
    assert found.activations == 32 * 4096 * token
    assert found.activations < 0.6 * estimate(EIGHT, *LORA, *rows(1, 4096)).activations
    # Of three layers nothing is kept but the input.
    anew = estimate(EIGHT, *LORA, *rows(1, 4096), keys, LAYERS)
    assert anew.activations == 4096 * (29 * token + 3 * 2 * 4096)


def test_megatron_keeps_gradients_and_shards_its_optimizer() -> None:
    params = 1_235_814_400
    two = [*MEGATRON, *rows(1, 2048, gpus=2)]
    found = estimate(BILLION, *two)
    assert (found.weights, found.gradients, found.optimizer) == (2 * params, 4 * params, 6 * params)
    fast = estimate(BILLION, *two, fast=True)
    assert (fast.gradients, fast.optimizer) == (2 * params, 5 * params)
    key = "policy.megatron_cfg.optimizer.use_distributed_optimizer=false"
    assert estimate(BILLION, *two, key).optimizer == 12 * params


def test_routed_experts_are_the_weights_and_a_token_keeps_those_it_meets() -> None:
    path = RECIPES / "sft-nanov3-30ba3b-2n8g-fsdp2-lora.yaml"
    found = estimate(path, "policy.dtensor_cfg.expert_parallel_size=1", replicas=16)
    assert found.weights / 2 == pytest.approx(31.6e9, rel=0.01)
    mamba = 2688 + (2688 + 10_304) + 6144 + (4096 + 2688) + 2 * 4096
    experts = 2 * 2688 + 6 * 2 * (2688 + 1856) + 2 * (2688 + 3712)
    attention = 2 * 2688 + 2688 + 2 * 4096 + 2 * 256 + 4 * 32 / 2
    mamba += 2688
    token = 2 * (23 * mamba + 23 * experts + 6 * attention)
    assert found.activations == pytest.approx(2048 * token, rel=0.01)


def test_the_fast_path_of_a_hybrid_model_needs_what_was_measured() -> None:
    """The whole model on one H200, as docs/performance.md notes it; its capture included."""
    found = estimate(RECIPES / "sft-nanov3-30ba3b-1n1g-fsdp2-lora.yaml", *rows(8, 2048), fast=True)
    # Projection and its input, convolution, the scan's input and output, out's input; and the residual.
    mamba = 10_304 + 2688 + 6144 + 3 * 4096 + 2688 + 64 * 4 / 2
    experts = 2688 + 6 * 1856 + 2688 + 2 * 3712 + 2688
    attention = 2 * 2688 + 2 * 4096 + 2 * 256 + 4 * 32 / 2
    assert found.activations == pytest.approx(
        2 * 16_384 * (23 * mamba + 23 * experts + 6 * attention), rel=0.01
    )
    assert found.total / GIB == pytest.approx(115.0, rel=0.06)
    assert found.fits(int(139.8 * GIB))


def test_a_small_model_in_float32_has_no_masters() -> None:
    found = estimate(TINY, "policy.precision=float32")
    assert found.weights == 4 * 115_008 / 2
    assert found.optimizer == 8 * 115_008 / 2


def test_the_text_names_the_parts() -> None:
    found = MemoryEstimate(2**30, 0, 2**29, 0, 0, 2**31, 0, 2**30)
    assert str(found) == "3.5 GiB (weights 1.0, adapters 0.5, activations 2.0, fresh 1.0)"
    tiny = MemoryEstimate(2**20, 0, 0, 0, 0, 0, 0, 2**19)
    assert str(tiny) == "1.5 MiB (weights 1.0, fresh 0.5)"
    assert found.fits(int(3.5 * 2**30 / 0.9) + 1)
    assert not found.fits(int(3.5 * 2**30 / 0.9) - 1)


def test_ranks_of_the_fast_path_share_the_update() -> None:
    params, ends = 1_235_814_400, 128_256 * 2048
    found = estimate(BILLION, *rows(1, 2048, gpus=4), replicas=4, fast=True)
    assert (found.weights, found.optimizer, found.gradients) == (2 * params, 2.5 * params, params)
    assert found.fresh == (2 + 4) * ends  # the largest bucket


def test_the_fast_path_and_megatron_split_the_vocabulary() -> None:
    sizes = ["policy.dtensor_cfg.tensor_parallel_size=2", "cluster.gpus_per_node=2"]
    plain, fast = (estimate(BILLION, *rows(1, 2048)[1:], *sizes, fast=fast) for fast in (False, True))
    norms, ends = 33 * 2048, 128_256 * 2048
    assert fast.weights == 2 * ((1_235_814_400 - norms) / 2 + norms)
    assert plain.weights == 4 * ((1_235_814_400 - norms - ends) / 2 + norms + ends)


def test_split_experts_are_sharded_over_those_that_have_the_same() -> None:
    path = RECIPES / "sft-nanov3-30ba3b-2n8g-fsdp2-lora.yaml"
    split = "policy.dtensor_cfg.expert_parallel_size=8"
    experts, total = 23 * 128 * 2 * 2688 * 1856, 31_577_937_344
    assert estimate(path, split).weights == pytest.approx(2 * total / 16)
    assert estimate(path, split, replicas=16).weights == 2 * (total - experts + experts // 8)


PAIR = RECIPES / "sft-nanov3-30ba3b-1n2g-fsdp2.yaml"
EXPERTS, ENDS, ALL = 23 * 128 * 2 * 2688 * 1856, 2 * 131_072 * 2688, 31_577_937_344
H200 = int(139.8 * GIB)


def test_split_experts_on_the_fast_path_are_each_ranks_own() -> None:
    """Each of two has half of them, with remainders and gradients; of the rest all, updated by halves."""
    found, others = estimate(PAIR, replicas=2, fast=True), ALL - EXPERTS
    assert found.weights == 2 * (others + EXPERTS // 2)
    assert found.optimizer == 2 * (others // 2 + EXPERTS // 2)
    assert found.gradients == 4 * others // 2
    # Experts' gradients in bfloat16; embedding or head as gradient and in float32, on their way.
    assert found.fresh == 2 * EXPERTS // 2 + (2 + 4) * ENDS
    assert found.fits(H200)
    adam = estimate(PAIR, "policy.optimizer.name=torch.optim.AdamW", replicas=2, fast=True)
    assert adam.optimizer == (2 + 8) * (others // 2 + EXPERTS // 2)
    assert not adam.fits(H200)
    assert not estimate(PAIR, "policy.dtensor_cfg.expert_parallel_size=1", replicas=2, fast=True).fits(H200)


def test_pairs_of_four_ranks_share_the_update_of_their_experts() -> None:
    four = ["cluster.gpus_per_node=4", "policy.train_global_batch_size=4"]
    found, others = estimate(PAIR, *four, replicas=4, fast=True), ALL - EXPERTS
    assert found.weights == 2 * (others + EXPERTS // 2)
    assert found.optimizer == 2 * (others // 4 + EXPERTS // 4)
    assert found.gradients == 4 * (others // 4 + EXPERTS // 4)
    # Each of two micro batches is summed over ranks first, and then added to the other.
    two = estimate(PAIR, *four[:1], "policy.train_global_batch_size=8", replicas=4, fast=True)
    assert two.gradients == 2 * found.gradients


def test_a_rank_keeps_what_its_experts_make_of_the_tokens_of_all() -> None:
    """Their input and hidden states, and nothing else, of twice as many tokens; and half of the frames."""
    path = RECIPES / "sft-nanov3-30ba3b-1n2g-fsdp2-lora.yaml"
    whole, split = (
        estimate(path, f"policy.dtensor_cfg.expert_parallel_size={size}", replicas=2, fast=True)
        for size in (1, 2)
    )
    assert split.activations - whole.activations == 2 * 2048 * 23 * (2688 + 6 * 1856)
    factors, frames = 8 * (2688 + 1856), 8 * (2688 + 1856 + 8)
    # Factors and their gradients in bfloat16, master and its gradient in float32; SGD has no moments.
    assert whole.adapters - split.adapters == 23 * 2 * 64 * (12 * factors + 2 * frames)
