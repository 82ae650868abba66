# SPDX-License-Identifier: Apache-2.0
"""LoRA: the operation, the bank that owns every adapter, adapter files, invariants. Both backends use it."""
