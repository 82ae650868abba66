# SPDX-License-Identifier: Apache-2.0
"""What a training needs of each GPU's memory, by what it is needed for, before it starts.

Counted are tensors that the training itself holds. The allocator's rounding, workspaces of kernels, the
process's own part of the GPU (about half a GiB) and what a collective needs are left to `HEADROOM`.

Full SFT in bfloat16 holds, a parameter: 2 bytes of weight, 4 of master, 4 and 4 of Adam's moments, and its
gradient. FSDP2 shards the masters and gathers weights from them, so that there the 2 bytes are of layers at
work; Megatron keeps them, and so does the fast path, with masters of 2 bytes: what the weights lack of them.
LoRA holds 2 bytes of frozen weight, and all the rest for adapters alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from lora_suite.blueprint.activations import Keeping, kept_by_layer
from lora_suite.blueprint.facts import Blueprint
from lora_suite.blueprint.layout import COLUMN, ROW, RankLayout
from lora_suite.blueprint.linears import Linear
from lora_suite.config.schema import Recipe

HEADROOM = 0.9
"""Share of a GPU's memory that what the model counts may take."""
WIDTHS = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
"""Bytes of an element."""

_GATHERED_LAYERS = 2  # the one at work, and the next, which is prefetched
# Tokens of which the fast path holds logits, `lora_suite.train.fast.head_loss`.
_CHUNK, _TRAINED_CHUNK = 512, 2048
_FLOAT32_LOGITS = 2**26  # logits in float32 at a time, `lora_suite.train.token_loss.ELEMENTS_AT_ONCE`
# Megatron's fused linears, by the kinds of their parts.
_WHOLE = {
    **dict.fromkeys(("q", "k", "v"), "linear_qkv"),
    "o": "linear_proj",
    **dict.fromkeys(("gate", "up"), "linear_fc1"),
    "down": "linear_fc2",
}
_FRAME = 8  # the fast path pads ranks of a stack to a multiple of this


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that one rank holds, on the rank that holds most.

    weights: what the model multiplies with, or the sharded masters that it is gathered from. optimizer:
    masters beside the weights, and moments. adapters: with all that belongs to them. gradients: sums and
    buffers that lie there all through a pass. Of a pass: gathered, layers that FSDP2 has put together;
    activations and logits at its turn; and fresh, gradients at its end.
    """

    weights: int
    optimizer: int
    adapters: int
    gradients: int
    gathered: int
    activations: int
    logits: int
    fresh: int

    @property
    def total(self) -> int:
        """The most that is held at once: activations go as fresh gradients come."""
        turn, end = self.gathered + self.activations + self.logits, self.fresh
        return self.weights + self.optimizer + self.adapters + self.gradients + max(turn, end)

    def fits(self, memory: int) -> bool:
        """Whether a GPU with that many bytes has room for it."""
        return self.total <= HEADROOM * memory

    @property
    def gib(self) -> dict[str, float]:
        """The parts in GiB, without those that are nothing."""
        return {name: value / 2**30 for name, value in asdict(self).items() if value}

    def __str__(self) -> str:
        size, unit = unit_of(self.total)
        parts = ", ".join(f"{name} {value / size:.1f}" for name, value in asdict(self).items() if value)
        return f"{self.total / size:.1f} {unit} ({parts})"


def unit_of(size: float) -> tuple[int, str]:
    """The unit, in bytes and by its name, that memory of this size is told in."""
    return (2**30, "GiB") if size >= 2**30 else (2**20, "MiB")


def estimate_memory(recipe: Recipe, blueprint: Blueprint, layout: RankLayout, fast: bool) -> MemoryEstimate:
    """What a rank of a training needs.

    fast: by the backend's fast path, which keeps less and holds weights whole. Raises ValueError where the
    model's shape is not known.
    """
    if blueprint.model is None:
        raise ValueError("the model's shape is not known")
    state = _adapted_state if blueprint.rank is not None else _full_state
    held = LocalParams.of(blueprint, layout, splits_ends(recipe, fast))
    activations, logits = _pass(recipe, blueprint, layout, fast)
    return MemoryEstimate(
        activations=activations, logits=logits, **state(recipe, blueprint, layout, held, fast)
    )


@dataclass(frozen=True)
class LocalParams:
    """Parameters of a rank before sharding: of its layers without routed experts, of these, of the ends.

    The ends are embedding, head and last norm. The first pipeline stage has the one, the last the other.
    """

    layers: float
    experts: float
    ends: float
    layer: float

    @property
    def all(self) -> float:
        """Of all of them."""
        return self.layers + self.experts + self.ends

    def sharded(self, layout: RankLayout) -> float:
        """What a rank keeps."""
        return (self.layers + self.ends) / layout.shards + self.experts / layout.expert_shards

    @property
    def at_work(self) -> float:
        """What is whole at a time where weights are gathered: two layers, and the ends."""
        return _GATHERED_LAYERS * self.layer + self.ends

    @classmethod
    def of(cls, blueprint: Blueprint, layout: RankLayout, splits_ends: bool) -> LocalParams:
        """Of a rank of the stage with most. splits_ends: see `splits_ends`."""
        model = blueprint.model
        assert model is not None
        embedding = model.vocab * model.hidden
        head = 0 if model.tied_head else embedding
        split = sum(each.params for each in blueprint.linears if each.kind in (*COLUMN, *ROW))
        experts = sum(each.params for each in blueprint.linears if each.kind == "experts")
        whole = blueprint.total_params - embedding - head - split - experts
        layers = (split / layout.tensor + whole) / layout.pipeline
        local_experts = experts / layout.expert / layout.pipeline
        ends = embedding + head if layout.pipeline == 1 else embedding
        return cls(
            layers=layers,
            experts=local_experts,
            ends=ends / (layout.tensor if splits_ends else 1),
            layer=(layers + local_experts) * layout.pipeline / model.layers,
        )


def splits_ends(recipe: Recipe, fast: bool) -> bool:
    """Whether tensor parallel ranks split embedding and head by vocabulary."""
    return fast or recipe.policy.backend == "megatron"


def moment_bytes(recipe: Recipe) -> int:
    """Bytes a parameter of Adam's two moments; SGD has none."""
    if recipe.policy.backend == "dtensor" and recipe.policy.optimizer.name.endswith("SGD"):
        return 0
    return 2 * max(4, WIDTHS[recipe.policy.precision])


