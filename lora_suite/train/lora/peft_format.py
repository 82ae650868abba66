# SPDX-License-Identifier: Apache-2.0
"""Adapters as PEFT stores them, written and read without PEFT.

A folder holds ``adapter_model.safetensors``, with A [rank, in] and B [out, rank] of every adapted linear
under ``base_model.model.<linear>.lora_A.weight`` and ``….lora_B.weight``, and ``adapter_config.json``
(https://huggingface.co/docs/peft/developer_guides/checkpoint).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from lora_suite.config.errors import ConfigError
from lora_suite.train.lora.adapter_files import CONFIG, SAFETENSORS, AdapterFolder
from lora_suite.train.lora.names import few, place
from lora_suite.train.lora.spec import LoraSpec
from lora_suite.train.lora.stacked import from_peft, is_stack, to_peft

PREFIX = "base_model.model."


class Kind(Protocol):
    """What the files say of adapters: a `LoraSpec` does, and whatever else has these figures."""

    @property
    def rank(self) -> int:
        """Rows of A, columns of B."""

    @property
    def alpha(self) -> float:
        """The scale is alpha / rank."""

    @property
    def dropout(self) -> float:
        """Probability."""


Factors = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""Whole factors (A [rank, in], B [out, rank]) by the adapted linear's full name in the transformers model."""


def write_peft_adapter(directory: Path, factors: Factors, spec: Kind, base_model_name: str | None) -> None:
    """Write an adapter folder that ``PeftModel.from_pretrained(base, directory)`` loads.

    factors: whole, on any device, in the dtype to be stored (the float32 masters, so that nothing is lost).
    base_model_name: of the model that was adapted, a hub name or folder; PEFT looks for its configuration
    there. Targets are written as full names, which match these linears and no others. The files say nothing
    of dropout's place: PEFT's is on the adapter's input, which matters only where training goes on. Factors
    of stacks of experts, of three dimensions, become PEFT's `target_parameters`. Raises ValueError for
    factors that are none of this rank, and ConfigError for an adapter that all experts share, of which PEFT
    knows nothing, and where the folder cannot be written.
    """
    if not factors:
        raise ValueError("no adapters: there is nothing to write")
    for name, (a, b) in factors.items():
        if a.dim() != b.dim() or a.dim() not in (2, 3) or (a.shape[-2], b.shape[-1]) != (spec.rank,) * 2:
            raise ValueError(
                f"{name}: A {list(a.shape)} and B {list(b.shape)} are not factors of rank {spec.rank}"
            )
        if a.dim() == 2 and is_stack(name):
            raise ConfigError(
                f"{directory}: {name}: PEFT has no adapter that all experts of a stack share; only those of "
                f"experts: per_expert can be written"
            )
    stacks = {name: pair for name, pair in factors.items() if pair[0].dim() == 3}
    plain = {name: pair for name, pair in factors.items() if name not in stacks}
    tensors: dict[str, torch.Tensor] = {}
    for name, (a, b) in {**plain, **to_peft(stacks)}.items():
        # A clone, because tensors that share memory (views of a bank) are refused by safetensors.
        for kind, factor in (("A", a), ("B", b)):
            tensors[f"{PREFIX}{name}.lora_{kind}.weight"] = factor.detach().cpu().contiguous().clone()
    from safetensors.torch import save_file

    try:
        directory.mkdir(parents=True, exist_ok=True)
        save_file(tensors, directory / SAFETENSORS, metadata={"format": "pt"})
        config = _peft_config(sorted(plain), spec, base_model_name)
        if stacks:
            config["target_parameters"] = sorted(stacks)
        text = json.dumps(config, indent=2)
        (directory / CONFIG).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be written: {error}") from error


