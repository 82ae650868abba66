# SPDX-License-Identifier: Apache-2.0
"""The training program: one process a rank."""