def micro_batches(recipe: Recipe) -> int:
    """Micro batches of a data parallel rank in a step; packed rows may take fewer."""
    policy = recipe.policy
    return policy.train_global_batch_size // (policy.train_micro_batch_size * recipe.data_parallel_size)


def micro_batch_tokens(recipe: Recipe) -> int:
    """Slots of a micro batch of the longest rows."""
    return recipe.policy.train_micro_batch_size * recipe.policy.max_total_sequence_length


def _full_state(
    recipe: Recipe, blueprint: Blueprint, layout: RankLayout, held: LocalParams, fast: bool
) -> dict[str, int]:
    """What is held for training every weight."""
    width, several = WIDTHS[recipe.policy.precision], micro_batches(recipe) > 1
    wide = max(4, width)
    master, moments = (wide if width < wide else 0), moment_bytes(recipe)
    kept = held.sharded(layout)
    if fast:
        lacking = wide - width
        return {
            "weights": int(width * held.all),
            "optimizer": int((lacking + moments) * sum(_updated(layout, held))),
            "adapters": 0,
            "gathered": 0,
            **_fast_gradients(layout, held, width, wide, several),
        }
    if recipe.policy.backend == "megatron":
        split = layout.data if recipe.policy.megatron_cfg.optimizer.use_distributed_optimizer else 1
        return {
            "weights": int(width * held.all),
            "optimizer": int((master + moments) * held.all / split),
            "adapters": 0,
            "gradients": int(wide * held.all),
            "gathered": 0,
            "fresh": 0,
        }
    return {
        "weights": int(wide * kept),
        "optimizer": int(moments * kept),
        "adapters": 0,
        # Without a reduction after every micro batch the sums are whole.
        "gradients": int(wide * held.all) if several else 0,
        "gathered": int(width * (held.at_work if layout.shards > 1 else held.all if master else 0.0)),
        "fresh": 0 if several else int(wide * kept),
    }


