# SPDX-License-Identifier: Apache-2.0
"""What happens to rows between the products of routed experts: copied, activated, summed.

Each function leaves `extra` columns free behind its result, where an adapter's part will stand. One Triton
kernel each on a GPU, plain torch elsewhere. ends int32 [experts] is where each expert's rows end. Rows behind
the last are of experts that this rank has not: what they hold is not defined, since grouped products leave
them as they were in memory (https://github.com/pytorch/pytorch/issues/154557), and adds nothing.
"""

from __future__ import annotations

import torch


def gather(
    x: torch.Tensor, order: torch.Tensor, ends: torch.Tensor, choices: int, extra: int
) -> torch.Tensor:
    """Rows of x [tokens, width] by expert: [rows, width + extra]; row i is of token order[i] / choices."""
    rows, width = len(order), x.shape[1]
    out = x.new_empty(rows, width + extra)
    if x.is_cuda:
        from lora_suite.train.fast import expert_kernels

        expert_kernels.gather(x, order, ends, choices, out)
    else:
        out[:, :width] = x[order // choices]
    return out


def relu2(
    h: torch.Tensor, weights: torch.Tensor, order: torch.Tensor, ends: torch.Tensor, extra: int
) -> torch.Tensor:
    """weight · relu(h)² [rows, width + extra] of h [rows, width]; weights [tokens, choices] of the rows."""
    rows, width = h.shape
    out = h.new_empty(rows, width + extra)
    if h.is_cuda:
        from lora_suite.train.fast import expert_kernels

        expert_kernels.relu2(h, weights, order, ends, out)
    else:
        wide = h.to(weights.dtype).relu().square() * weights.flatten()[order, None]
        out[:, :width] = wide.to(h.dtype)
    return out


def relu2_backward(
    h: torch.Tensor,
    d: torch.Tensor,
    weights: torch.Tensor,
    order: torch.Tensor,
    ends: torch.Tensor,
    extra: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients by h [rows, width + extra] and by each row's weight [rows], of the gradient d by `relu2`.

    Those by weights of rows that are not this rank's are zero.
    """
    rows, width = h.shape
    out, d_weights = h.new_empty(rows, width + extra), weights.new_empty(rows)
    if h.is_cuda:
        from lora_suite.train.fast import expert_kernels

        expert_kernels.relu2_backward(h, d, weights, order, ends, out, d_weights)
    else:
        positive, d = h.to(weights.dtype).relu(), d.to(weights.dtype)
        out[:, :width] = (d * 2.0 * positive * weights.flatten()[order, None]).to(h.dtype)
        torch.sum(d * positive.square(), 1, out=d_weights)
        d_weights.masked_fill_(torch.arange(rows, device=h.device) >= ends[-1], 0.0)
    return out, d_weights


def combine(
    rows: torch.Tensor, places: torch.Tensor, ends: torch.Tensor, choices: int, width: int
) -> torch.Tensor:
    """Sums over each token's rows, in the order of its choices: [tokens, width] of rows [rows, width]."""
    tokens = len(places) // choices
    if rows.is_cuda:
        from lora_suite.train.fast import expert_kernels

        return expert_kernels.combine(rows, places, ends, choices, rows.new_empty(tokens, width))
    ours = rows[places].masked_fill((places >= ends[-1])[:, None], 0.0)
    return ours.view(tokens, choices, width).sum(1)
