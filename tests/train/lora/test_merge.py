# SPDX-License-Identifier: Apache-2.0
"""Merged weights: the logits of the adapter beside the base, in every dtype; a tied head stays tied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lora_suite.config.errors import ConfigError
from lora_suite.train.lora.adapter_files import read_adapter
from lora_suite.train.lora.merge import merge_adapter
from lora_suite.train.lora.peft_format import write_peft_adapter
from tests.train.lora.adapters import spec

Q, DOWN, HEAD = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "lm_head"
SIZES = {Q: (32, 32), DOWN: (48, 32)}
SCALE = 6.0 / 4
IDS = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(2))


def write_base(folder: Path, dtype: torch.dtype = torch.float32, tied: bool = False) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        vocab_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)  # type: ignore[arg-type]
    return folder


def load(folder: Path, dtype: Any = "auto") -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    result: torch.Tensor = model(IDS).logits
    return result


def write_adapter(folder: Path, names: tuple[str, ...] = (Q, DOWN)) -> Path:
    generator = torch.Generator().manual_seed(1)
    sizes = SIZES | {HEAD: (32, 64)}
    factors = {
        name: (
            0.3 * torch.randn(4, sizes[name][0], generator=generator),
            0.3 * torch.randn(sizes[name][1], 4, generator=generator),
        )
        for name in names
    }
    write_peft_adapter(folder, factors, spec(rank=4, alpha=6.0), None)
    return folder


def unmerged(base: Path, adapter: Path, dtype: torch.dtype) -> torch.Tensor:
    """Logits of PEFT's own layers, in the base's dtype."""
    from peft import PeftModel

    return logits(PeftModel.from_pretrained(load(base, dtype), str(adapter), autocast_adapter_dtype=False))


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_merged_is_unmerged(tmp_path: Path, dtype: torch.dtype, limit: float) -> None:
    base, adapter = write_base(tmp_path / "base", dtype), write_adapter(tmp_path / "adapter")
    assert merge_adapter(read_adapter(adapter), str(base), tmp_path / "merged") == 2
    merged = load(tmp_path / "merged")
    assert merged.dtype == dtype
    expected = unmerged(base, adapter, dtype)
    torch.testing.assert_close(logits(merged), expected, rtol=limit, atol=limit)
    assert not torch.allclose(expected, logits(load(base)), atol=1e-2)


def test_bfloat16_weights_are_rounded_once_and_cost_no_more_than_the_dtype_does(tmp_path: Path) -> None:
    base, adapter = write_base(tmp_path / "base", torch.bfloat16), write_adapter(tmp_path / "adapter")
    merge_adapter(read_adapter(adapter), str(base), tmp_path / "merged")
    before, after = (load_file(tmp_path / each / "model.safetensors") for each in ("base", "merged"))
    factors = load_file(adapter / "adapter_model.safetensors")
    for name, weight in before.items():
        module = name.removesuffix(".weight")
        exact = weight.double()
        if module in SIZES:
            a, b = (factors[f"base_model.model.{module}.lora_{each}.weight"].double() for each in "AB")
            exact = exact + SCALE * b @ a
        # Half a unit in the last of bfloat16's 8 places, and the last bit of the float32 sum.
        torch.testing.assert_close(after[name].double(), exact, rtol=2**-8 * 1.001, atol=1e-6)
        assert torch.equal(after[name], weight) == (module not in SIZES)
    exact_logits = unmerged(base, adapter, torch.float64)

    def error(found: torch.Tensor) -> float:
        return float((found.double() - exact_logits).norm() / exact_logits.norm())

    merged_error, unmerged_error = (
        error(logits(load(tmp_path / "merged"))),
        error(unmerged(base, adapter, torch.bfloat16)),
    )
    assert 0 < merged_error < 2 * unmerged_error


def test_a_tied_model_stays_tied_and_its_embedding_unchanged(tmp_path: Path) -> None:
    base, adapter = write_base(tmp_path / "base", tied=True), write_adapter(tmp_path / "adapter")
    merge_adapter(read_adapter(adapter), str(base), tmp_path / "merged")
    merged, before = load(tmp_path / "merged"), load(base)
    assert merged.config.tie_word_embeddings
    assert merged.lm_head.weight is merged.model.embed_tokens.weight
    assert torch.equal(merged.model.embed_tokens.weight, before.model.embed_tokens.weight)
    torch.testing.assert_close(logits(merged), unmerged(base, adapter, torch.float32), rtol=1e-5, atol=1e-5)


def test_an_adapter_of_a_tied_head_is_refused(tmp_path: Path) -> None:
    base, adapter = write_base(tmp_path / "base", tied=True), write_adapter(tmp_path / "adapter", (Q, HEAD))
    with pytest.raises(ConfigError, match=r"adapter for lm_head, which is the embedding"):
        merge_adapter(read_adapter(adapter), str(base), tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_an_untied_head_is_merged_like_any_linear(tmp_path: Path) -> None:
    base, adapter = write_base(tmp_path / "base"), write_adapter(tmp_path / "adapter", (Q, HEAD))
    merge_adapter(read_adapter(adapter), str(base), tmp_path / "merged")
    merged = load(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), unmerged(base, adapter, torch.float32), rtol=1e-5, atol=1e-5)
    assert torch.equal(merged.model.embed_tokens.weight, load(base).model.embed_tokens.weight)


def test_adapters_of_another_model_are_named(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    factors = {"model.layers.5.mlp.up_proj": (torch.ones(4, 32), torch.ones(48, 4))}
    write_peft_adapter(tmp_path / "other", factors, spec(rank=4), None)
    with pytest.raises(ConfigError, match=r"has adapters for model\.layers\.5\.mlp\.up_proj, which"):
        merge_adapter(read_adapter(tmp_path / "other"), str(base), tmp_path / "merged")
    write_peft_adapter(tmp_path / "size", {Q: (torch.ones(4, 30), torch.ones(32, 4))}, spec(rank=4), None)
    with pytest.raises(ConfigError, match=r"q_proj: B·A is \[32, 30\]"):
        merge_adapter(read_adapter(tmp_path / "size"), str(base), tmp_path / "merged")
    with pytest.raises(ConfigError, match="no pretrained model"):
        merge_adapter(read_adapter(tmp_path / "size"), str(tmp_path / "absent"), tmp_path / "merged")
