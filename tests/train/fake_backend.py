# SPDX-License-Identifier: Apache-2.0
"""A backend as small as can be, for tests of the loop: embedding, one linear with an adapter, head."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from lora_suite.blueprint import Blueprint
from lora_suite.config.schema import Recipe
from lora_suite.train.backends.base import NO_GPU
from lora_suite.train.backends.dtensor.linear import LoraLinear
from lora_suite.train.batch import IGNORED, MicroBatch
from lora_suite.train.lora.adapter import Adapter
from lora_suite.train.lora.bank import AdapterBank
from lora_suite.train.lora.spec import DTYPES, LoraSpec
from lora_suite.train.models.fingerprint import fingerprint
from lora_suite.train.topology import Axis, Topology

VOCABULARY, WIDTH = 259, 24


class TinyModel(nn.Module):
    """Predicts a token from the one before it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, dtype=dtype)
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=dtype)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(torch.tanh(self.linear(self.embedding(tokens))))
        return logits


def token_loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Summed cross-entropy, as torch has it."""
    logits, labels = logits.flatten(0, 1), labels.flatten()
    loss: torch.Tensor = functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    return loss


class FakeBackend:
    """Data parallel over all ranks; every rank holds the whole model.

    dead_adapter: add an adapter that the model never calls.
    """

    def __init__(self, recipe: Recipe, dead_adapter: bool = False) -> None:
        grouped = dist.is_initialized() and dist.get_world_size() > 1
        rank, size = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
        one = Axis(0, 1)
        dp = Axis(rank, size, dist.group.WORLD if grouped else None)
        self.topology = Topology(rank, size, torch.device("cpu"), dp, one, one)
        self.slow_path_reason: str | None = NO_GPU
        dtype = DTYPES[recipe.policy.precision]
        self.model = TinyModel(dtype)
        self.bank: AdapterBank | None = None
        lora = recipe.policy.lora
        if lora.enabled:
            self.model.requires_grad_(False)
            spec = LoraSpec.from_config(lora, recipe.sft.seed)
            adapter = Adapter("linear", WIDTH, WIDTH, spec)
            LoraLinear.adapt(self.model.linear, adapter)
            dead = [Adapter("dead", WIDTH, WIDTH, spec)] if dead_adapter else []
            self.bank = AdapterBank([adapter, *dead], self.topology, dtype)
            self.bank.build_optimizer(recipe.policy.optimizer)
        self.trained = [each for each in self.model.parameters() if each.requires_grad]
        if self.bank is None:
            kwargs = recipe.policy.optimizer.kwargs
            self.optimizer = torch.optim.AdamW(self.trained, lr=kwargs.lr, weight_decay=kwargs.weight_decay)

    def forward_backward(self, batches: Sequence[MicroBatch], global_tokens: int) -> torch.Tensor:
        self.model.train()
        total = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            loss = token_loss_sum(self.model(batch.input_ids), batch.labels)
            (loss / global_tokens).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    def sync_gradients(self) -> None:
        if self.bank is not None:
            self.bank.sync_gradients()
            return
        for parameter in self.trained:
            assert parameter.grad is not None
            self.topology.dp.sum(parameter.grad)

    def clip_gradients(self, max_norm: float | None) -> torch.Tensor:
        if self.bank is not None:
            return self.bank.clip_gradients(max_norm)
        return nn.utils.clip_grad_norm_(self.trained, max_norm if max_norm is not None else float("inf"))

    def optimizer_step(self, lr: float) -> None:
        if self.bank is not None:
            self.bank.step(lr)
            return
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def evaluate(self, batches: Sequence[MicroBatch]) -> torch.Tensor:
        self.model.eval()
        total = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            total += token_loss_sum(self.model(batch.input_ids), batch.labels)
        return total

    def adapters_off(self) -> AbstractContextManager[None]:
        assert self.bank is not None
        return self.bank.disabled()

    def trainable_parameters(self) -> int:
        if self.bank is not None:
            return self.bank.trainable_parameters()
        return sum(parameter.numel() for parameter in self.trained)

    def frozen_fingerprint(self) -> str:
        frozen = [(name, each) for name, each in self.model.named_parameters() if not each.requires_grad]
        return fingerprint(frozen)

    def state_dict(self) -> dict[str, Any]:
        if self.bank is not None:
            return self.bank.state_dict()
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.bank is not None:
            self.bank.load_state_dict(state)
            return
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def build(recipe: Recipe, recipe_path: Path, blueprint: Blueprint, device: torch.device) -> FakeBackend:
    """As the real backends are built."""
    return FakeBackend(recipe)
