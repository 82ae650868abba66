# SPDX-License-Identifier: Apache-2.0
"""Checks across keys: what is well typed, but contradicts itself or has no implementation here.

Nothing that a recipe asks for is ignored in silence: a key that this trainer cannot honour is refused as soon
as it leaves its neutral value, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from lora_suite.config.errors import ConfigError
from lora_suite.config.schema import DTensorLora, Recipe

Problem = tuple[str, str]  # dotted key, what is wrong with it

_METRICS_OF_CHECKPOINTS = ("val:val_loss", "val:loss", "train:loss")


def check_recipe(recipe: Recipe, origin: Callable[[str], str]) -> None:
    """Raise ConfigError that lists every contradiction and unavailable feature, one a line."""
    problems = list(_backends(recipe))
    if not problems:
        problems += [
            *_lora(recipe),
            *_unavailable(recipe),
            *_fast_path(recipe),
            *_sizes(recipe),
            *_optimizer(recipe),
            *_rhythm(recipe),
            *_data(recipe),
            *_faults(recipe),
        ]
    if problems:
        raise ConfigError("\n".join(f"{origin(key)}: {key}: {text}" for key, text in problems))


def _backends(recipe: Recipe) -> Iterator[Problem]:
    """Exactly one backend, and LoRA asked for on that one."""
    policy = recipe.policy
    dtensor, megatron = policy.dtensor_cfg, policy.megatron_cfg
    if dtensor.enabled == megatron.enabled:
        both = "both backends are on" if dtensor.enabled else "no backend is on"
        yield (
            "policy.megatron_cfg.enabled",
            f"{both}; set policy.dtensor_cfg.enabled=true policy.megatron_cfg.enabled=false or the reverse",
        )
        return
    off, on = ("megatron", "dtensor") if dtensor.enabled else ("dtensor", "megatron")
    idle = megatron.lora_cfg if dtensor.enabled else dtensor.lora_cfg
    if idle.enabled and not policy.lora.enabled:
        yield (
            f"policy.{off}_cfg.lora_cfg.enabled",
            f"LoRA is on for the {off} backend, which is off; set policy.{on}_cfg.lora_cfg.enabled=true",
        )


def _lora(recipe: Recipe) -> Iterator[Problem]:
    """LoRA keys that contradict each other."""
    policy = recipe.policy
    lora, block = policy.lora, f"policy.{policy.backend}_cfg.lora_cfg"
    if not lora.enabled:
        return
    if lora.target_modules and lora.exclude_modules:
        yield (
            f"{block}.exclude_modules",
            "target_modules and exclude_modules are both set; name what to adapt or what to leave, not both",
        )
    if isinstance(lora, DTensorLora):
        if not policy.dtensor_cfg.v2:
            yield (
                "policy.dtensor_cfg._v2",
                "the first DTensor path has no LoRA; set policy.dtensor_cfg._v2=true",
            )
        named = lora.target_modules or lora.exclude_modules
        if lora.match_all_linear and named:
            yield (
                f"{block}.match_all_linear",
                "is true beside target_modules or exclude_modules; leave it null (it then means all linears "
                "unless modules are named)",
            )
        if lora.match_all_linear is False and not named:
            yield (
                f"{block}.match_all_linear",
                "is false and no target_modules are named: nothing would be adapted",
            )
    elif lora.lora_A_init_method == "zero" and lora.lora_B_init_method == "zero":
        yield f"{block}.lora_A_init_method", "A and B both start at zero, so neither ever gets a gradient"


def _unavailable(recipe: Recipe) -> Iterator[Problem]:
    """Features that the key tree has and this trainer has not."""
    policy = recipe.policy
    dtensor, megatron = policy.dtensor_cfg, policy.megatron_cfg
    tokenizer, data = policy.tokenizer, recipe.data
    table: list[tuple[bool, str, str]] = [
        (
            tokenizer.chat_template is None and tokenizer.chat_template_kwargs is not None,
            "policy.tokenizer.chat_template_kwargs",
            "no chat template is applied, so it has no variables (policy.tokenizer.chat_template is null)",
        ),
        (data.num_workers > 0, "data.num_workers", "rows are tokenized once, before the first step (set 0)"),
        (
            policy.dynamic_batching.enabled,
            "policy.dynamic_batching.enabled",
            "dynamic batching is not available",
        ),
    ]
    if policy.backend == "dtensor":
        lora = dtensor.lora_cfg
        table += [
            (
                lora.implementation == "peft" and dtensor.tensor_parallel_size > 1,
                "policy.dtensor_cfg.lora_cfg.implementation",
                "PEFT's layers know no tensor parallelism (set native, or tensor_parallel_size to 1)",
            ),
            (
                lora.implementation == "peft" and lora.dropout > 0.0 and lora.dropout_position == "post",
                "policy.dtensor_cfg.lora_cfg.dropout_position",
                "PEFT drops an adapter's input, not its output (set pre, or implementation to native)",
            ),
            (
                lora.experts != "off" and lora.implementation == "peft",
                "policy.dtensor_cfg.lora_cfg.experts",
                "PEFT's layers multiply whole stacks of experts (set off, or implementation to native)",
            ),
            (
                lora.experts == "per_expert" and lora.dropout > 0.0,
                "policy.dtensor_cfg.lora_cfg.dropout",
                "adapters of every routed expert have no dropout (set 0.0, or experts to shared or off)",
            ),
            (
                lora.experts == "per_expert" and lora.lora_dtype not in (None, policy.precision),
                "policy.dtensor_cfg.lora_cfg.lora_dtype",
                f"an expert's adapter multiplies in policy.precision, {policy.precision} (set null)",
            ),
            (dtensor.cpu_offload, "policy.dtensor_cfg.cpu_offload", "weights are not offloaded to the CPU"),
            (
                dtensor.sequence_parallel,
                "policy.dtensor_cfg.sequence_parallel",
                "is available on the megatron backend only",
            ),
            (
                dtensor.context_parallel_size > 1,
                "policy.dtensor_cfg.context_parallel_size",
                "context parallelism is not available (set 1)",
            ),
            (
                dtensor.custom_parallel_plan is not None,
                "policy.dtensor_cfg.custom_parallel_plan",
                "the built-in plan of the model family is used (set null)",
            ),
            *(
                (
                    name != "force_hf",
                    f"policy.dtensor_cfg.automodel_kwargs.{name}",
                    "models are transformers' own; only force_hf is known, and changes nothing",
                )
                for name in dtensor.automodel_kwargs
            ),
        ]
    else:
        table += [
            (
                megatron.lora_cfg.a2a_experimental and not megatron.sequence_parallel,
                "policy.megatron_cfg.lora_cfg.a2a_experimental",
                "exchanges channels for a slice of the sequence, which is whole without sequence parallelism "
                "(set policy.megatron_cfg.sequence_parallel=true, or false here)",
            ),
            (
                megatron.context_parallel_size > 1,
                "policy.megatron_cfg.context_parallel_size",
                "context parallelism is not available (set 1)",
            ),
            (
                megatron.expert_model_parallel_size > 1,
                "policy.megatron_cfg.expert_model_parallel_size",
                "expert parallelism is not available (set 1)",
            ),
            (
                megatron.expert_tensor_parallel_size > 1,
                "policy.megatron_cfg.expert_tensor_parallel_size",
                "expert parallelism is not available (set 1)",
            ),
        ]
    yield from ((key, text) for refused, key, text in table if refused)


def _fast_path(recipe: Recipe) -> Iterator[Problem]:
    """A path that is never taken cannot be required: every run would train first, and then fail."""
    policy = recipe.policy
    backend = policy.dtensor_cfg if policy.backend == "dtensor" else policy.megatron_cfg
    if policy.require_fast_path and backend.fast_path == "off":
        yield (
            f"policy.{policy.backend}_cfg.fast_path",
            "is off, but policy.require_fast_path is true, so no run could pass; set auto, or "
            "policy.require_fast_path=false",
        )


def _sizes(recipe: Recipe) -> Iterator[Problem]:
    """The world is made of whole copies of the model; sequence parallelism needs tensor parallelism."""
    if recipe.world_size % recipe.model_parallel_size:
        yield (
            "cluster.gpus_per_node",
            f"{recipe.world_size} processes (cluster.num_nodes × cluster.gpus_per_node) cannot be split into "
            f"groups of {recipe.model_parallel_size} (tensor × pipeline × context parallel size)",
        )
    elif recipe.policy.backend == "dtensor":
        yield from _sharding(recipe)
        parts = recipe.policy.dtensor_cfg.expert_parallel_size
        if recipe.data_parallel_size % parts:
            yield (
                "policy.dtensor_cfg.expert_parallel_size",
                f"is {parts}, which does not divide the {recipe.data_parallel_size} data parallel ranks",
            )
    megatron, multiple = recipe.policy.megatron_cfg, recipe.policy.make_sequence_length_divisible_by
    if recipe.policy.backend != "megatron" or not megatron.sequence_parallel:
        return
    if multiple % megatron.tensor_model_parallel_size:
        yield (
            "policy.make_sequence_length_divisible_by",
            f"is {multiple}, but sequence_parallel splits every sequence over "
            f"{megatron.tensor_model_parallel_size} tensor parallel ranks; make it a multiple",
        )
    if megatron.tensor_model_parallel_size == 1:
        yield (
            "policy.megatron_cfg.sequence_parallel",
            "splits over the tensor parallel ranks, of which there is one; "
            "set policy.megatron_cfg.tensor_model_parallel_size=2 or more, or false",
        )


def _sharding(recipe: Recipe) -> Iterator[Problem]:
    """The number of replicas divides the ranks and is what `sharding` means."""
    dtensor, ranks = recipe.policy.dtensor_cfg, recipe.data_parallel_size
    replicas, sharding = dtensor.dp_replicate_size, dtensor.sharding
    if replicas is None:
        if sharding == "hsdp" and not any(ranks % size == 0 for size in range(2, ranks)):
            yield (
                "policy.dtensor_cfg.sharding",
                f"is hsdp, but {ranks} data parallel ranks are not several groups of several; set auto, "
                f"replicate or fsdp",
            )
    elif ranks % replicas:
        yield (
            "policy.dtensor_cfg.dp_replicate_size",
            f"is {replicas}, which does not divide the {ranks} data parallel ranks",
        )
    else:
        meant = {"auto": True, "replicate": replicas == ranks, "fsdp": replicas == 1}
        if not meant.get(sharding, 1 < replicas < ranks):
            yield (
                "policy.dtensor_cfg.dp_replicate_size",
                f"is {replicas} of {ranks} data parallel ranks, but policy.dtensor_cfg.sharding is "
                f"{sharding}; leave one of them out (dp_replicate_size=null, or sharding=auto)",
            )


def _optimizer(recipe: Recipe) -> Iterator[Problem]:
    """One kind of torch kernel; Megatron's copies of keys that both backends have agree with them."""
    policy = recipe.policy
    if policy.optimizer.kwargs.foreach and policy.optimizer.kwargs.fused:
        yield "policy.optimizer.kwargs.fused", "foreach and fused are both true; torch takes one of them"
    if policy.backend != "megatron":
        return
    optimizer = policy.megatron_cfg.optimizer
    if optimizer.clip_grad != policy.max_grad_norm:
        yield (
            "policy.megatron_cfg.optimizer.clip_grad",
            f"is {optimizer.clip_grad}, but policy.max_grad_norm is {policy.max_grad_norm}; "
            "set policy.max_grad_norm, which clip_grad follows",
        )
    lowest = optimizer.lr * policy.scheduler.min_lr_ratio
    if not math.isclose(optimizer.min_lr, lowest, rel_tol=1e-6, abs_tol=1e-15):
        yield (
            "policy.megatron_cfg.optimizer.min_lr",
            f"is {optimizer.min_lr}, but lr × policy.scheduler.min_lr_ratio is {lowest}; "
            "set policy.scheduler.min_lr_ratio, which min_lr follows",
        )


