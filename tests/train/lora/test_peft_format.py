# SPDX-License-Identifier: Apache-2.0
"""Adapter files against PEFT itself: ours load there, theirs load here, and what is odd is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_suite.config.errors import ConfigError
from lora_suite.train.lora.adapter_files import CONFIG, SAFETENSORS, read_adapter
from lora_suite.train.lora.peft_format import (
    PREFIX,
    factors_of,
    matching_factors,
    scale_of,
    write_peft_adapter,
)
from tests.train.lora.adapters import spec

Q, DOWN, HEAD = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "lm_head"
SIZES = {Q: (32, 32), DOWN: (48, 32), HEAD: (32, 64)}
KIND = spec(rank=4, alpha=6.0)


def tiny_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        vocab_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return LlamaForCausalLM(config).eval()


def factors(dtype: torch.dtype = torch.float32) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return (0.3 * torch.randn(shape, generator=generator)).to(dtype)

    return {name: (drawn(4, inputs), drawn(outputs, 4)) for name, (inputs, outputs) in SIZES.items()}


def ids() -> torch.Tensor:
    return torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(2))


def with_added_weights(scale: float) -> torch.Tensor:
    """Logits of the plain model with scale · B·A added to its weights by hand."""
    model = tiny_llama()
    with torch.no_grad():
        for name, (a, b) in factors().items():
            model.get_submodule(name).weight += scale * b @ a
        logits: torch.Tensor = model(ids()).logits
    return logits


def write(folder: Path, **config: object) -> Path:
    """An adapter folder with keys of its configuration changed; None takes one away."""
    write_peft_adapter(folder, factors(), KIND, "some/model")
    keys = json.loads((folder / CONFIG).read_text()) | config
    (folder / CONFIG).write_text(json.dumps({key: value for key, value in keys.items() if value is not None}))
    return folder


def test_peft_loads_ours_and_gives_the_same_logits(tmp_path: Path) -> None:
    from peft import PeftModel

    write_peft_adapter(tmp_path / "adapter", factors(), KIND, "some/model")
    with torch.no_grad():
        loaded = PeftModel.from_pretrained(tiny_llama(), tmp_path / "adapter")(ids()).logits
    torch.testing.assert_close(loaded, with_added_weights(6.0 / 4), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(loaded, tiny_llama()(ids()).logits, atol=1e-2)


def test_peft_reads_the_configuration_as_meant(tmp_path: Path) -> None:
    from peft import LoraConfig, PeftConfig

    write_peft_adapter(tmp_path, factors(), spec(rank=4, alpha=6.5, dropout=0.25), "some/model")
    config = PeftConfig.from_pretrained(str(tmp_path))
    assert isinstance(config, LoraConfig)
    assert (config.r, config.lora_alpha, config.lora_dropout) == (4, 6.5, 0.25)
    assert set(config.target_modules or ()) == set(SIZES)
    assert (config.bias, config.task_type, config.base_model_name_or_path) == (
        "none",
        "CAUSAL_LM",
        "some/model",
    )


@pytest.mark.parametrize("rooted", [False, True])
def test_theirs_load_here(tmp_path: Path, rooted: bool) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_alpha=6, use_rslora=rooted, target_modules=["q_proj", "down_proj"])
    theirs = get_peft_model(tiny_llama(), config)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    theirs.save_pretrained(str(tmp_path))
    folder = read_adapter(tmp_path)
    found = factors_of(folder)
    assert set(found) == {
        f"model.layers.{layer}.{leaf}" for layer in (0, 1) for leaf in ("self_attn.q_proj", "mlp.down_proj")
    }
    scale = scale_of(folder, 4)
    assert scale == (3.0 if rooted else 1.5)
    plain = tiny_llama()
    with torch.no_grad():
        for name, (a, b) in found.items():
            plain.get_submodule(name).weight += scale * b @ a
        torch.testing.assert_close(plain(ids()).logits, theirs(ids()).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_written_is_read_bit_by_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    write_peft_adapter(tmp_path, factors(dtype), KIND, None)
    found = matching_factors(read_adapter(tmp_path), SIZES, KIND)
    assert found.keys() == factors().keys()
    for name, pair in factors(dtype).items():
        for mine, theirs in zip(found[name], pair, strict=True):
            assert mine.dtype == dtype
            assert torch.equal(mine, theirs)


def test_views_of_one_buffer_are_written_apart(tmp_path: Path) -> None:
    flat = torch.arange(2.0 * 4 * 32)
    write_peft_adapter(tmp_path, {Q: (flat[:128].view(4, 32), flat[128:].view(32, 4))}, KIND, None)
    a, b = factors_of(read_adapter(tmp_path))[Q]
    assert torch.equal(torch.cat([a.flatten(), b.flatten()]), flat)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{PREFIX}{Q}.lora_B.weight": None}, rf"{Q} has no B"),
        ({f"{PREFIX}{Q}.lora_A.weight": None}, rf"{Q} has no A"),
        ({f"{PREFIX}model.norm.weight": torch.ones(32)}, r"model\.norm\.weight is no factor"),
        ({f"{PREFIX}{Q}.lora_A.weight": torch.ones(5, 32)}, rf"{Q}: A \[5, 32\] and B \[32, 4\]"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    tensors = load_file(write(tmp_path / "it") / SAFETENSORS) | change
    save_file({k: v for k, v in tensors.items() if v is not None}, tmp_path / "it" / SAFETENSORS)
    with pytest.raises(ConfigError, match=rf"{tmp_path / 'it'}: .*{message}"):
        factors_of(read_adapter(tmp_path / "it"))


@pytest.mark.parametrize(
    ("key", "value"),
    [("use_dora", True), ("bias", "all"), ("modules_to_save", ["lm_head"]), ("alpha_pattern", {"q_proj": 1})],
)
def test_what_is_more_than_factors_is_refused(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        factors_of(read_adapter(write(tmp_path / "it", **{key: value})))


def test_adapters_that_the_recipe_lacks_or_has_besides_are_named(tmp_path: Path) -> None:
    folder = read_adapter(write(tmp_path / "it"))
    fewer = {Q: SIZES[Q]}
    with pytest.raises(ConfigError, match=rf"has an adapter for {HEAD}, {DOWN}, which the recipe does not"):
        matching_factors(folder, fewer, KIND)
    with pytest.raises(ConfigError, match=r"it: has no adapter for model\.layers\.7\.x, which the recipe"):
        matching_factors(folder, SIZES | {"model.layers.7.x": (1, 1)}, KIND)


def test_another_rank_or_scale_is_refused(tmp_path: Path) -> None:
    folder = read_adapter(write(tmp_path / "it"))
    with pytest.raises(ConfigError, match=r"has A \[4, 32\] and B \[32, 4\], the recipe \[8, 32\]"):
        matching_factors(folder, SIZES, spec(rank=8))
    with pytest.raises(ConfigError, match=r"its scale is 1\.5, the recipe's 2"):
        matching_factors(folder, SIZES, spec(rank=4, alpha=8.0))
    with pytest.raises(ConfigError, match="lora_alpha"):
        matching_factors(read_adapter(write(tmp_path / "other", lora_alpha=None)), SIZES, KIND)


def test_factors_of_another_rank_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"{Q}: A \[4, 32\]"):
        write_peft_adapter(tmp_path, factors(), spec(rank=3), None)
    with pytest.raises(ValueError, match="nothing to write"):
        write_peft_adapter(tmp_path, {}, KIND, None)
