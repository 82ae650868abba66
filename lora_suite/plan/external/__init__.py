# SPDX-License-Identifier: Apache-2.0
"""Cases of other trainers: what their scripts and recipes say, read and never executed."""