def _rhythm(recipe: Recipe) -> Iterator[Problem]:
    """Validation needs rows; the best checkpoint needs a validation at the step it is saved."""
    sft, checkpointing, data = recipe.sft, recipe.checkpointing, recipe.data
    validates = bool(sft.val_period) or sft.val_at_start or sft.val_at_end
    if validates and data.validation is None and not data.train.split_validation_size:
        yield (
            "sft.val_period",
            "validation is on, but there are no rows for it; set data.validation or "
            "data.train.split_validation_size, or switch it off (sft.val_period=0 sft.val_at_start=false "
            "sft.val_at_end=false)",
        )
    if not checkpointing.enabled or checkpointing.metric_name is None:
        return
    if checkpointing.metric_name not in _METRICS_OF_CHECKPOINTS:
        yield (
            "checkpointing.metric_name",
            f"is {checkpointing.metric_name!r}; write val:val_loss, train:loss or null",
        )
    elif checkpointing.metric_name.startswith("val:") and (
        not sft.val_period or checkpointing.save_period % sft.val_period
    ):
        yield (
            "checkpointing.metric_name",
            f"is a validation metric, but not every checkpoint (checkpointing.save_period "
            f"{checkpointing.save_period}) has a validation (sft.val_period {sft.val_period}); make the "
            "one a multiple of the other, or set checkpointing.metric_name=null",
        )


