# SPDX-License-Identifier: Apache-2.0
"""lora-suite: tells a training team whether LoRA fine-tuning is still right and still fast."""

__version__ = "0.1.0"
