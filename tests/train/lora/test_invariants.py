# SPDX-License-Identifier: Apache-2.0
"""Each invariant turns red for the fault that it is there for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from lora_suite.judge.invariants import REQUIRED_INVARIANTS
from lora_suite.train.batch import MicroBatch
from lora_suite.train.collect import gather
from lora_suite.train.lora import invariants as module
from lora_suite.train.lora.adapter import Adapter
from lora_suite.train.lora.invariants import InvariantChecks
from tests.train.conftest import LORA, small_recipe
from tests.train.fake_backend import FakeBackend

TOKENS = torch.tensor([[65, 66, 67, 68]])
BATCHES = [MicroBatch(TOKENS, torch.tensor([[66, 67, 68, -100]]))]
SUPERVISED = 3


def checks_of(
    backend: FakeBackend, expected: int | None = 384, first_step: int = 1, **more: Any
) -> InvariantChecks:
    assert backend.bank is not None
    more = {"layer_coverage": 1.0, **more}
    return InvariantChecks(backend, backend.bank, expected, first_step, frozen_before=None, **more)


def make_step(backend: FakeBackend, checks: InvariantChecks, step: int) -> None:
    loss = backend.forward_backward(BATCHES, SUPERVISED)
    backend.sync_gradients()
    checks.after_backward(step)
    backend.optimizer_step(0.01)
    checks.after_step(step, float(loss) / SUPERVISED, loss_is_comparable=True)
    checks.take_seconds(1.0)


def train(
    spoil: Callable[[FakeBackend], None] = lambda backend: None,
    *,
    after: Callable[[FakeBackend], None] = lambda backend: None,
    steps: int = 2,
    overrides: Sequence[str] = (),
    dead_adapter: bool = False,
) -> dict[str, bool | None]:
    """Verdicts of a training of a few steps; `spoil` before the first, `after` behind the last."""
    recipe = small_recipe(LORA, *overrides)
    backend = FakeBackend(recipe, dead_adapter)
    spoil(backend)
    dropout = recipe.policy.lora.dropout
    checks = checks_of(backend, expected=backend.trainable_parameters(), dropout=dropout)
    checks.before_first_step(BATCHES, SUPERVISED, b_is_zero=True)
    for step in range(1, steps + 1):
        make_step(backend, checks, step)
    after(backend)
    checks.after_training(steps, BATCHES)
    return {each.name: each.ok for each in checks.results}


def red(verdicts: dict[str, bool | None]) -> list[str]:
    return sorted(name for name, ok in verdicts.items() if not ok)


def test_a_sound_training_is_green_in_everything() -> None:
    verdicts = train()
    assert list(verdicts) == [
        "trainable_params",
        "layer_coverage",
        "adapters_resumed",
        "step1_loss_equals_base",
        "b_gradients_step1",
        "a_gradients_step2",
        "adapters_moved",
        "adapters_finite",
        "adapter_growth",
        "frozen_unchanged",
        "only_adapters_train",
        "replicas_equal",
        "adapter_formula",
        "dropout_applied",
        "invariants_cost",
    ]
    assert set(verdicts) == set(REQUIRED_INVARIANTS)
    assert red(verdicts) == []


def test_a_b_that_does_not_start_at_zero_changes_the_first_loss() -> None:
    def spoil(backend: FakeBackend) -> None:
        assert backend.bank is not None
        backend.bank.master.add_(0.5)
        backend.bank.publish()

    assert red(train(spoil)) == ["step1_loss_equals_base"]


def test_an_adapter_that_the_model_never_calls_gets_no_gradient() -> None:
    # https://github.com/unslothai/unsloth/pull/9331
    assert red(train(dead_adapter=True)) == ["a_gradients_step2", "adapters_moved", "b_gradients_step1"]


def test_an_a_without_gradient_is_seen_at_step_two(monkeypatch: pytest.MonkeyPatch) -> None:
    def beside(adapter: Adapter, x: torch.Tensor, weight: torch.Tensor, bias: None) -> torch.Tensor:
        return x @ weight.T + adapter.spec.scale * (x @ adapter.a.detach().T @ adapter.b.T)

    monkeypatch.setattr(Adapter, "beside", beside)
    # Weight decay still moves A, so that having moved proves less than a gradient.
    assert red(train()) == ["a_gradients_step2"]


def test_coverage_counts_adapters_with_a_gradient() -> None:
    backend = FakeBackend(small_recipe(LORA), dead_adapter=True)
    checks = checks_of(backend)
    assert checks.coverage == 0.0
    make_step(backend, checks, 1)
    assert checks.coverage == 0.5


def test_a_frozen_weight_that_moves_is_seen() -> None:
    # https://github.com/NVIDIA-NeMo/Automodel/issues/547
    def after(backend: FakeBackend) -> None:
        with torch.no_grad():
            backend.model.head.weight[3, 4] += 1e-12

    assert red(train(after=after)) == ["frozen_unchanged"]


def test_a_wrong_count_is_seen_and_an_unknown_one_not_measured() -> None:
    backend = FakeBackend(small_recipe(LORA))
    counts = (checks_of(backend, expected=expected).results[0] for expected in (385, None))
    assert [(each.name, each.ok) for each in counts] == [
        ("trainable_params", False),
        ("trainable_params", None),
    ]


def test_one_step_asks_nothing_of_a() -> None:
    verdicts = train(steps=1)
    assert "a_gradients_step2" not in verdicts
    assert red(verdicts) == []


def test_where_b_does_not_start_at_zero_the_loss_is_not_measured() -> None:
    checks = checks_of(FakeBackend(small_recipe(LORA)))
    checks.before_first_step(BATCHES, SUPERVISED, b_is_zero=False)
    invariant = checks.results[-1]
    assert invariant.name == "step1_loss_equals_base"
    assert (invariant.ok, invariant.message) == (None, "B does not start at zero")


def test_where_a_starts_at_zero_b_has_its_gradient_one_step_later() -> None:
    megatron = (
        "policy.dtensor_cfg.enabled=false",
        "policy.dtensor_cfg.lora_cfg.enabled=false",
        "policy.megatron_cfg.enabled=true",
        "policy.megatron_cfg.lora_cfg.enabled=true",
        "policy.megatron_cfg.lora_cfg.lora_A_init_method=zero",
        "policy.megatron_cfg.lora_cfg.lora_B_init_method=normal",
        "policy.megatron_cfg.lora_cfg.dim=8",
    )
    assert red(train(overrides=megatron)) == []


def test_a_training_loss_that_differs_from_the_base_is_seen() -> None:
    backend = FakeBackend(small_recipe(LORA))
    checks = checks_of(backend)
    checks.before_first_step(BATCHES, SUPERVISED, b_is_zero=True)
    checks.after_step(1, 99.0, loss_is_comparable=False)
    assert red({each.name: each.ok for each in checks.results}) == []
    checks.after_step(1, 99.0, loss_is_comparable=True)
    assert red({each.name: each.ok for each in checks.results}) == ["step1_loss_equals_base"]


def test_a_resumed_training_measures_what_it_can() -> None:
    backend = FakeBackend(small_recipe(LORA))
    checks = checks_of(backend, first_step=5)
    checks.before_first_step(BATCHES, SUPERVISED, b_is_zero=True)
    make_step(backend, checks, 5)
    make_step(backend, checks, 6)
    assert checks.coverage == 1.0
    checks.after_training(6, BATCHES)
    measured = {each.name for each in checks.results}
    at_the_start = {"step1_loss_equals_base", "b_gradients_step1", "a_gradients_step2"}
    assert measured == set(REQUIRED_INVARIANTS) - at_the_start


def test_frozen_weights_of_the_first_segment_count(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FakeBackend(small_recipe(LORA))
    assert backend.bank is not None
    adapters = checks_of(backend).adapters_fingerprint
    checks = InvariantChecks(
        backend,
        backend.bank,
        384,
        5,
        frozen_before="of other weights",
        layer_coverage=1.0,
        saved_adapters=adapters,
    )
    make_step(backend, checks, 5)
    checks.after_training(5, BATCHES)
    assert red({each.name: each.ok for each in checks.results}) == ["frozen_unchanged"]


@pytest.mark.parametrize(
    ("place", "changed", "expected"),
    [
        # The other rank as (pp, tp, ep, all but split experts, those, replicated part), given ours.
        ((0, 0, 0), (True, False, True), False),  # a data parallel copy that differs
        ((0, 0, 0), (False, False, False), True),
        ((0, 1, 0), (True, False, False), True),  # a tensor parallel rank has other shards, equal replicas
        ((0, 1, 0), (True, False, True), False),
        ((1, 0, 0), (True, True, True), True),  # another pipeline stage has other adapters
        ((0, 0, 1), (False, True, False), True),  # an expert parallel rank has other experts
        ((0, 0, 0), (False, True, False), False),  # a copy of the same experts that differs
    ],
)
def test_replicas_are_compared_where_they_are_replicas(
    monkeypatch: pytest.MonkeyPatch,
    place: tuple[int, int, int],
    changed: tuple[bool, bool, bool],
    expected: bool,
) -> None:
    def two_ranks(topology: object, value: object) -> list[object]:
        if isinstance(value, tuple) and len(value) == 6:
            other = [
                f"other {each}" if differs else each for each, differs in zip(value[3:], changed, strict=True)
            ]
            return [value, (*place, *other)]
        return [value]

    backend = FakeBackend(small_recipe(LORA))
    checks = checks_of(backend)
    make_step(backend, checks, 1)
    monkeypatch.setattr(module, "gather", two_ranks)
    checks.after_training(1, BATCHES)
    verdicts = {each.name: each.ok for each in checks.results}
    assert verdicts["replicas_equal"] is expected


def test_a_gradient_missing_on_another_rank_is_a_gradient_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        module, "gather", lambda topology, value: [value, ["linear.b"] if value == [] else value]
    )
    backend = FakeBackend(small_recipe(LORA))
    checks = checks_of(backend)
    make_step(backend, checks, 1)
    results = {each.name: each for each in checks.results}
    assert results["b_gradients_step1"].ok is False
    assert results["b_gradients_step1"].message == "not so: linear.b"


def test_gather_on_one_rank_is_the_value() -> None:
    assert gather(FakeBackend(small_recipe()).topology, {"a": None}) == [{"a": None}]
