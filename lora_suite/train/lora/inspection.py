# SPDX-License-Identifier: Apache-2.0
"""What is in an adapter folder, and what is wrong with it."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch

from lora_suite.train.lora.adapter_files import AdapterFolder
from lora_suite.train.lora.names import DELIBERATE, place

# The first number in a dotted name is the layer's: in layers.1.mlp.experts.0 it is 1.
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")


@dataclass(frozen=True)
class Defect:
    """One thing that is wrong: its kind, the module or tensor, and what was found."""

    kind: str
    name: str
    message: str

    def __str__(self) -> str:
        """The defect on one line."""
        return f"{self.kind}: {self.name}: {self.message}"


@dataclass(frozen=True)
class ModuleRow:
    """One module over all layers. module: its name with `*` for the layer; layers: empty where it has none.

    ranks: every rank that occurs. parameters: of both factors, over all layers.
    """

    module: str
    layers: tuple[int, ...]
    ranks: tuple[int, ...]
    parameters: int


@dataclass(frozen=True)
class Inspection:
    """What an adapter folder holds. rank, alpha, scale: None where neither tensors nor configuration say."""

    form: str
    rank: int | None
    alpha: float | None
    scale: float | None
    adapters: int
    parameters: int
    rows: tuple[ModuleRow, ...]
    defects: tuple[Defect, ...]


@dataclass
class _Adapter:
    """Both factors of one adapter. module: the full name of what is adapted."""

    module: str
    a: torch.Tensor | None = None
    b: torch.Tensor | None = None
    layer: int | None = field(init=False)
    pattern: str = field(init=False)

    def __post_init__(self) -> None:
        found = _LAYER.search(self.module)
        self.layer = int(found[0]) if found else None
        self.pattern = _LAYER.sub("*", self.module, count=1)

    @property
    def rank(self) -> int | None:
        """The dimension that A [rank, in] and B [out, rank] share; None if they don't.

        Grouped experts keep their factors the other way round, A [experts, in, rank].
        """
        if self.a is None or self.b is None or min(self.a.dim(), self.b.dim()) < 2:
            return None
        if self.a.shape[-2] == self.b.shape[-1]:
            return int(self.a.shape[-2])
        return int(self.a.shape[-1]) if self.a.shape[-1] == self.b.shape[-2] else None

    @property
    def parameters(self) -> int:
        """Parameters of the factors that are there."""
        return sum(each.numel() for each in (self.a, self.b) if each is not None)


def inspect(folder: AdapterFolder) -> Inspection:
    """Look at every tensor of an adapter folder."""
    adapters = _adapters(folder)
    ranks = Counter(each.rank for each in adapters if each.rank is not None)
    rank = ranks.most_common(1)[0][0] if ranks else _number(folder.config, "r")
    alpha = _number(folder.config, "lora_alpha")
    rooted = bool(folder.config.get("use_rslora"))
    scale = alpha / (math.sqrt(rank) if rooted else rank) if alpha is not None and rank else None
    defects = [
        *_nothing(adapters),
        *_unmatched_tensors(folder),
        *_unmatched_targets(folder.config, adapters),
        *(defect for each in adapters for defect in _adapter_defects(each, folder.config)),
        *_incomplete_layers(adapters, folder.config),
    ]
    return Inspection(
        form=folder.form,
        rank=int(rank) if rank is not None else None,
        alpha=alpha,
        scale=scale,
        adapters=len(adapters),
        parameters=sum(each.parameters for each in adapters),
        rows=tuple(_rows(adapters)),
        defects=tuple(defects),
    )


def inspection_lines(found: Inspection) -> Iterator[str]:
    """The inspection as text: figures, a table of modules over layers, defects."""
    yield (
        f"{found.form}: rank {_or_unknown(found.rank)}, alpha {_or_unknown(found.alpha)}, "
        f"scale {_or_unknown(found.scale)}, {found.adapters} adapters, {found.parameters} parameters"
    )
    width = max((len(row.module) for row in found.rows), default=0)
    if found.rows:
        yield f"{'module':{width}}  {'layers':>12}  {'rank':>6}  {'parameters':>12}"
    for row in found.rows:
        ranks = ",".join(map(str, row.ranks)) or "?"
        yield f"{row.module:{width}}  {_ranges(row.layers):>12}  {ranks:>6}  {row.parameters:>12}"
    for defect in found.defects:
        yield str(defect)
    yield f"{len(found.defects)} defects" if found.defects else "nothing is wrong"


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers in ascending order with runs as `0-3`; `-` for none."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{low}-{high}" if high > low else f"{low}" for low, high in runs) or "-"


def _or_unknown(value: float | None) -> str:
    return "unknown" if value is None else f"{value:g}"


def _adapters(folder: AdapterFolder) -> list[_Adapter]:
    """The adapters of a folder, in the order of its tensors."""
    found: dict[str, _Adapter] = {}
    for name, tensor in folder.tensors.items():
        where = place(name)
        if where is not None and not name.endswith(".bias"):
            adapter = found.setdefault(where.adapter, _Adapter(where.module))
            setattr(adapter, where.kind, tensor)
    return list(found.values())


def _rows(adapters: Sequence[_Adapter]) -> Iterator[ModuleRow]:
    """One row for each module, in the order of the file."""
    for pattern in dict.fromkeys(each.pattern for each in adapters):
        same = [each for each in adapters if each.pattern == pattern]
        yield ModuleRow(
            module=pattern,
            layers=tuple(sorted({each.layer for each in same if each.layer is not None})),
            ranks=tuple(sorted({each.rank for each in same if each.rank is not None})),
            parameters=sum(each.parameters for each in same),
        )


def _nothing(adapters: Sequence[_Adapter]) -> Iterator[Defect]:
    if not adapters:
        yield Defect("no-adapter", "the folder", "no tensor is a factor of an adapter")


def _unmatched_tensors(folder: AdapterFolder) -> Iterator[Defect]:
    """Tensors that are no factor, nor anything that PEFT was asked to train beside them."""
    saved = [str(each) for each in folder.config.get("modules_to_save") or []]
    for name in folder.tensors:
        words = name.split(".")
        deliberate = any(word in words for word in (*DELIBERATE, *saved))
        if place(name) is None and not deliberate:
            yield Defect("unmatched-key", name, "belongs to no adapter")


def _unmatched_targets(config: Mapping[str, Any], adapters: Sequence[_Adapter]) -> Iterator[Defect]:
    """Targets of the configuration that no adapter answers to, as PEFT reads them."""
    targets = config.get("target_modules")
    modules = [each.module for each in adapters]
    if isinstance(targets, str):
        matches = re.compile(targets)
        if targets != "all-linear" and not any(matches.fullmatch(_bare(module)) for module in modules):
            yield Defect("unmatched-target", targets, "no adapted module matches this pattern")
        return
    for target in targets or []:
        if not any(fnmatchcase(f".{module}", f"*.{target}") for module in modules):
            yield Defect("unmatched-target", str(target), "no module of this name has an adapter")


def _bare(module: str) -> str:
    """The name of a module as it was before PEFT wrapped its model."""
    return module.removeprefix("base_model.model.")


def _adapter_defects(adapter: _Adapter, config: Mapping[str, Any]) -> Iterator[Defect]:
    """What is wrong with one adapter."""
    factors = {"A": adapter.a, "B": adapter.b}
    for name, tensor in factors.items():
        if tensor is None:
            yield Defect("missing-factor", adapter.module, f"has no {name}")
        elif not bool(torch.isfinite(tensor).all()):
            bad = int((~torch.isfinite(tensor)).sum())
            yield Defect("non-finite", adapter.module, f"{bad} of {tensor.numel()} values of {name}")
    if adapter.a is None or adapter.b is None:
        return
    for name, tensor in (("A", adapter.a), ("B", adapter.b)):
        dead = _zero_layers(tensor, adapter.layer is None)
        if dead is not None:
            yield Defect(f"zero-{name.lower()}", adapter.module, f"{name} is all zero{dead}")
    if adapter.rank is None:
        shapes = f"A {list(adapter.a.shape)} and B {list(adapter.b.shape)}"
        yield Defect("shape", adapter.module, f"{shapes} share no rank")
    elif not config.get("rank_pattern") and _number(config, "r") not in (None, adapter.rank):
        yield Defect(
            "shape", adapter.module, f"rank {adapter.rank}, but the configuration says {config['r']}"
        )


def _zero_layers(tensor: torch.Tensor, stacked: bool) -> str | None:
    """Where a factor is all zero: "" for all of it, else its layers; None for nowhere.

    stacked: the tensor holds all layers, one after the other, if it has three dimensions.
    """
    if not bool(tensor.any()):
        return ""
    if not stacked or tensor.dim() < 3:
        return None
    dead = [str(index) for index, layer in enumerate(tensor) if not bool(layer.any())]
    return f" in layer {', '.join(dead)}" if dead else None


def _incomplete_layers(adapters: Sequence[_Adapter], config: Mapping[str, Any]) -> Iterator[Defect]:
    """Layers that lack modules which most layers have, and numbers that a regular model skips.

    A layer is incomplete if its modules are a part of those that at least half of the layers have; hybrid
    models, whose layers have different modules, are not. A number is missing where all layers are alike.
    """
    modules: dict[int, set[str]] = {}
    for each in adapters:
        if each.layer is not None:
            modules.setdefault(each.layer, set()).add(each.pattern)
    if not modules:
        return
    usual, count = Counter(frozenset(found) for found in modules.values()).most_common(1)[0]
    if 2 * count >= len(modules):
        for layer, found in sorted(modules.items()):
            if found < usual:
                lacking = ", ".join(sorted(usual - found))
                yield Defect(
                    "missing-module", f"layer {layer}", f"lacks {lacking}, which {count} layers have"
                )
    if count == len(modules) and config.get("layers_to_transform") is None:
        for layer in sorted(set(range(max(modules))).difference(modules)):
            yield Defect("missing-layer", f"layer {layer}", "has no adapter; all other layers are alike")


def _number(config: Mapping[str, Any], key: str) -> float | None:
    value = config.get(key)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
