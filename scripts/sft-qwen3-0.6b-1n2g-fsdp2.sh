#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
declare_case steps=3 minutes=10
train "$@"
check --when policy.init=pretrained 'data["train/loss"]["3"] < 5.9'
# Random weights start at ln(151936) = 11.9 and a little more.
check --when policy.init=random 'data["train/loss"]["3"] < 13.4'
check 'data["validation/loss"]["3"] < 13.4'