def _updated(layout: RankLayout, held: LocalParams) -> tuple[float, float]:
    """Parameters whose update is a rank's on the fast path: of split experts, and of all others.

    Ranks that hold the same share its update.
    """
    apart = held.experts if layout.expert > 1 else 0.0
    return apart * layout.expert / layout.data, (held.all - apart) / layout.data


def _fast_gradients(
    layout: RankLayout, held: LocalParams, width: int, wide: int, several: bool
) -> dict[str, int]:
    """Gradients of full SFT on the fast path.

    Where ranks share an update, each has the sums of its part in `wide` bytes, and of the rest a bucket at a
    time. Where it is a rank's alone, gradients are whole and in the weights' precision, until several micro
    batches add up.
    """
    experts, rest = _updated(layout, held)
    whole = rest if layout.data == 1 else 0.0
    layer = held.layer
    if layout.expert > 1 and layout.expert == layout.data:
        whole += experts
        layer *= held.layers / (held.layers + held.experts)
    # What is shared has a buffer into which a micro batch is summed over ranks, besides the sum over several.
    summed = experts + rest - whole + (experts + rest if several else 0.0)
    bucket = 0.0 if layout.data == 1 else (wide + width) * max(layer, held.ends)
    return {"gradients": int(wide * summed), "fresh": int(width * whole + bucket)}


def _adapted_state(
    recipe: Recipe, blueprint: Blueprint, layout: RankLayout, held: LocalParams, fast: bool
) -> dict[str, int]:
    """What is held for training adapters beside frozen weights."""
    width = WIDTHS[recipe.policy.precision]
    factors = local_adapter_params(blueprint, layout)
    lora = recipe.policy.lora
    factor = WIDTHS[lora.lora_dtype] if lora.lora_dtype is not None else width
    master = max(4, factor)
    # The bank: factors and gradients in the dtype they are multiplied in; master, its gradient, the moments.
    adapters = factors * (2 * factor + 2 * master) + factors * moment_bytes(recipe)
    if fast:
        adapters += width * _frames(blueprint, layout) / layout.tensor
    sharded = layout.shards > 1 and not fast
    return {
        "weights": int(width * (held.sharded(layout) if sharded else held.all)),
        "optimizer": 0,
        "adapters": int(adapters),
        "gradients": 0,
        "gathered": int(width * held.at_work) if sharded else 0,
        "fresh": 0,
    }


def local_adapter_params(blueprint: Blueprint, layout: RankLayout) -> float:
    """Parameters of a rank's adapters: of a split linear one factor is split, and the other is whole."""
    rank, total = blueprint.rank or 0, 0.0
    for site in blueprint.adapters:
        if site.experts is not None:
            continue
        inputs, outputs = float(site.in_features), float(site.out_features)
        if site.kind in COLUMN:
            outputs /= layout.tensor
        elif site.kind in ROW:
            inputs /= layout.tensor
        total += rank * (inputs + outputs)
    return total / layout.pipeline + expert_adapter_params(blueprint, layout)


def expert_adapter_params(blueprint: Blueprint, layout: RankLayout) -> float:
    """Parameters of a rank's adapters of single experts, which lie where these do."""
    stacked = (site.params(blueprint.rank or 0) for site in blueprint.adapters if site.experts is not None)
    return sum(stacked) / (layout.expert * layout.pipeline)


