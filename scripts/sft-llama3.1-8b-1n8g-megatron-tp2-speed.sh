#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
declare_case steps=12 minutes=15
train "$@"
# Random weights start at ln(128256) = 11.8 and a little more.
check --when policy.init=random 'data["train/loss"]["12"] < 13.3'
# What a card of 141 GB holds, less a reserve.
check 'worst("ray/node.*.gpu.*.mem_gb") < 132'
