# SPDX-License-Identifier: Apache-2.0
"""What is known of a training before it starts: its linears, adapters, counts and arithmetic floor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lora_suite.blueprint.linears import Linear
from lora_suite.blueprint.shape import ModelShape
from lora_suite.blueprint.targets import AdapterSite

Training = Literal["full", "lora"]


@dataclass(frozen=True)
class Blueprint:
    """Facts of a recipe's model, without torch.

    model: None where the architecture is not on this machine; then there are no linears and no counts. rank:
    of the adapters, None for full SFT. sequence_length: slots of a row.
    """

    model: ModelShape | None
    linears: tuple[Linear, ...]
    adapters: tuple[AdapterSite, ...]
    rank: int | None
    sequence_length: int
    total_params: int

    @property
    def trainable_params(self) -> int:
        """Parameters that train: rank × (in + out) summed over the adapters, or all but routers without LoRA.

        Routers of experts are frozen: what a router learns in a short training moves rows between experts,
        and with them the time of a step.
        """
        if self.rank is None:
            return self.total_params - sum(linear.params for linear in self._routers)
        return sum(site.params(self.rank) for site in self.adapters)

    @property
    def adapters_by_kind(self) -> dict[str, tuple[int, int]]:
        """Adapters and their parameters by the kind of linear, in the order in which kinds first occur."""
        counts: dict[str, tuple[int, int]] = {}
        for site in self.adapters:
            adapters, params = counts.get(site.kind, (0, 0))
            counts[site.kind] = adapters + 1, params + site.params(self.rank or 0)
        return counts

    @property
    def layer_coverage(self) -> float:
        """Share of the layers that carry an adapter."""
        if self.model is None:
            return 0.0
        return len({site.layer for site in self.adapters if site.layer is not None}) / self.model.layers

    @property
    def _routers(self) -> list[Linear]:
        return [linear for linear in self.linears if linear.kind == "router"]

    @property
    def active_params(self) -> int:
        """Matrix elements that one token is multiplied with (P), head and routers included."""
        return sum(linear.active_params for linear in self.linears)

    def flops_per_token(self, training: Training) -> float:
        """Floating point operations that one token of a row costs, forward and backward.

        Full: 6 P + A, less 2 P for routers, which are frozen. LoRA: 4 P + 6 r (in + out of every adapter that
        it meets) + A, less 2 P for linears in layers below the lowest adapter, through which nothing flows
        back. Two operations for a multiplication with addition; one pass forward, one for the input's
        gradient, one for the weight's. A: causal attention, 2 × 2 × S/2 channels forward for scores and
        values, twice that backward. Recomputation, norms, activations and the scan of Mamba layers are left
        out, so this is a floor.
        """
        if self.model is None:
            raise ValueError("the model's shape is not known")
        model = self.model
        attention = 6.0 * model.attention_layers * model.heads * model.head_dim * self.sequence_length
        if training == "full":
            return 6.0 * self.active_params - 2.0 * sum(r.active_params for r in self._routers) + attention
        lowest = min((site.layer for site in self.adapters if site.layer is not None), default=None)
        adapters = sum(site.active_params(self.rank or 0) for site in self.adapters)
        below = sum(
            linear.active_params
            for linear in self.linears
            if linear.layer is not None and (lowest is None or linear.layer < lowest)
        )
        return 4.0 * self.active_params - 2.0 * below + 6.0 * adapters + attention
