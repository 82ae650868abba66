# SPDX-License-Identifier: Apache-2.0
"""The fast path against the eager one: another model class and other products, the same numbers.

Without a GPU nothing is compiled or captured, and the code in between is what is tested here.
"""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from unittest import mock

import pytest
import torch

from lora_suite.blueprint.layout import rank_layout
from lora_suite.blueprint.memory import estimate_memory
from lora_suite.blueprint.preflight import preflight
from lora_suite.train.backends.dtensor import fast
from lora_suite.train.backends.dtensor.build import build as build_plain
from lora_suite.train.batch import IGNORED
from lora_suite.train.fast.linears import FramedLinear
from tests.train.dtensor.ranks import LORA, RECIPES, TINY, Setting, awake, rows, run_ranks, share, supervised

CPU = torch.device("cpu")
MEMORY = 2**30
PADDED = "data.pad_to_max_length=true"
BLOCK = "policy.dtensor_cfg.lora_cfg"
PEFT = f"{BLOCK}.implementation=peft"
MODELS = {
    "llama": {},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "num_key_value_heads": 1},
}


def model_file(folder, family):
    path = folder / f"{family}.json"
    path.write_text(json.dumps(json.loads(TINY.read_text()) | MODELS[family]))
    return path


def build_fast(setting):
    path = RECIPES / "sft.yaml"
    blueprint = preflight(setting.recipe, path)
    return fast.build(setting.recipe, path, blueprint, CPU, gpu=False)


def refusal(setting, memory=MEMORY):
    return fast.refusal(setting.recipe, preflight(setting.recipe, RECIPES / "sft.yaml"), memory)


@pytest.mark.parametrize(
    ("overrides", "precision", "world"),
    [
        ((LORA, PADDED), "float32", 1),
        ((PADDED,), "float32", 1),
        ((PADDED,), "bfloat16", 1),
        ((PADDED,), "bfloat16", 2),
    ],
)
def test_a_training_that_does_not_fit_with_whole_weights_is_left_to_shards(overrides, precision, world):
    setting = Setting(overrides, precision=precision, world=world)
    blueprint = preflight(setting.recipe, RECIPES / "sft.yaml")
    needed = estimate_memory(setting.recipe, blueprint, rank_layout(setting.recipe, world), fast=True).total
    assert refusal(setting, int(needed / 0.9) + 2) is None
    assert "by the memory model" in str(refusal(setting, int(needed / 0.9) - 2))


def test_weights_that_are_to_be_sharded_are():
    for key in ("sharding=fsdp", "dp_replicate_size=1"):
        said = refusal(Setting((LORA, PADDED, f"policy.dtensor_cfg.{key}"), world=2))
        assert said is not None
        assert said.startswith(f"policy.dtensor_cfg.{key.replace('=', ' is ')}")
        assert refusal(Setting((LORA, PADDED, f"policy.dtensor_cfg.{key}"))) is None
    for key in ("sharding=replicate", "dp_replicate_size=2"):
        assert refusal(Setting((LORA, PADDED, f"policy.dtensor_cfg.{key}"), world=2)) is None


def wake(backend):
    bank = backend.bank
    for slot in bank.slots:
        if slot.factor == "b":
            bank.master[slot.start : slot.stop] = awake(slot.key, slot.adapter.full_shape("b")).flatten()
    bank.publish()


def trace(backend, micro, steps=3):
    """Loss, norm and validation loss of some steps, and the adapters' gradients of the last."""
    if backend.bank is not None:
        wake(backend)
    dp, seen = backend.topology.dp, []
    for step in range(steps):
        batch = rows(seed=step)
        mine = share(batch, dp.index, dp.size, micro)
        loss = dp.sum(backend.forward_backward(mine, supervised(batch)).clone())
        backend.sync_gradients()
        norm = backend.clip_gradients(0.1)
        gradients = factors(backend, backend.bank.master_gradient) if backend.bank is not None else {}
        backend.optimizer_step(1e-2)
        seen += [loss.item(), norm.item(), dp.sum(backend.evaluate(mine).clone()).item()]
    return {"seen": seen, "gradients": gradients}


def factors(backend, flat):
    return {slot.key: flat[slot.start : slot.stop].clone() for slot in backend.bank.slots}


