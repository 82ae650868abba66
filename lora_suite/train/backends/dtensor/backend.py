# SPDX-License-Identifier: Apache-2.0
"""The dtensor backend at work: forward, backward, update of a model that `build` has laid out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lora_suite.train.backends.dtensor.full import FullParameters, local_part
from lora_suite.train.backends.trained import TrainedBackend
from lora_suite.train.batch import MicroBatch
from lora_suite.train.lora.bank import AdapterBank
from lora_suite.train.models.fingerprint import fingerprint
from lora_suite.train.token_loss import token_loss_sum
from lora_suite.train.topology import Topology


class DTensorBackend(TrainedBackend):
    """A transformers model under FSDP2 and tensor parallelism; see `lora_suite.train.backends.base.Backend`.

    trained: what trains, the adapters or every parameter. All dp ranks must pass equally many micro batches,
    for training and for evaluation: every forward pass of a sharded model is a collective.
    """

    def __init__(self, model: nn.Module, topology: Topology, trained: AdapterBank | FullParameters) -> None:
        super().__init__(trained)
        self.model = model
        self.topology = topology
        # Taken while FSDP2 has its shards registered, not the whole tensors that it gathers.
        self._frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]

    def forward_backward(self, batches: Sequence[MicroBatch], global_tokens: int) -> torch.Tensor:
        """Accumulate gradients over the micro batches; return their summed token loss.

        Sharded gradients are kept whole until the last micro batch and reduced once.
        """
        losses = []
        for index, batch in enumerate(batches):
            if isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(index == len(batches) - 1)
            if self.bank is not None and index:
                self.bank.collect()
            loss = self._loss(batch)
            torch.autograd.backward(loss / global_tokens)
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def _loss(self, batch: MicroBatch) -> torch.Tensor:
        output = self.model(
            input_ids=batch.input_ids,
            position_ids=batch.positions,
            segments=batch.segments,
            use_cache=False,
        )
        return token_loss_sum(output.logits, batch.labels)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Summed token loss of the micro batches, dropout off."""
        self.model.eval()
        losses = [self._loss(batch) for batch in batches]
        self.model.train()
        return torch.stack(losses).sum()

    def frozen_fingerprint(self) -> str:
        """Hash of this rank's shards of the frozen weights; "" for full SFT."""
        return fingerprint((name, local_part(parameter)) for name, parameter in self._frozen)
