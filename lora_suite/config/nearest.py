# SPDX-License-Identifier: Apache-2.0
"""The nearest valid name for one that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


def nearest(name: str, names: Iterable[str], count: int = 1) -> list[str]:
    """Return up to `count` of `names` that look like `name`, best first; none if nothing comes near."""
    by_lower = {candidate.lower(): candidate for candidate in names}
    close = difflib.get_close_matches(name.lower(), list(by_lower), n=count, cutoff=0.5)
    return [by_lower[match] for match in close]


def nearest_key(key: str, keys: Iterable[str]) -> str | None:
    """Return the dotted key that was likely meant by an unknown one, or None.

    A similar word in the same block comes first, then the same word elsewhere, then a similar one elsewhere.
    """
    known = list(keys)
    parent, _, leaf = key.rpartition(".")
    siblings = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == parent}
    if close := nearest(leaf, siblings):
        return siblings[close[0]]
    for word in (leaf, *nearest(leaf, {name.rpartition(".")[2] for name in known})):
        namesakes = [name for name in known if name.rpartition(".")[2] == word]
        if namesakes:
            return (nearest(key, sorted(namesakes)) or sorted(namesakes))[0]
    return None


def similar_file(path: Path) -> str:
    """End of a message about a missing YAML file: the one of its folder whose name comes nearest, or ""."""
    near = nearest(path.name, [file.name for file in path.parent.glob("*.yaml")])
    return f"; the nearest is {path.parent / near[0]}" if near else ""
