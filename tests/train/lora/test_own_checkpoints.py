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


def test_fused_adapters_have_no_name_in_peft(tmp_path: Path) -> None:
    folder = tmp_path / "fused"
    folder.mkdir()
    name = "decoder.layers.0.self_attention.linear_qkv"
    factors = {f"{name}.a": torch.ones(18), f"{name}.b": torch.ones(24)}
    torch.save({"backend": {"factors": factors, "sharded": []}}, folder / "rank_0.pt")
    meta = {"layout": {"dp": 1, "tp": 1, "pp": 1}, "lora": {"dim": 3, "alpha": 6.0, "dropout": 0.0}}
    (folder / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(ConfigError, match=r"linear_qkv: adapters of fused linears.*fused=false"):
        export_adapter(read_adapter(folder), tmp_path / "peft", None)


def test_fused_gate_and_up_in_parts_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "fused"
    folder.mkdir()
    name = "decoder.layers.0.mlp.linear_fc1"
    for rank in range(2):
        factors = {f"{name}.a": torch.ones(18), f"{name}.b": torch.ones(24)}
        state = {"backend": {"factors": factors, "sharded": [f"{name}.b"]}}
        torch.save(state, folder / f"rank_{rank}.pt")
    meta = {"layout": {"dp": 1, "tp": 2, "pp": 1}, "lora": {"dim": 3, "alpha": 6.0, "dropout": 0.0}}
    (folder / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(ConfigError, match=r"linear_fc1 is a fused adapter"):
        read_adapter(folder)
