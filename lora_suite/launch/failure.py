# SPDX-License-Identifier: Apache-2.0
"""failure.RANK.json: what a rank says of its own death, for the launcher to name it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

CONFIGURATION = 2
"""Exit status of a rank that found, before its first step, that it was asked for something impossible."""

NOTHING_TO_DO = 4
"""Exit status of a rank that was to continue a training which had reached its last step already."""


@dataclass(frozen=True)
class Failure:
    """A rank's last words: its rank, the step it was in (0: before the first), the error in one line."""

    rank: int
    step: int
    message: str
    time: float

    def write(self, run_dir: Path) -> None:
        """Write the file of this rank."""
        (run_dir / f"failure.{self.rank}.json").write_text(json.dumps(asdict(self)), encoding="utf-8")


def first_failure(run_dir: Path) -> Failure | None:
    """The earliest failure that any rank of the run wrote: later ones are usually its consequences."""
    found = []
    for path in run_dir.glob("failure.*.json"):
        try:
            found.append(Failure(**json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError):
            continue
    return min(found, key=lambda failure: failure.time, default=None)
