# SPDX-License-Identifier: Apache-2.0
"""From a training to files and back: export, PEFT, merge, and a second training that starts from them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.nn import functional

from lora_suite.blueprint import preflight
from lora_suite.cli import main
from lora_suite.config import ConfigError, load_recipe
from lora_suite.train.batch import IGNORED
from lora_suite.train.data.load import load_data
from lora_suite.train.lora.peft_format import write_peft_adapter
from lora_suite.train.program import build_backend
from lora_suite.train.topology import Axis
from tests.train.conftest import LORA, RECIPE, SMALL, Run
from tests.train.lora.adapters import spec

BLOCK = "policy.dtensor_cfg.lora_cfg"
SAVE = ("checkpointing.enabled=true", "checkpointing.save_period=4", "checkpointing.metric_name=null")


def invoke(*words: object) -> Any:
    return CliRunner().invoke(main, [str(word) for word in words])


def write_base(folder: Path) -> Path:
    """A small Llama with weights, as a pretrained model lies on disk."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = json.loads((RECIPE.parent / "models" / "tiny-llama.json").read_text())
    config = LlamaConfig(**{key: value for key, value in shape.items() if key != "model_type"})
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(3.0)
    model.to(torch.float64).save_pretrained(folder)  # type: ignore[arg-type]
    return folder


def first_loss(model: Any, overrides: tuple[str, ...]) -> float:
    """Mean loss of a model on the first batch of a training, by torch alone."""
    loaded = load_recipe(RECIPE, [*SMALL, *overrides])
    data = load_data(loaded.recipe, RECIPE)
    batch = data.steps[0]
    total = 0.0
    with torch.no_grad():
        for micro in data.slicing.micro_batches(batch, Axis(0, 1)):
            logits = model(micro.input_ids).logits.flatten(0, 1)
            total += functional.cross_entropy(
                logits, micro.labels.flatten(), ignore_index=IGNORED, reduction="sum"
            ).item()
    return total / batch.supervised


