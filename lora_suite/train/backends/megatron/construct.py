# SPDX-License-Identifier: Apache-2.0
"""From a recipe to a Megatron backend: groups, model, weights, adapters or optimizer, in this order."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel

from lora_suite.blueprint.facts import Blueprint
from lora_suite.blueprint.preflight import preflight
from lora_suite.config.errors import ConfigError
from lora_suite.config.models import find_config, read_config
from lora_suite.config.paths import locate
from lora_suite.config.schema import Megatron, Recipe
from lora_suite.train.backends.base import Backend
from lora_suite.train.backends.megatron.architecture import Architecture
from lora_suite.train.backends.megatron.attach import Attacher
from lora_suite.train.backends.megatron.backend import MegatronBackend
from lora_suite.train.backends.megatron.compat import on_device
from lora_suite.train.backends.megatron.fast.build import FAST, fast_backend, slow_path_reason
from lora_suite.train.backends.megatron.model import ADAPTED, PLAIN, build_model, transformer_config
from lora_suite.train.backends.megatron.optimizer import (
    FullOptimizer,
    MegatronAdamW,
    TorchAdamW,
    adapter_optimizer,
)
from lora_suite.train.backends.megatron.weights import ShardMap, drawn, stored
from lora_suite.train.lora.adapter import Adapter
from lora_suite.train.lora.bank import AdapterBank
from lora_suite.train.lora.spec import DTYPES, LoraSpec
from lora_suite.train.topology import Axis, Topology


def build_backend(
    recipe: Recipe, recipe_path: Path, blueprint: Blueprint, device: torch.device, fast: bool | None = None
) -> Backend:
    """Build the backend of a recipe on this rank, after `init_process_group`.

    fast: whether by the fast path; None: where there is a GPU and it can be taken. Adapters are attached
    before the weights are loaded, and their bank or an optimizer is made after. Raises ConfigError for a
    model that megatron-core's GPTModel would compute differently.
    """
    policy, parallel, dtype = recipe.policy, recipe.policy.megatron_cfg, DTYPES[recipe.policy.precision]
    folder = _weights_folder(policy.model_name, recipe_path) if policy.init == "pretrained" else None
    if blueprint.model is None:
        named = {"policy": policy.model_copy(update={"model_name": str(folder)})}
        blueprint = preflight(recipe.model_copy(update=named), recipe_path)
    config_path = folder / "config.json" if folder else find_config(policy.model_name, recipe_path)
    assert blueprint.model is not None
    assert config_path is not None
    architecture = Architecture.read(blueprint.model, read_config(config_path))
    reason = None if fast else slow_path_reason(recipe, blueprint, device)
    fast = reason is None if fast is None else fast
    with on_device(device):
        topology = _start_groups(parallel, recipe.sft.seed, device)
        config = transformer_config(architecture, parallel, dtype, device)
        modules = FAST if fast else ADAPTED if policy.lora.enabled else PLAIN
        model = build_model(config, architecture, modules)
        adapters = []
        if policy.lora.enabled:
            spec = LoraSpec.from_config(parallel.lora_cfg, recipe.sft.seed)
            exchanged = parallel.lora_cfg.a2a_experimental
            attacher = Attacher(blueprint.adapters, spec, architecture.shape, topology.tp, exchanged)
            adapters = attacher.attach(model)
        if folder is not None:
            fetch = stored(folder)
        else:
            fetch = drawn(architecture.shape, architecture.init_std, recipe.sft.seed, dtype, device)
        first_layer = model.decoder.layers[0].layer_number - 1
        ShardMap(architecture.shape, topology.tp).load(model, first_layer, fetch)
        bank = _bank(model, adapters, parallel, topology, dtype) if policy.lora.enabled else None
        if fast:
            return fast_backend(model, topology, bank, parallel.optimizer)
        if bank is not None:
            backend = _for_adapters(model, bank, parallel, topology)
        else:
            backend = _for_all_weights(model, parallel, topology, dtype)
        backend.slow_path_reason = reason
        return backend


def _start_groups(parallel: Megatron, seed: int, device: torch.device) -> Topology:
    """Start megatron-core's process groups and random states."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        create_gloo_process_groups=False,
    )
    if device.type == "cuda":
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
    else:
        tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)
    groups = (
        parallel_state.get_data_parallel_group(),
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
    )
    dp, tp, pp = (Axis(group.rank(), group.size(), group) for group in groups)
    return Topology(dist.get_rank(), dist.get_world_size(), device, dp, tp, pp)


def _bank(
    model: GPTModel, adapters: list[Adapter], parallel: Megatron, topology: Topology, dtype: torch.dtype
) -> AdapterBank:
    """Freeze the weights and give the adapters to a bank."""
    if not adapters:
        raise ConfigError(
            f"policy.megatron_cfg.lora_cfg: no linear of pipeline stage {topology.pp.index} has an adapter; "
            f"name some in each stage, or use policy.megatron_cfg.pipeline_model_parallel_size=1"
        )
    model.requires_grad_(False)
    bank = AdapterBank(adapters, topology, dtype)
    bank.build_optimizer(adapter_optimizer(parallel.optimizer))
    return bank


def _for_adapters(
    model: GPTModel, bank: AdapterBank, parallel: Megatron, topology: Topology
) -> MegatronBackend:
    """The frozen model as it is."""
    if parallel.activation_checkpointing and model.pre_process:
        # Recomputation finds gradients through its input alone, and that of a frozen embedding has none
        # (https://github.com/huggingface/transformers/issues/26221).
        model.embedding.register_forward_hook(lambda _module, _inputs, output: output.requires_grad_())
    return MegatronBackend(topology, model, bank=bank)


def megatron_optimizer_runs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether megatron-core's optimizers can be used: they check for CUDA tensors of at most 32 bits."""
    return device.type == "cuda" and dtype != torch.float64


def _for_all_weights(
    model: GPTModel, parallel: Megatron, topology: Topology, dtype: torch.dtype
) -> MegatronBackend:
    """Wrap the model in megatron-core's DDP, with gradients reduced in float32 where weights are bfloat16."""
    with_torch = not megatron_optimizer_runs(topology.device, dtype)
    if with_torch and dtype == torch.bfloat16:
        raise ConfigError(
            "policy.precision: full SFT in bfloat16 needs a GPU on the megatron backend, where main weights "
            "are float32; use policy.precision=float32"
        )
    ddp = DistributedDataParallel(
        config=model.config,
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=dtype == torch.bfloat16,
            use_distributed_optimizer=parallel.optimizer.use_distributed_optimizer and not with_torch,
        ),
        module=model,
    )
    optimizer: FullOptimizer
    if with_torch:
        optimizer = TorchAdamW(ddp, topology, parallel.optimizer)
    else:
        optimizer = MegatronAdamW(ddp, parallel.optimizer, dtype)
    return MegatronBackend(topology, model, ddp=ddp, optimizer=optimizer)


def _weights_folder(model_name: str, recipe_path: Path) -> Path:
    """The folder of a pretrained model: a local one, or the hub's, downloaded into its cache."""
    folder = locate(model_name, recipe_path)
    if folder is not None and folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model_name, allow_patterns=["*.safetensors", "*.json"]))
