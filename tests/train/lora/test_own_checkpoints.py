# SPDX-License-Identifier: Apache-2.0
"""Adapters out of checkpoints of any layout: ranks' parts put together are the whole factors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_suite.config.errors import ConfigError
from lora_suite.train.lora.adapter import Adapter, Placement
from lora_suite.train.lora.adapter_files import read_adapter
from lora_suite.train.lora.export import export_adapter
from lora_suite.train.lora.merge import merge_adapter
from lora_suite.train.lora.peft_format import factors_of
from lora_suite.train.topology import Axis
from tests.train.lora.adapters import bank_of, spec, topology
from tests.train.lora.test_bank import optimizer

LINEARS: dict[str, tuple[int, int, Placement]] = {
    "self_attn.q_proj": (6, 8, "column"),
    "self_attn.o_proj": (8, 6, "row"),
}
KIND = spec(rank=3, alpha=6.0, dropout=0.25)


def bank_state(names: list[str], tp: Axis) -> dict[str, Any]:
    """What a rank saves whose stage has these linears."""
    adapters = []
    for name in names:
        inputs, outputs, placement = LINEARS[name.split(".", 3)[3]]
        adapters.append(Adapter(name, inputs, outputs, KIND, placement if tp.size > 1 else "none", tp))
    bank = bank_of(adapters, topology(tp=tp))
    bank.build_optimizer(optimizer())
    return {"backend": bank.state_dict()}


def write(folder: Path, dp: int, tp: int, pp: int, **meta: object) -> Path:
    """A checkpoint of that layout; only the files of the first data parallel rank, one layer a stage."""
    folder.mkdir()
    for stage in range(pp):
        layers = range(2) if pp == 1 else [stage]
        names = [f"model.layers.{layer}.{linear}" for layer in layers for linear in LINEARS]
        for index in range(tp):
            state = bank_state(names, Axis(index, tp))
            torch.save(state, folder / f"rank_{stage * dp * tp + index}.pt")
    content = {
        "layout": {"dp": dp, "tp": tp, "pp": pp},
        "lora": {"dim": 3, "alpha": 6.0, "dropout": 0.25},
        "model": "some/model",
    }
    (folder / "meta.json").write_text(json.dumps(content | meta))
    return folder


@pytest.mark.parametrize(("dp", "tp", "pp"), [(2, 1, 1), (1, 2, 1), (2, 2, 2), (1, 1, 2)])
def test_any_layout_gives_the_factors_of_one_process(tmp_path: Path, dp: int, tp: int, pp: int) -> None:
    expected = factors_of(read_adapter(write(tmp_path / "one", 1, 1, 1)))
    assert len(expected) == 4
    found = factors_of(read_adapter(write(tmp_path / "many", dp, tp, pp)))
    assert found.keys() == expected.keys()
    for name, pair in expected.items():
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found[name], pair, strict=True))
        assert tuple(pair[0].shape) == (3, LINEARS[name.split(".", 3)[3]][0])


def test_an_export_says_what_the_checkpoint_knows(tmp_path: Path) -> None:
    assert export_adapter(read_adapter(write(tmp_path / "own", 1, 2, 1)), tmp_path / "peft", None) == 4
    folder = read_adapter(tmp_path / "peft")
    config = {key: folder.config[key] for key in ("r", "lora_alpha", "lora_dropout")}
    assert config == {"r": 3, "lora_alpha": 6, "lora_dropout": 0.25}
    assert folder.config["base_model_name_or_path"] == "some/model"
    assert export_adapter(folder, tmp_path / "again", "other/model") == 4
    assert read_adapter(tmp_path / "again").config["base_model_name_or_path"] == "other/model"


def write_fused(folder: Path, name: str, ranks: list[torch.Tensor], **meta: object) -> Path:
    """A checkpoint with one fused adapter: A of ones, and each tensor parallel rank's rows of B."""
    folder.mkdir()
    for rank, b in enumerate(ranks):
        factors = {f"{name}.a": torch.ones(3 * 8), f"{name}.b": b.flatten()}
        state = {"backend": {"factors": factors, "sharded": [f"{name}.b"] if len(ranks) > 1 else []}}
        torch.save(state, folder / f"rank_{rank}.pt")
    layout = {"dp": 1, "tp": len(ranks), "pp": 1}
    content = {"layout": layout, "lora": {"dim": 3, "alpha": 6.0, "dropout": 0.0}}
    (folder / "meta.json").write_text(json.dumps(content | meta))
    return folder


