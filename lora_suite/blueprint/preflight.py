# SPDX-License-Identifier: Apache-2.0
"""Everything about a training that can be known, and refused, before a GPU is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lora_suite.blueprint.facts import Blueprint
from lora_suite.blueprint.linears import model_linears, total_params
from lora_suite.blueprint.shape import ModelShape, read_shape
from lora_suite.blueprint.targets import select_sites
from lora_suite.config.errors import ConfigError
from lora_suite.config.models import find_config, known_models
from lora_suite.config.nearest import nearest
from lora_suite.config.paths import locate
from lora_suite.config.resolvers import BYTES_TOKENIZER
from lora_suite.config.schema import DTensorLora, MegatronLora, Recipe

_ROW_PARALLEL = ("o", "down", "linear_proj", "linear_fc2")
BYTES_VOCABULARY = 259  # 256 bytes, begin, end, padding


def preflight(recipe: Recipe, recipe_path: Path) -> Blueprint:
    """Check a typed recipe against its model and files, and return the facts.

    Raises ConfigError with every problem, one a line. A pretrained model of the hub whose architecture is not
    on this machine gives a blueprint without a model; what does not depend on it is checked all the same.
    """
    config_path = _model_config(recipe, recipe_path)
    shape = read_shape(config_path) if config_path is not None else None
    problems = [*_batches(recipe), *_files(recipe, recipe_path)]
    if shape is not None:
        problems += [*_divisions(recipe, shape), *_limits(recipe, shape)]
    if problems:
        raise ConfigError("\n".join(f"{recipe_path}: {problem}" for problem in problems))
    return _facts(recipe, recipe_path, shape)


def _facts(recipe: Recipe, recipe_path: Path, shape: ModelShape | None) -> Blueprint:
    """Assemble the blueprint; selecting adapters may raise ConfigError."""
    policy = recipe.policy
    rank = policy.lora.dim if policy.lora.enabled else None
    if shape is None:
        return Blueprint(None, (), (), rank, policy.max_total_sequence_length, 0)
    linears = model_linears(shape)
    where = f"{recipe_path}: policy.{policy.backend}_cfg.lora_cfg"
    sites = select_sites(linears, policy.lora, shape.tied_head, where) if policy.lora.enabled else ()
    theirs = isinstance(policy.lora, DTensorLora) and policy.lora.implementation == "peft"
    if theirs and any(site.kind == "mamba_out" for site in sites):
        raise ConfigError(
            f"{where}.implementation: PEFT puts no adapter beside out_proj of a Mamba mixer "
            f"(https://github.com/huggingface/peft/pull/2562); set exclude_modules=['*out_proj*'], or native"
        )
    exchanged = isinstance(policy.lora, MegatronLora) and policy.lora.a2a_experimental
    if sites and exchanged and not any(site.kind in _ROW_PARALLEL for site in sites):
        raise ConfigError(
            f"{where}.a2a_experimental: is about adapters of linear_proj and linear_fc2, and there are none; "
            f"name one of them in target_modules, or set false"
        )
    return Blueprint(shape, linears, sites, rank, policy.max_total_sequence_length, total_params(shape))


def _model_config(recipe: Recipe, recipe_path: Path) -> Path | None:
    """Return the model's JSON; None only for a pretrained model of the hub that is not on this machine."""
    name, random = recipe.policy.model_name, recipe.policy.init == "random"
    path = find_config(name, recipe_path)
    key = f"{recipe_path}: policy.model_name: {name}"
    if path is None and (random or _is_path(name)):
        near = nearest(name, known_models(recipe_path), 1)
        hint = f"; the nearest is {near[0]}" if near else ""
        remedy = "name a JSON file, a folder with config.json, or a model that a file in models/ states"
        raise ConfigError(f"{key}: not on this machine{hint}; {remedy}")
    if path is not None and not random and locate(name, recipe_path) == path:
        raise ConfigError(f"{key}: an architecture alone has no weights; set policy.init=random")
    return path


def _is_path(name: str) -> bool:
    """Whether a model's name can only be a path: hub names are `owner/name`."""
    return name.endswith(".json") or name.startswith(("/", ".", "~")) or name.count("/") > 1


def _batches(recipe: Recipe) -> Iterator[str]:
    """Global batches are whole micro batches on every data-parallel rank."""
    ranks, policy, sft = recipe.data_parallel_size, recipe.policy, recipe.sft
    batches = [("policy.train", policy.train_global_batch_size, policy.train_micro_batch_size)]
    if sft.val_period or sft.val_at_start or sft.val_at_end:
        batches.append(("sft.val", sft.val_global_batch_size, sft.val_micro_batch_size))
    for key, total, micro in batches:
        if total % (micro * ranks):
            yield (
                f"{key}_global_batch_size is {total}, which {ranks} data-parallel ranks cannot share in "
                f"micro batches of {micro} ({key}_micro_batch_size); make it a multiple of {micro * ranks}"
            )


