# SPDX-License-Identifier: Apache-2.0
"""Bugs that the field had, planted in a small training: each turns the invariant red that is there for it."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lora_suite.launch.record import Invariant
from lora_suite.train.backends.dtensor.linear import LoraLinear
from lora_suite.train.lora import invariants as module
from lora_suite.train.lora.adapter import Adapter
from lora_suite.train.lora.bank import AdapterBank
from lora_suite.train.lora.spec import LoraSpec
from lora_suite.train.program import Build, build_backend
from lora_suite.train.topology import Axis, Topology
from tests.train.conftest import LORA, Run, small_recipe
from tests.train.fake_backend import VOCABULARY, WIDTH, FakeBackend, TinyModel, build
from tests.train.lora.test_invariants import BATCHES, SUPERVISED, checks_of, make_step, red, train

DROPOUT = "policy.dtensor_cfg.lora_cfg.dropout=0.5"


def test_an_adapter_that_is_never_called() -> None:
    # https://github.com/unslothai/unsloth/pull/9331
    assert "b_gradients_step1" in red(train(dead_adapter=True))


class Reentrant(TinyModel):
    """Recomputes its body with the variant that needs an input which asks for a gradient; the embedding is
    frozen, so none does, and nothing flows into the body."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        body = checkpoint(
            lambda hidden: torch.tanh(self.linear(hidden)), self.embedding(tokens), use_reentrant=True
        )
        logits: torch.Tensor = self.head(body)
        return logits


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_gradient_that_reentrant_checkpointing_cuts_off() -> None:
    # https://github.com/huggingface/transformers/issues/26221
    verdicts = train_two_adapters(Reentrant)
    assert verdicts["b_gradients_step1"].message == "not so: linear.b"
    assert not verdicts["b_gradients_step1"].ok
    assert not verdicts["a_gradients_step2"].ok
    # The same model without it is green.
    assert all(each.ok for each in train_two_adapters(TinyModel).values())


def train_two_adapters(kind: type[TinyModel]) -> dict[str, Invariant]:
    """Two steps with adapters in the body and on the head, so that the loss has a gradient in any case."""
    recipe = small_recipe(LORA)
    backend = FakeBackend(recipe)
    assert backend.bank is not None
    backend.model.__class__ = kind
    adapter = backend.bank.adapters[0]
    head = Adapter("head", WIDTH, VOCABULARY, adapter.spec)
    LoraLinear.adapt(backend.model.head, head)
    backend.bank = AdapterBank([adapter, head], backend.topology, torch.float64)
    backend.bank.build_optimizer(recipe.policy.optimizer)
    checks = checks_of(backend, expected=backend.trainable_parameters())
    checks.before_first_step(BATCHES, SUPERVISED, b_is_zero=True)
    for step in (1, 2):
        make_step(backend, checks, step)
    checks.after_training(2, BATCHES)
    return {each.name: each for each in checks.results}


def test_a_base_that_was_unfrozen_by_parallelising() -> None:
    # https://github.com/NVIDIA-NeMo/Automodel/issues/547: requires_grad was set everywhere
    def unfreeze(backend: FakeBackend) -> None:
        backend.model.embedding.requires_grad_(True)

    assert red(train(unfreeze)) == ["only_adapters_train"]


def test_a_base_that_moves() -> None:
    def move(backend: FakeBackend) -> None:
        with torch.no_grad():
            backend.model.head.weight.add_(1e-6)

    assert red(train(after=move)) == ["frozen_unchanged"]


@pytest.mark.parametrize("summed", [True, False])
def test_a_gradient_that_is_not_summed_over_tensor_parallel_ranks(
    monkeypatch: pytest.MonkeyPatch, summed: bool
) -> None:
    # https://github.com/modelscope/mcore-bridge/pull/173: each rank went its own way with a replicated factor
    checks = []
    for index in (0, 1):
        recipe = small_recipe(LORA)
        backend = FakeBackend(recipe)
        one = Axis(0, 1)
        backend.topology = Topology(index, 2, torch.device("cpu"), one, Axis(index, 2), one)
        adapter = Adapter(
            "linear", WIDTH, WIDTH, LoraSpec.from_config(recipe.policy.lora, 1), "column", Axis(index, 2)
        )
        monkeypatch.setattr(Axis, "sum", lambda axis, tensor: tensor)
        monkeypatch.setattr(module, "gather", lambda topology, value: [value])
        backend.bank = AdapterBank([adapter], backend.topology, torch.float64)
        backend.bank.build_optimizer(recipe.policy.optimizer)
        watch = checks_of(backend)
        # This rank's part of the sum; with the sum done, both ranks hold all of it.
        backend.bank.gradient.fill_(1.0 if summed else 1.0 + index)
        backend.bank.sync_gradients()
        backend.bank.step(0.01)
        backend.bank.gradient.fill_(0.5 if summed else 0.5 - index)
        backend.bank.sync_gradients()
        backend.bank.step(0.01)
        checks.append(watch)
    told: list[tuple[int, int, str, str]] = []

    def note(topology: Topology, value: tuple[int, int, str, str]) -> list[tuple[int, int, str, str]]:
        told.append(value)
        return list(told)

    monkeypatch.setattr(module, "gather", note)
    for each in checks:
        each._check_replicas()
    (invariant,) = (each for each in checks[1].results if each.name == "replicas_equal")
    assert invariant.ok is summed
    assert summed or invariant.message == "differ: tensor parallel ranks of pp 0"


