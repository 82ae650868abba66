# SPDX-License-Identifier: Apache-2.0
"""A repository in the shape of the NeMo-RL family, written part by part."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

HEAD = """#!/bin/bash
SCRIPT_DIR=$( cd -- "$( dirname -- "${BASH_SOURCE[0]}" )" &> /dev/null && pwd)
source $SCRIPT_DIR/common.env

"""
CONFIG = """# ===== BEGIN CONFIG =====
NUM_NODES=2
STEPS_PER_RUN=20  # a step takes about 10 s
MAX_STEPS=50
NUM_RUNS=$(( (MAX_STEPS + STEPS_PER_RUN - 1) / STEPS_PER_RUN ))  # round up
NUM_MINUTES=30
# ===== END CONFIG =====
"""
TRAIN = """
exit_if_max_steps_reached

cd $PROJECT_ROOT
uv run examples/run_sft.py \\
    --config $CONFIG_PATH \\
    sft.max_num_steps=$MAX_STEPS \\
    logger.log_dir=$LOG_DIR \\
    ~policy.tokenizer.chat_template \\
    $@ \\
    2>&1 | tee $RUN_LOG
uv run tests/json_dump_tb_logs.py $LOG_DIR --output_path $JSON_METRICS
"""
CHECKS = """
if [[ $(jq '."train/loss" | keys | map(tonumber) | max' $JSON_METRICS) -ge $MAX_STEPS ]]; then
    uv run tests/check_metrics.py $JSON_METRICS \\
        'data["train/loss"]["1"] < 1.0' \\
        "data['train/loss']['$MAX_STEPS'] < 0.8" \\
        'mean(data["timing/train/total_step_time"], 2) < 30'
    rm -rf "$CKPT_DIR"
fi
"""
WHOLE = HEAD + CONFIG + TRAIN + CHECKS


@dataclass
class Repository:
    """Writes scripts and recipes where that family has them."""

    root: Path

    def script(self, name: str, text: str = WHOLE) -> Path:
        """Write a script of the suite `llm`."""
        return self._write(f"tests/test_suites/llm/{name}.sh", text)

    def recipe(self, name: str, text: str) -> Path:
        """Write the recipe of a script's name."""
        return self._write(f"examples/configs/recipes/llm/{name}.yaml", text)

    def _write(self, place: str, text: str) -> Path:
        path = self.root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "their")
