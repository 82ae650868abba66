# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of Mamba-2's recurrence, forward and backward; `models.mamba.recurrence` is their reference.

Of each head, with totals s of the decays inside a chunk of positions, L_ij = exp(s_i - s_j) for j ≤ i, and
P and E the state before a chunk and the gradient by the state after it:

    y_i  = Σ_j (q_i·k_j) L_ij v_j + exp(s_i) q_i·P
    P'   = exp(s_last) P + Σ_j exp(s_last - s_j) k_j v_jᵀ

    dM   = dy·vᵀ,  dS = dM∘L,  W = dM∘L∘(q·kᵀ),  G = dy·Pᵀ,  F = v·Eᵀ
    dq_i = Σ_j dS_ij k_j + exp(s_i) G_i,       dk_j = Σ_i dS_ij q_i + exp(s_last - s_j) F_j
    dv_j = Σ_i (q_i·k_j) L_ij dy_i + exp(s_last - s_j) k_j·E
    ds_i = Σ_j (W_ij - W_ji) + exp(s_i) dy_i·(q_i·P) - exp(s_last - s_i) v_i·(k_i·E)
    ds_last += Σ_j exp(s_last - s_j) v_j·(k_j·E) + exp(s_last) P·E

A state's blocks walk over the chunks of a row one after the other; everything else is one program a chunk.
Products are in the inputs' dtype with float32 sums; decays, their totals and their gradients are float32.
Loaded where Triton and a GPU are.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

CHUNK = 64
"""Positions that one program takes: a state is stored for each of them, so fewer cost more memory."""

_STATE_BLOCK = 32
_FORGET = -40.0
"""Logarithm of the decay at a segment's start: exp of it is below what float32 sums can tell from zero."""


