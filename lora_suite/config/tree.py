# SPDX-License-Identifier: Apache-2.0
"""Resolved recipes as plain trees: flat view, fingerprint, and the keys in which two of them differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

ABSENT = "(absent)"


def flatten(tree: Mapping[str, Any]) -> dict[str, object]:
    """Return ``{dotted key: value}`` of all leaves; lists and empty mappings are leaves."""
    flat: dict[str, object] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat.update({f"{key}.{below}": leaf for below, leaf in flatten(value).items()})
        else:
            flat[key] = value
    return flat


def differences(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[tuple[str, object, object]]:
    """Return ``(key, left value, right value)`` for every key in which two trees differ, in key order.

    A key that one side lacks has the value `ABSENT` there. 1 and 1.0 are equal, 1 and true are not.
    """
    one, other = flatten(left), flatten(right)
    found = []
    for key in sorted(one.keys() | other.keys()):
        a, b = one.get(key, ABSENT), other.get(key, ABSENT)
        if a != b or isinstance(a, bool) is not isinstance(b, bool):
            found.append((key, a, b))
    return found


def recipe_hash(tree: Mapping[str, Any]) -> str:
    """Return 16 hexadecimal digits that depend on every value of the tree, and on nothing else."""
    canonical = json.dumps(tree, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]
