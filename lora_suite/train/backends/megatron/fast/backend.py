# SPDX-License-Identifier: Apache-2.0
"""The Megatron backend's fast path at work: one pipeline stage, its layers compiled, its passes captured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel

from lora_suite.train.backends.graphed import GraphedBackend
from lora_suite.train.backends.megatron.compat import on_device
from lora_suite.train.backends.megatron.fast.modules import Slots
from lora_suite.train.batch import MicroBatch
from lora_suite.train.fast.collectives import TensorParallel
from lora_suite.train.fast.head_loss import chunk_loss_of, evaluate_loss, head_loss
from lora_suite.train.fast.masters import MasterWeights
from lora_suite.train.lora.bank import AdapterBank
from lora_suite.train.models.attention import Blocks
from lora_suite.train.models.fingerprint import fingerprint
from lora_suite.train.topology import Topology

Layer = Callable[..., tuple[torch.Tensor, Any]]
"""A TransformerLayer's forward function."""


class FastMegatronBackend(GraphedBackend):
    """See `lora_suite.train.backends.base.Backend`.

    megatron-core's model computes the states, layer by layer; its schedule and its head are left out. The one
    waits on the host, the other stores logits. trained: the adapters, or every weight. gpu: compile and
    capture; otherwise the same code runs as it is.
    """

    model: GPTModel

    def __init__(
        self, model: GPTModel, topology: Topology, trained: AdapterBank | MasterWeights, *, gpu: bool
    ) -> None:
        self._tp = TensorParallel.over(topology.tp)
        self._part_loss = chunk_loss_of(self._tp)
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
        return head_loss(states, self._head, _by_position(labels), self._weight, self._of_chunk)

    def _states(
        self, input_ids: torch.Tensor, blocks: Blocks | None, layers: Iterable[Layer]
    ) -> torch.Tensor:
        """input_ids [rows, length] to normalised states [length · rows, hidden]; blocks: of packed rows.

        megatron-core's own way for packed rows, `packed_seq_params`, reads each row's length on the host.
        """
        with on_device(self.topology.device):
            x = self.model.embedding(input_ids, None)
            angles = self._angles_of(input_ids.shape[1] if blocks is None else blocks.longest)
        slots = Slots.of(angles, blocks, self._dtype)
        for layer in layers:
            x, _ = layer(hidden_states=x, attention_mask=slots)
        states: torch.Tensor = self.model.decoder.final_layernorm(x)
        return states.flatten(0, 1)

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
            total += evaluate_loss(states, self._head, _by_position(batch.labels), self._part_loss)
        return total

    def frozen_fingerprint(self) -> str:
        """Hash of this rank's frozen weights; "" for full SFT."""
        return fingerprint((n, p) for n, p in self.model.named_parameters() if not p.requires_grad)


def _by_position(labels: torch.Tensor) -> torch.Tensor:
    """Labels [rows, length] in the order of megatron-core's states: all rows' first position first."""
    return labels.t().flatten()
