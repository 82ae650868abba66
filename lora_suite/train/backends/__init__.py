# SPDX-License-Identifier: Apache-2.0
"""The two ways to hold and train a model; both implement `base.Backend`."""
