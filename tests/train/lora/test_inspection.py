# SPDX-License-Identifier: Apache-2.0
"""Adapter folders of three kinds, whole ones and ones with each defect."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from safetensors.torch import save_file

from lora_suite.cli import main
from lora_suite.config.errors import ConfigError
from lora_suite.train.lora.adapter_files import read_adapter
from lora_suite.train.lora.inspection import Inspection, inspect, inspection_lines

RANK = 4
SHAPES = {"self_attn.q_proj": (6, 6), "self_attn.v_proj": (6, 2), "mlp.up_proj": (6, 10)}
LAYER = "base_model.model.model.layers.{}.{}.lora_{}.weight"
Tensors = dict[str, torch.Tensor]


def factors(layers=range(3), name: str = LAYER) -> Tensors:
    """Adapters of rank 4 on three linears of each layer."""
    torch.manual_seed(0)
    made = {}
    for layer in layers:
        for module, (inputs, outputs) in SHAPES.items():
            made[name.format(layer, module, "A")] = torch.randn(RANK, inputs)
            made[name.format(layer, module, "B")] = torch.randn(outputs, RANK)
    return made


def write_peft(folder: Path, tensors: Tensors, binary: bool = False, **config: object) -> Path:
    """A folder as PEFT saves it."""
    folder.mkdir(exist_ok=True)
    content = {"r": RANK, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "up_proj"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(content))
    if binary:
        torch.save(tensors, folder / "adapter_model.bin")
    else:
        save_file(
            {name: each.contiguous() for name, each in tensors.items()}, folder / "adapter_model.safetensors"
        )
    return folder


@pytest.fixture
def look(tmp_path) -> Callable[..., Inspection]:
    """Inspect a PEFT folder with these tensors and configuration."""
    return lambda tensors, **config: inspect(
        read_adapter(write_peft(tmp_path / "adapter", tensors, **config))
    )


def defects(found: Inspection) -> list[str]:
    """Kind and name of every defect."""
    return [f"{each.kind} {each.name}" for each in found.defects]


@pytest.mark.parametrize("binary", [False, True])
def test_a_whole_peft_folder(look, binary):
    found = look(factors(), binary=binary)
    assert (found.form, found.rank, found.alpha, found.scale) == ("PEFT", 4, 8, 2.0)
    # rank·(in + out): 4·(12 + 8 + 16) for each of three layers.
    assert (found.adapters, found.parameters) == (9, 4 * 36 * 3)
    assert defects(found) == []
    rows = {row.module.rsplit(".", 1)[1]: (row.layers, row.ranks, row.parameters) for row in found.rows}
    assert rows == {
        "q_proj": ((0, 1, 2), (4,), 3 * 48),
        "v_proj": ((0, 1, 2), (4,), 3 * 32),
        "up_proj": ((0, 1, 2), (4,), 3 * 64),
    }


def test_what_peft_saves(tmp_path):
    peft = pytest.importorskip("peft")
    base = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 4))
    model = peft.get_peft_model(
        base, peft.LoraConfig(r=2, lora_alpha=4, target_modules=["0"], modules_to_save=["1"])
    )
    model.save_pretrained(str(tmp_path))
    found = inspect(read_adapter(tmp_path))
    assert (found.rank, found.scale, found.parameters) == (2, 2.0, 24)
    # PEFT starts B at zero, and nothing was trained.
    assert [each.kind for each in found.defects] == ["zero-b"]


def test_rank_stabilised_scale(look):
    assert look(factors(), use_rslora=True).scale == 8 / math.sqrt(4)


def changed(index: int, factor: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
    """Whole adapters but for one factor of q_proj."""
    tensors = factors()
    name = LAYER.format(index, "self_attn.q_proj", factor)
    tensors[name] = change(tensors[name])
    return tensors


def without(*parts: str) -> Tensors:
    """Whole adapters without the tensors whose name has one of these parts."""
    return {name: each for name, each in factors().items() if not any(part in name for part in parts)}


NAME = "base_model.model.model.layers.0."
HEAD = {"base_model.model.lm_head.weight": torch.ones(2)}
Q1 = "base_model.model.model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    ("tensors", "config", "expected"),
    [
        (changed(1, "B", torch.zeros_like), {}, [f"zero-b {Q1}"]),
        (changed(1, "A", torch.zeros_like), {}, [f"zero-a {Q1}"]),
        (changed(1, "A", lambda a: a / 0.0), {}, [f"non-finite {Q1}"]),
        (changed(1, "B", lambda b: b[:, :3]), {}, [f"shape {Q1}"]),
        (factors([0]), {"r": 8}, [f"shape {NAME}{each}" for each in sorted(SHAPES)]),
        (factors(), {"r": 8, "rank_pattern": {"q_proj": 4}}, []),
        (without(f"{Q1}.lora_A"), {}, [f"missing-factor {Q1}"]),
        (without(Q1), {}, ["missing-module layer 1"]),
        (without("layers.1."), {}, ["missing-layer layer 1"]),
        (without("layers.0."), {}, ["missing-layer layer 0"]),
        (without("layers.1."), {"layers_to_transform": [0, 2]}, []),
        (factors() | HEAD, {}, ["unmatched-key base_model.model.lm_head.weight"]),
        (factors() | HEAD, {"modules_to_save": ["lm_head"]}, []),
        (factors(), {"target_modules": ["q_proj", "self_attn.v_proj", "up_proj"]}, []),
        (factors(), {"target_modules": ["q_proj", "_proj"]}, ["unmatched-target _proj"]),
        (factors(), {"target_modules": r".*\.self_attn\..*"}, []),
        (factors(), {"target_modules": r".*\.attention\..*"}, [r"unmatched-target .*\.attention\..*"]),
        (HEAD, {"modules_to_save": ["lm_head"], "target_modules": None}, ["no-adapter the folder"]),
    ],
)  # fmt: skip
def test_each_defect_is_found_and_no_other(look, tensors, config, expected):
    assert defects(look(tensors, **config)) == expected


def test_a_hybrid_model_is_whole(look):
    """Layers of different kinds, as in Nemotron-H: attention in layer 2 and 5 only."""
    tensors = {}
    for layer in range(7):
        module = "mixer.q_proj" if layer in (2, 5) else "mixer.in_proj"
        tensors[LAYER.format(layer, module, "A")] = torch.ones(RANK, 6)
        tensors[LAYER.format(layer, module, "B")] = torch.ones(6, RANK)
    assert defects(look(tensors, target_modules=["q_proj", "in_proj"])) == []


def test_the_layer_is_the_first_number(look):
    tensors = {
        f"base_model.model.model.layers.1.mlp.experts.{expert}.up_proj.lora_{factor}.weight": torch.ones(4, 4)
        for expert in (0, 1)
        for factor in "AB"
    }
    found = look(tensors, target_modules=["up_proj"], layers_to_transform=[1])
    assert [row.layers for row in found.rows] == [(1,), (1,)]
    assert defects(found) == []


def test_grouped_experts_are_the_other_way_round(look):
    name = "base_model.model.model.layers.0.mlp.experts.lora_down_{}"
    tensors = {name.format("A"): torch.ones(3, 10, RANK), name.format("B"): torch.ones(3, RANK, 6)}
    found = look(tensors, target_modules=["experts"])
    assert (found.rank, defects(found)) == (4, [])


def test_a_distributed_checkpoint(tmp_path):
    """Megatron stacks all layers in one tensor; optimizer states have the parameter's name."""
    name = "decoder.layers.self_attention.linear_qkv.adapter.linear_{}.weight"
    b = torch.ones(3, 10, RANK)
    b[1] = 0
    state = {
        name.format("in"): torch.ones(3, RANK, 6),
        name.format("out"): b,
        "decoder.layers.self_attention.linear_qkv.weight": torch.ones(3, 10, 6),
        "optimizer.state.exp_avg." + name.format("in"): torch.zeros(3, RANK, 6),
    }
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    found = inspect(read_adapter(tmp_path))
    assert (found.form, found.rank, found.alpha) == ("distributed checkpoint", 4, None)
    assert found.parameters == 3 * RANK * 16
    assert [str(each) for each in found.defects] == [
        "zero-b: decoder.layers.self_attention.linear_qkv: B is all zero in layer 1"
    ]


