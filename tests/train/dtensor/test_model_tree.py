# SPDX-License-Identifier: Apache-2.0
"""What the backend makes of a model: the plain tree without LoRA, adapters in it with LoRA, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lora_suite.blueprint.targets import AdapterSite
from lora_suite.config.errors import ConfigError
from lora_suite.train.backends.dtensor.adapters import attach_adapters
from lora_suite.train.backends.dtensor.linear import LoraLinear
from lora_suite.train.backends.dtensor.parallel import check_family
from lora_suite.train.lora.spec import LoraSpec
from lora_suite.train.models.causal_lm import build_on_meta
from lora_suite.train.topology import Axis, Topology
from tests.train.dtensor.ranks import (
    LORA,
    Setting,
    plain_model,
    rows,
    run_ranks,
    share,
    supervised,
    wake_adapters,
)

CPU = torch.device("cpu")
ALONE = Topology(0, 1, CPU, Axis(0, 1), Axis(0, 1), Axis(0, 1))
SPEC = LoraSpec(8, 32, 0.0, "post", "xavier", "zero", None, seed=1)


def tree_on_this_rank(setting):
    model = setting.build().model
    modules = [(name, type(module).__name__) for name, module in model.named_modules()]
    return modules, [name for name, _ in model.named_parameters()], model(rows().input_ids).logits.detach()


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_without_lora_the_tree_is_the_plain_models(tmp_path, world):
    setting = Setting(world=world)
    plain = plain_model(setting)
    expected = [(name, type(module).__name__) for name, module in plain.named_modules()]
    logits = plain(rows().input_ids).logits
    for modules, parameters, found in run_ranks(world, tmp_path / "ranks", tree_on_this_rank, setting):
        # FSDP2 gives a module that it shards a class of its own, FSDP before the old name.
        assert [(name, kind.removeprefix("FSDP")) for name, kind in modules] == expected
        assert any(kind.startswith("FSDP") for _, kind in modules) == (world > 1)
        assert parameters == [name for name, _ in plain.named_parameters()]
        torch.testing.assert_close(found, logits, rtol=1e-5, atol=1e-5)


def lora_tree_on_this_rank(setting):
    return list(dict(setting.build().model.named_parameters()))


@pytest.mark.slow
def test_lora_keeps_the_names_of_the_base(tmp_path):
    setting = Setting((LORA, "policy.dtensor_cfg.lora_cfg.target_modules=[q_proj]"))
    (names,) = run_ranks(1, tmp_path / "ranks", lora_tree_on_this_rank, setting)
    adapters = {
        f"model.layers.{layer}.self_attn.q_proj.adapter.{factor}" for layer in (0, 1) for factor in "ab"
    }
    plain = {name for name, _ in plain_model(setting).named_parameters()}
    assert set(names) == plain | adapters


def off_on_this_rank(setting):
    """Losses of evaluation: with adapters awake, off, and on again; and whether dropout was left on."""
    backend = setting.build()
    wake_adapters(backend)
    batches = share(rows(), backend.topology.dp.index, backend.topology.dp.size, 2)
    awake = backend.evaluate(batches).item()
    with backend.adapters_off():
        off = backend.evaluate(batches).item()
    return awake, off, backend.evaluate(batches).item(), backend.model.training


@pytest.mark.slow
def test_adapters_off_is_the_plain_model_and_evaluation_has_no_dropout(tmp_path):
    setting = Setting((LORA, "policy.dtensor_cfg.lora_cfg.dropout=0.5"), precision="float64")
    ((awake, off, again, training),) = run_ranks(1, tmp_path / "ranks", off_on_this_rank, setting)
    logits = plain_model(setting)(rows().input_ids).logits.flatten(0, 1)
    plain = nn.functional.cross_entropy(logits, rows().labels.flatten(), reduction="sum")
    assert off == pytest.approx(plain.item(), rel=1e-12)
    assert awake == again
    assert abs(awake - off) > 1e-3 * off
    assert training


def dropout_on_this_rank(settings):
    """Loss and gradient of two steps' worth of micro batches, for each setting."""
    results = []
    for setting in settings:
        backend = setting.build()
        wake_adapters(backend)
        loss = backend.forward_backward(share(rows(), 0, 1, 2), supervised(rows()))
        results.append((loss.item(), backend.bank.gradient.clone()))
    return results


@pytest.mark.slow
@pytest.mark.parametrize("position", ["pre", "post"])
def test_recomputation_draws_the_same_dropout(tmp_path, position):
    dropout = (
        "policy.dtensor_cfg.lora_cfg.dropout=0.5",
        f"policy.dtensor_cfg.lora_cfg.dropout_position={position}",
    )
    again = "policy.dtensor_cfg.activation_checkpointing=true"
    settings = [Setting((LORA, *extra), precision="float64") for extra in ((), dropout, (*dropout, again))]
    ((none, once, twice),) = run_ranks(1, tmp_path / "ranks", dropout_on_this_rank, settings)
    assert once[0] != none[0]
    assert twice[0] == once[0]
    torch.testing.assert_close(twice[1], once[1], rtol=1e-12, atol=1e-14)


def tiny_on_meta():
    from transformers import LlamaConfig

    config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=1, vocab_size=32)
    return build_on_meta(config, torch.float32)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.qkv_proj", "model.norm", "model.layers.0.mlp"])
def test_a_site_that_is_no_linear_is_named(name):
    with pytest.raises(ConfigError, match=rf"{name} is not a linear"):
        attach_adapters(tiny_on_meta(), [AdapterSite(name, 64, 64, 0, "q")], SPEC, ALONE, torch.float32)


def test_a_site_of_another_size_is_named():
    site = AdapterSite("model.layers.0.mlp.up_proj", 64, 64, 0, "up")
    with pytest.raises(ConfigError, match=r"up_proj is not a linear of 64 by 64"):
        attach_adapters(tiny_on_meta(), [site], SPEC, ALONE, torch.float32)


def test_lora_needs_to_know_the_architecture():
    with pytest.raises(ConfigError, match=r"config\.json"):
        attach_adapters(tiny_on_meta(), [], SPEC, ALONE, torch.float32)


def test_an_adapter_may_multiply_in_another_dtype():
    from dataclasses import replace

    linear = nn.Linear(64, 32, dtype=torch.bfloat16)
    model = nn.ModuleDict({"up_proj": linear})
    site = AdapterSite("up_proj", 64, 32, 0, "up")
    bank = attach_adapters(model, [site], replace(SPEC, dtype=torch.float32), ALONE, torch.bfloat16)
    assert isinstance(linear, LoraLinear)
    x = torch.randn(3, 64, dtype=torch.bfloat16, requires_grad=True)
    y = linear(x)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype, bank.gradient.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert bool(bank.gradient.any())


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt2"])
def test_a_family_that_is_not_known_is_refused(family):
    with pytest.raises(ConfigError, match=rf"policy\.model_name.*llama, qwen2, qwen3.*{family}"):
        check_family(family)
