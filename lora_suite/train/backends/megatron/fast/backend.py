# SPDX-License-Identifier: Apache-2.0
"""The Megatron backend's fast path at work: one pipeline stage, its layers compiled, its passes captured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from megatron.core.models.gpt.gpt_model import GPTModel

from lora_suite.train.backends.graphed import GraphedBackend
from lora_suite.train.backends.megatron.compat import on_device
from lora_suite.train.backends.megatron.fast.modules import normed_sum
from lora_suite.train.batch import MicroBatch
from lora_suite.train.fast.collectives import TensorParallel
from lora_suite.train.fast.head_loss import chunk_loss_of, evaluate_loss, head_loss
from lora_suite.train.fast.layer_ops import LayerOps
from lora_suite.train.fast.masters import MasterWeights
from lora_suite.train.fast.rotary import Rotation
from lora_suite.train.lora.bank import AdapterBank
from lora_suite.train.models.attention import Blocks
from lora_suite.train.models.fingerprint import fingerprint
from lora_suite.train.topology import Topology

Layer = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""A `FastLayer`'s forward function."""


class FastMegatronBackend(GraphedBackend):
    """See `lora_suite.train.backends.base.Backend`.

    megatron-core's model computes the states, layer by layer; its schedule and its head are left out. The one
    waits on the host, the other stores logits. trained: the adapters, or every weight. ops: of the layers
    and the last norm. gpu: compile and capture; otherwise the same code runs as it is.
    """

    model: GPTModel

    def __init__(
        self,
        model: GPTModel,
        topology: Topology,
        trained: AdapterBank | MasterWeights,
        ops: LayerOps,
        *,
        gpu: bool,
    ) -> None:
        self._tp = TensorParallel.over(topology.tp)
        self._part_loss = chunk_loss_of(self._tp)
        self._ops = ops
        dtype = model.config.params_dtype
        super().__init__(model, topology, trained, dtype, gpu=gpu, of_chunk=self._part_loss)
        self._written: list[Layer] = [layer.forward for layer in model.decoder.layers]
        self._layers = self._written
        if gpu:
            self._layers = [torch.compile(each, fullgraph=True, dynamic=False) for each in self._written]
        self._angles: dict[int, torch.Tensor] = {}

    def _loss(
        self, input_ids: torch.Tensor, labels: torch.Tensor, blocks: Blocks | None = None
    ) -> torch.Tensor:
        states = self._tp.enter(self._states(input_ids, blocks, self._layers))
        return head_loss(states, self._head, labels.flatten(), self._weight, self._of_chunk)

    def _states(
        self, input_ids: torch.Tensor, blocks: Blocks | None, layers: Iterable[Layer]
    ) -> torch.Tensor:
        """input_ids [rows, length] to normalised states [rows · length, hidden]; blocks: of packed rows.

        megatron-core's own way for packed rows, `packed_seq_params`, reads each row's length on the host.
        """
        with on_device(self.topology.device):
            x: torch.Tensor = self.model.embedding(input_ids, None).transpose(0, 1)
            angles = self._angles_of(input_ids.shape[1] if blocks is None else blocks.longest)
        rotation = self._rotation(angles, blocks)
        fed: torch.Tensor | None = None
        for layer in layers:
            x, fed = layer(x, fed, rotation, blocks)
        last = None if fed is None else fed.flatten(0, 1)
        states, _ = normed_sum(x.flatten(0, 1), last, self.model.decoder.final_layernorm, self._ops.norm)
        return states

    def _rotation(self, angles: torch.Tensor, blocks: Blocks | None) -> Rotation:
        """Cosines and sines of each slot [length, head_dim], once a pass for all layers and heads."""
        angles = angles[:, 0, 0]
        if blocks is not None:
            angles = angles[blocks.positions[0]]
        return angles.cos().to(self._dtype), angles.sin().to(self._dtype)

    def _angles_of(self, length: int) -> torch.Tensor:
        """The rotary embedding's angles of every position; kept, since graphs read them where they are."""
        if length not in self._angles:
            self._angles[length] = self.model.rotary_pos_emb(length)
        return self._angles[length]

    @property
    def _head(self) -> torch.Tensor:
        """This rank's part of the head, which is the embedding where they are tied."""
        model = self.model
        tied = model.share_embeddings_and_output_weights
        weight: torch.Tensor = (model.embedding.word_embeddings if tied else model.output_layer).weight
        return weight

    @torch.no_grad()
    def evaluate(self, batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Summed token loss of the micro batches, layer by layer as written: shapes vary, and time is not
        measured here."""
        total = torch.zeros_like(self._weight)
        for batch in batches:
            blocks = None
            if batch.positions is not None and batch.segments is not None:
                packed = batch.segments
                blocks = Blocks.of(batch.positions, packed.boundaries, packed.longest, self._dtype)
            states = self._states(batch.input_ids, blocks, self._written)
            total += evaluate_loss(states, self._head, batch.labels.flatten(), self._part_loss)
        return total

    def frozen_fingerprint(self) -> str:
        """Hash of this rank's frozen weights; "" for full SFT."""
        return fingerprint((n, p) for n, p in self.model.named_parameters() if not p.requires_grad)
