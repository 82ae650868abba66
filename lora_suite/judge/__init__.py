# SPDX-License-Identifier: Apache-2.0
"""Results to verdicts: checks, invariants, pair statistics, curves."""
