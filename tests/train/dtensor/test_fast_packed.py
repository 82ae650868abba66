# SPDX-License-Identifier: Apache-2.0
"""Packed rows on the fast path: the same training, one shape for all packs, layers compiled once."""

from __future__ import annotations

from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from lora_suite.train.batch import IGNORED, MicroBatch, Segments
from lora_suite.train.models import attention
from tests.train.dtensor.ranks import LORA, Setting, rows, run_ranks
from tests.train.dtensor.test_fast import MODELS, PEFT, build_fast, factors, model_file, refusal, wake


def test_packs_are_of_one_shape_whatever_their_rows():
    packed = "policy.sequence_packing.enabled=true"
    assert refusal(Setting((LORA, packed, "data.pad_to_max_length=false"))) is None
    assert refusal(Setting((LORA, PEFT, packed, "data.pad_to_max_length=false"))) is None


def losses_packed_and_not(setting, lengths):
    """Loss, norm, validation loss and gradients of the same rows: padded, and packed into `lengths`."""
    batch = rows()
    packed = [packed_rows(batch, counts) for counts in lengths]
    return (
        backend_trace(build_fast(setting), [batch]),
        backend_trace(build_fast(setting), packed),
        backend_trace(setting.build(), packed),
    )


def backend_trace(backend, micro):
    if backend.bank is not None:
        wake(backend)
    loss = backend.forward_backward(micro, 30).item()
    backend.sync_gradients()
    norm = backend.clip_gradients(None).item()
    gradients = factors(backend, backend.bank.master_gradient) if backend.bank is not None else {}
    backend.optimizer_step(1e-2)
    return {"seen": [loss, norm, backend.evaluate(micro).item()], "gradients": gradients}


def packed_rows(batch, which):
    """Rows one behind the other, each without its padding, and padding behind, in pieces: 48 slots."""
    lengths = [16 - row for row in which]
    ids = torch.cat([batch.input_ids[row, : 16 - row] for row in which])
    labels = torch.cat([batch.labels[row, : 16 - row] for row in which])
    rest = 48 - len(ids)
    lengths += [min(16, rest - start) for start in range(0, rest, 16)]
    return MicroBatch(
        torch.cat([ids, ids.new_zeros(rest)])[None],
        torch.cat([labels, labels.new_full((rest,), IGNORED)])[None],
        torch.cat([torch.arange(length) for length in lengths])[None],
        Segments.of(tuple(lengths)),
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("overrides", [(), (LORA,), (LORA, PEFT)], ids=["full", "lora", "peft"])
def test_packed_rows_train_like_padded_ones(tmp_path, family, overrides):
    setting = Setting(overrides, model_file(tmp_path, family), "float64")
    # Packs of different numbers of rows: the second is mostly padding.
    padded, *others = run_ranks(1, tmp_path / "ranks", losses_packed_and_not, setting, [[0, 2, 3], [1]])[0]
    for packed in others:
        assert packed["seen"] == pytest.approx(padded["seen"], rel=1e-12)
        for name, gradient in padded["gradients"].items():
            torch.testing.assert_close(packed["gradients"][name], gradient, rtol=1e-10, atol=1e-16)


def outgrown(setting):
    backend, batch = build_fast(setting), rows()
    wake(backend)
    narrow = [packed_rows(batch, [3])]
    wide = packed_rows(batch, [0, 1, 2])
    ids, labels = wide.input_ids, wide.labels
    single = MicroBatch(ids, labels, torch.zeros_like(ids), Segments.of((1,) * 48))
    said = StringIO()
    with redirect_stdout(said):
        losses = [backend.forward_backward(each, 30).item() for each in (narrow, [single], [single], narrow)]
    return losses, said.getvalue(), backend.evaluate(narrow).item()


def test_packs_that_outgrow_their_room_are_told_once(tmp_path):
    losses, said, evaluated = run_ranks(
        1, tmp_path / "ranks", outgrown, Setting((LORA,), precision="float64")
    )[0]
    assert losses[0] == losses[3] == pytest.approx(evaluated, rel=1e-12)
    assert losses[1] == losses[2] != losses[0]
    (line,) = said.splitlines()
    assert "policy.sequence_packing: a pack has 48 rows of up to 512 tokens, there was room for 8" in line


@torch.library.custom_op("lora_suite_tests::packed", mutates_args=())
def stand_in(states: torch.Tensor, boundaries: torch.Tensor, longest: int) -> torch.Tensor:
    """For the kernel, which needs a GPU: every state times what it is told of rows."""
    return states * (len(boundaries) + longest / 1024)


@stand_in.register_fake
def _(states, boundaries, longest):
    return torch.empty_like(states)


def backward_of_stand_in(ctx, gradient):
    return stand_in(gradient, ctx.saved_tensors[0], ctx.longest), None, None


def keep_for_backward(ctx, inputs, output):
    ctx.save_for_backward(inputs[1])
    ctx.longest = inputs[2]


stand_in.register_autograd(backward_of_stand_in, setup_context=keep_for_backward)


def attend_by_stand_in(query, key, value, boundaries, longest, scale):
    return stand_in(query, boundaries, longest)


def of_many_kinds_of_packs(setting):
    """Losses and norms of packs of ever more and longer rows, written and compiled; and the compilations."""
    attention.VARLEN = attend_by_stand_in
    attention._in_kernel = lambda device, dtype: True
    written, compiled = build_fast(setting), build_fast(setting)
    graphs = CompileCounterWithBackend("aot_eager")
    for layer in compiled.model.layers:
        layer.compile(fullgraph=True, dynamic=False, backend=graphs)
    pack = packed_rows(rows(), [0, 2, 3])
    seen = []
    for kind in range(1, 7):
        batch = replace(pack, segments=pack.segments.filled(8 * kind))
        for backend in (written, compiled):
            wake(backend)
            backend.bank.gradient.zero_()
            loss = backend._compute(512 * kind, *batch.tensors).item()
            seen.append((loss, backend.bank.gradient.norm().item()))
    return seen, graphs.frame_count


@pytest.mark.slow
@pytest.mark.parametrize("arm", [(LORA,), (LORA, PEFT)], ids=["lora", "peft"])
def test_layers_are_compiled_once_for_all_kinds_of_packs(tmp_path, arm):
    seen, graphs = run_ranks(1, tmp_path / "ranks", of_many_kinds_of_packs, Setting(arm))[0]
    # The first layer's input has no gradient, so it is another graph.
    assert graphs == 2
    assert len(set(seen[::2])) == 6
    for written, compiled in zip(seen[::2], seen[1::2], strict=True):
        assert compiled == pytest.approx(written, rel=1e-5)
