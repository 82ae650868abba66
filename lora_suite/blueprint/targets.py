# SPDX-License-Identifier: Apache-2.0
"""Which linears get an adapter: the meaning of `target_modules`, `exclude_modules` and `match_all_linear`.

An entry names a linear if it equals the linear's full name or the last component of it, or if it has a ``*``
and matches the full name from end to end (each ``*`` stands for any characters, dots included). Nothing
named: all linears. The head and routers of experts are adapted only by an entry that spells out their own
name (``lm_head``, ``*lm_head``, ``gate``); ``*`` alone does not reach them. Stacks of routed experts are
among the linears where ``experts`` is not ``off``.

On Megatron a linear has several names. With ``fused: false`` the query projection of layer 0 is
``model.layers.0.self_attn.q_proj``, ``decoder.layers.0.self_attention.linear_q`` and, as a part of the fused
linear, ``decoder.layers.0.self_attention.linear_qkv``. With ``fused: true`` there is only the fused linear,
and an entry that names a part of it is refused: one adapter for all parts cannot adapt one of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from lora_suite.blueprint.linears import Kind, Linear
from lora_suite.config.errors import ConfigError
from lora_suite.config.nearest import nearest
from lora_suite.config.schema import DTensorLora, MegatronLora

_GUARDED: tuple[Kind, ...] = ("head", "router")
# Megatron's place and names: (canonical part or whole, fused whole). Source: megatron-core's GPT layer specs.
_MEGATRON = {
    "q": ("self_attention", "linear_q", "linear_qkv"),
    "k": ("self_attention", "linear_k", "linear_qkv"),
    "v": ("self_attention", "linear_v", "linear_qkv"),
    "o": ("self_attention", "linear_proj", "linear_proj"),
    "gate": ("mlp", "linear_fc1_gate", "linear_fc1"),
    "up": ("mlp", "linear_fc1_up", "linear_fc1"),
    "down": ("mlp", "linear_fc2", "linear_fc2"),
}


# Why what is no linear takes no adapter, and what the linears in a stack of experts are called elsewhere.
_BARE: dict[Kind, str] = {
    "experts": "routed experts, which are stacked tensors and take no adapter here{remedy}",
    "router": "the router of experts, which takes no adapter here",
}
_STACKED = {"gate_up_proj": ("gate_proj", "up_proj", "linear_fc1"), "down_proj": ("linear_fc2",)}


@dataclass(frozen=True)
class AdapterSite:
    """One adapter to be: the linear it belongs to, A [rank, in_features], B [out_features, rank].

    name: full transformers name of the linear; for a fused Megatron linear its full Megatron name. experts:
    None; of a stack of routed experts that have an A and a B each, how many. met: how many of the linear's
    matrices a token meets.
    """

    name: str
    in_features: int
    out_features: int
    layer: int | None
    kind: str
    experts: int | None = None
    met: int = 1

    @property
    def stacked(self) -> bool:
        """Whether it is beside a stack of routed experts."""
        return self.kind == "experts"

    def params(self, rank: int) -> int:
        """Parameters of all A and B together."""
        return (self.experts or 1) * rank * (self.in_features + self.out_features)

    def active_params(self, rank: int) -> int:
        """Elements of A and B that one token is multiplied with."""
        return self.met * rank * (self.in_features + self.out_features)


@dataclass(frozen=True)
class _Candidate:
    """A linear that could be adapted, all its names, and the names of parts it cannot tell apart."""

    site: AdapterSite
    names: tuple[str, ...]
    parts: tuple[str, ...] = ()

    @property
    def guarded(self) -> bool:
        """Whether only an entry that spells out its name reaches it."""
        return self.site.kind in _GUARDED

    def named_by(self, entry: str) -> bool:
        """Whether an entry of the recipe names this linear."""
        return any(_names(entry, name, self.guarded) for name in self.names)


def select_sites(
    linears: Sequence[Linear], lora: DTensorLora | MegatronLora, tied_head: bool, where: str
) -> tuple[AdapterSite, ...]:
    """Return the adapters that a LoRA block asks for, in the order of the linears.

    where: what errors begin with. Raises ConfigError for entries that match nothing, for a part of a fused
    linear, for a head that is the embedding, and if nothing at all would be adapted.
    """
    fused = isinstance(lora, MegatronLora) and lora.fused
    candidates = list(_fused(linears) if fused else _separate(linears, lora))
    for key, entries in (("target_modules", lora.target_modules), ("exclude_modules", lora.exclude_modules)):
        remedy = "; set experts: per_expert or shared" if isinstance(lora, DTensorLora) else ""
        _refuse_unmatched(entries, candidates, linears, f"{where}.{key}", remedy)
    if lora.target_modules:
        chosen = [c for c in candidates if any(c.named_by(entry) for entry in lora.target_modules)]
    elif isinstance(lora, DTensorLora) and lora.match_all_linear is False and not lora.exclude_modules:
        chosen = []
    else:
        chosen = [
            c
            for c in candidates
            if not c.guarded and not any(c.named_by(entry) for entry in lora.exclude_modules)
        ]
    if not chosen:
        raise ConfigError(f"{where}: no linear would get an adapter; name some in target_modules")
    if tied_head and any(c.site.kind == "head" for c in chosen):
        raise ConfigError(
            f"{where}.target_modules: the head of this model is its embedding "
            f"(tie_word_embeddings), so an adapter on it would change the embedding, too; leave it out"
        )
    return tuple(c.site for c in chosen)


def _names(entry: str, name: str, guarded: bool) -> bool:
    """Whether an entry names the linear of that full name."""
    last = name.rpartition(".")[2]
    if "*" not in entry:
        return entry in (name, last)
    if guarded and last not in entry:
        return False
    return re.fullmatch(".*".join(re.escape(piece) for piece in entry.split("*")), name) is not None


def _separate(linears: Iterable[Linear], lora: DTensorLora | MegatronLora) -> Iterator[_Candidate]:
    """One candidate a linear, or stack of experts where they are adapted; routers take no adapter."""
    megatron = isinstance(lora, MegatronLora)
    experts = "off" if isinstance(lora, MegatronLora) else lora.experts
    for linear in linears:
        if linear.kind == "router" or (linear.kind == "experts" and experts == "off"):
            continue
        each = linear.count if linear.kind == "experts" and experts == "per_expert" else None
        size = (linear.in_features, linear.out_features)
        site = AdapterSite(linear.name, *size, linear.layer, linear.kind, each, linear.active)
        names = [linear.name]
        if megatron and linear.kind in _MEGATRON:
            place, part, whole = _MEGATRON[linear.kind]
            prefix = f"decoder.layers.{linear.layer}.{place}"
            names += dict.fromkeys((f"{prefix}.{part}", f"{prefix}.{whole}"))
        elif megatron and linear.kind == "head":
            names.append("output_layer")
        yield _Candidate(site, tuple(names))


def _fused(linears: Iterable[Linear]) -> Iterator[_Candidate]:
    """One candidate a Megatron linear: q, k, v are one, gate and up are one."""
    groups: dict[str, list[Linear]] = {}
    for linear in linears:
        if linear.kind == "head":
            groups.setdefault("output_layer", []).append(linear)
        elif linear.kind in _MEGATRON:
            place, _, whole = _MEGATRON[linear.kind]
            groups.setdefault(f"decoder.layers.{linear.layer}.{place}.{whole}", []).append(linear)
    for name, members in groups.items():
        first, out = members[0], sum(member.out_features for member in members)
        kind = "head" if first.kind == "head" else name.rpartition(".")[2]
        site = AdapterSite(name, first.in_features, out, first.layer, kind)
        if len(members) == 1:
            yield _Candidate(site, (name, first.name))
            continue
        canonical = (f"{name.rpartition('.')[0]}.{_MEGATRON[member.kind][1]}" for member in members)
        yield _Candidate(site, (name,), (*(member.name for member in members), *canonical))


def _names_kind(entry: str, kind: Kind, linears: Sequence[Linear]) -> bool:
    """Whether an entry names something of this kind, or a linear in a stack of this kind."""
    return any(
        _names(entry, linear.name, False)
        or entry.rpartition(".")[2] in _STACKED.get(linear.name.rpartition(".")[2], ())
        for linear in linears
        if linear.kind == kind
    )


def _refuse_unmatched(
    entries: Sequence[str],
    candidates: Sequence[_Candidate],
    linears: Sequence[Linear],
    where: str,
    remedy: str,
) -> None:
    """Raise ConfigError naming the entries that match nothing, why, and the names that come nearest.

    remedy: what to do about experts that take no adapter.
    """
    unmatched = [entry for entry in entries if not any(c.named_by(entry) for c in candidates)]
    if not unmatched:
        return
    known = sorted({name.rpartition(".")[2] for c in candidates for name in c.names})
    reasons = []
    for entry in unmatched:
        whole = next((c for c in candidates if any(_names(entry, part, False) for part in c.parts)), None)
        bare = next((reason for kind, reason in _BARE.items() if _names_kind(entry, kind, linears)), None)
        if whole is not None:
            reasons.append(
                f"{entry!r} is a part of {whole.site.kind}, which fused: true adapts as one; "
                f"name {whole.site.kind}, or set fused: false"
            )
        elif bare is not None:
            reasons.append(f"{entry!r} names {bare.format(remedy=remedy)}")
        else:
            near = nearest(entry, known)
            reasons.append(f"{entry!r} matches no linear" + (f"; the nearest is {near[0]}" if near else ""))
    raise ConfigError(f"{where}: {'; '.join(reasons)} (names are {', '.join(known)})")
