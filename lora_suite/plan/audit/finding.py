# SPDX-License-Identifier: Apache-2.0
"""What an audit reports: findings, their kinds with the remedy, and what the repository costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple


class Kind(NamedTuple):
    """A kind of finding: what is wrong, and what to do about it."""

    title: str
    remedy: str


# In the order in which they are reported: what lets a regression pass comes first.
KINDS: dict[str, Kind] = {
    "skipped-checks": Kind(
        "checks that a short or missing run skips, with exit status 0",
        "give the `if` an `else` that says how far the run came and exits with 1",
    ),
    "exit-before-checks": Kind(
        "an exit with status 0 before the checks",
        "check the old results again before exiting, or remove them before the run",
    ),
    "swallowed-failure": Kind(
        "a program whose failure is swallowed",
        "remove `|| true`; where a failure is expected, test for that one status",
    ),
    "pipe-before-pipefail": Kind(
        "a pipe that hides the failure of its first command",
        "put `set -o pipefail` at the beginning of the script or of what it sources",
    ),
    "cannot-fail": Kind(
        "a check that no run can fail", "give it a limit within what the metric can be, or remove it"
    ),
    "unreachable-step": Kind(
        "a check of a step that the run never reaches", "use $MAX_STEPS in the check, or train that far"
    ),
    "unparsable-check": Kind(
        "a check that is no readable expression", "mend it; docs/check_metrics.md has the language"
    ),
    "incomparable-arms": Kind(
        "a LoRA script and its full-SFT twin that differ in more than LoRA",
        "make the keys equal, in a common parent recipe; else a pair of limits compares two different things",
    ),
    "resources": Kind(
        "a name that does not say what the script or recipe uses",
        "rename the script and recipe, or correct the CONFIG block",
    ),
    "minutes": Kind(
        "a wall-clock limit that a run within its step time would exceed",
        "raise NUM_MINUTES, or tighten the limit of the step time",
    ),
    "leaking-variable": Kind(
        "a variable that keeps another script's value when a launcher sources both in one shell",
        "set it in every CONFIG block, or reset it in the launcher before each script",
    ),
    "stale-note": Kind(
        "a note to revert a limit that already is reverted", "remove the note, and close what it refers to"
    ),
    "unquoted-arguments": Kind(
        "arguments that bash splits at spaces and expands", 'write "$@"'
    ),
    "missing-recipe": Kind("a script without its recipe", "add the recipe, or remove the script"),
    "unreadable-script": Kind("a script that is not readable as bash", "mend it; it was not audited"),
    "unreadable-recipe": Kind(
        "a recipe that does not resolve", "mend it; it was compared with nothing"
    ),
    "gpu-hours": Kind(
        "a budget that counts too little, because each script's GPU-hours are rounded down",
        "add up GPU-minutes, and divide the sum by 60",
    ),
}  # fmt: skip
_ORDER = {name: place for place, name in enumerate(KINDS)}


@dataclass(frozen=True)
class AuditFinding:
    """One finding. file: as seen from the audited folder. line: 0 for the whole file.

    subject: what it is about, without line numbers and values that move, so that a baseline recognises it.
    details: lines that the message summarises.
    """

    kind: str
    file: Path
    line: int
    subject: str
    message: str
    details: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"there is no kind {self.kind}")

    def __lt__(self, other: AuditFinding) -> bool:
        """Kinds in the order of `KINDS`, then files, then lines."""
        return self._place < other._place

    @property
    def _place(self) -> tuple[int, str, int, str]:
        return _ORDER[self.kind], str(self.file), self.line, self.subject

    @property
    def where(self) -> str:
        """``file:line``, in the form that editors know."""
        return f"{self.file}:{self.line}" if self.line else f"{self.file}"


@dataclass(frozen=True)
class GpuHours:
    """GPUs × minutes × runs of some scripts, in hours. floored: the sum of each script's whole hours.

    unknown: scripts whose CONFIG block does not say.
    """

    exact: Fraction
    floored: int
    unknown: int


@dataclass(frozen=True)
class AuditReport:
    """An audited folder. gpu_hours: of all scripts, and of each list of scripts (``nightly.txt``)."""

    root: Path
    scripts: int
    checks: int
    findings: tuple[AuditFinding, ...]
    gpu_hours: Mapping[str, GpuHours]
