#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
declare_case steps=30 minutes=10
train "$@"
# Random weights start at ln(128256) = 11.8 and a little more.
check 'data["train/loss"]["30"] < 13.3'