def both(setting, micro):
    return trace(setting.build(), micro), trace(build_fast(setting), micro)


@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize(
    "overrides",
    [(), (LORA,), (LORA, f"{BLOCK}.target_modules=['*q_proj','*v_proj','*down_proj']", f"{BLOCK}.dim=3")],
    ids=["full", "lora", "lora-on-some"],
)
def test_fast_trains_like_eager(tmp_path, family, overrides):
    setting = Setting(overrides, model_file(tmp_path, family), "float64")
    eager, quick = run_ranks(1, tmp_path / "ranks", both, setting, 2)[0]
    assert quick["seen"] == pytest.approx(eager["seen"], rel=1e-12)
    assert quick["gradients"].keys() == eager["gradients"].keys()
    for name, gradient in eager["gradients"].items():
        torch.testing.assert_close(quick["gradients"][name], gradient, rtol=1e-10, atol=1e-16)


@pytest.mark.slow
def test_two_ranks_hold_the_whole_model_and_share_the_rows(tmp_path):
    overrides = (LORA, "policy.train_global_batch_size=4")
    one = run_ranks(1, tmp_path / "one", both, Setting(overrides, precision="float64"), 1)[0][1]
    two = run_ranks(2, tmp_path / "two", both, Setting(overrides, precision="float64", world=2), 1)
    for rank in two:
        assert rank[1]["seen"] == pytest.approx(one["seen"], rel=1e-12)
        assert rank[0]["seen"] == pytest.approx(one["seen"], rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
def test_peft_on_the_fast_path_trains_like_eager_peft(tmp_path, family):
    setting = Setting((LORA, PEFT), model_file(tmp_path, family), "float64")
    eager, quick = run_ranks(1, tmp_path / "ranks", both, setting, 2)[0]
    assert quick["seen"] == pytest.approx(eager["seen"], rel=1e-12)
    assert quick["gradients"].keys() == eager["gradients"].keys()
    for name, gradient in eager["gradients"].items():
        torch.testing.assert_close(quick["gradients"][name], gradient, rtol=1e-10, atol=1e-16)


def switched(setting):
    backend = build_fast(setting)
    batch = [rows()]
    base = backend.evaluate(batch).item()
    before = backend.frozen_fingerprint()
    wake(backend)
    awake_loss = backend.evaluate(batch).item()
    with backend.adapters_off():
        off = backend.evaluate(batch).item()
    framed = [each for each in backend.model.modules() if isinstance(each, FramedLinear)]
    framed[0].matrix[0, 0] += 1.0
    return base, awake_loss, off, before, backend.frozen_fingerprint(), backend.trainable_parameters()


def test_adapters_change_the_output_and_can_be_switched_off(tmp_path):
    base, awake_loss, off, before, after, trainable = run_ranks(
        1, tmp_path / "ranks", switched, Setting((LORA,), precision="float64")
    )[0]
    assert off == base != awake_loss
    # The fingerprint sees a frozen weight inside the frame.
    assert before != after
    assert trainable == 16384


def resumed(setting):
    straight, again = build_fast(setting), build_fast(setting)
    trace(straight, 2, steps=2)
    again.load_state_dict(straight.state_dict())
    batch = [rows(seed=9)]
    return straight.evaluate(batch).item(), again.evaluate(batch).item()


@pytest.mark.parametrize("overrides", [(), (LORA,)], ids=["full", "lora"])
def test_a_state_comes_back(tmp_path, overrides):
    left, right = run_ranks(1, tmp_path / "ranks", resumed, Setting(overrides))[0]
    assert left == right


@pytest.mark.slow
def test_the_program_trains_alike_and_every_invariant_holds(new_run):
    losses = []
    for name, build in (("plain", build_plain), ("fast", partial(fast.build, gpu=False))):
        run = new_run(name)
        assert run.train(LORA, backend=build) == 0
        assert [each.name for each in run.record.invariants if each.ok is False] == []
        losses.append(list(run.metrics["train/loss"].values()))
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("policy.dtensor_cfg.activation_checkpointing=true", "activation_checkpointing is on"),
        (f"{BLOCK}.dropout=0.1", "dropout"),
        (f"{BLOCK}.lora_dtype=bfloat16", "lora_dtype"),
        (f"{BLOCK}.target_modules=['lm_head','*q_proj']", "outside the layers"),
        ("data.pad_to_max_length=false", "data.pad_to_max_length is off"),
    ],
)
def test_what_it_cannot_do_is_named(override, reason):
    setting = Setting((LORA, PADDED, override), world=2)
    said = refusal(setting)
    assert said is not None
    assert reason in said


