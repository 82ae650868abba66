# SPDX-License-Identifier: Apache-2.0
"""AdamW over all weights, for full SFT: megatron-core's own on GPUs, torch's where that one cannot run.

Both mean the same as torch's AdamW over every parameter: decoupled weight decay, on norms and biases as well.
Megatron-core by default leaves tensors of one dimension out of the decay; an empty `config_overrides` is its
documented way to decay them, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import nn

from lora_suite.config.schema import MegatronOptimizer, Optimizer, OptimizerKwargs
from lora_suite.train.topology import Topology


class FullOptimizer(Protocol):
    """What the backend needs of an optimizer; gradients lie in the DDP's buffer and are already summed."""

    def clip(self, max_norm: float | None) -> torch.Tensor:
        """Scale gradients to `max_norm`; return the global norm before (scalar)."""
        ...

    def step(self, lr: float) -> None:
        """Update the weights."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """This rank's moments, step and main weights."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`."""
        ...


def adapter_optimizer(config: MegatronOptimizer) -> Optimizer:
    """The same hyper-parameters for the adapter bank, so that both arms of a pair follow the same keys."""
    return Optimizer(
        name="torch.optim.AdamW",
        kwargs=OptimizerKwargs(
            lr=config.lr,
            weight_decay=config.weight_decay,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            foreach=None,
            fused=None,
        ),
    )


def is_replica(parameter: nn.Parameter) -> bool:
    """Whether tensor parallel ranks hold equal copies of it (norms), not shards."""
    return not getattr(parameter, "tensor_model_parallel", False)


def is_second_copy(parameter: nn.Parameter) -> bool:
    """Whether it is the last pipeline stage's copy of a tied embedding, which the first stage counts."""
    return getattr(parameter, "shared", False)


def main_gradient(parameter: nn.Parameter) -> torch.Tensor:
    """The gradient in the DDP's buffer."""
    gradient: torch.Tensor = parameter.main_grad  # type: ignore[attr-defined]
    return gradient


class TorchAdamW:
    """torch's AdamW on megatron-core's gradient buffers: CPU, or float64.

    Megatron-core's optimizers check for CUDA float32 tensors when they clip.
    """

    def __init__(self, model: DistributedDataParallel, topology: Topology, config: MegatronOptimizer) -> None:
        self.topology = topology
        self.parameters: list[nn.Parameter] = [p for p in model.parameters() if p.requires_grad]
        self.inner = torch.optim.AdamW(
            self.parameters,
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
        )

    def clip(self, max_norm: float | None) -> torch.Tensor:
        """Scale gradients to `max_norm`; return the global norm before (scalar)."""
        counted = [p for p in self.parameters if not is_second_copy(p)]
        replicated = self._squared_norm(p for p in counted if is_replica(p))
        sharded = self._squared_norm(p for p in counted if not is_replica(p))
        norm = self.topology.pp.sum(replicated + self.topology.tp.sum(sharded)).sqrt()
        if max_norm is not None:
            # The same guard as torch.nn.utils.clip_grad_norm_ and megatron-core's clipping.
            factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            for parameter in self.parameters:
                main_gradient(parameter).mul_(factor)
        return norm

    def _squared_norm(self, parameters: Iterable[nn.Parameter]) -> torch.Tensor:
        zero = main_gradient(self.parameters[0]).new_zeros(())
        return sum((main_gradient(parameter).square().sum() for parameter in parameters), zero)

    def step(self, lr: float) -> None:
        """Update the weights."""
        for group in self.inner.param_groups:
            group["lr"] = lr
        for parameter in self.parameters:
            parameter.grad = main_gradient(parameter)
        self.inner.step()
        # Else the next backward pass would accumulate into the buffer by itself, besides the DDP's hook.
        self.inner.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """This rank's moments and step; the weights are their own main copies."""
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`."""
        self.inner.load_state_dict(state)


class MegatronAdamW:
    """megatron-core's optimizer, distributed over data parallel ranks or not, with float32 main weights."""

    def __init__(self, model: DistributedDataParallel, config: MegatronOptimizer, dtype: torch.dtype) -> None:
        chain = get_megatron_optimizer(
            OptimizerConfig(
                optimizer=config.optimizer,
                lr=config.lr,
                min_lr=config.min_lr,
                weight_decay=config.weight_decay,
                adam_beta1=config.adam_beta1,
                adam_beta2=config.adam_beta2,
                adam_eps=config.adam_eps,
                params_dtype=dtype,
                bf16=dtype == torch.bfloat16,
                use_distributed_optimizer=config.use_distributed_optimizer,
            ),
            [model],
            config_overrides={},
            use_gloo_process_groups=False,
        )
        # One link: a dense model has no separate optimizer for experts.
        (self.inner,) = chain.chained_optimizers

    def clip(self, max_norm: float | None) -> torch.Tensor:
        """Scale gradients to `max_norm`; return the global norm before (scalar)."""
        self.inner.prepare_grads()
        norm = self.inner.get_grad_norm() if max_norm is None else self.inner.clip_grad_norm(max_norm)
        return torch.tensor(norm, device="cuda")

    def step(self, lr: float) -> None:
        """Update the main weights and copy them to the model's."""
        for group in self.inner.param_groups:
            group["lr"] = lr
        self.inner.step_with_ready_grads()
        # Drops the main weights' gradients, which may be the DDP's buffer itself (see `TorchAdamW.step`).
        self.inner.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """This rank's moments, step and main weights (its own part under the distributed optimizer)."""
        return {"adam": self.inner.optimizer.state_dict(), "main": [p.detach() for p in self._main()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`; the model's own weights are restored by the backend."""
        self.inner.optimizer.load_state_dict(state["adam"])
        with torch.no_grad():
            for parameter, value in zip(self._main(), state["main"], strict=True):
                parameter.copy_(value)

    def _main(self) -> list[torch.Tensor]:
        return [p for group in self.inner.optimizer.param_groups for p in group["params"]]
