# SPDX-License-Identifier: Apache-2.0
"""The fast path: megatron-core's model, compiled and captured in CUDA graphs."""
