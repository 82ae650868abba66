# SPDX-License-Identifier: Apache-2.0
"""The suite's own test of its verdicts: what they call noise, what they find, and what gets past them."""