def test_selective_checkpointing_stays_on_the_fast_path_where_its_kernels_are():
    some = "policy.dtensor_cfg.activation_checkpointing=selective"
    assert refusal(Setting((LORA, PADDED, some), precision="bfloat16")) is None
    assert refusal(Setting((PADDED, some), precision="bfloat16")) is None
    assert "the layers are PEFT's" in str(refusal(Setting((LORA, PADDED, PEFT, some), precision="bfloat16")))
    assert "no kernels of float64" in str(refusal(Setting((LORA, PADDED, some), precision="float64")))
    layers = "policy.dtensor_cfg.recompute_mlp_layers=1"
    assert refusal(Setting((LORA, PADDED, some, layers), precision="bfloat16")) is None
    assert "recompute_mlp_layers" in str(refusal(Setting((PADDED, some, layers), precision="bfloat16")))


def test_a_bias_that_every_rank_would_add_is_named(tmp_path):
    path = tmp_path / "biased.json"
    path.write_text(json.dumps(json.loads(TINY.read_text()) | {"attention_bias": True}))
    split = "policy.dtensor_cfg.tensor_parallel_size=2"
    assert "o_proj or down_proj has a bias" in str(refusal(Setting((LORA, PADDED, split), path, world=2)))
    assert refusal(Setting((LORA, PADDED), path)) is None


def kernels_of(setting):
    """Whether each stack's thin products are kernels', and what is said of it, where there would be a GPU."""
    path, said = RECIPES / "sft.yaml", StringIO()
    # The backend itself starts its kernels at once.
    with (
        redirect_stdout(said),
        mock.patch("lora_suite.train.backends.dtensor.fast.build.FastBackend") as built,
    ):
        fast.build(setting.recipe, path, preflight(setting.recipe, path), CPU, gpu=True)
    model = built.call_args.args[0]
    return [linear.thin is not None for linear in model.linears()], said.getvalue()


@pytest.mark.parametrize(
    ("overrides", "taken", "said"),
    [
        ((f"{BLOCK}.dim=8",), [True] * 8, ""),
        # Queries, keys and values of rank 16 need a frame of 48 columns, gate and up one of 32.
        ((f"{BLOCK}.dim=16",), [False, True, True, True] * 2, "use_triton: 2 of 8 stacks"),
        ((f"{BLOCK}.dim=8", f"{BLOCK}.use_triton=false"), [False] * 8, ""),
    ],
)
def test_thin_kernels_are_taken_where_they_win_and_can_be_left(tmp_path, overrides, taken, said):
    pytest.importorskip("triton")
    setting = Setting((LORA, PADDED, *overrides), precision="bfloat16")
    found, text = run_ranks(1, tmp_path / "ranks", kernels_of, setting)[0]
    assert found == taken
    assert text.startswith(said)
    assert bool(text) == bool(said)


@pytest.mark.parametrize("trained", [False, True])
def test_head_loss_is_the_cross_entropy_of_every_supervised_token(monkeypatch, trained):
    from lora_suite.train.fast import head_loss as module

    monkeypatch.setattr(module, "CHUNK", 3)
    monkeypatch.setattr(module, "TRAINED_CHUNK", 4)
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(10, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    head = torch.randn(7, 4, generator=generator, dtype=torch.float64, requires_grad=trained)
    labels = torch.tensor([1, 2, IGNORED, 0, 6, IGNORED, IGNORED, IGNORED, 5, 3])
    weight = torch.tensor(0.25, dtype=torch.float64)
    loss = module.head_loss(states, head, labels, weight)
    loss.backward()
    mine = states.grad, head.grad
    states.grad = head.grad = None
    expected = torch.nn.functional.cross_entropy(
        states @ head.t(), labels, ignore_index=IGNORED, reduction="sum"
    )
    (expected * 0.25).backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(mine[0], states.grad)
    torch.testing.assert_close(mine[1], head.grad)
    assert module.evaluate_loss(states, head, labels).item() == pytest.approx(expected.item(), rel=1e-12)
