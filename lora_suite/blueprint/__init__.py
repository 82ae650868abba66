# SPDX-License-Identifier: Apache-2.0
"""Facts of a model from its configuration, without torch: shapes, LoRA targets, counts, floors."""
