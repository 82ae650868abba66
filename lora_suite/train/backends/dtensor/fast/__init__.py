# SPDX-License-Identifier: Apache-2.0
"""The fast path: a plain decoder with stacked linears, compiled, captured in CUDA graphs; see `build`."""

from lora_suite.train.backends.dtensor.fast.build import build, refusal

__all__ = ["build", "refusal"]
