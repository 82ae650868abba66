#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
declare_case steps=40 minutes=15
train "$@"
# Random weights start at ln(131072) = 11.8 and a little more.
check 'data["train/loss"]["40"] < 13.3'
check 'worst("ray/node.*.gpu.*.mem_gb") < 76'
check 'data["lora/grad_coverage"]["40"] == 1'