@pytest.mark.train
@pytest.mark.slow
def test_a_trained_adapter_goes_to_peft_into_weights_and_into_another_training(
    new_run: Callable[[str], Run], tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = write_base(tmp_path / "base")
    model = ("policy.init=pretrained", f"policy.model_name={base}", "policy.tokenizer.name=bytes", LORA)
    assert (
        new_run("first").train(*model, *SAVE, "policy.optimizer.kwargs.lr=0.02", backend=build_backend) == 0
    )
    checkpoint = tmp_path / "first" / "ckpts" / "step_4"

    done = invoke("adapter", "export", checkpoint, "-o", tmp_path / "adapter")
    assert (done.exit_code, done.output) == (0, f"{tmp_path / 'adapter'}: 14 adapters\n")
    assert invoke("inspect-adapter", tmp_path / "adapter").exit_code == 0
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    before = first_loss(plain, model)
    adapted = PeftModel.from_pretrained(plain, str(tmp_path / "adapter"), autocast_adapter_dtype=False)
    after = first_loss(adapted, model)
    assert after < before - 0.1

    second = new_run("second")
    start = f"{BLOCK}.adapter={tmp_path / 'adapter'}"
    assert second.train(*model, start, backend=build_backend) == 0
    assert second.metrics["train/loss"]["1"] == pytest.approx(after, rel=1e-9)
    assert {each.name for each in second.record.invariants if each.ok is False} == set()
    (unmeasured,) = [each for each in second.record.invariants if each.name == "step1_loss_equals_base"]
    assert unmeasured.ok is None

    # From the checkpoint itself, and from what was exported of it: the same merged weights, bit by bit.
    for name, source in (("direct", checkpoint), ("detour", tmp_path / "adapter")):
        done = invoke("adapter", "merge", source, "--base", base, "-o", tmp_path / name)
        assert (done.exit_code, done.stdout) == (0, f"{tmp_path / name}: 14 adapters merged\n")
    direct, detour, plain = (
        AutoModelForCausalLM.from_pretrained(each, dtype="auto")
        for each in (tmp_path / "direct", tmp_path / "detour", base)
    )
    for (name, mine), theirs, unchanged in zip(
        direct.named_parameters(), detour.parameters(), plain.parameters(), strict=True
    ):
        assert torch.equal(mine, theirs), name
        assert torch.equal(mine, unchanged) == (not name.endswith("_proj.weight")), name
    assert first_loss(direct, model) == pytest.approx(after, rel=1e-9)


def test_other_adapters_than_the_recipes_are_refused_before_training(
    new_run: Callable[[str], Run], tmp_path: Path
) -> None:
    name = "model.layers.0.self_attn.q_proj"
    factors = {name: (torch.ones(8, 64), torch.ones(64, 8))}
    write_peft_adapter(tmp_path / "adapter", factors, spec(rank=8, alpha=32.0), None)
    run, start = new_run("run"), f"{BLOCK}.adapter={tmp_path / 'adapter'}"
    with pytest.raises(ConfigError, match=r"adapter: has no adapter for model\.layers\.0\.mlp\.down_proj, "):
        run.train(LORA, start, backend=build_backend)


def test_a_checkpoint_counts_more_than_the_adapter_that_the_training_started_from(
    new_run: Callable[[str], Run], tmp_path: Path
) -> None:
    sites = preflight(load_recipe(RECIPE, [*SMALL, LORA]).recipe, RECIPE).adapters

    def write_start(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        factors = {
            site.name: (
                torch.randn(8, site.in_features, generator=generator) / 8,
                torch.randn(site.out_features, 8, generator=generator) / 8,
            )
            for site in sites
        }
        write_peft_adapter(tmp_path / "adapter", factors, spec(rank=8, alpha=32.0), None)

    arm = (LORA, f"{BLOCK}.adapter={tmp_path / 'adapter'}")
    saved = (*SAVE, "checkpointing.save_period=2")
    straight, halved = new_run("straight"), new_run("halved")
    write_start(1)
    straight.train(*arm, backend=build_backend)
    halved.train(*arm, *saved, "debug.faults.stop_at=2", backend=build_backend)
    write_start(2)
    halved.train(*arm, *saved, backend=build_backend)
    assert halved.record.segments == [1, 3]
    assert halved.metrics["train/loss"] == straight.metrics["train/loss"]
    assert halved.metrics["train/grad_norm"] == straight.metrics["train/grad_norm"]
    assert {each.name: each.ok for each in halved.record.invariants}["adapters_resumed"]
    # The second adapter is another model.
    other = new_run("other")
    other.train(*arm, backend=build_backend)
    assert other.metrics["train/loss"]["3"] != straight.metrics["train/loss"]["3"]


def test_a_folder_that_is_not_there_is_named_before_anything_is_built() -> None:
    recipe = load_recipe(RECIPE, [*SMALL, LORA, f"{BLOCK}.adapter=nowhere"]).recipe
    with pytest.raises(ConfigError, match=r"dtensor_cfg\.lora_cfg\.adapter: there is no folder nowhere"):
        preflight(recipe, RECIPE)


def test_what_is_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    for words in (("export",), ("merge", "--base", "some/model")):
        done = invoke("adapter", *words, tmp_path, "-o", tmp_path / "full")
        assert done.exit_code == 2
        assert f"{tmp_path / 'full'}: is there already" in done.output
    assert invoke("adapter", "export", tmp_path / "absent", "-o", tmp_path / "new").exit_code == 2


@pytest.mark.parametrize(("lora_dtype", "multiplied"), [("null", "bfloat16"), ("float32", "float32")])
def test_the_adapters_dtypes_are_recorded_and_printed(
    run: Run, capsys: pytest.CaptureFixture[str], lora_dtype: str, multiplied: str
) -> None:
    """float32 masters, multiplied in the model's dtype or in the chosen one."""
    model = ("policy.precision=bfloat16", f"{BLOCK}.lora_dtype={lora_dtype}", "sft.max_num_steps=1")
    assert run.train(LORA, *model, backend=build_backend) == 0
    assert run.record.lora is not None
    recorded = {key: run.record.lora[key] for key in ("master_dtype", "compute_dtype", "trainable_params")}
    expected = {"master_dtype": "float32", "compute_dtype": multiplied, "trainable_params": 16384}
    assert recorded == expected
    line = f"LoRA: 14 adapters, 28 tensors, 16,384 parameters; masters float32, multiplied in {multiplied}\n"
    assert line in capsys.readouterr().out
