# SPDX-License-Identifier: Apache-2.0
"""An adapter added into the weights that it was trained beside."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from lora_suite.config.errors import ConfigError
from lora_suite.train.lora.adapter_files import AdapterFolder
from lora_suite.train.lora.export import plain_factors
from lora_suite.train.lora.names import few
from lora_suite.train.lora.peft_format import scale_of
from lora_suite.train.lora.stacked import is_stack

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def merge_adapter(folder: AdapterFolder, base: str, directory: Path) -> int:
    """Write the base model with W + scale · B·A in place of every adapted W; return how many there were.

    base: folder or hub name of a pretrained model, whose dtypes and tokenizer are kept. Sums are made in
    float32 (float64 for a float64 base) and rounded once. Adapters of fused linears are split first. Raises
    ConfigError for a base that cannot be had, for adapters of linears that it has not, and for one of a head
    that is the embedding, too: that would change the embedding
    (https://github.com/huggingface/peft/issues/2018).
    """
    from transformers import AutoModelForCausalLM

    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{base}: no pretrained model: {error}") from error
    factors = plain_factors(folder, base)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    weights = {name: module.weight for name, module in linears.items()}
    weights |= {name: stack for name, stack in model.named_parameters() if is_stack(name)}
    if missing := sorted(factors.keys() - weights.keys()):
        raise ConfigError(f"{folder.path}: has adapters for {few(missing)}, which {base} has not")
    _refuse_tied_head(model, folder, {name: linears[name] for name in factors if name in linears})
    for name, (a, b) in factors.items():
        weight = weights[name]
        product = (*b.shape[:-1], a.shape[-1])
        shared = weight.dim() == 3 and product == tuple(weight.shape[1:])
        if product != tuple(weight.shape) and not shared:
            raise ConfigError(
                f"{folder.path}: {name}: B·A is {list(product)}, but {base} has {list(weight.shape)} there"
            )
        scale = scale_of(folder, a.shape[-2])
        if weight.dim() == 2:
            add_product(weight, a, b, scale)
            continue
        for expert, matrix in enumerate(weight.detach()):
            own = (a, b) if shared else (a[expert], b[expert])
            add_product(matrix, *own, scale)
    try:
        model.save_pretrained(directory)
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be written: {error}") from error
    _copy_tokenizer(base, directory)
    return len(factors)


@torch.no_grad()
def add_product(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
    """weight [out, in] += scale · b [out, rank] · a [rank, in], rounded to the weight's dtype at the end."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    weight.copy_(torch.addmm(weight.to(wide), b.to(wide), a.to(wide), alpha=scale))


def _refuse_tied_head(model: PreTrainedModel, folder: AdapterFolder, adapted: dict[str, nn.Linear]) -> None:
    embedding = model.get_input_embeddings().weight
    tied = [name for name, linear in adapted.items() if linear.weight is embedding]
    if tied:
        raise ConfigError(
            f"{folder.path}: has an adapter for {tied[0]}, which is the embedding of this model, too "
            "(tie_word_embeddings); merging it would change the embedding. Untie the model first, or use the "
            "adapter unmerged"
        )


def _copy_tokenizer(base: str, directory: Path) -> None:
    """The base's tokenizer, if it has one: a model of random weights may have none."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(base)
    except (OSError, ValueError, KeyError):
        return
    tokenizer.save_pretrained(directory)
