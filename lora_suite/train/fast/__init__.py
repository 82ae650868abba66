# SPDX-License-Identifier: Apache-2.0
"""What the backends' fast paths are made of: products, kernels, losses, updates and graphs."""
