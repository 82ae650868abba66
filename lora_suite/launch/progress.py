# SPDX-License-Identifier: Apache-2.0
"""progress.json: where a running training is. Rewritten every step by rank 0, read by the live view."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

NAME = "progress.json"


@dataclass(frozen=True)
class Progress:
    """One look at a running training: step (0 before the first), of steps, last loss, seconds left."""

    step: int
    steps: int
    loss: float | None
    seconds_left: float | None

    def write(self, run_dir: Path) -> None:
        """Replace the file atomically, without waiting for the disk: it matters only while the run lives."""
        temporary = run_dir / f".{NAME}.{os.getpid()}"
        temporary.write_text(json.dumps(asdict(self)), encoding="utf-8")
        temporary.replace(run_dir / NAME)

    @classmethod
    def read(cls, run_dir: Path) -> Progress | None:
        """Return the newest look, or None if the training has not written one yet."""
        try:
            return cls(**json.loads((run_dir / NAME).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None
