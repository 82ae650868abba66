# SPDX-License-Identifier: Apache-2.0
"""Runs a driver, watches it, names how it ended; and starts one training's processes."""
