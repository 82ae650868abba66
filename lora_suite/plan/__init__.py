# SPDX-License-Identifier: Apache-2.0
"""Suite YAML to ordered runs: cases, pairs, comparability of arms, order, cost."""
