# SPDX-License-Identifier: Apache-2.0
"""Adapters of stacks of experts in files: PEFT's form both ways, our checkpoints', and added into weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_suite.config.errors import ConfigError
from lora_suite.train.lora.adapter_files import read_adapter
from lora_suite.train.lora.merge import merge_adapter
from lora_suite.train.lora.peft_format import factors_of, matching_factors, write_peft_adapter
from tests.train.dtensor.ranks import TINY_HYBRID
from tests.train.lora.adapters import spec

KIND = spec(rank=4, alpha=6.0)
EXPERTS = "model.layers.1.mixer.experts"
SIZES: dict[str, tuple[int, ...]] = {
    "model.layers.2.mixer.q_proj": (64, 64),
    f"{EXPERTS}.up_proj": (64, 48, 8),
    f"{EXPERTS}.down_proj": (48, 64, 8),
    "model.layers.4.mixer.experts.down_proj": (48, 64, 8),  # alone in its module
}
IDS = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(1))


def factors() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return {
        name: (
            torch.randn(*experts, 4, inputs, generator=generator) * 0.1,
            torch.randn(*experts, outputs, 4, generator=generator) * 0.1,
        )
        for name, (inputs, outputs, *experts) in SIZES.items()
    }


def hybrid() -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(2)
    config = AutoConfig.for_model(**json.loads(TINY_HYBRID.read_text()))
    return AutoModelForCausalLM.from_config(config).eval()  # type: ignore[no-untyped-call]


@torch.no_grad()
def expected_logits() -> torch.Tensor:
    model = hybrid()
    weights = dict(model.named_parameters())
    for name, (a, b) in factors().items():
        weights[name if name in weights else f"{name}.weight"].add_(b @ a * (6.0 / 4))
    logits: torch.Tensor = model(IDS).logits
    return logits


def test_peft_loads_ours_and_gives_the_same_logits(tmp_path: Path) -> None:
    from peft import PeftModel

    write_peft_adapter(tmp_path, factors(), KIND, "some/model")
    with torch.no_grad():
        loaded = PeftModel.from_pretrained(hybrid(), tmp_path)(IDS).logits
        assert not torch.allclose(loaded, hybrid()(IDS).logits, atol=1e-2)
    torch.testing.assert_close(loaded, expected_logits(), rtol=1e-4, atol=1e-4)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    write_peft_adapter(tmp_path, factors(), KIND, None)
    found = matching_factors(read_adapter(tmp_path), SIZES, KIND)
    assert found.keys() == SIZES.keys()
    for name, pair in factors().items():
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found[name], pair, strict=True))
    with pytest.raises(ConfigError, match=r"down_proj has A \[8, 4, 48\]"):
        matching_factors(read_adapter(tmp_path), SIZES | {f"{EXPERTS}.down_proj": (48, 64, 4)}, KIND)


def test_an_adapter_that_all_experts_share_has_no_form_in_peft(tmp_path: Path) -> None:
    shared = {f"{EXPERTS}.up_proj": (torch.ones(4, 64), torch.ones(48, 4))}
    with pytest.raises(ConfigError, match="all experts of a stack share"):
        write_peft_adapter(tmp_path, shared, KIND, None)


@torch.no_grad()
def test_stacks_are_added_into_the_weights(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    hybrid().save_pretrained(tmp_path / "base")
    write_peft_adapter(tmp_path / "adapter", factors(), KIND, None)
    assert merge_adapter(read_adapter(tmp_path / "adapter"), str(tmp_path / "base"), tmp_path / "merged") == 4
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(merged(IDS).logits, expected_logits(), rtol=1e-4, atol=1e-4)


def test_a_checkpoint_of_split_experts_is_read_whole(tmp_path: Path) -> None:
    a, b = factors()[f"{EXPERTS}.up_proj"]
    key = f"{EXPERTS}.up_proj"
    for rank in range(2):
        parts = {f"{key}.a": a.chunk(2)[rank].flatten(), f"{key}.b": b.chunk(2)[rank].flatten()}
        backend = {"factors": parts, "sharded": [], "experts": dict.fromkeys(parts, 4)}
        torch.save({"backend": backend}, tmp_path / f"rank_{rank}.pt")
    lora = {"dim": 4, "alpha": 6.0, "dropout": 0.0}
    (tmp_path / "meta.json").write_text(
        json.dumps({"layout": {"dp": 2, "tp": 1, "pp": 1, "ep": 2}, "lora": lora})
    )
    (found,) = factors_of(read_adapter(tmp_path)).values()
    assert torch.equal(found[0], a)
    assert torch.equal(found[1], b)
