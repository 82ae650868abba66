# SPDX-License-Identifier: Apache-2.0
"""The floor's terms, worked out by hand for a GPU of round figures."""

from __future__ import annotations

from math import comb
from pathlib import Path

import pytest

from lora_suite.blueprint import preflight
from lora_suite.blueprint.floor import Floor, StepFloor
from lora_suite.blueprint.hardware import Gpu, find_gpu
from lora_suite.blueprint.layout import rank_layout
from lora_suite.config import load_recipe
from tests.config.helpers import MEGATRON, RECIPES

# 10¹² operations, 10⁹ bytes of memory, 10⁶ from a neighbour and 10⁵ over the network, each a second.
ROUND = Gpu(1e12, 1e9, 1e6, 1e5)
H200 = find_gpu("NVIDIA H200", "bfloat16")
BILLION, EIGHT = RECIPES / "sft-llama3.2-1b-1n1g-fsdp2.yaml", RECIPES / "sft-llama3.1-8b-1n8g-fsdp2tp1.yaml"
NANO, NANO_LORA = (RECIPES / f"sft-nanov3-30ba3b-2n8g-fsdp2{arm}.yaml" for arm in ("", "-lora"))
QUIET = ("policy.init=random", "sft.val_period=0", "sft.val_at_start=false", "sft.val_at_end=false")
LORA = ("policy.dtensor_cfg.lora_cfg.enabled=true", "policy.dtensor_cfg.lora_cfg.dim=8")
# Every rank has all experts, and none of them an adapter.
WHOLE_EXPERTS = ("policy.dtensor_cfg.expert_parallel_size=1", "policy.dtensor_cfg.lora_cfg.experts=off")
PARAMS_1B, PARAMS_8B, PARAMS_NANO = 1_235_814_400, 8_030_261_248, 31_577_937_344


def floor(path: Path, slots: int, *overrides: str, replicas: int = 1, gpu: Gpu = ROUND) -> Floor:
    """The floor of one step of a shipped recipe with overrides."""
    recipe = load_recipe(path, [*QUIET, *overrides]).recipe
    blueprint = preflight(recipe, path)
    return StepFloor(recipe, blueprint, rank_layout(recipe, replicas), gpu).of(slots)


def sized(rows: int, length: int, gpus: int = 1, micro: int = 1) -> list[str]:
    """Overrides for a global batch of so many rows, in micro batches of one, on GPUs of one node."""
    return [
        f"policy.train_global_batch_size={rows}",
        f"policy.train_micro_batch_size={micro}",
        f"policy.max_total_sequence_length={length}",
        f"cluster.gpus_per_node={gpus}",
    ]


def test_the_slowest_of_a_pass_counts_and_the_update_comes_on_top() -> None:
    assert Floor(3.0, 2.0, 1.0, 0.5).seconds == 3.5
    assert Floor(3.0, 2.0, 1.0, 0.5).bound_by == "arithmetic"
    assert Floor(1.0, 2.0, 4.0, 0.5).bound_by == "communication"
    assert Floor(1.0, 2.0, 1.0, 0.5).seconds == 2.5
    assert Floor(1.0, 2.0, 1.0, 9.0).bound_by == "update"


def test_full_sft_on_one_gpu() -> None:
    found = floor(BILLION, 2048, *sized(1, 2048))
    norms = (2 * 16 + 1) * 2048
    read_written = 3 * 2 * (PARAMS_1B - norms)  # the tied head is the embedding, which is read as the head
    kept = 2 * (2 * 2048 + 2048 + 5120 + 2048 + 3 * 8192) + 4 * 32
    assert found.memory == pytest.approx((read_written + 2 * 2048 * 16 * kept) / 1e9)
    assert found.update == pytest.approx(26 * PARAMS_1B / 1e9)
    assert found.communication == 0.0
    operations = 2048 * (6 * (PARAMS_1B - norms) + 6 * 16 * 2048 * 2048)
    assert found.arithmetic == pytest.approx(operations / 1e12)


def test_lora_reads_weights_twice_and_updates_adapters_alone() -> None:
    found = floor(BILLION, 2048, *LORA, *sized(1, 2048))
    norms = (2 * 16 + 1) * 2048
    kept = 2 * (2 * 2048 + 2048 + 5120 + 2048 + 3 * 8192) + 4 * 32
    assert found.memory == pytest.approx((2 * 2 * (PARAMS_1B - norms) + 2 * 2048 * 16 * kept) / 1e9)
    assert found.update == pytest.approx(26 * 5_636_096 / 1e9)


