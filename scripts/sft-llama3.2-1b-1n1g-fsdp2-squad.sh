#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
declare_case steps=20 minutes=15
train "$@"
# With pretrained weights the first loss is far below that of a guess, ln(128256) = 11.8.
check --when policy.init=pretrained 'max(data["train/loss"]) < 6' 'data["validation/loss"]["20"] < 6'
check --when policy.init=random 'data["train/loss"]["20"] < 13.3'
