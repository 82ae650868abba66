#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
SCRIPT_DIR=$( cd -- "$( dirname -- "${BASH_SOURCE[0]}" )" &> /dev/null && pwd)
source "$SCRIPT_DIR/common.env"

# ===== BEGIN CONFIG =====
NUM_NODES=1
STEPS_PER_RUN=20
MAX_STEPS=20
NUM_RUNS=$(( (MAX_STEPS + STEPS_PER_RUN - 1) / STEPS_PER_RUN ))  # round up
NUM_MINUTES=30
# ===== END CONFIG =====

cd "$PROJECT_ROOT"
python3 examples/run_sft.py \
    --config "$CONFIG_PATH" \
    sft.max_num_steps=$MAX_STEPS \
    logger.log_dir="$LOG_DIR" \
    checkpointing.checkpoint_dir="$CKPT_DIR" \
    "$@" \
    2>&1 | tee "$RUN_LOG"

lora-suite metrics import "$LOG_DIR" -o "$JSON_METRICS"

if [[ $(last_step) -ge $MAX_STEPS ]]; then
    check_metrics "$JSON_METRICS" \
        "data['train/loss']['$MAX_STEPS'] < 2.0" \
        'data["train/loss"]["100"] < 1.5'
    rm -rf "$CKPT_DIR"
else
    echo "$EXP_NAME reached only $(last_step) of $MAX_STEPS steps" >&2
    exit 1
fi
