# SPDX-License-Identifier: Apache-2.0
"""Suite YAML to ordered runs: cases, pairs, comparability of arms, order, cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lora_suite.plan.load import load_plan

__all__ = ["load_plan"]


def __getattr__(name: str) -> Any:
    """Import `load_plan` on first use: a rank that wants metric names must not wait for Hydra."""
    if name != "load_plan":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lora_suite.plan.load import load_plan

    return load_plan
