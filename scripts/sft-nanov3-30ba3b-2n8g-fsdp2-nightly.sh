#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
declare_case steps=20 minutes=30
train "$@"
check --when policy.init=pretrained 'data["train/loss"]["20"] < 2.05'
# Random weights start at ln(131072) = 11.8 and a little more.
check --when policy.init=random 'data["train/loss"]["20"] < 13.3'
# Weights are held as whole as a card has room for.
check --on H100 'worst("ray/node.*.gpu.*.mem_gb") < 76' --on H200 'worst("ray/node.*.gpu.*.mem_gb") < 132'