def numbered(*rows: int) -> torch.Tensor:
    """B of rank 3 whose rows hold one number each."""
    return torch.tensor(rows, dtype=torch.float32)[:, None].expand(-1, 3)


def rows_of(folder: Path) -> dict[str, list[int]]:
    """The numbers of B's rows, by the linear's last name."""
    factors = factors_of(read_adapter(folder))
    assert all(torch.equal(a, torch.ones(3, 8)) for a, _ in factors.values())
    return {name.rpartition(".")[2]: b[:, 0].int().tolist() for name, (_, b) in factors.items()}


BASE = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "vocab_size": 8,
    "max_position_embeddings": 8,
}


def test_fused_adapters_are_split_for_peft_by_the_base_s_heads(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(BASE))
    # Two groups of two queries, a key and a value, of two channels; gate and up of two ranks.
    qkv = [numbered(0, 1, 2, 3, 10, 11, 20, 21), numbered(4, 5, 6, 7, 12, 13, 22, 23)]
    for name, ranks, expected in (
        (
            "decoder.layers.0.self_attention.linear_qkv",
            qkv,
            {"q_proj": [0, 1, 2, 3, 4, 5, 6, 7], "k_proj": [10, 11, 12, 13], "v_proj": [20, 21, 22, 23]},
        ),
        (
            "decoder.layers.0.mlp.linear_fc1",
            [numbered(0, 1, 10, 11), numbered(2, 3, 12, 13)],
            {"gate_proj": [0, 1, 2, 3], "up_proj": [10, 11, 12, 13]},
        ),
    ):
        last = name.rpartition(".")[2]
        split = write_fused(tmp_path / f"split {last}", name, ranks, model=str(base))
        export_adapter(read_adapter(split), tmp_path / f"peft {last}", None)
        assert rows_of(tmp_path / f"peft {last}") == expected


def test_fused_adapters_cannot_be_split_without_the_base_s_configuration(tmp_path: Path) -> None:
    name = "decoder.layers.0.self_attention.linear_qkv"
    folder = read_adapter(write_fused(tmp_path / "fused", name, [numbered(*range(16))], model="some/model"))
    for base in (None, str(tmp_path / "gone")):
        with pytest.raises(ConfigError, match=r"linear_qkv: adapters of fused linears are split.*--base"):
            export_adapter(folder, tmp_path / "peft", base)


def test_a_fused_checkpoint_is_merged_like_what_was_exported_of_it(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    config = {key: value for key, value in BASE.items() if key != "model_type"}
    LlamaForCausalLM(LlamaConfig(**config)).save_pretrained(tmp_path / "base")  # type: ignore[arg-type]
    name = "decoder.layers.0.self_attention.linear_qkv"
    fused = read_adapter(write_fused(tmp_path / "fused", name, [numbered(*range(16))]))
    base = str(tmp_path / "base")
    assert merge_adapter(fused, base, tmp_path / "direct") == 3
    assert export_adapter(fused, tmp_path / "peft", base) == 3
    assert merge_adapter(read_adapter(tmp_path / "peft"), base, tmp_path / "detour") == 3
    plain, direct, detour = (
        AutoModelForCausalLM.from_pretrained(tmp_path / each).state_dict()
        for each in ("base", "direct", "detour")
    )
    assert all(torch.equal(direct[key], detour[key]) for key in plain)
    # scale 6 / 3, rank 3, A of ones: each weight of a row grows by six times the row's number.
    for linear, numbers in (("q", (0, 1, 2, 3, 8, 9, 10, 11)), ("k", (4, 5, 12, 13)), ("v", (6, 7, 14, 15))):
        key = f"model.layers.0.self_attn.{linear}_proj.weight"
        grown = (direct[key] - plain[key]).mean(1)
        torch.testing.assert_close(grown, 6.0 * torch.tensor(numbers, dtype=torch.float32))


def test_a_head_with_megatron_s_name_is_exported_as_the_head(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    fused = read_adapter(write_fused(tmp_path / "fused", "output_layer", [numbered(*range(8))]))
    assert export_adapter(fused, tmp_path / "peft", str(tmp_path)) == 1
    assert rows_of(tmp_path / "peft") == {"lm_head": list(range(8))}
