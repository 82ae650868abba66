#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
declare_case steps=30 minutes=3
train "$@"
check 'data["train/loss"]["30"] < 4.2' 'data["validation/loss"]["30"] < 4.2'
check 'data["lora/grad_coverage"]["30"] == 1'
