#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
declare_case steps=30 minutes=3
train "$@"
check 'last(data["train/loss"]) / first(data["train/loss"]) < 0.8'
