# SPDX-License-Identifier: Apache-2.0
"""Models by architecture and their first weights, the same for every backend and layout."""
