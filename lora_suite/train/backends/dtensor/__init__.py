# SPDX-License-Identifier: Apache-2.0
"""The dtensor backend: a transformers model under FSDP2 and DTensor's tensor parallelism."""

from lora_suite.train.backends.dtensor.build import build

__all__ = ["build"]
