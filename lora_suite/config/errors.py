# SPDX-License-Identifier: Apache-2.0
"""The one error of everything that is found before a training starts."""

from __future__ import annotations


class ConfigError(Exception):
    """A recipe, suite, driver or command line is wrong; the text names file, key and remedy.

    Commands print the text and exit with 2; nothing has run.
    """
