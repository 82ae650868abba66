# SPDX-License-Identifier: Apache-2.0
"""Folders of suite runs as `lora-suite run` leaves them, by a launcher that writes files."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

from lora_suite.campaign.execute import execute
from lora_suite.judge.verdict import SuiteVerdict
from lora_suite.launch.record import write_json_atomically
from lora_suite.plan.model import Plan
from tests.campaign.helpers import Deed, FakeLauncher, console
from tests.judge.helpers import make_plan


def suite_run(
    root: Path, deeds: Mapping[tuple[str, int], Deed] | None = None, plan: Plan | None = None
) -> Path:
    """Run a plan, by default one pair of four repeats, and store its verdict; returns the folder."""
    folder = root / secrets.token_hex(4)
    folder.mkdir()
    verdict = execute(plan or make_plan(), folder, FakeLauncher(deeds), console(), keep=False)
    write_json_atomically(folder / "verdict.json", verdict.model_dump(mode="json"))
    return folder


def verdict_of(folder: Path) -> SuiteVerdict:
    """The stored verdict of a folder."""
    return SuiteVerdict.model_validate_json((folder / "verdict.json").read_text())
