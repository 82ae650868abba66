# SPDX-License-Identifier: Apache-2.0
"""Small repositories in the family's shape, whose parts a test changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lora_suite.plan.audit import AuditFinding, audit

COMMON = "set -eou pipefail\n"
HEAD = 'SCRIPT_DIR=$( cd -- "$( dirname -- "${BASH_SOURCE[0]}" )" && pwd)\nsource "$SCRIPT_DIR/common.env"\n'
CONFIG = (
    "# ===== BEGIN CONFIG =====\nNUM_NODES=1\nGPUS_PER_NODE=8\nSTEPS_PER_RUN=50\nMAX_STEPS=50\n"
    "NUM_RUNS=1\nNUM_MINUTES=30\n# ===== END CONFIG =====\n"
)
TRAIN = 'uv run examples/run_sft.py --config "$CONFIG_PATH" "$@" 2>&1 | tee "$RUN_LOG"\n'
CHECK = 'uv run tests/check_metrics.py $JSON_METRICS \'data["train/loss"]["50"] < 2.0\'\n'
STEM = "sft-tiny-1n8g-fsdp2"
BASE = """
sft: {max_num_steps: 50}
policy:
  model_name: tiny
  train_global_batch_size: 32
  dtensor_cfg: {enabled: true, lora_cfg: {enabled: false, dim: 8}}
  megatron_cfg: {enabled: false, peft: {enabled: false}}
"""
LORA = "policy: {dtensor_cfg: {lora_cfg: {enabled: true}}}\n"


class Family:
    """Writes scripts and recipes, and audits them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.suite = root / "tests/test_suites/llm"
        self.recipes = root / "examples/configs/recipes/llm"
        self.suite.mkdir(parents=True)
        self.recipes.mkdir(parents=True)
        (self.suite / "common.env").write_text(COMMON)
        (self.recipes / "base.yaml").write_text(BASE)

    def case(
        self,
        stem: str = STEM,
        *,
        head: str = HEAD,
        config: str = CONFIG,
        train: str = TRAIN,
        check: str = CHECK,
        recipe: str = "",
    ) -> None:
        """Write a script, by default one without a defect, and its recipe."""
        (self.suite / f"{stem}.sh").write_text(f"#!/bin/bash\n{head}{config}{train}{check}")
        (self.recipes / f"{stem}.yaml").write_text(f"defaults: base.yaml\n{recipe}")

    def findings(self) -> list[AuditFinding]:
        """What the audit finds."""
        return list(audit(self.root).findings)

    def kinds(self) -> list[str]:
        """Kinds of what it finds."""
        return [each.kind for each in self.findings()]


@pytest.fixture
def family(tmp_path: Path) -> Family:
    return Family(tmp_path / "their")


@pytest.fixture
def kinds(family: Family) -> Callable[..., list[str]]:
    """Kinds that are found in one script with these parts."""

    def find(**parts: str) -> list[str]:
        family.case(**parts)
        return family.kinds()

    return find
