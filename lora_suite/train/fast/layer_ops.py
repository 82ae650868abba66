# SPDX-License-Identifier: Apache-2.0
"""The kernels of what stands between a layer's products, of either backend's decoder."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from lora_suite.train.fast.entry import NormOps, norm_ops
from lora_suite.train.fast.mlp import GatedOps, kernel_ops
from lora_suite.train.fast.rotary import RotaryOps, rotary_ops


@dataclass(frozen=True)
class LayerOps:
    """Kernels of what stands between a layer's products; None where plain torch is to do it.

    gated: of the activation. norm: of residuals and norms. rotary: of queries and keys.
    """

    gated: GatedOps | None = None
    norm: NormOps | None = None
    rotary: RotaryOps | None = None

    def with_products_anew(self) -> LayerOps:
        """The same, and gate and up are made anew in the backward pass."""
        return replace(self, gated=self.gated and replace(self.gated, products=True))


NO_KERNELS = LayerOps()


def layer_ops(dtype: torch.dtype, recompute: bool = False) -> LayerOps:
    """The kernels of a GPU; none for float64, since they compute in float32.

    recompute: whether norms and activations are made anew in the backward pass.
    """
    if dtype == torch.float64:
        return NO_KERNELS
    return LayerOps(kernel_ops(dtype, recompute), norm_ops(recompute), rotary_ops())