def _data(recipe: Recipe) -> Iterator[Problem]:
    """Every source of rows names one source; inputs fit into the sequence."""
    data = recipe.data
    for name, source in (("train", data.train), ("validation", data.validation)):
        if source is not None and (source.data_path is None) == (source.dataset_name is None):
            yield (
                f"data.{name}",
                "set either data_path (a file or folder) or dataset_name (of the hub, or random)",
            )
    if data.validation is not None and data.train.split_validation_size:
        yield (
            "data.train.split_validation_size",
            "rows are split off only where data.validation is null; set one of them",
        )
    if data.validation is not None and data.validation.split_validation_size:
        yield "data.validation.split_validation_size", "only training rows are split (set 0)"
    if data.max_input_seq_length > recipe.policy.max_total_sequence_length:
        yield (
            "data.max_input_seq_length",
            f"is {data.max_input_seq_length}, more than policy.max_total_sequence_length "
            f"({recipe.policy.max_total_sequence_length})",
        )


def _faults(recipe: Recipe) -> Iterator[Problem]:
    """A rank that is to fail exists, or the planted fault would never show."""
    faults = recipe.debug.faults
    for key in ("kill_rank_at", "out_of_memory_at"):
        fault: str | None = getattr(faults, key)
        if fault is not None and int(fault.partition(":")[0]) >= recipe.world_size:
            yield f"debug.faults.{key}", f"is {fault}, but ranks end at {recipe.world_size - 1}"
