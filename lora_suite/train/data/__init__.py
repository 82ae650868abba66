# SPDX-License-Identifier: Apache-2.0
"""Rows to tokens to batches: the same global batches in the same order, whatever the parallel layout."""
