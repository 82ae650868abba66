# SPDX-License-Identifier: Apache-2.0
"""What became of cases and pairs over time: a SQLite store, and what it says of a trend."""
