# SPDX-License-Identifier: Apache-2.0
"""Bugs that the field had, planted in this backend: each turns the invariant red that is there for it."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest

from lora_suite.train.lora.invariants import InvariantChecks
from lora_suite.train.topology import Axis
from tests.train.dtensor.ranks import LORA, Setting, rows, run_ranks, share, supervised

TP2 = Setting((LORA, "policy.dtensor_cfg.tensor_parallel_size=2"), world=2)
# With the head adapted the loss has a gradient, though the layers below it are cut off.
RECOMPUTED = Setting(
    (
        LORA,
        "policy.dtensor_cfg.lora_cfg.target_modules=[lm_head, q_proj]",
        "policy.dtensor_cfg.activation_checkpointing=true",
    )
)


def nothing(backend):
    """A sound training."""


def sum_left_out(backend):
    """The bank as of a rank that is alone in tensor parallelism."""
    backend.bank.topology = replace(backend.topology, tp=Axis(0, 1))


def norms_unfrozen(backend):
    """What is no linear asks for a gradient again."""
    for name, parameter in backend.model.named_parameters():
        if "norm" in name:
            parameter.requires_grad_(True)


def all_unfrozen(backend):
    """Every weight asks for a gradient again."""
    backend.model.requires_grad_(True)


def verdicts(setting, spoil):
    """The invariants of two steps: name -> (ok, message)."""
    backend = setting.build()
    batches = share(rows(), backend.topology.dp.index, backend.topology.dp.size, 2)
    checks = InvariantChecks(backend, backend.bank, None, 1, None)
    spoil(backend)
    for step in (1, 2):
        loss = backend.forward_backward(batches, supervised(rows()))
        backend.sync_gradients()
        checks.after_backward(step)
        backend.clip_gradients(1.0)
        backend.optimizer_step(1e-3)
        checks.after_step(step, float(loss), loss_is_comparable=False)
    checks.after_training(2, batches)
    return {each.name: (each.ok, each.message) for each in checks.results}


def on_two_ranks():
    """The faults of tensor parallelism, and what is said where every weight trains."""
    found = {spoil.__name__: verdicts(TP2, spoil) for spoil in (nothing, sum_left_out, norms_unfrozen)}
    with pytest.raises(ValueError, match="frozen") as refusal:
        verdicts(TP2, all_unfrozen)
    return found | {"refusal": str(refusal.value)}


def reentrant(model, *_):
    """Recompute as trainers did that took back what transformers does for frozen embeddings."""
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.disable_input_require_grads()


def recomputed():
    """Recomputation as it is, and in the variant that needs an input which asks for a gradient."""
    found = {"sound": verdicts(RECOMPUTED, nothing)}
    with pytest.MonkeyPatch.context() as patch:
        # The package has a function of the module's name.
        module = importlib.import_module("lora_suite.train.backends.dtensor.build")
        patch.setattr(module, "recompute_layers", reentrant)
        found["reentrant"] = verdicts(RECOMPUTED, nothing)
    return found


def red(found):
    return sorted(name for name, (ok, _) in found.items() if ok is False)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run_ranks(2, tmp_path_factory.mktemp("two") / "ranks", on_two_ranks)


@pytest.mark.slow
def test_a_sum_over_tensor_parallel_ranks_that_is_left_out(two):
    # https://github.com/modelscope/mcore-bridge/pull/173
    for rank in two:
        assert red(rank["nothing"]) == []
        assert red(rank["sum_left_out"]) == ["replicas_equal"]
        assert rank["sum_left_out"]["replicas_equal"][1] == "differ: tensor parallel ranks of pp 0"


@pytest.mark.slow
def test_a_base_that_is_unfrozen_after_it_was_split(two):
    # https://github.com/NVIDIA-NeMo/Automodel/issues/547
    for rank in two:
        assert red(rank["norms_unfrozen"]) == ["only_adapters_train"]
        assert "model.layers.0.input_layernorm.weight" in rank["norms_unfrozen"]["only_adapters_train"][1]
        assert "frozen" in rank["refusal"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_reentrant_recomputation_that_cuts_adapters_off(tmp_path):
    # https://github.com/huggingface/transformers/issues/26221
    (found,) = run_ranks(1, tmp_path / "ranks", recomputed)
    assert red(found["sound"]) == []
    assert {"a_gradients_step2", "adapters_moved", "b_gradients_step1"} <= set(red(found["reentrant"]))
    assert found["reentrant"]["b_gradients_step1"][1] == (
        "not so: model.layers.0.self_attn.q_proj.b, model.layers.1.self_attn.q_proj.b"
    )