def write_own(folder: Path, lora: object = {"dim": 4, "alpha": 32.0, "dropout": 0.0}) -> Path:
    """A checkpoint as `lora-suite train` writes it."""
    flat = {}
    for name, tensor in factors(name="model.layers.{}.{}.{}").items():
        module, _, factor = name.rpartition(".")
        flat[f"{module}.{factor.lower()}"] = tensor.flatten()
    layout = {"backend": "dtensor", "world_size": 1, "dp": 1, "tp": 1, "pp": 1}
    (folder / "meta.json").write_text(json.dumps({"layout": layout, "lora": lora}))
    torch.save({"backend": {"factors": flat}}, folder / "rank_0.pt")
    return folder


def test_a_checkpoint_of_ours(tmp_path):
    found = inspect(read_adapter(write_own(tmp_path)))
    assert (found.form, found.rank, found.scale, found.parameters) == ("lora-suite checkpoint", 4, 8.0, 432)
    assert defects(found) == []


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda folder: folder / "absent", "there is no such folder"),
        (lambda folder: folder, "is no adapter folder: it has neither adapter_model.safetensors"),
        (lambda folder: write_own(folder, lora=None), "is a checkpoint of full SFT"),
    ],
)
def test_what_cannot_be_read(tmp_path, build, message):
    with pytest.raises(ConfigError, match=message):
        read_adapter(build(tmp_path))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("adapter_model.safetensors", b"\x00" * 3),
        ("adapter_model.bin", b"no pickle"),
        ("adapter_model.bin", b""),
        ("adapter_config.json", b"{"),
        ("adapter_config.json", b"[]"),
        (".metadata", b"no pickle"),
        ("meta.json", b"{}"),
    ],
)
def test_a_damaged_file_is_one_message(tmp_path, file, content):
    if file.startswith("adapter_"):
        write_peft(tmp_path, factors(), binary=file.endswith("bin"))
    (tmp_path / file).write_bytes(content)
    result = CliRunner().invoke(main, ["inspect-adapter", str(tmp_path)])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {tmp_path}")


