# SPDX-License-Identifier: Apache-2.0
"""Where a suite states the checks of its pairs, for a report to point at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml


def pair_check_lines(suite: Path) -> dict[tuple[str, str], int]:
    """The line of each check by its pair's name and its text, and of each pair by its name and `""`.

    suite: a file that has been read as a suite before. One that has gone since has no lines.
    """
    try:
        root = yaml.compose(suite.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    pairs = _at(root, "pairs")
    return dict(_lines(pairs)) if isinstance(pairs, yaml.SequenceNode) else {}


def _lines(pairs: yaml.SequenceNode) -> Iterator[tuple[tuple[str, str], int]]:
    for pair in pairs.value:
        name, checks = _at(pair, "name"), _at(pair, "checks")
        if name is None:
            continue
        yield (str(name.value), ""), name.start_mark.line + 1
        for check in checks.value if isinstance(checks, yaml.SequenceNode) else ():
            yield (str(name.value), str(check.value).strip()), check.start_mark.line + 1


def _at(node: yaml.Node | None, key: str) -> yaml.Node | None:
    """The value of a mapping's key, None where there is none."""
    if not isinstance(node, yaml.MappingNode):
        return None
    return next((value for name, value in node.value if name.value == key), None)
