# SPDX-License-Identifier: Apache-2.0
"""Why two runs differ in speed: which phase, which kernels, and what else is not the same about them."""

from lora_suite.judge.explain.explain import explain
from lora_suite.judge.explain.model import Explanation, Side

__all__ = ["Explanation", "Side", "explain"]
