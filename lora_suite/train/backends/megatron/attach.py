# SPDX-License-Identifier: Apache-2.0
"""Put a blueprint's adapters beside the linears of a GPTModel.

Canonical adapters have Hugging Face's names (`model.layers.0.self_attn.q_proj`): one for each of the linears
that a Megatron linear holds, so their values, counts and files are those of the other backend. Fused ones
have Megatron's (`decoder.layers.0.self_attention.linear_qkv`): one for all that a Megatron linear holds,
which then share A. B of a fused adapter has its rows in the order that `ShardMap` stacks them for one rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear

from lora_suite.blueprint.shape import ModelShape
from lora_suite.blueprint.targets import AdapterSite
from lora_suite.train.backends.megatron.lora import (
    AdapterGroup,
    ExchangedAdapter,
    GatedAdapter,
    LoraColumnParallelLinear,
)
from lora_suite.train.backends.megatron.weights import LAYER_LINEARS
from lora_suite.train.lora.adapter import Adapter
from lora_suite.train.lora.spec import LoraSpec
from lora_suite.train.topology import Axis

HEAD_NAMES = ("lm_head", "output_layer")


class Attacher:
    """Creates adapters and hangs them into one stage of a model.

    exchanged: adapters of row-parallel linears are `ExchangedAdapter`s.
    """

    def __init__(
        self, sites: Sequence[AdapterSite], spec: LoraSpec, shape: ModelShape, tp: Axis, exchanged: bool
    ) -> None:
        self.sites = {site.name: site for site in sites}
        self.row_kind = ExchangedAdapter if exchanged else Adapter
        self.spec = spec
        self.shape = shape
        self.tp = tp

    def attach(self, model: GPTModel) -> list[Adapter]:
        """Attach this stage's adapters and return them in the order of the layers."""
        adapters: list[Adapter] = []
        for layer in model.decoder.layers:
            index = layer.layer_number - 1
            for path, parts in LAYER_LINEARS.items():
                group = self._group(index, path, parts)
                if group is not None:
                    layer.get_submodule(path).adapt(group)
                    adapters += group.by_position.values()
        if model.post_process:
            adapters += self._attach_to_head(model)
        return adapters

    def _group(self, layer: int, path: str, parts: Sequence[str]) -> AdapterGroup | None:
        """The adapters of one Megatron linear; None if the blueprint has none for it."""
        fused = self.sites.get(f"decoder.layers.{layer}.{path}")
        if fused is not None:
            return self._alone(self._adapter(fused, path))
        sites = [self.sites.get(f"model.layers.{layer}.{part}") for part in parts]
        adapters = {
            position: self._adapter(site, path) for position, site in enumerate(sites) if site is not None
        }
        if not adapters:
            return None
        if len(parts) == 1:
            return self._alone(adapters[0])
        return AdapterGroup(self._widths(path), self._alternations(path), adapters)

    def _adapter(self, site: AdapterSite, path: str) -> Adapter:
        """The adapter of a site; `path` is of the Megatron linear that holds it."""
        row = path in ("self_attention.linear_proj", "mlp.linear_fc2")
        kind = self.row_kind if row else GatedAdapter if site.kind == "linear_fc1" else Adapter
        return kind(
            site.name, site.in_features, site.out_features, self.spec, "row" if row else "column", self.tp
        )

    @staticmethod
    def _alone(adapter: Adapter) -> AdapterGroup:
        return AdapterGroup((adapter.out_features,), 1, {0: adapter})

    def _widths(self, path: str) -> tuple[int, ...]:
        """Output features on this rank of each linear that a Megatron linear holds."""
        shape, tp = self.shape, self.tp.size
        if path == "mlp.linear_fc1":
            return (shape.intermediate // tp,) * 2
        keys = shape.kv_heads * shape.head_dim // tp
        return (shape.heads * shape.head_dim // tp, keys, keys)

    def _alternations(self, path: str) -> int:
        return self.shape.kv_heads // self.tp.size if path == "self_attention.linear_qkv" else 1

    def _attach_to_head(self, model: GPTModel) -> list[Adapter]:
        """GPTModel builds its head without a spec, so a head to adapt is replaced by the class that can."""
        site = next((self.sites[name] for name in HEAD_NAMES if name in self.sites), None)
        if site is None:
            return []
        plain: ColumnParallelLinear = model.output_layer
        head = LoraColumnParallelLinear(
            plain.input_size,
            plain.output_size,
            config=plain.config,
            init_method=plain.config.init_method,
            bias=False,
            tp_group=plain.tp_group,
        )
        head.weight = plain.weight
        adapter = self._adapter(site, "output_layer")
        head.adapt(self._alone(adapter))
        model.output_layer = head
        return [adapter]
