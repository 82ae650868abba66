#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
set -e
SCRIPT_DIR=$( cd -- "$( dirname -- "${BASH_SOURCE[0]}" )" &> /dev/null && pwd)
PROJECT_ROOT=$(realpath "$SCRIPT_DIR/../../..")
EXP_NAME=$(basename "$0" .sh)
LOG_DIR=$SCRIPT_DIR/$EXP_NAME/logs
CKPT_DIR=$SCRIPT_DIR/$EXP_NAME/ckpts
RUN_LOG=$SCRIPT_DIR/$EXP_NAME/run.log
JSON_METRICS=$SCRIPT_DIR/$EXP_NAME/metrics.json
CONFIG_PATH=$PROJECT_ROOT/examples/configs/recipes/llm/$EXP_NAME.yaml

# ===== BEGIN CONFIG =====
NUM_NODES=1
GPUS_PER_NODE=8
STEPS_PER_RUN=20
MAX_STEPS=20
NUM_RUNS=$(( (MAX_STEPS + STEPS_PER_RUN - 1) / STEPS_PER_RUN ))  # round up
NUM_MINUTES=30
# ===== END CONFIG =====

cd "$PROJECT_ROOT"
python3 examples/run_grpo.py \
    --config "$CONFIG_PATH" \
    grpo.max_num_steps=$MAX_STEPS \
    logger.log_dir="$LOG_DIR" \
    checkpointing.checkpoint_dir="$CKPT_DIR" \
    "$@" \
    2>&1 | tee "$RUN_LOG"

lora-suite metrics import "$LOG_DIR" -o "$JSON_METRICS"

# The step became slow with a new release of its kernels.
# TODO: revert the limit to < 14 once that is fixed.
check_metrics "$JSON_METRICS" \
    'mean(data["train/reward"]) > 0.1' \
    'mean(data["timing/train/total_step_time"], 2) < 14'
