# SPDX-License-Identifier: Apache-2.0
"""The Megatron backend: megatron-core's GPTModel and schedules behind the `Backend` protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func

from lora_suite.train.backends.megatron.compat import on_device
from lora_suite.train.backends.megatron.modules import PackedRows
from lora_suite.train.backends.megatron.optimizer import FullOptimizer, is_replica, is_second_copy
from lora_suite.train.batch import IGNORED, MicroBatch
from lora_suite.train.lora.bank import AdapterBank
from lora_suite.train.models.fingerprint import fingerprint
from lora_suite.train.token_loss import token_loss_sum
from lora_suite.train.topology import Axis, Topology


class MegatronBackend:
    """One GPTModel and what trains it: the adapter bank, or megatron-core's DDP with an optimizer.

    model: this stage. ddp and optimizer: for full SFT. bank: for LoRA, whose gradients it sums itself; the
    frozen model is then not wrapped at all. slow_path_reason: set by whoever chose this path.
    """

    def __init__(
        self,
        topology: Topology,
        model: GPTModel,
        bank: AdapterBank | None = None,
        ddp: DistributedDataParallel | None = None,
        optimizer: FullOptimizer | None = None,
    ) -> None:
        self.topology = topology
        self.model = model
        self.bank = bank
        self.ddp = ddp
        self.optimizer = optimizer
        self.slow_path_reason: str | None = None
        self._schedule: Callable[..., list[torch.Tensor]] = get_forward_backward_func()

    # -- one step -------------------------------------------------------------------------------------------

    def forward_backward(self, batches: Sequence[MicroBatch], global_tokens: int) -> torch.Tensor:
        """Accumulate gradients of the token loss over `global_tokens`; return the summed token loss."""
        self.model.train()
        return self._run(batches, global_tokens, forward_only=False)

    def _run(self, batches: Sequence[MicroBatch], global_tokens: int, forward_only: bool) -> torch.Tensor:
        """Run megatron-core's schedule; the loss lives on the last stage and is told to the others."""
        rows, length = batches[0].input_ids.shape
        with on_device(self.topology.device):
            losses = self._schedule(
                forward_step_func=partial(self._forward_step, global_tokens),
                data_iterator=iter(enumerate(batches)),
                model=[self.ddp or self.model],
                num_microbatches=len(batches),
                seq_length=length,
                micro_batch_size=rows,
                forward_only=forward_only,
            )
        return self.topology.pp.sum(torch.stack(losses).sum() if losses else self._no_loss())

    def _forward_step(
        self, global_tokens: int, batches: Iterator[tuple[int, MicroBatch]], model: torch.nn.Module
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor, ...]]]:
        """megatron-core's forward step: the stage's output, and what makes a loss of the last stage's.

        The model knows positions and the causal mask by itself, of packed rows by their segments.
        """
        index, batch = next(batches)
        packed = PackedRows(batch.segments) if batch.segments is not None else None
        output = model(batch.input_ids, None, None, packed_seq_params=packed)
        if self.bank is not None and index and output.requires_grad:
            # Where a stage's backward pass begins: pipelines run several forward passes before the first one.
            output.register_hook(self._collect)
        return output, partial(_loss, batch.labels, global_tokens, self.topology.tp)

    def _collect(self, _gradient: torch.Tensor) -> None:
        """Keep the gradients of the micro batches before this one in float32."""
        assert self.bank is not None
        self.bank.collect()

    def _no_loss(self) -> torch.Tensor:
        """Zero in the dtype of a loss, which is `token_loss_sum`'s."""
        dtype = torch.promote_types(self.model.config.params_dtype, torch.float32)
        return torch.zeros((), dtype=dtype, device=self.topology.device)

    def sync_gradients(self) -> None:
        """Sum gradients over data parallel ranks, and partial ones over tensor parallel ranks."""
        if self.bank is not None:
            self.bank.sync_gradients()
        else:
            with on_device(self.topology.device):
                finalize_model_grads([self.ddp])

    def clip_gradients(self, max_norm: float | None) -> torch.Tensor:
        """Scale gradients to `max_norm`; return the global norm before."""
        if self.bank is not None:
            return self.bank.clip_gradients(max_norm)
        return self._full[1].clip(max_norm)

    def optimizer_step(self, lr: float) -> None:
        """Update what trains with this learning rate and clear the gradients."""
        if self.bank is not None:
            self.bank.step(lr)
        else:
            ddp, optimizer = self._full
            optimizer.step(lr)
            ddp.zero_grad_buffer()

    @property
    def _full(self) -> tuple[DistributedDataParallel, FullOptimizer]:
        if self.ddp is None or self.optimizer is None:
            raise RuntimeError("full SFT needs megatron-core's DDP and an optimizer")
        return self.ddp, self.optimizer

    # -- without gradients ----------------------------------------------------------------------------------

    def evaluate(self, batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Summed token loss of this data parallel rank's rows, dropout off."""
        if not batches:
            return self._no_loss()
        self.model.eval()
        with torch.no_grad():
            return self._run(batches, 1, forward_only=True)

    def adapters_off(self) -> AbstractContextManager[None]:
        """Within it the model computes as if it had no adapters."""
        if self.bank is None:
            raise RuntimeError("full SFT has no adapters")
        return self.bank.disabled()

    def trainable_parameters(self) -> int:
        """Trainable parameters of the whole model: shards of all ranks, replicas once."""
        if self.bank is not None:
            count = self.bank.trainable_parameters()
        else:
            count = sum(
                p.numel() * (1 if is_replica(p) else self.topology.tp.size)
                for p in self.model.parameters()
                if not is_second_copy(p)
            )
        return int(self.topology.pp.sum(torch.tensor(count, device=self.topology.device)))

    def frozen_fingerprint(self) -> str:
        """Hash of this rank's frozen weights, bit by bit; "" for full SFT."""
        return fingerprint((n, p) for n, p in self.model.named_parameters() if not p.requires_grad)

    # -- checkpoints ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's trainable parameters and optimizer state, by reference: save before the next step."""
        if self.bank is not None:
            return self.bank.state_dict()
        weights = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        return {"weights": weights, "optimizer": self._full[1].state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()` of the same rank of the same layout."""
        if self.bank is not None:
            self.bank.load_state_dict(state)
            return
        if not isinstance(state["weights"], dict):
            raise KeyError("the checkpoint is of the fast path; set policy.megatron_cfg.fast_path=auto")
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(state["weights"][name])
        self._full[1].load_state_dict(state["optimizer"])


def _loss(
    labels: torch.Tensor, global_tokens: int, vocabulary: Axis, logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """From logits [rows, length, part of the vocabulary] to what megatron-core's schedule wants of a loss.

    That is this micro batch's part of the mean loss, its supervised tokens, and what is reported: its summed
    loss. megatron-core's own token losses are float32 in every precision, these float64 in a float64 model.
    """
    summed = token_loss_sum(logits, labels, vocabulary)
    return summed / global_tokens, (labels != IGNORED).sum(), summed.detach()
