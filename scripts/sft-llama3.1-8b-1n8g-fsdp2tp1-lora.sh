#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
declare_case steps=50 minutes=30
train "$@"
check --when policy.init=pretrained 'data["train/loss"]["1"] < 1.0' 'data["train/loss"]["50"] < 0.8'
# Random weights start at ln(128256) = 11.8 and a little more.
check --when policy.init=random 'data["train/loss"]["50"] < 13.3'
check 'max(data["ray/node.0.gpu.0.mem_gb"]) < 50' 'worst("ray/node.*.gpu.*.mem_gb") < 50'
check 'mean(data["timing/train/step_time"], 2) < 10'
check 'data["lora/grad_coverage"]["50"] == 1'
