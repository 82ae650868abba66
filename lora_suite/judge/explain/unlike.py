# SPDX-License-Identifier: Apache-2.0
"""What else differs between two runs: planted faults, code, packages, the machine, settings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from lora_suite.config import differences
from lora_suite.judge.evidence import Evidence
from lora_suite.judge.explain.model import Unlike
from lora_suite.plan.comparability import FAULTS

CODE = "code"
"""Key of a run's soft environment under which the trainer's commit stands."""

_VERSION = re.compile(r"\d+(\.\w+)+([+.-]\w+)*")
_ORDER = ("fault", CODE, "package", "machine", "configuration")


def unlike(left: Evidence, right: Evidence) -> list[Unlike]:
    """Everything that the two records do not have in common, most telling kind first."""
    found = [
        *_told("configuration", left.record.recipe, right.record.recipe),
        *_told("machine", _environment(left), _environment(right)),
    ]
    return sorted(found, key=lambda each: (_ORDER.index(each.what), each.key))


def _told(
    what: Literal["machine", "configuration"], left: Mapping[str, Any], right: Mapping[str, Any]
) -> Iterator[Unlike]:
    for key, ours, theirs in differences(left, right):
        kind = _package(key, ours, theirs) if what == "machine" else _setting(key)
        yield Unlike(what=kind, key=key, left=str(ours), right=str(theirs))


def _setting(key: str) -> Literal["fault", "configuration"]:
    return "fault" if key.startswith(f"{FAULTS}.") else "configuration"


def _package(key: str, left: object, right: object) -> Literal["code", "package", "machine"]:
    """Packages are told from other facts of a machine by their versions."""
    if key == CODE:
        return "code"
    versions = any(isinstance(value, str) and _VERSION.fullmatch(value) for value in (left, right))
    return "package" if versions else "machine"


def _environment(run: Evidence) -> dict[str, Any]:
    environment = run.record.environment
    return {} if environment is None else {**environment.soft, **environment.strict}