@pytest.mark.parametrize(
    ("multiple", "fails"), [(4.0, True), (2.0, True), (0.25, True), (-1.0, True), (1.0, False)]
)
def test_a_scale_that_is_applied_twice_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch, multiple: float, fails: bool
) -> None:
    # The suite's default scale is 32 / 8 = 4: applied twice, the adapters add four times what they should.
    monkeypatch.setattr(LoraSpec, "scale", property(lambda spec: multiple * spec.alpha / spec.rank))
    assert red(train()) == (["adapter_formula"] if fails else [])


def test_the_message_says_how_far_off_the_scale_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoraSpec, "scale", property(lambda spec: 16.0))
    backend = FakeBackend(small_recipe(LORA))
    checks = checks_of(backend)
    make_step(backend, checks, 1)
    checks.after_training(1, BATCHES)
    messages = {each.name: each.message for each in checks.results}
    assert messages["adapter_formula"] == "not so: linear adds 4 times what it should"


RESUMED = (LORA, "checkpointing.enabled=true", "checkpointing.metric_name=null")


@pytest.mark.parametrize(("lost", "backend"), [(True, build), (False, build), (True, build_backend)])
def test_adapters_that_are_lost_at_a_resume(
    run: Run, monkeypatch: pytest.MonkeyPatch, lost: bool, backend: Build
) -> None:
    # https://github.com/huggingface/lerobot/issues/3459: wrapped anew after the adapter had been loaded
    run.train(*RESUMED, "debug.faults.stop_at=2", backend=backend)
    load = AdapterBank.load_state_dict

    def loaded(bank: AdapterBank, state: dict[str, object]) -> None:
        load(bank, state)
        if lost:
            for slot in bank.slots:
                bank._initialise(slot)
            bank.publish()

    monkeypatch.setattr(AdapterBank, "load_state_dict", loaded)
    run.train(*RESUMED, backend=backend)
    assert run.record.segments == [1, 3]
    resumed = {each.name: each for each in run.record.invariants}["adapters_resumed"]
    assert resumed.ok is not lost
    assert not lost or resumed.message == "not the checkpoint's on rank 0"


