# SPDX-License-Identifier: Apache-2.0
"""What a series says tonight, and where it moved: the monitor's answer and the levels, with acks taken in."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date

from lora_suite.history.facts import AckFact
from lora_suite.history.levels import FEWEST_ON_A_LEVEL, change_points
from lora_suite.history.monitor import FEWEST_NIGHTS, Signal, Watched, watch
from lora_suite.history.series import NightSeries
from lora_suite.judge.verdict import CaseHistory, ChangePoint, State

_TENTATIVE = "tentative"
_LEVELS = "levels"


@dataclass(frozen=True)
class Trend:
    """A series, judged. signal: what tonight gave rise to and nobody answered for.

    changes: where it moved, oldest first, by index into the series' nights; tonight: the one of them that the
    signal is about. judged: whether there were nights enough to judge tonight's. answered: acks that count
    today. expired: those that no longer do.
    """

    series: NightSeries
    watched: Watched
    changes: list[ChangePoint]
    signal: Signal | None
    tonight: ChangePoint | None
    judged: bool
    answered: list[AckFact]
    expired: list[AckFact]

    @property
    def alerted(self) -> bool:
        """Whether tonight is worse than what was accepted."""
        return self.signal is not None and self.signal.worse

    @property
    def state(self) -> State:
        """FAIL where tonight is worse, INCONCLUSIVE where it could not be judged."""
        if self.alerted:
            return "FAIL"
        return "PASS" if self.judged else "INCONCLUSIVE"

    @property
    def message(self) -> str:
        """What is said of tonight, in words; empty where nothing."""
        nights = len(self.series.nights)
        if self.signal is not None:
            return _alert(self.signal, self.series)
        if not self.judged:
            return f"not judged: {nights} comparable nights, and {FEWEST_NIGHTS} are needed on a level"
        return ""

    def history(self, last: int | None = None) -> CaseHistory:
        """The last nights (None: all) as a report shows them; changes count from the first night shown."""
        hidden = 0 if last is None else max(0, len(self.series.nights) - last)
        shown = [
            change.model_copy(update={"at": change.at - hidden})
            for change in self.changes
            if change.at >= hidden
        ]
        return CaseHistory(
            case=self.series.name,
            metric=self.series.metric,
            environment=self.series.environment,
            nights=[night.shown for night in self.series.nights[hidden:]],
            changes=shown,
            alert=self.message if self.signal is not None else "",
        )


def judge_series(series: NightSeries, acks: Sequence[AckFact] = (), today: date | None = None) -> Trend:
    """Judge the last night of a series, which has at least one, and find where the series moved.

    acks: answers to alerts of this case and metric; those of another recipe or environment are left out.
    today: the day on which acks must still count; by default today.
    """
    day = today or date.today()
    own = [
        ack
        for ack in acks
        if (ack.version, ack.environment) == (series.version, series.environment)
        and _index(series, ack.started) is not None
    ]
    answered = [ack for ack in own if ack.counts(day)]
    starts = {_index(series, ack.started) or 0 for ack in answered if ack.label != "noise"}
    dismissed = {
        _index(series, ack.started) or 0: _last_index(series, ack.last)
        for ack in answered
        if ack.label == "noise"
    }
    watched = watch(series.values, series.policy, starts, dismissed)
    signal = watched.signals[-1]
    answered_tonight = any(ack.last >= series.nights[-1].started for ack in answered)
    levels = [_change(series, at, [_LEVELS]) for at in change_points(series.values, series.policy)]
    changes, tonight = (levels, None) if signal is None else _with_signal(series, levels, signal)
    return Trend(
        series=series,
        watched=watched,
        changes=changes,
        signal=signal,
        tonight=tonight,
        judged=watched.judged[-1] or answered_tonight,
        answered=answered,
        expired=[ack for ack in own if not ack.counts(day)],
    )


def _index(series: NightSeries, started: str) -> int | None:
    """Index of the first night at or after a time, None where there is none."""
    return next((at for at, night in enumerate(series.nights) if night.started >= started), None)


def _last_index(series: NightSeries, started: str) -> int:
    return max((at for at, night in enumerate(series.nights) if night.started <= started), default=-1)


def _with_signal(
    series: NightSeries, levels: list[ChangePoint], signal: Signal
) -> tuple[list[ChangePoint], ChangePoint]:
    """All changes, and the one that a signal is about: one nearby that the whole series shows, or its own."""
    near = [change for change in levels if abs(change.at - signal.first) < FEWEST_ON_A_LEVEL]
    tentative = len(series.nights) - signal.first < FEWEST_ON_A_LEVEL
    if near and not tentative:
        nearest = min(near, key=lambda change: abs(change.at - signal.first))
        nearest.detectors.append(signal.detector)
        return levels, nearest
    # A level has five nights or more, so that one nearby would begin among the good nights.
    others = [change for change in levels if change not in near]
    mine = _change(series, signal.first, [signal.detector, *([_TENTATIVE] if tentative else [])])
    mine.ratio = 1 + signal.change
    return sorted([*others, mine], key=lambda change: change.at), mine


def _change(series: NightSeries, at: int, detectors: list[str]) -> ChangePoint:
    before = series.values[max(0, at - FEWEST_NIGHTS) : at]
    after = series.values[at : at + FEWEST_NIGHTS]
    return ChangePoint(
        at=at,
        first_bad=series.nights[at].shown,
        last_good=series.nights[at - 1].shown,
        ratio=math.exp(statistics.median(map(math.log, after)) - statistics.median(map(math.log, before))),
        detectors=detectors,
    )


def _alert(signal: Signal, series: NightSeries) -> str:
    size = f"{100 * abs(signal.change):.1f} % {'above' if signal.change > 0 else 'below'}"
    if signal.detector == "chart":
        return f"tonight is {size} the median of the accepted nights (z {signal.score:+.1f})"
    nights = len(series.nights) - signal.first
    return f"the last nights are {size} the accepted level, for {nights} nights (CUSUM {signal.score:.1f})"
