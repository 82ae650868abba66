# SPDX-License-Identifier: Apache-2.0
"""The loops over the other rooms: plan, launch, judge, report."""