def test_each_micro_batch_reads_the_weights_again() -> None:
    one = floor(BILLION, 4 * 2048, *LORA, *sized(4, 2048, micro=4))
    four = floor(BILLION, 4 * 2048, *LORA, *sized(4, 2048))
    norms = (2 * 16 + 1) * 2048
    assert four.memory - one.memory == pytest.approx(3 * 2 * 2 * (PARAMS_1B - norms) / 1e9)
    assert (four.arithmetic, four.update) == (one.arithmetic, one.update)


def test_packed_rows_take_as_many_micro_batches_as_they_fill() -> None:
    packed = "policy.sequence_packing.enabled=true"
    found = floor(BILLION, 2 * 2048, *LORA, *sized(4, 2048), packed)
    assert found.memory == pytest.approx(floor(BILLION, 2 * 2048, *LORA, *sized(2, 2048)).memory)


def test_nothing_is_read_on_the_way_back_below_the_lowest_adapter() -> None:
    top = "policy.dtensor_cfg.lora_cfg.target_modules=['*.layers.15.*']"
    all_layers = floor(BILLION, 2048, *LORA, *sized(1, 2048))
    some = floor(BILLION, 2048, *LORA, *sized(1, 2048), top)
    layer = 2048 * (2048 + 2 * 512 + 2048 + 3 * 8192)
    less_kept = 2 * (2048 + 2048 + 8192)  # inputs of qkv, of gate and up, down's input
    assert all_layers.memory - some.memory == pytest.approx(
        15 * (2 * layer + 2 * 2048 * less_kept) / 1e9, rel=1e-6
    )


def test_sharded_full_sft_gathers_twice_and_reduces_once() -> None:
    found = floor(EIGHT, 16 * 4096, *sized(16, 4096, gpus=8))
    gathers = 2 * 2 * (2 * PARAMS_8B * 7 / 8)  # two micro batches, two directions
    reduces = 4 * PARAMS_8B * 7 / 8
    assert found.communication == pytest.approx((gathers + reduces) / 1e6)
    assert found.update == pytest.approx(26 * PARAMS_8B / 8 / 1e9)


def test_groups_of_replicas_gather_among_few_and_sum_what_they_share() -> None:
    found = floor(EIGHT, 8 * 4096, *sized(8, 4096, gpus=8), replicas=2)
    gathers, reduces = 2 * (2 * PARAMS_8B * 3 / 4), 4 * PARAMS_8B * 3 / 4
    sums = (4 + 2) * (PARAMS_8B / 4) / 2  # gradients to the other's half, and weights back
    assert found.communication == pytest.approx((gathers + reduces + sums) / 1e6)


def test_replicated_lora_sums_its_adapters_and_nothing_else() -> None:
    found = floor(EIGHT, 8 * 4096, *LORA, *sized(8, 4096, gpus=8), replicas=8)
    assert found.communication == pytest.approx(2 * 4 * 20_971_520 * 7 / 8 / 1e6)


def test_over_nodes_a_node_receives_through_all_its_adapters() -> None:
    sizes = [*sized(16, 4096, gpus=8), "cluster.num_nodes=2"]
    found = floor(EIGHT, 16 * 4096, *LORA, *sizes, replicas=16)
    summed = 4 * 20_971_520
    # Each node gets the other's half, an eighth an adapter: more than its links take.
    assert summed / 2 / 8 / 1e5 < summed * 15 / 16 / 1e6
    assert found.communication == pytest.approx(2 * summed * 15 / 16 / 1e6)
    alone = [*sized(2, 4096), "cluster.num_nodes=2"]
    assert floor(EIGHT, 2 * 4096, *LORA, *alone, replicas=2).communication == pytest.approx(
        2 * summed / 2 / 1e5
    )


def test_tensor_parallelism_sums_states_after_each_block() -> None:
    sizes = [*sized(1, 4096, gpus=2), "policy.dtensor_cfg.tensor_parallel_size=2"]
    found = floor(EIGHT, 4096, *LORA, *sizes)
    states = 2 * 4096 * 4096
    assert found.communication == pytest.approx(
        32 * 2 * 2 * states / 1e6
    )  # an all-reduce over two brings 1 ×
    assert found.arithmetic == pytest.approx(floor(EIGHT, 4096, *LORA, *sized(1, 4096)).arithmetic / 2)


