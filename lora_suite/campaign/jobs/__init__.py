# SPDX-License-Identifier: Apache-2.0
"""A suite as jobs of a cluster: submitted, followed from any process, judged where all have ended.

Everything that is known of the jobs lies in the results folder, so the process that submitted them may die.
"""