@triton.jit  # type: ignore[untyped-decorator]
def _walk(  # type: ignore[no-untyped-def]
    left,
    right,
    decay,
    states,
    length,
    left_row,
    left_time,
    heads: tl.constexpr,
    shared: tl.constexpr,
    n: tl.constexpr,
    p: tl.constexpr,
    chunk: tl.constexpr,
    block: tl.constexpr,
    backward: tl.constexpr,
):
    """States before each chunk, of left = k and right = v; backward: gradients after each, of q and dy."""
    row, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    over_n = tl.program_id(1) * block + tl.arange(0, block)
    over_p = tl.arange(0, p)
    at = tl.arange(0, chunk)
    chunks = tl.cdiv(length, chunk)
    left += row * left_row + (head // shared) * n
    right += (row * length * heads + head) * p
    decay += row * length * heads + head
    states += (row * chunks * heads + head) * n * p
    state = tl.zeros([block, p], tl.float32)
    for step in range(chunks):
        index = chunks - 1 - step if backward else step
        time = index * chunk + at.to(tl.int64)
        begin = tl.cast(index, tl.int64) * (heads * n * p)
        place = states + begin + over_n[:, None] * p + over_p[None, :]
        tl.store(place, state.to(states.dtype.element_ty))
        inside = time < length
        total = tl.cumsum(tl.load(decay + time * heads, mask=inside, other=0.0), 0)
        last = tl.sum(tl.where(at == chunk - 1, total, 0.0), 0)
        factor = tl.exp(total) if backward else tl.exp(last - total)
        x = tl.load(left + time[None, :] * left_time + over_n[:, None], mask=inside[None, :], other=0.0)
        z = tl.load(right + time[:, None] * heads * p + over_p[None, :], mask=inside[:, None], other=0.0)
        x = (x.to(tl.float32) * factor[None, :]).to(z.dtype)
        state = state * tl.exp(last) + tl.dot(x, z)


@triton.jit  # type: ignore[untyped-decorator]
def _output(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    decay,
    states,
    y,
    length,
    q_row,
    q_time,
    k_row,
    k_time,
    heads: tl.constexpr,
    shared: tl.constexpr,
    n: tl.constexpr,
    p: tl.constexpr,
    chunk: tl.constexpr,
):
    """y of one chunk of one head."""
    index = tl.program_id(0).to(tl.int64)
    row, head = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    group = head // shared
    at, over_n, over_p = tl.arange(0, chunk), tl.arange(0, n), tl.arange(0, p)
    chunks = tl.cdiv(length, chunk)
    time = index * chunk + at
    inside = time < length
    total = tl.cumsum(tl.load(decay + (row * length + time) * heads + head, mask=inside, other=0.0), 0)
    queries = tl.load(
        q + row * q_row + time[:, None] * q_time + group * n + over_n[None, :],
        mask=inside[:, None],
        other=0.0,
    )
    keys = tl.load(
        k + row * k_row + time[:, None] * k_time + group * n + over_n[None, :],
        mask=inside[:, None],
        other=0.0,
    )
    place = ((row * length + time[:, None]) * heads + head) * p + over_p[None, :]
    values = tl.load(v + place, mask=inside[:, None], other=0.0)
    state = tl.load(
        states + ((row * chunks + index) * heads + head) * n * p + over_n[:, None] * p + over_p[None, :]
    )
    causal = at[:, None] >= at[None, :]
    between = tl.exp(tl.where(causal, total[:, None] - total[None, :], -float("inf")))
    scores = (tl.dot(queries, tl.trans(keys)) * between).to(values.dtype)
    out = tl.dot(queries, state) * tl.exp(total)[:, None] + tl.dot(scores, values)
    tl.store(y + place, out.to(y.dtype.element_ty), mask=inside[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _by_head(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    dy,
    decay,
    states,
    ends,
    dv,
    d_decay,
    length,
    q_row,
    q_time,
    k_row,
    k_time,
    heads: tl.constexpr,
    shared: tl.constexpr,
    n: tl.constexpr,
    p: tl.constexpr,
    chunk: tl.constexpr,
):
    """dv and the gradient of the decays, of one chunk of one head."""
    index = tl.program_id(0).to(tl.int64)
    row, head = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    group = head // shared
    at, over_n, over_p = tl.arange(0, chunk), tl.arange(0, n), tl.arange(0, p)
    chunks = tl.cdiv(length, chunk)
    time = index * chunk + at
    inside = time < length
    rows = inside[:, None]
    total = tl.cumsum(tl.load(decay + (row * length + time) * heads + head, mask=inside, other=0.0), 0)
    last = tl.sum(tl.where(at == chunk - 1, total, 0.0), 0)
    queries = tl.load(
        q + row * q_row + time[:, None] * q_time + group * n + over_n[None, :], mask=rows, other=0.0
    )
    keys = tl.load(
        k + row * k_row + time[:, None] * k_time + group * n + over_n[None, :], mask=rows, other=0.0
    )
    place = ((row * length + time[:, None]) * heads + head) * p + over_p[None, :]
    values = tl.load(v + place, mask=rows, other=0.0)
    d_out = tl.load(dy + place, mask=rows, other=0.0)
    of_state = ((row * chunks + index) * heads + head) * n * p + over_n[:, None] * p + over_p[None, :]
    state, end = tl.load(states + of_state), tl.load(ends + of_state)

    causal = at[:, None] >= at[None, :]
    between = tl.exp(tl.where(causal, total[:, None] - total[None, :], -float("inf")))
    scores = tl.dot(queries, tl.trans(keys)) * between
    weighted = tl.dot(d_out, tl.trans(values)) * scores
    to_end = tl.dot(keys, end) * tl.exp(last - total)[:, None]
    from_state = tl.dot(queries, state) * tl.exp(total)[:, None]
    d_values = tl.dot(tl.trans(scores.to(d_out.dtype)), d_out) + to_end
    tl.store(dv + place, d_values.to(dv.dtype.element_ty), mask=rows)

    by_end = tl.sum(to_end * values.to(tl.float32), 1)
    d_total = tl.sum(weighted, 1) - tl.sum(weighted, 0) - by_end
    d_total += tl.sum(from_state * d_out.to(tl.float32), 1)
    carried = tl.sum(tl.sum(state.to(tl.float32) * end.to(tl.float32), 1), 0) * tl.exp(last)
    d_total += tl.where(at == chunk - 1, tl.sum(by_end, 0) + carried, 0.0)
    later = tl.cumsum(d_total, 0, reverse=True)
    tl.store(d_decay + (row * length + time) * heads + head, later, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _by_group(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    dy,
    decay,
    states,
    ends,
    dq,
    dk,
    length,
    q_row,
    q_time,
    k_row,
    k_time,
    heads: tl.constexpr,
    shared: tl.constexpr,
    n: tl.constexpr,
    p: tl.constexpr,
    chunk: tl.constexpr,
):
    """dq and dk of one chunk of one group: sums over its heads, one after the other."""
    groups: tl.constexpr = heads // shared
    index = tl.program_id(0).to(tl.int64)
    row, group = (tl.program_id(1) // groups).to(tl.int64), tl.program_id(1) % groups
    at, over_n, over_p = tl.arange(0, chunk), tl.arange(0, n), tl.arange(0, p)
    chunks = tl.cdiv(length, chunk)
    time = index * chunk + at
    inside = time < length
    rows = inside[:, None]
    causal = at[:, None] >= at[None, :]
    d_queries = tl.zeros([chunk, n], tl.float32)
    d_keys = tl.zeros([chunk, n], tl.float32)
    d_plain = tl.zeros([chunk, chunk], tl.float32)
    for member in range(shared):
        head = group * shared + member
        total = tl.cumsum(tl.load(decay + (row * length + time) * heads + head, mask=inside, other=0.0), 0)
        last = tl.sum(tl.where(at == chunk - 1, total, 0.0), 0)
        place = ((row * length + time[:, None]) * heads + head) * p + over_p[None, :]
        values = tl.load(v + place, mask=rows, other=0.0)
        d_out = tl.load(dy + place, mask=rows, other=0.0)
        of_state = ((row * chunks + index) * heads + head) * n * p + over_n[:, None] * p + over_p[None, :]
        state, end = tl.load(states + of_state), tl.load(ends + of_state)
        between = tl.exp(tl.where(causal, total[:, None] - total[None, :], -float("inf")))
        d_plain += tl.dot(d_out, tl.trans(values)) * between
        d_out = (d_out.to(tl.float32) * tl.exp(total)[:, None]).to(state.dtype)
        d_queries = tl.dot(d_out, tl.trans(state), d_queries)
        values = (values.to(tl.float32) * tl.exp(last - total)[:, None]).to(end.dtype)
        d_keys = tl.dot(values, tl.trans(end), d_keys)
    queries = tl.load(
        q + row * q_row + time[:, None] * q_time + group * n + over_n[None, :], mask=rows, other=0.0
    )
    keys = tl.load(
        k + row * k_row + time[:, None] * k_time + group * n + over_n[None, :], mask=rows, other=0.0
    )
    d_plain = d_plain.to(keys.dtype)
    d_queries = tl.dot(d_plain, keys, d_queries)
    d_keys = tl.dot(tl.trans(d_plain), queries, d_keys)
    place = ((row * length + time[:, None]) * groups + group) * n + over_n[None, :]
    tl.store(dq + place, d_queries.to(dq.dtype.element_ty), mask=rows)
    tl.store(dk + place, d_keys.to(dk.dtype.element_ty), mask=rows)


def _sizes(q: torch.Tensor, v: torch.Tensor) -> dict[str, int]:
    heads, groups = v.shape[2], q.shape[2]
    return {"heads": heads, "shared": heads // groups, "n": q.shape[3], "p": v.shape[3], "chunk": CHUNK}


def _states(left: torch.Tensor, right: torch.Tensor, decay: torch.Tensor, backward: bool) -> torch.Tensor:
    """What `_walk` leaves: [rows, chunks, heads, state, channels] in right's dtype."""
    rows, length, heads, p = right.shape
    n = left.shape[3]
    states = right.new_empty(rows, triton.cdiv(length, CHUNK), heads, n, p)
    block = min(_STATE_BLOCK, n)
    _walk[(rows * heads, n // block)](
        left,
        right,
        decay,
        states,
        length,
        left.stride(0),
        left.stride(1),
        **_sizes(left, right),
        block=block,
        backward=backward,
        num_warps=4,
    )
    return states


def _strided(x: torch.Tensor) -> torch.Tensor:
    """x [rows, length, groups, state] with the last two dims in one piece."""
    return x if x.stride(3) == 1 and x.stride(2) == x.shape[3] else x.contiguous()


@torch.library.custom_op("lora_suite::scan", mutates_args=())
def scan(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """The recurrence: q, k [rows, length, groups, state]; v [rows, length, heads, channels]; decay float32.

    state and channels must be powers of two from 16 on.
    """
    q, k, v, decay = _strided(q), _strided(k), v.contiguous(), decay.contiguous()
    rows, length, heads, _ = v.shape
    states = _states(k, v, decay, backward=False)
    y = torch.empty_like(v)
    _output[(states.shape[1], rows * heads)](
        q,
        k,
        v,
        decay,
        states,
        y,
        length,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        **_sizes(q, v),
        num_warps=4,
    )
    return y


@torch.library.custom_op("lora_suite::scan_backward", mutates_args=())
def scan_backward(
    dy: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `scan` by q, k, v and decay; the states are computed again rather than kept."""
    q, k, v, decay, dy = _strided(q), _strided(k), v.contiguous(), decay.contiguous(), dy.contiguous()
    rows, length, heads, _ = v.shape
    states, ends = _states(k, v, decay, backward=False), _states(q, dy, decay, backward=True)
    dq, dk = (torch.empty_like(each, memory_format=torch.contiguous_format) for each in (q, k))
    dv, d_decay = torch.empty_like(v), torch.empty_like(decay)
    sizes = _sizes(q, v)
    given = (q, k, v, dy, decay, states, ends)
    strides = (length, q.stride(0), q.stride(1), k.stride(0), k.stride(1))
    _by_head[(states.shape[1], rows * heads)](*given, dv, d_decay, *strides, **sizes, num_warps=4)
    _by_group[(states.shape[1], rows * q.shape[2])](*given, dq, dk, *strides, **sizes, num_warps=8)
    return dq, dk, dv, d_decay


@scan.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    return v.new_empty(v.shape)


@scan_backward.register_fake
def _(
    dy: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    return tuple(each.new_empty(each.shape) for each in (q, k, v, decay))


def _keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    gradients: tuple[torch.Tensor, ...] = scan_backward(dy, *ctx.saved_tensors)
    return gradients


scan.register_autograd(_differentiate, setup_context=_keep)


def through_kernels(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, starts: torch.Tensor | None
) -> torch.Tensor:
    """`models.mamba.Recurrence` by the kernels."""
    if starts is not None:
        decay = decay.masked_fill(starts[..., None], _FORGET)
    y: torch.Tensor = scan(q, k, v, decay)
    return y
