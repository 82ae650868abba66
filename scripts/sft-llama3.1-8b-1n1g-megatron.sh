#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
declare_case steps=40 minutes=15
train "$@"
check --when policy.init=pretrained 'data["train/loss"]["40"] < 5.9'
# Random weights start at ln(128256) = 11.8 and a little more.
check --when policy.init=random 'data["train/loss"]["40"] < 13.3'
# What an H200 holds, less a reserve.
check 'worst("ray/node.*.gpu.*.mem_gb") < 138'
