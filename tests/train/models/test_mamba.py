# SPDX-License-Identifier: Apache-2.0
"""The Mamba-2 core against the recurrence as it is written down, and against transformers' mixer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lora_suite.train.models.mamba import MambaSizes, MambaWeights, causal_conv, gated_norm, mix, recurrence

SIZES = MambaSizes(
    heads=4, head_dim=3, groups=2, state=5, kernel=4, chunk=4, eps=1e-5, dt_limits=(0.001, float("inf"))
)


def draw(*size, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*size, generator=generator, dtype=torch.float64) * scale).requires_grad_()


def one_by_one(q, k, v, decay, starts):
    """The recurrence position by position: the definition."""
    rows, length, heads, _ = v.shape
    shared = heads // q.shape[2]
    q, k = (each.repeat_interleave(shared, 2) for each in (q, k))
    state, out = torch.zeros(rows, heads, q.shape[3], v.shape[3], dtype=v.dtype), []
    for t in range(length):
        kept = decay[:, t].exp()
        if starts is not None:
            kept = kept.where(~starts[:, t, None], 0.0)
        state = state * kept[..., None, None] + k[:, t, :, :, None] * v[:, t, :, None]
        out.append(torch.einsum("rhn,rhnp->rhp", q[:, t], state))
    return torch.stack(out, 1)


def inputs(rows=2, length=11, seed=0):
    q, k = (draw(rows, length, 2, 5, seed=seed + each) for each in (1, 2))
    v = draw(rows, length, 4, 3, seed=seed + 3)
    decay = (-draw(rows, length, 4, seed=seed + 4).detach().exp()).requires_grad_()
    return q, k, v, decay


STARTS = torch.tensor(
    [[1, 0, 0, 0, 0, 1, 0, 0, 1, 1, 0], [1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]], dtype=torch.bool
)


@pytest.mark.parametrize("starts", [None, STARTS], ids=["rows", "packed"])
@pytest.mark.parametrize("chunk", [1, 4, 16])
def test_chunks_compute_the_recurrence(chunk, starts):
    given = inputs()
    weight = draw(2, 11, 4, 3, seed=9).detach()
    expected, found = one_by_one(*given, starts), recurrence(*given, starts, chunk)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    wanted = torch.autograd.grad((expected * weight).sum(), given)
    for mine, theirs in zip(torch.autograd.grad((found * weight).sum(), given), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


def test_a_strong_decay_forgets_without_nan():
    q, k, v, _ = inputs()
    decay = torch.full((2, 11, 4), -1e4, dtype=torch.float64, requires_grad=True)
    y = recurrence(q, k, v, decay, None, 4)
    # Nothing but the position itself is left.
    own = (q * k).sum(-1).repeat_interleave(2, 2)[..., None] * v
    torch.testing.assert_close(y, own)
    y.sum().backward()
    assert decay.grad.isfinite().all()


def test_the_convolution_is_torchs_own():
    x, weight, bias = draw(2, 7, 6), draw(6, 1, 4, seed=1), draw(6, seed=2)
    expected = torch.nn.functional.conv1d(x.transpose(1, 2), weight, bias, padding=3, groups=6)[..., :7]
    expected = torch.nn.functional.silu(expected).transpose(1, 2)
    torch.testing.assert_close(causal_conv(x, weight, bias, None), expected)


def weights():
    return MambaWeights(
        conv=draw(SIZES.conv_channels, 1, 4, seed=1),
        conv_bias=draw(SIZES.conv_channels, seed=2),
        dt_bias=draw(4, seed=3),
        a_log=draw(4, seed=4),
        d=draw(4, seed=5),
        norm=draw(12, seed=6),
    )


def test_packed_rows_do_not_see_each_other():
    given, rows = weights(), [draw(1, length, SIZES.projected, seed=20 + length) for length in (6, 1, 5)]
    apart = torch.cat([mix(row, given, SIZES) for row in rows], 1)
    positions = torch.cat([torch.arange(row.shape[1]) for row in rows])[None]
    packed = mix(torch.cat(rows, 1), given, SIZES, positions)
    torch.testing.assert_close(packed, apart)
    assert not torch.allclose(packed, mix(torch.cat(rows, 1), given, SIZES))


def test_the_norm_is_of_each_group():
    x, gate, weight = draw(2, 3, 12), draw(2, 3, 12, seed=1), draw(12, seed=2)
    gated = x * gate * torch.sigmoid(gate)
    parts = [part / (part.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() for part in gated.chunk(2, -1)]
    torch.testing.assert_close(gated_norm(x, gate, weight, 2, 1e-5), torch.cat(parts, -1) * weight)


@pytest.fixture
def nemotron(monkeypatch):
    """transformers' module, which computes much in float32 whatever the model's dtype, in float64."""
    from transformers.models.nemotron_h import modeling_nemotron_h as module

    class Wide:
        float32 = torch.float64

        def __getattr__(self, name):
            return getattr(torch, name)

    monkeypatch.setattr(module, "torch", Wide())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    return module


def test_the_mixer_is_transformers(nemotron):
    config = SimpleNamespace(
        mamba_num_heads=4,
        mamba_head_dim=3,
        hidden_size=8,
        ssm_state_size=5,
        conv_kernel=4,
        use_conv_bias=True,
        mamba_hidden_act="silu",
        n_groups=2,
        chunk_size=4,
        time_step_min=0.001,
        use_bias=False,
        layer_norm_epsilon=1e-5,
        use_mamba_kernels=True,
        layer_types=["linear_attention"],
    )
    mixer, mine = nemotron.NemotronHMamba2Mixer(config, 0).double(), weights()
    theirs = (mixer.conv1d.weight, mixer.conv1d.bias, mixer.dt_bias, mixer.A_log, mixer.D, mixer.norm.weight)
    with torch.no_grad():
        for target, source in zip(theirs, mine, strict=True):
            target.copy_(source)
    x = draw(2, 11, 8, seed=30)
    y = mix(x @ mixer.in_proj.weight.t(), mine, SIZES) @ mixer.out_proj.weight.t()
    expected = mixer(x)
    torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-12)
    weight = draw(2, 11, 8, seed=31).detach()
    wanted = torch.autograd.grad((expected * weight).sum(), (x, *theirs))
    for ours, other in zip(torch.autograd.grad((y * weight).sum(), (x, *mine)), wanted, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-10, atol=1e-11)
