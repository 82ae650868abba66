# SPDX-License-Identifier: Apache-2.0
"""Which experts a token goes to: sigmoid scores, corrected for balance (DeepSeek-V3, arXiv 2412.19437)."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Routes:
    """How experts are chosen.

    experts: in all. choices: of a token. groups and best_groups: experts stand in groups, and a token goes to
    the groups whose two best experts score highest. normalised: whether a token's weights sum to 1 before
    they are multiplied by `scale`.
    """

    experts: int
    choices: int
    groups: int
    best_groups: int
    normalised: bool
    scale: float


def choose(
    x: torch.Tensor, weight: torch.Tensor, correction: torch.Tensor, routes: Routes
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token, int64 [tokens, choices], and their weights, of float32 at least.

    x [tokens, hidden]; weight [experts, hidden]; correction [experts] is added to the scores for the choice
    alone. Computed in the weight's dtype. No gradient flows through the choice.
    """
    scores = (x.to(weight.dtype) @ weight.t()).sigmoid()
    ranked = scores.detach() + correction
    if routes.best_groups < routes.groups:
        by_group = ranked.view(len(x), routes.groups, -1)
        best = by_group.topk(2, -1).values.sum(-1).topk(routes.best_groups, -1, sorted=False).indices
        kept = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter_(1, best, True)
        ranked = by_group.where(kept[..., None], -torch.inf).view(len(x), -1)
    chosen = ranked.topk(routes.choices, -1, sorted=False).indices
    weights = scores.gather(1, chosen)
    if routes.normalised:
        # The same guard as transformers': a token may score zero with all of its experts.
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return chosen, weights * routes.scale
