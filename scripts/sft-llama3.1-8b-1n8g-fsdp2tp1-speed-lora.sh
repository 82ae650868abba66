#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
declare_case steps=12 minutes=15
train "$@"
# Random weights start at ln(128256) = 11.8 and a little more.
check --when policy.init=random 'data["train/loss"]["12"] < 13.3'
check 'worst("ray/node.*.gpu.*.mem_gb") < 50'
check 'mean(data["timing/train/step_time"], 2) < 10'
check 'data["lora/grad_coverage"]["12"] == 1'
