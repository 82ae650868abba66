#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
declare_case steps=60 minutes=10
train "$@"
check --when policy.init=pretrained 'data["train/loss"]["60"] < 5.9'
# Random weights start at ln(128256) = 11.8 and a little more.
check --when policy.init=random 'data["train/loss"]["60"] < 13.3'
check 'worst("ray/node.*.gpu.*.mem_gb") < 40'
