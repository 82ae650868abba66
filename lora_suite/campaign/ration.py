# SPDX-License-Identifier: Apache-2.0
"""What a night may still spend: hours of the clock, and GPU-hours."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

from lora_suite.plan.model import AnyCase


class NightRation:
    """Allows a run only where it can end in time and within the cost, however long it takes.

    deadline: when all runs must have ended; None: whenever. gpu_hours: cap of the night; None: none. A run is
    held to cost its declared minutes on all its processes until it has ended, then what it took.
    """

    def __init__(
        self,
        deadline: datetime | None,
        gpu_hours: float | None,
        clock: Callable[[], datetime],
    ) -> None:
        self._deadline = deadline
        self._cap = gpu_hours
        self._clock = clock
        self._reserved = 0.0
        self.used = 0.0
        self.cut = ""

    def refusal(self, case: AnyCase) -> str:
        """Why no run of the case may begin, empty where it may; its cost is then reserved."""
        worst = case.gpus * case.minutes / 60
        reason = self._reason(case, worst)
        if reason:
            self.cut = self.cut or reason
        else:
            self._reserved += worst
        return reason

    def spent(self, case: AnyCase, seconds: float) -> None:
        """A run of the case, which was allowed, ended after so long."""
        self._reserved -= case.gpus * case.minutes / 60
        self.book(case, seconds)

    def book(self, case: AnyCase, seconds: float) -> None:
        """A run of the case took so long."""
        self.used += case.gpus * seconds / 3600

    def _reason(self, case: AnyCase, worst: float) -> str:
        if self._deadline is not None and self._clock() + timedelta(minutes=case.minutes) > self._deadline:
            closes, needed = f"{self._deadline:%H:%M}", f"{case.minutes:g} minutes"
            return f"the window closes at {closes}, and {case.stem} may take {needed}"
        if self._cap is not None and self.used + self._reserved + worst > self._cap:
            left = f"{max(self._cap - self.used - self._reserved, 0.0):.3g}"
            return f"of {self._cap:g} GPU-hours {left} are left, and {case.stem} may take {worst:.3g}"
        return ""
