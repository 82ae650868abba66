# SPDX-License-Identifier: Apache-2.0
"""The Verdict model: what became of every planned check, invariant, run and pair.

`verdict.json` is this model; every report is a pure rendering of it. Its JSON schema is published by
`SuiteVerdict.model_json_schema()`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

State = Literal["PASS", "FAIL", "ERROR", "MISSING", "INCOMPARABLE", "INCONCLUSIVE"]

# Exit code of each state; the code that wins is the first of _PRECEDENCE that occurs.
EXIT_CODES: dict[State, int] = {
    "PASS": 0,
    "FAIL": 1,
    "ERROR": 3,
    "MISSING": 4,
    "INCOMPARABLE": 5,
    "INCONCLUSIVE": 5,
}
_PRECEDENCE: tuple[State, ...] = ("ERROR", "MISSING", "FAIL", "INCOMPARABLE", "INCONCLUSIVE", "PASS")


class Model(BaseModel):
    """Base of the verdict's parts: closed to unknown keys."""

    model_config = ConfigDict(extra="forbid")


class CheckVerdict(Model):
    """One threshold expression, invariant or broken series of one run.

    kind `series`: a metric that is absent, has holes or is not finite; only broken ones are listed.
    value: the checked side's value as text (never truncated). margin_percent: distance to the limit.
    source: file:line of the limit, where known.
    """

    kind: Literal["check", "invariant", "series"]
    name: str
    state: State
    value: str = ""
    margin_percent: float | None = None
    message: str = ""
    source: str = ""


class RunVerdict(Model):
    """One planned run. `checks` is empty where it never got so far.

    state: the worst of `own_state` and the checks. own_state: what became of the run itself, whatever its
    checks say (ERROR where it broke, MISSING where it fell short). summary: `final_loss` in nats,
    `median_step_time` and its `floor_time` in s, `peak_memory_gib`; only what was measured. not_judged: what
    did not apply, and why. run_id: as its record says, empty without a record.
    """

    case: str
    repeat: int
    pair: str | None
    arm: str | None
    state: State
    own_state: State = "PASS"
    message: str = ""
    directory: str = ""
    run_id: str = ""
    steps_done: int = 0
    steps_planned: int
    seconds: float | None = None
    summary: dict[str, float] = Field(default_factory=dict)
    checks: list[CheckVerdict] = Field(default_factory=list)
    not_judged: list[str] = Field(default_factory=list)


class Effect(Model):
    """A pair's ratio with its confidence interval over repeats, and what could have been seen.

    All are ratios (1.0 is equal). smallest_detectable: the smallest relative change that this many repeats
    with this spread detect with 80 % power, as a share (0.02 is 2 %).
    """

    estimate: float
    low: float
    high: float
    confidence: float
    repeats: int
    smallest_detectable: float | None


class PairCheckVerdict(Model):
    """One pair check: its state, the effect where it is a ratio, else the value as text.

    operator, limit: what the value is held against, where the check is one function of two arms.
    """

    expression: str
    state: State
    value: str = ""
    operator: str = ""
    limit: float | None = None
    effect: Effect | None = None
    message: str = ""


class PairVerdict(Model):
    """One pair: arms (name to case), its checks, and why it could not be judged, if so.

    state: the worst of `own_state` and the checks. own_state: MISSING where a run of an arm is lacking,
    INCOMPARABLE where the arms differ in more than the pair allows; `message` says which.
    """

    name: str
    arms: dict[str, str]
    state: State
    own_state: State = "PASS"
    message: str = ""
    checks: list[PairCheckVerdict] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)


class SuiteVerdict(Model):
    """One `lora-suite run`, judged."""

    schema_version: int = 1
    suite: str
    started: str
    seconds: float
    directory: str
    interrupted: bool = False
    runs: list[RunVerdict]
    pairs: list[PairVerdict]

    @property
    def states(self) -> list[State]:
        """States of every planned verdict: runs and pairs."""
        return [*(run.state for run in self.runs), *(pair.state for pair in self.pairs)]

    @property
    def exit_code(self) -> int:
        """The whole's exit code: 130 if interrupted, 4 if nothing was planned, else the worst state's."""
        if self.interrupted:
            return 130
        return EXIT_CODES[worst(self.states)] if self.states else EXIT_CODES["MISSING"]


def worst(states: list[State]) -> State:
    """The state that wins over the others; PASS for none."""
    return next((state for state in _PRECEDENCE if state in states), "PASS")