def _peft_config(targets: list[str], spec: Kind, base_model_name: str | None) -> dict[str, Any]:
    """The keys that every release of PEFT knows; it fills in the others."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model_name,
        "r": spec.rank,
        "lora_alpha": int(spec.alpha) if float(spec.alpha).is_integer() else spec.alpha,
        "lora_dropout": spec.dropout,
        "target_modules": targets,
        "exclude_modules": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "modules_to_save": None,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }


def factors_of(folder: AdapterFolder) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The factors in an adapter folder, by the adapted linear's name without PEFT's prefix.

    Those of a stack of experts have three dimensions, A [experts, rank, in] and B [experts, out, rank].
    Raises ConfigError, naming folder and tensors, for a tensor that is no factor (it would be lost without a
    word), a factor without its other half, and an adapter that is more than A and B.
    """
    problems = list(_more_than_factors(folder.config))
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in folder.tensors.items():
        where = place(key)
        if where is None or tensor.dim() != (3 if is_stack(where.module) and tensor.dim() == 3 else 2):
            problems.append(f"{key} is no factor A or B of a linear")
        else:
            found.setdefault(where.module.removeprefix(PREFIX), {})[where.kind] = tensor
    for name, pair in found.items():
        if len(pair) < 2:
            missing = "B" if "a" in pair else "A"
            problems.append(f"{name} has no {missing}")
        elif pair["a"].shape[-2] != pair["b"].shape[-1]:
            shapes = f"A {list(pair['a'].shape)} and B {list(pair['b'].shape)}"
            problems.append(f"{name}: {shapes} share no rank")
    if not found:
        problems.append("there are no adapters in it")
    _refuse(folder, problems)
    pairs = {name: (pair["a"], pair["b"]) for name, pair in found.items()}
    parameters = folder.config.get("target_parameters") or []
    if not parameters:
        return pairs
    stacks = from_peft(pairs, parameters, int(folder.config["r"]))
    inside = {name.rpartition(".")[0] for name in stacks}
    plain = {name: pair for name, pair in pairs.items() if name.removesuffix(".base_layer") not in inside}
    return {**plain, **stacks}


def scale_of(folder: AdapterFolder, rank: int) -> float:
    """What B·A is multiplied with: alpha / rank, or alpha / √rank (use_rslora). Raises ConfigError."""
    alpha = folder.config.get("lora_alpha")
    if not isinstance(alpha, int | float):
        raise ConfigError(f"{folder.path}: {CONFIG} says no lora_alpha, so the scale is not known")
    return float(alpha) / (math.sqrt(rank) if folder.config.get("use_rslora") else rank)


def matching_factors(
    folder: AdapterFolder, sizes: Mapping[str, tuple[int, ...]], spec: LoraSpec
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The factors of a folder if they are those of a recipe: the same linears, rank and scale.

    sizes: (in, out) of every linear that the recipe adapts, (in, out, experts) of a stack of which every
    expert has an adapter. Raises ConfigError, naming folder and linears: an
    adapter whose keys match nothing would stay at its start without an error
    (https://github.com/huggingface/peft/issues/2412).
    """
    factors = factors_of(folder)
    problems = []
    if missing := sorted(sizes.keys() - factors.keys()):
        problems.append(f"has no adapter for {few(missing)}, which the recipe adapts")
    if extra := sorted(factors.keys() - sizes.keys()):
        problems.append(f"has an adapter for {few(extra)}, which the recipe does not adapt")
    for name in sorted(factors.keys() & sizes.keys()):
        (a, b), (inputs, outputs, *experts) = factors[name], sizes[name]
        wanted = ((*experts, spec.rank, inputs), (*experts, outputs, spec.rank))
        if (tuple(a.shape), tuple(b.shape)) != wanted:
            problems.append(
                f"{name} has A {list(a.shape)} and B {list(b.shape)}, the recipe {list(wanted[0])} and "
                f"{list(wanted[1])}"
            )
    if not problems and not math.isclose(scale_of(folder, spec.rank), spec.scale, rel_tol=1e-6):
        problems.append(f"its scale is {scale_of(folder, spec.rank):g}, the recipe's {spec.scale:g}")
    _refuse(folder, problems)
    return factors


def _more_than_factors(config: Mapping[str, Any]) -> Iterator[str]:
    """What PEFT can add to A and B, or vary between linears, and nothing here can read."""
    if config.get("bias") not in (None, "none"):
        yield f"it trains biases ({CONFIG}: bias is {config['bias']!r})"
    for key in ("use_dora", "modules_to_save", "alpha_pattern", "fan_in_fan_out", "lora_bias"):
        if config.get(key):
            yield f"{CONFIG}: {key} is {config[key]!r}, which is not known here"


def _refuse(folder: AdapterFolder, problems: list[str]) -> None:
    if problems:
        raise ConfigError(f"{folder.path}: {few(problems, '; ')}")
