# SPDX-License-Identifier: Apache-2.0
"""The typed recipe: what a resolved YAML must look like before anything is started.

`recipes/sft.yaml` holds the defaults and documents every key; this module holds the types. The key tree is
the one that the field's ``run_sft.py`` examples use, so that their command lines carry over. Every model
forbids unknown keys and is strict: ``dim: 8.0`` or ``enabled: "true"`` are errors, not conversions.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]


def _by_one_name(value: object) -> object:
    """One value for each meaning; 1 would pass for true."""
    if isinstance(value, str):
        return {"none": False, "full": True}.get(value, value)
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


Recomputation = Annotated[Literal[False, "selective", True], BeforeValidator(_by_one_name)]
"""Which activations are computed anew in the backward pass: none, those that cost little, or all."""


class Block(BaseModel):
    """Base of every block: immutable, strict, closed to unknown keys."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Sft(Block):
    """Length, validation rhythm and seed of the training."""

    max_num_steps: Positive
    max_num_epochs: Positive
    val_period: NonNegative
    val_batches: NonNegative
    val_global_batch_size: Positive
    val_micro_batch_size: Positive
    val_at_start: bool
    val_at_end: bool
    seed: NonNegative


class Checkpointing(Block):
    """When checkpoints are written, which are kept, and whether a run continues from one."""

    enabled: bool
    checkpoint_dir: str
    metric_name: str | None
    higher_is_better: bool
    keep_top_k: Positive | None
    save_period: Positive
    resume: bool


class Tokenizer(Block):
    """The tokenizer: ``bytes`` (built in), or a hub name or folder.

    chat_template: null joins the texts of a row's messages; ``default``, which a deleted key means too, is
    the tokenizer's own; else a path that ends in ``.jinja``, or the template itself.
    """

    name: str
    chat_template: str | None = "default"
    chat_template_kwargs: dict[str, Any] | None = None


class OptimizerKwargs(Block):
    """Arguments of the torch optimizer; `betas`, `eps` and `weight_decay` as torch names them."""

    lr: Annotated[float, Field(gt=0)]
    weight_decay: Annotated[float, Field(ge=0)]
    betas: tuple[float, float]
    eps: Annotated[float, Field(gt=0)]
    foreach: bool | None
    fused: bool | None


class Optimizer(Block):
    """The optimizer of the dtensor backend, for full SFT and LoRA."""

    name: Literal["torch.optim.Adam", "torch.optim.AdamW", "torch.optim.SGD"]
    kwargs: OptimizerKwargs


class Scheduler(Block):
    """Learning rate: linear warm-up from zero, then constant, linear or cosine down to `min_lr_ratio`."""

    decay: Literal["constant", "linear", "cosine"]
    warmup_steps: NonNegative
    decay_steps: Positive | None
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)]


class DTensorLora(Block):
    """LoRA on the dtensor backend; meanings are written down in `recipes/sft.yaml` and `docs/lora.md`."""

    enabled: bool
    target_modules: list[str]
    exclude_modules: list[str]
    match_all_linear: bool | None
    dim: Positive
    alpha: Annotated[float, Field(gt=0)]
    dropout: Share
    dropout_position: Literal["pre", "post"]
    lora_A_init: Literal["xavier", "uniform", "kaiming"]
    lora_dtype: Literal["float32", "bfloat16", "float16", "float64"] | None
    use_triton: bool
    experts: Literal["off", "per_expert", "shared"]
    implementation: Literal["native", "peft"]
    adapter: str | None
    min_layer_coverage: Annotated[float, Field(ge=0, le=1)]


class MegatronLora(Block):
    """LoRA on the Megatron backend; `fused` adapts qkv and gate/up as one linear each."""

    enabled: bool
    target_modules: list[str]
    exclude_modules: list[str]
    dim: Positive
    alpha: Annotated[float, Field(gt=0)]
    dropout: Share
    dropout_position: Literal["pre", "post"]
    lora_A_init_method: Literal["xavier", "uniform", "kaiming", "normal", "zero"]
    lora_B_init_method: Literal["zero", "normal", "xavier", "uniform", "kaiming"]
    a2a_experimental: bool
    lora_dtype: Literal["float32", "bfloat16", "float16", "float64"] | None
    fused: bool
    adapter: str | None
    min_layer_coverage: Annotated[float, Field(ge=0, le=1)]


class DTensor(Block):
    """The dtensor backend: a transformers model under FSDP2 and tensor parallelism."""

    enabled: bool
    v2: bool = Field(alias="_v2")
    env_vars: dict[str, str]
    cpu_offload: bool
    sequence_parallel: bool
    activation_checkpointing: Recomputation
    recompute_mlp_layers: NonNegative
    fast_path: Literal["auto", "off"]
    sharding: Literal["auto", "replicate", "hsdp", "fsdp"]
    dp_replicate_size: Positive | None
    tensor_parallel_size: Positive
    context_parallel_size: Positive
    expert_parallel_size: Positive
    experts_implementation: Literal["auto", "grouped", "loop"]
    custom_parallel_plan: str | None
    automodel_kwargs: dict[str, Any]
    lora_cfg: DTensorLora


class MegatronOptimizer(Block):
    """Megatron-core's optimizer keys, for full SFT and LoRA on that backend."""

    optimizer: Literal["adam"]
    lr: Annotated[float, Field(gt=0)]
    min_lr: Annotated[float, Field(ge=0)]
    weight_decay: Annotated[float, Field(ge=0)]
    adam_beta1: Share
    adam_beta2: Share
    adam_eps: Annotated[float, Field(gt=0)]
    use_distributed_optimizer: bool
    clip_grad: Annotated[float, Field(gt=0)] | None


