#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# What the field's nightly job of this name declares, stated to be compared: it is never run from here. In NeMo-RL it lies in
# tests/test_suites/llm (https://github.com/NVIDIA-NeMo/RL/tree/main/tests/test_suites/llm).
# ===== BEGIN CONFIG =====
NUM_NODES=2
STEPS_PER_RUN=20
MAX_STEPS=20
NUM_RUNS=1
NUM_MINUTES=30
# ===== END CONFIG =====
echo "this states a published job; run it in a checkout of NeMo-RL (docs/nano_v3.md)" >&2
exit 2
uv run examples/run_sft.py --config $CONFIG_PATH sft.max_num_steps=$MAX_STEPS "$@"
if [[ $(jq '."train/loss" | keys | map(tonumber) | max' $JSON_METRICS) -ge $MAX_STEPS ]]; then
    uv run tests/check_metrics.py $JSON_METRICS \
        'data["train/loss"]["20"] < 2.05' \
        'mean(data["timing/train/total_step_time"], 2) < 18'
fi
