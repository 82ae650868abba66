# SPDX-License-Identifier: Apache-2.0
"""How often ranks talk in a step: adapters and micro batches must not add to it."""

from __future__ import annotations

from collections import Counter

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from tests.train.dtensor.ranks import LORA, Setting, rows, run_ranks, share, supervised


class Collectives(TorchDispatchMode):
    """Counts the reductions and gatherings that are called within it, by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional") and (
            "reduce" in func.__name__ or "gather" in func.__name__
        ):
            self.counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def counts_on_this_rank(settings, micro):
    """Collectives of forward and backward, for each setting."""
    counts = []
    for setting in settings:
        backend = setting.build()
        dp = backend.topology.dp
        with Collectives() as collectives:
            backend.forward_backward(share(rows(), dp.index, dp.size, micro), supervised(rows()))
        counts.append(collectives.counts)
    return counts


@pytest.mark.slow
def test_adapters_add_no_collective_under_tensor_parallelism(tmp_path):
    tp = "policy.dtensor_cfg.tensor_parallel_size=2"
    settings = [Setting((LORA, tp), world=2), Setting((tp,), world=2)]
    for lora, full in run_ranks(2, tmp_path / "ranks", counts_on_this_rank, settings, 4):
        # Two layers: forward the outputs of attention and MLP; backward their inputs.
        assert full.total() == 2 * 4
        # Below the first adapters nothing needs a gradient, so the first attention's input needs no sum.
        assert lora.total() in (full.total(), full.total() - 1)
        assert not lora - full


@pytest.mark.slow
@pytest.mark.parametrize("lora", [(LORA,), ()], ids=["lora", "full"])
def test_gradients_are_reduced_once_a_step(tmp_path, lora):
    setting = Setting(lora, world=2)
    ((one,), (two,)) = (
        run_ranks(2, tmp_path / str(micro), counts_on_this_rank, [setting], micro)[0] for micro in (2, 1)
    )
    reductions = [kind for kind in one | two if "reduce" in kind]
    # Two layers and the rest of the model; frozen weights are never reduced.
    assert [sum(counts[kind] for kind in reductions) for counts in (one, two)] == ([0, 0] if lora else [3, 3])
    assert two.total() > one.total()