class Megatron(Block):
    """The Megatron backend: megatron-core's GPTModel under tensor, sequence and pipeline parallelism."""

    enabled: bool
    env_vars: dict[str, str]
    activation_checkpointing: bool
    fast_path: Literal["auto", "off"]
    tensor_model_parallel_size: Positive
    expert_tensor_parallel_size: Positive
    expert_model_parallel_size: Positive
    pipeline_model_parallel_size: Positive
    context_parallel_size: Positive
    sequence_parallel: bool
    lora_cfg: MegatronLora
    optimizer: MegatronOptimizer


class Packing(Block):
    """Sequence packing or dynamic batching."""

    enabled: bool


class Policy(Block):
    """The model, how it is built, split and optimized."""

    model_name: str
    init: Literal["random", "pretrained"]
    tokenizer: Tokenizer
    train_global_batch_size: Positive
    train_micro_batch_size: Positive
    max_total_sequence_length: Positive
    make_sequence_length_divisible_by: Positive
    precision: Literal["bfloat16", "float32", "float64"]
    max_grad_norm: Annotated[float, Field(gt=0)] | None
    dtensor_cfg: DTensor
    megatron_cfg: Megatron
    optimizer: Optimizer
    scheduler: Scheduler
    dynamic_batching: Packing
    sequence_packing: Packing
    require_fast_path: bool

    @property
    def backend(self) -> Literal["dtensor", "megatron"]:
        """The enabled backend; validation has made sure that there is exactly one."""
        return "dtensor" if self.dtensor_cfg.enabled else "megatron"

    @property
    def lora(self) -> DTensorLora | MegatronLora:
        """The LoRA block of the enabled backend (which may say ``enabled: false``)."""
        return self.dtensor_cfg.lora_cfg if self.dtensor_cfg.enabled else self.megatron_cfg.lora_cfg


class Dataset(Block):
    """One source of rows: local files (`data_path`), or a data set of the hub (`dataset_name`)."""

    data_path: str | None = None
    dataset_name: str | None = None
    split: str | None = None
    input_key: str = "input"
    output_key: str = "output"
    chat_key: str = "messages"
    split_validation_size: Share = 0.0
    seed: NonNegative = 42


class Data(Block):
    """Rows, and how a row becomes tokens."""

    max_input_seq_length: Positive
    add_bos: bool
    add_eos: bool
    add_generation_prompt: bool
    only_unmask_final: bool
    shuffle: bool
    num_workers: NonNegative
    pad_to_max_length: bool
    train: Dataset
    validation: Dataset | None


class WandbLogger(Block):
    """Weights & Biases: project and run name."""

    project: str
    name: str


class GpuMonitoring(Block):
    """Sampling of device memory, in seconds."""

    collection_interval: Annotated[float, Field(gt=0)]
    flush_interval: Annotated[float, Field(gt=0)]


class Logger(Block):
    """Where metrics go besides metrics.json and run.json, which are always written."""

    log_dir: str | None
    wandb_enabled: bool
    tensorboard_enabled: bool
    monitor_gpus: bool
    profile_steps: NonNegative
    wandb: WandbLogger
    gpu_monitoring: GpuMonitoring


class Cluster(Block):
    """Nodes, and GPUs (on a machine without any: processes) a node."""

    num_nodes: Positive
    gpus_per_node: Positive


class SlowPhase(Block):
    """By how much each phase of a step is made longer, as a share of the whole step (0.03: 3 %)."""

    data: Annotated[float, Field(ge=0)]
    forward_backward: Annotated[float, Field(ge=0)]
    grad_sync: Annotated[float, Field(ge=0)]
    optimizer: Annotated[float, Field(ge=0)]


class Faults(Block):
    """Faults planted on purpose, to see a verdict turn red. All off by default.

    freeze_b: adapters' B gets no update. slow_step: the step takes this many times as long. slow_phase: one
    phase takes longer. kill_rank_at: that rank kills itself at the given step ("rank:step").
    out_of_memory_at: that rank's memory runs out at that step. stop_at:
    training ends after that step as if it were done.
    """

    freeze_b: bool
    slow_step: Annotated[float, Field(ge=1)]
    slow_phase: SlowPhase
    kill_rank_at: Annotated[str, Field(pattern=r"^\d+:\d+$")] | None
    out_of_memory_at: Annotated[str, Field(pattern=r"^\d+:\d+$")] | None
    stop_at: Positive | None


class Debug(Block):
    """Switches for tests of the suite itself."""

    faults: Faults


class Recipe(Block):
    """One training, resolved and typed."""

    sft: Sft
    checkpointing: Checkpointing
    policy: Policy
    data: Data
    logger: Logger
    cluster: Cluster
    debug: Debug

    @property
    def world_size(self) -> int:
        """Processes of the run: one a GPU (on CPU machines one a counted process)."""
        return self.cluster.num_nodes * self.cluster.gpus_per_node

    @property
    def model_parallel_size(self) -> int:
        """Ranks that share one copy of the data: tensor × pipeline × context."""
        policy = self.policy
        if policy.backend == "dtensor":
            return policy.dtensor_cfg.tensor_parallel_size * policy.dtensor_cfg.context_parallel_size
        megatron = policy.megatron_cfg
        return (
            megatron.tensor_model_parallel_size
            * megatron.pipeline_model_parallel_size
            * megatron.context_parallel_size
        )

    @property
    def data_parallel_size(self) -> int:
        """Ranks that see different rows."""
        return self.world_size // self.model_parallel_size
