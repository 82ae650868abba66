# SPDX-License-Identifier: Apache-2.0
"""The dtensor backend's fast path at work: a rank holds its tensor parallel part, compiled and captured."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lora_suite.train.backends.dtensor.fast.decoder import Decoder
from lora_suite.train.backends.dtensor.fast.hybrid import HybridDecoder
from lora_suite.train.backends.dtensor.fast.peft import TransformersDecoder
from lora_suite.train.backends.graphed import GraphedBackend
from lora_suite.train.batch import MicroBatch
from lora_suite.train.fast.collectives import TensorParallel
from lora_suite.train.fast.head_loss import chunk_loss_of, evaluate_loss, head_loss
from lora_suite.train.fast.masters import MasterWeights
from lora_suite.train.lora.bank import AdapterBank
from lora_suite.train.models.attention import Blocks
from lora_suite.train.models.fingerprint import fingerprint
from lora_suite.train.topology import Topology


class FastBackend(GraphedBackend):
    """See `lora_suite.train.backends.base.Backend`.

    trained: the adapters, or every weight. gpu: compile the layers and capture each shape of micro batch;
    otherwise the same code runs as it is.
    """

    model: Decoder | HybridDecoder | TransformersDecoder

    def __init__(
        self,
        model: Decoder | HybridDecoder | TransformersDecoder,
        topology: Topology,
        trained: AdapterBank | MasterWeights,
        *,
        gpu: bool,
    ) -> None:
        self._loss_of_chunk = chunk_loss_of(TensorParallel.over(topology.tp))
        super().__init__(model, topology, trained, model.head.dtype, gpu=gpu, of_chunk=self._loss_of_chunk)
        if gpu:
            for layer in model.layers:
                layer.compile(fullgraph=True, dynamic=False)

    def _loss(
        self, input_ids: torch.Tensor, labels: torch.Tensor, blocks: Blocks | None = None
    ) -> torch.Tensor:
        states = self.model(input_ids, blocks).flatten(0, 1)
        return head_loss(states, self.model.head, labels.flatten(), self._weight, self._of_chunk)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Summed token loss of the micro batches, layer by layer as written: shapes vary, and time is not
        measured here."""
        losses = []
        for batch in batches:
            blocks = None
            if batch.positions is not None and batch.segments is not None:
                packed = batch.segments
                blocks = Blocks.of(batch.positions, packed.boundaries, packed.longest, self.model.head.dtype)
            states = self.model.states(batch.input_ids, blocks).flatten(0, 1)
            labels = batch.labels.flatten()
            losses.append(evaluate_loss(states, self.model.head, labels, self._loss_of_chunk))
        return torch.stack(losses).sum()

    def frozen_fingerprint(self) -> str:
        """Hash of the frozen weights; "" for full SFT."""
        return "" if self.bank is None else fingerprint(self.model.named_tensors())