def test_peft_needs_its_configuration(tmp_path):
    write_peft(tmp_path, factors())
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(ConfigError, match=r"adapter_config\.json is missing"):
        read_adapter(tmp_path)


def test_the_command(tmp_path):
    whole = CliRunner().invoke(main, ["inspect-adapter", str(write_peft(tmp_path / "whole", factors()))])
    assert whole.exit_code == 0
    assert [line.split() for line in whole.output.splitlines()] == [
        ["PEFT:", "rank", "4,", "alpha", "8,", "scale", "2,", "9", "adapters,", "432", "parameters"],
        ["module", "layers", "rank", "parameters"],
        ["base_model.model.model.layers.*.mlp.up_proj", "0-2", "4", "192"],
        ["base_model.model.model.layers.*.self_attn.q_proj", "0-2", "4", "144"],
        ["base_model.model.model.layers.*.self_attn.v_proj", "0-2", "4", "96"],
        ["nothing", "is", "wrong"],
    ]


def test_the_command_with_a_defect(tmp_path):
    folder = write_peft(tmp_path / "adapter", changed(1, "B", torch.zeros_like))
    result = CliRunner().invoke(main, ["inspect-adapter", str(folder), "--json"])
    assert result.exit_code == 1
    content = json.loads(result.output)
    assert content["defects"] == [{"kind": "zero-b", "name": Q1, "message": "B is all zero"}]
    assert content["rows"][0]["layers"] == [0, 1, 2]


def test_layers_are_shown_as_ranges(look):
    lines = list(inspection_lines(look(without("layers.1."))))
    assert "0,2" in lines[2].split()
    assert lines[-1] == "1 defects"
