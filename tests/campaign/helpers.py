# SPDX-License-Identifier: Apache-2.0
"""A launcher that writes run directories in place of training, and a suite for it."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from lora_suite.launch.progress import Progress
from lora_suite.launch.record import Ended
from lora_suite.plan.model import Case, PlannedRun
from tests.judge.helpers import DONE, LORA, write_run

Deed = Callable[[Case, PlannedRun, Path], Ended]

# Repeats of both arms scatter by up to 1 %; LoRA takes 0.7 of the time.
_SCATTER = (1.0, 1.01, 0.99, 1.005)


def train(case: Case, planned: PlannedRun, run_dir: Path, **options: Any) -> Ended:
    """A run that does everything right."""
    scatter = _SCATTER[(planned.repeat + case.lora) % 4]
    options.setdefault("step_time", (0.07 if case.lora else 0.1) * scatter)
    write_run(run_dir, case, planned.repeat, **options)
    return DONE


class FakeLauncher:
    """Does `deeds[(case, repeat)]`, by default a healthy training. Remembers what it was asked to run."""

    def __init__(self, deeds: Mapping[tuple[str, int], Deed] | None = None) -> None:
        self.deeds = dict(deeds or {})
        self.ran: list[tuple[str, int]] = []
        self.kept: list[bool] = []

    def run(
        self,
        case: Case,
        planned: PlannedRun,
        run_dir: Path,
        *,
        keep: bool,
        poll: Callable[[Progress | None, str], None],
    ) -> Ended:
        """Run it."""
        self.ran.append((planned.case, planned.repeat))
        self.kept.append(keep)
        poll(None, "starting")
        poll(Progress(step=3, steps=case.steps, loss=2.5, seconds_left=4.0), "step 3")
        return self.deeds.get((planned.case, planned.repeat), train)(case, planned, run_dir)


def slow_lora(factor: float) -> dict[tuple[str, int], Deed]:
    """Deeds of LoRA runs that take `factor` times as long as full SFT."""

    def deed(case: Case, planned: PlannedRun, run_dir: Path) -> Ended:
        return train(case, planned, run_dir, step_time=0.1 * factor * _SCATTER[(planned.repeat + 1) % 4])

    return {(LORA, repeat): deed for repeat in range(1, 9)}


def console(width: int = 80, *, terminal: bool = False) -> Console:
    """A console that keeps what is printed."""
    return Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None)


def printed(target: Console) -> str:
    """What was printed so far."""
    assert isinstance(target.file, io.StringIO)
    return target.file.getvalue()
