# SPDX-License-Identifier: Apache-2.0
"""What the initialisations mean, in figures: frameworks disagree on the words."""

from __future__ import annotations

import math

import pytest
import torch

from lora_suite.train.lora.spec import LoraSpec, initialise
from tests.train.conftest import LORA, small_recipe


def draw(method: str, rows: int = 8, columns: int = 64, seed: int = 0) -> torch.Tensor:
    factor = torch.empty(rows, columns)
    initialise(factor, method, torch.Generator().manual_seed(seed))
    return factor


def many(method: str) -> torch.Tensor:
    """200 factors of rank 8 beside a linear of 64 inputs: 102,400 values."""
    return torch.stack([draw(method, seed=seed) for seed in range(200)])


def test_xavier_is_glorots_normal_not_a_unit_interval() -> None:
    # https://github.com/NVIDIA-NeMo/Automodel/pull/896: U(0, 1) has mean 0.5 and std 0.289.
    values = many("xavier")
    assert float(values.mean()) == pytest.approx(0.0, abs=0.003)
    assert float(values.std()) == pytest.approx(math.sqrt(2 / 72), rel=0.02)
    assert math.sqrt(2 / 72) == pytest.approx(0.1667, abs=5e-5)
    # Normal, not uniform: the kurtosis is 3, not 1.8.
    assert float((values**4).mean() / (values**2).mean() ** 2) == pytest.approx(3.0, abs=0.15)


@pytest.mark.parametrize("method", ["kaiming", "uniform"])
def test_kaiming_is_torchs_default_for_a_linear(method: str) -> None:
    values = many(method)
    assert float(values.abs().max()) <= 0.125
    assert float(values.std()) == pytest.approx(0.0722, rel=0.02)
    torch.manual_seed(5)
    reference = torch.nn.init.kaiming_uniform_(torch.empty(2000, 64), a=math.sqrt(5))
    assert float(values.std()) == pytest.approx(float(reference.std()), rel=0.02)


def test_normal_and_zero() -> None:
    assert float(many("normal").std()) == pytest.approx(0.02, rel=0.02)
    assert float(many("zero").abs().max()) == 0.0


def test_an_unknown_name_is_refused_not_replaced() -> None:
    with pytest.raises(ValueError, match="unknown initialisation 'orthogonal'"):
        draw("orthogonal")


def test_the_dtensor_block_starts_b_at_zero_and_the_megatron_block_chooses() -> None:
    recipe = small_recipe(LORA, "policy.dtensor_cfg.lora_cfg.alpha=24", "policy.dtensor_cfg.lora_cfg.dim=6")
    spec = LoraSpec.from_config(recipe.policy.lora, seed=9)
    assert (spec.rank, spec.scale, spec.b_init, spec.dtype, spec.seed) == (6, 4.0, "zero", None, 9)
    megatron = small_recipe(
        "policy.dtensor_cfg.enabled=false",
        "policy.megatron_cfg.enabled=true",
        "policy.megatron_cfg.lora_cfg.enabled=true",
        "policy.megatron_cfg.lora_cfg.lora_B_init_method=normal",
        "policy.megatron_cfg.lora_cfg.lora_dtype=float32",
    )
    spec = LoraSpec.from_config(megatron.policy.lora, seed=9)
    assert (spec.b_init, spec.dtype) == ("normal", torch.float32)