def test_replicas_share_the_update_whether_the_recipe_lets_them_or_not() -> None:
    two = [*MEGATRON, *sized(2, 2048, gpus=2)]
    found = floor(BILLION, 2 * 2048, *two)
    assert found.update == pytest.approx(26 * PARAMS_1B / 2 / 1e9)
    whole = floor(BILLION, 2 * 2048, *two, "policy.megatron_cfg.optimizer.use_distributed_optimizer=false")
    assert whole.update == found.update
    assert found.communication == pytest.approx((4 + 2) * PARAMS_1B / 2 / 1e6)


def test_experts_that_no_token_meets_are_not_read() -> None:
    # 128 experts, 6 a token: one token touches 6, many all.
    one, many = (
        floor(
            NANO_LORA, 16 * length, *WHOLE_EXPERTS, f"policy.max_total_sequence_length={length}", replicas=16
        )
        for length in (1, 2048)
    )
    experts, embedding = 23 * 128 * 2 * 2688 * 1856, 131_072 * 2688  # of which a token is one row
    others = 31.58e9 - experts - embedding
    assert one.memory == pytest.approx(2 * 2 * (others + experts * 6 / 128) / 1e9, rel=0.01)
    assert many.memory > 2 * 2 * 31e9 / 1e9


def test_the_floors_that_were_found_by_other_means() -> None:
    """The sums of docs/performance.md, and of a mixture of experts that reads 63 GB of weights twice."""
    assert H200 is not None
    lora = floor(BILLION, 2048, *LORA, *sized(1, 2048), gpu=H200)
    full = floor(BILLION, 2048, *sized(1, 2048), gpu=H200)
    assert lora.seconds == pytest.approx(0.0111, rel=0.01)
    assert full.arithmetic == pytest.approx(0.0162, rel=0.01)
    assert full.seconds == pytest.approx(0.0162 + 26 * PARAMS_1B / 4.8e12, rel=0.01)
    nano = floor(NANO_LORA, 16 * 2048, *WHOLE_EXPERTS, gpu=H200, replicas=16)
    assert (nano.bound_by, nano.arithmetic) == ("memory", pytest.approx(0.026, rel=0.06))
    # Weights in bfloat16 twice, and 1.5 million elements of activations a token, written and read.
    weights, kept = 2 * 2 * (PARAMS_NANO - 131_072 * 2688), 2 * 2 * 2048 * 1.51e6
    assert nano.memory == pytest.approx((weights + kept) / 4.8e12, rel=0.01)
    sharded = floor(NANO, 16 * 2048, WHOLE_EXPERTS[0], gpu=H200)
    assert sharded.bound_by == "communication"
    # Over 16 ranks 63 GB a gather, twice, and 126 GB of float32 gradients, at 450 GB/s.
    assert sharded.communication == pytest.approx(4 * 63.1e9 * 15 / 16 / 450e9, rel=0.01)


def test_split_experts_are_reduced_among_those_that_have_the_same() -> None:
    keys = ["cluster.num_nodes=1", "policy.train_global_batch_size=8"]
    whole = floor(NANO, 8 * 2048, *keys, WHOLE_EXPERTS[0], replicas=8)
    split = floor(NANO, 8 * 2048, *keys, "policy.dtensor_cfg.expert_parallel_size=2", replicas=8)
    experts = 23 * 128 * 2 * 2688 * 1856
    others = PARAMS_NANO - experts
    assert whole.communication == pytest.approx(6 * PARAMS_NANO * 7 / 8 / 1e6)
    # Both ranks have experts of a token, unless its 6 are all among one's 64 of 128.
    both = 1 - comb(64, 6) / comb(128, 6)
    travels = 4 * 2048 * 2688 * 2 * 23 * both
    assert split.communication == pytest.approx(
        (6 * others * 7 / 8 + 6 * experts / 2 * 3 / 4 + travels) / 1e6
    )
    assert split.update == pytest.approx(whole.update)


def test_adapters_of_single_experts_are_summed_where_these_are() -> None:
    keys = ["cluster.num_nodes=1", "policy.train_global_batch_size=8", "policy.dtensor_cfg.lora_cfg.dim=8"]
    split = "policy.dtensor_cfg.expert_parallel_size=2"
    experts_off, experts_on = (
        floor(NANO_LORA, 8 * 2048, *keys, split, f"policy.dtensor_cfg.lora_cfg.experts={which}", replicas=8)
        for which in ("off", "per_expert")
    )
    # A rank has half of 128 experts in 23 layers, each with two adapters, and sums them with three others.
    own = 23 * 64 * 2 * 8 * (2688 + 1856)
    assert experts_on.communication - experts_off.communication == pytest.approx(
        2 * 4 * own * 3 / 4 / 1e6, rel=1e-6
    )
    assert experts_on.update - experts_off.update == pytest.approx(26 * own / 1e9)
