# SPDX-License-Identifier: Apache-2.0
"""Facts of a model from its configuration, without torch: module shapes, LoRA targets, counts, floors."""

from lora_suite.blueprint.facts import Blueprint
from lora_suite.blueprint.linears import Linear, model_linears, total_params
from lora_suite.blueprint.preflight import preflight
from lora_suite.blueprint.shape import HybridShape, ModelShape, read_shape
from lora_suite.blueprint.targets import AdapterSite, select_sites

__all__ = [
    "AdapterSite",
    "Blueprint",
    "HybridShape",
    "Linear",
    "ModelShape",
    "model_linears",
    "preflight",
    "read_shape",
    "select_sites",
    "total_params",
]