def _files(recipe: Recipe, recipe_path: Path) -> Iterator[str]:
    """Local rows exist, and the adapter to start from."""
    for name, source in (("train", recipe.data.train), ("validation", recipe.data.validation)):
        if source is None or source.data_path is None:
            continue
        if locate(source.data_path, recipe_path) is None:
            yield f"data.{name}.data_path: there is no file {source.data_path}"
    lora = recipe.policy.lora
    if lora.enabled and lora.adapter is not None and locate(lora.adapter, recipe_path) is None:
        yield f"policy.{recipe.policy.backend}_cfg.lora_cfg.adapter: there is no folder {lora.adapter}"


def _divisions(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """What tensor and pipeline parallelism split must split evenly."""
    policy = recipe.policy
    if policy.backend == "dtensor":
        key, tp, pp = "policy.dtensor_cfg.tensor_parallel_size", policy.dtensor_cfg.tensor_parallel_size, 1
    else:
        megatron = policy.megatron_cfg
        tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
        key = "policy.megatron_cfg.tensor_model_parallel_size"
    sizes = {
        "attention heads": shape.heads,
        "key/value heads": shape.kv_heads,
        "hidden channels": shape.hidden,
        "MLP channels": shape.intermediate,
        "vocabulary": shape.vocab,
    }
    for what, size in sizes.items():
        if size % tp:
            yield f"{key} is {tp}, which does not divide the model's {what}, {size}"
    if shape.layers % pp:
        yield (
            f"policy.megatron_cfg.pipeline_model_parallel_size is {pp}, which does not divide the model's "
            f"layers, {shape.layers}"
        )


def _limits(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """Rows fit the model's positions and padding, ids fit its vocabulary, the backend knows its family."""
    policy = recipe.policy
    length, multiple = policy.max_total_sequence_length, policy.make_sequence_length_divisible_by
    if length > shape.max_positions:
        yield f"policy.max_total_sequence_length is {length}, but the model has {shape.max_positions}"
    if length % multiple:
        yield (
            f"policy.max_total_sequence_length is {length}, not a multiple of "
            f"policy.make_sequence_length_divisible_by, {multiple}"
        )
    if policy.tokenizer.name == BYTES_TOKENIZER and shape.vocab < BYTES_VOCABULARY:
        yield f"policy.tokenizer.name: bytes needs {BYTES_VOCABULARY} ids, but the model has {shape.vocab}"
    if policy.backend == "megatron" and shape.hybrid is not None:
        yield f"policy.model_name: the megatron backend does not build {shape.family} models"
    if shape.moe is not None:
        yield from _experts(recipe, shape)
    if policy.backend == "dtensor":
        yield from _experts_and_mixers(recipe, shape)
        yield from _recomputed(recipe, shape)


def _experts_and_mixers(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """Experts are split evenly, where there are any; hybrid layers are not split, nor recomputed in part."""
    dtensor = recipe.policy.dtensor_cfg
    size, experts = dtensor.expert_parallel_size, shape.hybrid.experts if shape.hybrid else 0
    if size > 1 and experts % size:
        yield (
            f"policy.dtensor_cfg.expert_parallel_size is {size}, which does not divide the model's experts, "
            f"{experts}"
        )
    if size > 1 and not experts:
        yield f"policy.dtensor_cfg.expert_parallel_size is {size}, but the model has no experts; set 1"
    if shape.hybrid and dtensor.activation_checkpointing == "selective":
        key = "policy.dtensor_cfg.activation_checkpointing"
        yield f"{key} is selective, which Mamba mixers and routed experts are not made for; set true or false"
    if shape.hybrid and dtensor.tensor_parallel_size > 1:
        key = "policy.dtensor_cfg.tensor_parallel_size"
        yield f"{key} is {dtensor.tensor_parallel_size}, but Mamba mixers and experts are not split; set 1"
    if dtensor.lora_cfg.enabled and dtensor.lora_cfg.experts != "off" and not experts:
        key = "policy.dtensor_cfg.lora_cfg.experts"
        yield f"{key} is {dtensor.lora_cfg.experts}, but the model has no experts; set off"


def _recomputed(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """Layers whose gate and up are made anew are some of those that make anew what is cheap."""
    dtensor, key = recipe.policy.dtensor_cfg, "policy.dtensor_cfg.recompute_mlp_layers"
    count = dtensor.recompute_mlp_layers
    if count and not dtensor.activation_checkpointing:
        yield f"{key} is {count}, which needs activation_checkpointing: selective; set that, or 0"
    elif count > shape.layers:
        yield f"{key} is {count}, but the model has {shape.layers} layers; set at most {shape.layers}"


def _experts(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """What is not available for a model with routed experts."""
    policy = recipe.policy
    if policy.backend == "dtensor":
        yield f"policy.model_name: the dtensor backend does not build {shape.family} models"
        return
    size = policy.megatron_cfg.tensor_model_parallel_size
    if size > 1:
        key = "policy.megatron_cfg.tensor_model_parallel_size"
        yield f"{key} is {size}, but routed experts are not split; set 1"
    if not policy.lora.enabled:
        yield (
            f"policy.megatron_cfg.lora_cfg.enabled is false, but of {shape.family} models only adapters are "
            f"trained; set true"
        )
