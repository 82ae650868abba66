# SPDX-License-Identifier: Apache-2.0
"""Slurm: jobs are submitted, followed and ended; a training takes the nodes of the allocation it is in."""