def _frames(blueprint: Blueprint, layout: RankLayout) -> int:
    """Elements that the fast path's frozen matrices are larger than their weights: [[W, s·B], [A, 0]].

    Of routed experts each of a rank's has a frame of its own.
    """
    rank, total = blueprint.rank or 0, 0
    adapted = {site.name for site in blueprint.adapters}
    fused = {(site.layer, site.kind) for site in blueprint.adapters}
    stacks: dict[tuple[int | None, str], list[Linear]] = {}
    for linear in blueprint.linears:
        stacks.setdefault((linear.layer, _WHOLE.get(linear.kind, linear.name)), []).append(linear)
    for stack, members in stacks.items():
        apart = sum(linear.name in adapted for linear in members)
        frame = rank * (apart or int(stack in fused))
        frame += -frame % _FRAME
        outputs = sum(linear.out_features for linear in members)
        count = members[0].count // (layout.expert if members[0].kind == "experts" else 1)
        total += count * frame * (outputs + members[0].in_features + frame)
    return total


def _pass(recipe: Recipe, blueprint: Blueprint, layout: RankLayout, fast: bool) -> tuple[int, int]:
    """Bytes of activations and of logits at the turn from forward to backward pass."""
    model, policy = blueprint.model, recipe.policy
    assert model is not None
    width, tokens = WIDTHS[policy.precision], micro_batch_tokens(recipe)
    megatron = policy.backend == "megatron"
    sequence = megatron and policy.megatron_cfg.sequence_parallel
    block = policy.megatron_cfg if megatron else policy.dtensor_cfg
    selective = block.activation_checkpointing == "selective"
    keeping = Keeping(
        width=width,
        lean=fast,
        full=blueprint.rank is None,
        needs_input=trains(blueprint),
        tensor=layout.tensor,
        sequence=sequence,
        expert=layout.expert,
        selective=selective,
        anew=policy.dtensor_cfg.recompute_mlp_layers if selective else 0,
    )
    layers = kept_by_layer(model, blueprint.linears, keeping)
    kept = sum(layers)
    if block.activation_checkpointing is True:
        inputs = width * model.hidden / (layout.tensor if sequence else 1)
        kept = len(layers) * inputs + max(layers)
    # Stages of a pipeline hold the activations of as many micro batches as there are stages.
    kept *= min(layout.pipeline, micro_batches(recipe)) / layout.pipeline
    vocabulary = model.vocab / (layout.tensor if splits_ends(recipe, fast) else 1)
    if fast:
        held = min(tokens, _TRAINED_CHUNK if blueprint.rank is None else _CHUNK)
        logits = held * vocabulary * (width + max(4, width)) + width * tokens * model.hidden
    else:
        in_float32 = min(tokens * vocabulary, _FLOAT32_LOGITS)
        logits = 2 * tokens * vocabulary * width + 2 * in_float32 * max(4, width)
    return int(tokens * kept), int(logits)


def trains(blueprint: Blueprint) -> Callable[[Linear], bool]:
    """Whether a linear's input is needed for a gradient of its weight or of its adapter."""
    if blueprint.rank is None:
        return lambda linear: True
    adapted = {site.name for site in blueprint.adapters}
    fused = {(site.layer, site.kind) for site in blueprint.adapters}
    return lambda linear: linear.name in adapted or (linear.layer, _WHOLE.get(linear.kind, "")) in fused


def mlps_in_one(blueprint: Blueprint) -> bool:
    """Whether each layer's gate, up, activation and down can be one operation.

    They have no bias then, and adapters on both sides of the activation. Where they are one, the fast path
    can make gate and up anew.
    """
    model = blueprint.model
    if model is None or model.mlp_bias:
        return False
    sides = {(site.layer, site.kind) for site in blueprint.adapters}
    return all(
        (layer, "down") in sides and ((layer, "gate") in sides or (layer, "up") in sides)
        for layer in range(model.layers)
    )