def test_adapters_that_are_loaded_but_not_multiplied_with(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.train(*RESUMED, "debug.faults.stop_at=2")
    load = AdapterBank.load_state_dict

    def stale(bank: AdapterBank, state: dict[str, object]) -> None:
        before = bank.compute.clone()
        load(bank, state)
        bank.compute.copy_(before)

    monkeypatch.setattr(AdapterBank, "load_state_dict", stale)
    run.train(*RESUMED)
    assert {each.name: each.ok for each in run.record.invariants}["adapters_resumed"] is False


def test_a_checkpoint_that_does_not_say_what_its_adapters_were() -> None:
    checks = checks_of(FakeBackend(small_recipe(LORA)), first_step=3, saved_adapters=None)
    assert {each.name: each.ok for each in checks.results}["adapters_resumed"] is None


def test_a_dropout_that_is_never_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    # https://github.com/meta-pytorch/torchtune/issues/996: the argument was not passed down
    assert red(train(overrides=(DROPOUT,))) == []
    monkeypatch.setattr(Adapter, "_keep", lambda adapter, x, channels, shard: None)
    assert red(train(overrides=(DROPOUT,))) == ["dropout_applied"]


def test_an_a_that_a_late_weight_init_zeroed() -> None:
    # https://github.com/nvidia-cosmos/cosmos-predict2.5/pull/15
    def initialise(backend: FakeBackend) -> None:
        assert backend.bank is not None
        for slot in backend.bank.slots:
            if slot.factor == "a":
                backend.bank.master[slot.start : slot.stop] = 0.0
        backend.bank.publish()

    verdicts = red(train(initialise))
    assert {"a_gradients_step2", "adapters_moved", "b_gradients_step1"} <= set(verdicts)


def test_too_few_layers_with_adapters() -> None:
    # https://github.com/huggingface/peft/issues/3554: 4 of 56 layers
    backend = FakeBackend(small_recipe(LORA))
    for coverage, ok in ((4 / 56, False), (0.5, True), (None, None)):
        checks = checks_of(backend, layer_coverage=coverage, least_coverage=0.5)
        result = {each.name: each for each in checks.results}["layer_coverage"]
        assert result.ok is ok
    assert checks_of(backend, layer_coverage=4 / 56, least_coverage=0.05).results[1].ok is True


@pytest.mark.parametrize(
    ("spoilt", "name"),
    [(float("nan"), "adapters_finite"), (float("inf"), "adapters_finite"), (1e3, "adapter_growth")],
)
@pytest.mark.parametrize(("in_step", "steps", "seen"), [(2, 3, 2), (3, 4, 4), (3, 7, 5)])
def test_adapters_that_explode(
    monkeypatch: pytest.MonkeyPatch, spoilt: float, name: str, in_step: int, steps: int, seen: int
) -> None:
    """Seen at the next look: after the first two steps, every fifth, and the last."""
    # https://github.com/pytorch/torchtitan/issues/421
    step = FakeBackend.optimizer_step
    made: list[int] = []

    def exploding(backend: FakeBackend, lr: float) -> None:
        step(backend, lr)
        made.append(1)
        if len(made) == in_step:
            assert backend.bank is not None
            backend.bank.master[7] = spoilt
            backend.bank.publish()

    monkeypatch.setattr(FakeBackend, "optimizer_step", exploding)
    backend = FakeBackend(small_recipe(LORA))
    checks = checks_of(backend)
    for number in range(1, steps + 1):
        make_step(backend, checks, number)
    checks.after_training(steps, BATCHES)
    results = {each.name: each for each in checks.results}
    assert results[name].ok is False
    assert results[name].message == f"not so: linear by step {seen}"
    others = {"adapters_finite", "adapter_growth"} - {name}
    assert all(results[other].ok for other in others)


def test_probes_leave_the_adapters_as_they_were() -> None:
    backend = FakeBackend(small_recipe(LORA, DROPOUT))
    assert backend.bank is not None
    checks = checks_of(backend, dropout=0.5)
    make_step(backend, checks, 1)
    master, compute = backend.bank.master.clone(), backend.bank.compute.clone()
    checks.after_training(1, BATCHES)
    assert torch.equal(backend.bank.master, master)
    assert torch.equal(backend.bank.compute, compute)
    assert not backend.bank.gradient.any()


def test_what_the_invariants_cost_is_measured_and_limited_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def cost(kind: str, seconds: float) -> Invariant:
        backend = FakeBackend(small_recipe(LORA))
        checks = checks_of(backend)
        make_step(backend, checks, 1)
        checks._steps_timed, checks._once = 0, 0.0
        # The first two steps may take as long as they like.
        for spent in (0.5, 0.25, seconds, 0.0):
            checks._seconds = spent
            assert checks.take_seconds(1.0) == spent
        assert checks.take_seconds(0.0) == 0.0
        one = Axis(0, 1)
        checks._topology = Topology(0, 1, torch.device(kind), one, one, one)
        checks._check_cost()
        return checks.results[-1]

    assert cost("cuda", 0.019).ok
    assert not cost("cuda", 0.021).ok
    assert cost("cpu", 0.021).ok
    expected = "1.05% of the steps' time (at most 1%), and 0.75 s in the first 2 steps"
    assert cost("cuda", 0.021).message == expected


def test_two_steps_cost_nothing_but_what_is_asked_once() -> None:
    backend = FakeBackend(small_recipe(LORA))
    checks = checks_of(backend)
    make_step(backend, checks, 1)
    checks._steps_timed, checks._once, checks._seconds = 1, 0.25, 0.25
    checks.take_seconds(1.0)
    checks._check_cost()
    assert (checks.results[-1].ok, checks.results[-1].message) == (
        True,
        "0.5 s in the first 2 steps, and there is no other",
    )


def test_every_step_says_what_its_invariants_took(run: Run) -> None:
    run.train(LORA)
    seconds = run.metrics["timing/train/invariants"]
    assert list(seconds) == ["1", "2", "3", "4"]
    assert all(value > 0.0 for value in seconds.values())


def test_without_a_timed_step_or_a_linear_to_ask_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = checks_of(FakeBackend(small_recipe(LORA)))
    monkeypatch.setattr(module, "scale_found", lambda *asked: {})
    checks._check_formula(BATCHES)
    checks._check_cost()
    assert [each.ok for each in checks.results[-2:]] == [None, None]
