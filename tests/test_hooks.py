# SPDX-License-Identifier: Apache-2.0
"""The hook for other trainers: each invariant turns red for what it is about, and for nothing else."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

from lora_suite.hooks import FILE_NAME, LoRAInvariants
from lora_suite.launch.record import Invariant

DOCS = Path(__file__).resolve().parents[1] / "docs" / "hooks.md"
RANK = 2


class Linear(nn.Module):
    """A frozen linear [4, 6] with an adapter whose parts are called as a framework calls them."""

    def __init__(self, a: str = "lora_A", b: str = "lora_B") -> None:
        super().__init__()
        self.base = nn.Linear(6, 4).requires_grad_(False)
        self.names = a, b
        down, up = nn.Linear(6, RANK, bias=False), nn.Linear(RANK, 4, bias=False)
        nn.init.zeros_(up.weight)
        for name, part in ((a, down), (b, up)):
            *path, last = name.split(".")
            holder: nn.Module = self
            for word in path:
                if not hasattr(holder, word):
                    holder.add_module(word, nn.Module())
                holder = getattr(holder, word)
            holder.add_module(last, part)

    def part(self, index: int) -> nn.Linear:
        """A (0) or B (1)."""
        return self.get_submodule(self.names[index])  # type: ignore[return-value]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.part(1)(self.part(0)(x))


class Model(nn.Module):
    """Two adapted linears, one after the other."""

    def __init__(self, a: str = "lora_A", b: str = "lora_B") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.widen, self.o = Linear(a, b), nn.Linear(4, 6).requires_grad_(False), Linear(a, b)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o(torch.tanh(self.widen(self.q(x))))


def train(model: nn.Module, folder: Path, steps: int = 3, first: int = 1, after=None, **options):
    """Train with AdamW, and return what the hook says, by name. after: called after every update."""
    checks = LoRAInvariants(model, folder, **options)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    for step in range(first, first + steps):
        model(torch.randn(8, 6)).square().mean().backward()
        checks.after_backward(step)
        optimizer.step()
        optimizer.zero_grad()
        if after is not None:
            after(model)
    return {each.name: each for each in checks.finish()}


def oks(invariants) -> dict[str, bool | None]:
    """What holds, by name."""
    return {name: each.ok for name, each in invariants.items()}


# What can be seen from outside of a training; the rest of the required ones needs our own loop.
MEASURED = (
    "trainable_params",
    "step1_loss_equals_base",
    "b_gradients_step1",
    "a_gradients_step2",
    "frozen_unchanged",
    "replicas_equal",
    "adapters_moved",
)
HEALTHY = dict.fromkeys(MEASURED, True) | {"step1_loss_equals_base": None}


@pytest.mark.parametrize(
    "names",
    [
        ("lora_A.default", "lora_B.default"),
        ("lora_A", "lora_B"),
        ("adapter.linear_in", "adapter.linear_out"),
        ("lora_a", "lora_b"),
    ],
    ids=["peft", "automodel", "megatron-bridge", "torchtitan"],
)
def test_a_healthy_training_in_every_framework_s_names(tmp_path, names):
    invariants = train(Model(*names), tmp_path)
    assert oks(invariants) == HEALTHY
    # Two adapters of rank·(in + out) parameters.
    assert invariants["trainable_params"].message == f"{2 * RANK * (6 + 4)} in 2 adapters"


def test_the_file_holds_what_was_returned(tmp_path):
    invariants = train(Model(), tmp_path / "new")
    content = json.loads((tmp_path / "new" / FILE_NAME).read_text())
    assert content["schema_version"] == 1
    stored = [Invariant.model_validate(each) for each in content["invariants"]]
    assert {each.name: each.ok for each in stored} == oks(invariants)
    assert [each.name for each in (tmp_path / "new").iterdir()] == [FILE_NAME]


def test_the_run_directory_is_the_default(tmp_path, monkeypatch):
    monkeypatch.setenv("LORA_SUITE_RUN_DIR", str(tmp_path))
    train(Model(), None)
    assert (tmp_path / FILE_NAME).is_file()


@pytest.mark.slow
def test_peft_itself(tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4))
    model = peft.get_peft_model(base, peft.LoraConfig(r=RANK, target_modules=["0"], modules_to_save=["2"]))
    invariants = train(model, tmp_path)
    assert oks(invariants) == HEALTHY
    assert "24 in 1 adapters, and 2 parameters that PEFT was asked to train" in str(
        invariants["trainable_params"].message
    )


def test_other_names_are_given_as_a_pattern(tmp_path):
    with pytest.raises(ValueError, match="no trainable parameter is an adapter's"):
        LoRAInvariants(Model("down", "up"), tmp_path)
    assert oks(train(Model("down", "up"), tmp_path, pattern=("down", "up"))) == HEALTHY


def test_a_name_is_a_whole_word(tmp_path):
    with pytest.raises(ValueError, match="attach the adapters first"):
        LoRAInvariants(Model("my_lora_A", "my_lora_B"), tmp_path)


def test_an_adapter_without_its_other_factor(tmp_path):
    model = Model()
    del model.o.lora_B
    with pytest.raises(ValueError, match=r"o\.lora_A\.weight has no other factor"):
        LoRAInvariants(model, tmp_path)


def red(invariants) -> dict[str, str]:
    """Messages of what does not hold."""
    return {name: each.message for name, each in invariants.items() if each.ok is False}


def test_a_dead_adapter(tmp_path):
    """The adapter of q is attached, and the forward pass never calls it."""
    model = Model()
    model.q.forward = lambda x: model.q.base(x)  # type: ignore[method-assign]
    assert red(train(model, tmp_path)) == {
        "b_gradients_step1": "no gradient: q.lora_B.weight",
        "a_gradients_step2": "no gradient: q.lora_A.weight",
        "adapters_moved": "as at the start: q.lora_A.weight, q.lora_B.weight",
    }


def test_a_factor_that_was_left_frozen(tmp_path):
    model = Model()
    model.o.part(0).requires_grad_(False)
    found = red(train(model, tmp_path))
    assert found["a_gradients_step2"] == "no gradient: o.lora_A.weight"
    assert "b_gradients_step1" not in found


def test_both_factors_at_zero(tmp_path):
    """No gradient ever flows."""
    model = Model()
    for linear in (model.q, model.o):
        nn.init.zeros_(linear.part(0).weight)
    assert set(red(train(model, tmp_path))) == {"b_gradients_step1", "a_gradients_step2", "adapters_moved"}


def test_a_at_zero_in_place_of_b(tmp_path):
    model = Model()
    for linear in (model.q, model.o):
        nn.init.zeros_(linear.part(0).weight)
        nn.init.ones_(linear.part(1).weight)
    assert oks(train(model, tmp_path)) == HEALTHY


def test_a_gradient_that_comes_late_is_too_late(tmp_path):
    model = Model()
    checks = LoRAInvariants(model, tmp_path)
    checks.after_backward(1)
    model(torch.randn(8, 6)).square().mean().backward()
    checks.after_backward(2)
    found = {each.name: each for each in checks.finish()}
    assert found["b_gradients_step1"].ok is False


@pytest.mark.parametrize("index", [0, 3])
def test_a_frozen_weight_that_moves(tmp_path, index):
    def nudge(model: Model) -> None:
        with torch.no_grad():
            model.q.base.bias[index] += 1e-6

    assert red(train(Model(), tmp_path, after=nudge)) == {"frozen_unchanged": "changed: q.base.bias"}


def test_a_base_that_is_trained_too(tmp_path):
    """The whole model was unfrozen by accident."""
    assert red(train(Model().requires_grad_(True), tmp_path)) == {
        "trainable_params": "trained besides the adapters: q.base.weight, q.base.bias, widen.weight, "
        "widen.bias, o.base.weight and 1 more"
    }


def test_an_optimizer_that_does_not_know_the_adapters(tmp_path):
    model = Model()
    checks = LoRAInvariants(model, tmp_path)
    for step in (1, 2):
        model(torch.randn(8, 6)).square().mean().backward()
        checks.after_backward(step)
        # An update that goes to copies leaves the model as it was; B's gradient is there, A's is not.
    found = {each.name: each.ok for each in checks.finish()}
    assert (found["b_gradients_step1"], found["adapters_moved"]) == (True, False)


def test_what_was_not_seen_is_not_measured(tmp_path):
    resumed = train(Model(), tmp_path, first=31)
    assert oks(resumed) == HEALTHY | {"b_gradients_step1": None, "a_gradients_step2": None}
    assert resumed["b_gradients_step1"].message == "after_backward was not called in step 1"
    assert oks(train(Model(), tmp_path, steps=1)) == HEALTHY | {"a_gradients_step2": None}
    assert {each.name: each.ok for each in LoRAInvariants(Model(), tmp_path).finish()} == HEALTHY | {
        "b_gradients_step1": None,
        "a_gradients_step2": None,
        "adapters_moved": None,
    }


def test_megatron_s_gradient_buffer(tmp_path):
    model = Model()
    checks = LoRAInvariants(model, tmp_path)
    model(torch.randn(8, 6)).square().mean().backward()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.main_grad, parameter.grad = parameter.grad, None  # type: ignore[attr-defined]
    checks.after_backward(1)
    assert {each.name: each.ok for each in checks.finish()}["b_gradients_step1"] is True


def test_a_wrapper_that_comes_too_late(tmp_path):
    model = Model()
    checks = LoRAInvariants(model, tmp_path)
    model.outer = model.o  # type: ignore[assignment]
    del model.o
    with pytest.raises(RuntimeError, match=r"o\.lora_A\.weight is gone: make LoRAInvariants after"):
        checks.after_backward(1)


def test_no_step_after_the_second_waits_for_the_device(tmp_path, monkeypatch):
    model = Model()
    checks = LoRAInvariants(model, tmp_path)
    monkeypatch.setattr(checks, "_with_gradient", lambda: pytest.fail("looked at gradients"))
    checks.after_backward(3)


def test_the_hook_brings_torch_alone():
    code = (
        "import sys, torch; before = set(sys.modules); import lora_suite.hooks; "
        "print({name.split('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "{'lora_suite'}"


def test_the_page_s_example_prints_what_the_page_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, said = re.findall(r"```(?:python|text)\n(.*?)```", DOCS.read_text(), flags=re.DOTALL)
    exec(compile(code, str(DOCS), "exec"), {"__name__": "example"})
    assert capsys.readouterr().out == said
    assert (tmp_path / FILE_NAME).is_file()


def _rank(rank: int, folder: Path) -> None:
    """One of two ranks: FSDP2 shards, then replicas that drift apart; rank 0 leaves both answers."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    sharded = Model()
    fully_shard(sharded)
    train(sharded, folder / "sharded")

    def drift(model: nn.Module) -> None:
        with torch.no_grad():
            model.get_parameter("q.lora_A.weight")[0, 0] += rank

    torch.manual_seed(1)
    train(Model(), folder / "drift", steps=1, after=drift)
    torch.manual_seed(1)
    train(Model(), folder / "equal")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks(tmp_path):
    mp.spawn(_rank, (tmp_path,), nprocs=2)
    stored = {
        name: {
            each["name"]: each for each in json.loads((tmp_path / name / FILE_NAME).read_text())["invariants"]
        }
        for name in ("sharded", "drift", "equal")
    }
    sharded = {name: each["ok"] for name, each in stored["sharded"].items()}
    assert sharded == HEALTHY | {"replicas_equal": None}
    assert stored["sharded"]["trainable_params"]["message"] == "40 in 2 adapters"
    assert {name: each["ok"] for name, each in stored["equal"].items()} == HEALTHY
    wrong = {name: each["message"] for name, each in stored["drift"].items() if each["ok"] is False}
    assert wrong == {"replicas_equal": "differ: q.lora_A.weight"}
