# SPDX-License-Identifier: Apache-2.0
"""What a comparison of two runs or suite runs found, as `compare --json` prints it."""

from __future__ import annotations

from pydantic import Field

from lora_suite.history.figures import Figure
from lora_suite.judge.verdict import EXIT_CODES, Attribution, Model, State, worst


class LossComparison(Model):
    """What the loss curves of two sides are to each other. tier: `exact`, `drift`, `apart`, `statistical`."""

    tier: str
    state: State
    message: str


class CaseComparison(Model):
    """One case on two sides, right against left.

    own_state: whether it could be compared. differing: what differs in recipe and strict environment.
    """

    case: str
    own_state: State
    message: str = ""
    differing: list[str] = Field(default_factory=list)
    figures: list[Figure] = Field(default_factory=list)
    loss: LossComparison | None = None

    @property
    def state(self) -> State:
        """The worst of its own state, its figures and its loss."""
        judged = [figure.state for figure in self.figures if figure.state is not None]
        return worst([self.own_state, *judged, *([self.loss.state] if self.loss else [])])


class PairComparison(Model):
    """One pair on two sides: which arm moved. attribution: None where the message says why there is none."""

    pair: str
    state: State
    message: str = ""
    attribution: Attribution | None = None


class Comparison(Model):
    """Two sides, compared. lenient: whether what is not comparable was compared all the same."""

    left: str
    right: str
    lenient: bool
    cases: list[CaseComparison]
    pairs: list[PairComparison] = Field(default_factory=list)

    @property
    def state(self) -> State:
        """The worst of all."""
        return worst([*(case.state for case in self.cases), *(pair.state for pair in self.pairs)])

    @property
    def exit_code(self) -> int:
        """Exit code of the state; 4 where nothing was compared."""
        return EXIT_CODES[self.state] if self.cases else EXIT_CODES["MISSING"]
