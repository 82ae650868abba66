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


class Points(Model):
    """A series as a report draws it: values at rising positions (steps, or seconds since the start)."""

    at: list[float]
    values: list[float]


class RunVerdict(Model):
    """One planned run. `checks` is empty where it never got so far.

    state: the worst of `own_state` and the checks. own_state: what became of the run itself, whatever its
    checks say (ERROR where it broke, MISSING where it fell short). summary: `final_loss` in nats,
    `median_step_time` and its `floor_time` in s, `peak_memory_gib`; only what was measured. not_judged: what
    did not apply, and why. run_id: as its record says, empty without a record.
    phases: median seconds of each phase of a step after warm-up. series: what a report draws of it, by metric
    (finite values alone, thinned where they are many). health: what was wrong with the machine while it ran;
    such a run is flagged, never dropped. environment: hash of its strict environment facts. code: commit of
    the trainer, `+` at its end where the tree had changes. link: where a tracker shows the run, a URL, or the
    folder of its offline files relative to `directory`; empty without a tracker. owner: who answers for the
    case, empty where nobody is named. floor_bound: the term that the floor is bound by, `arithmetic`,
    `memory`, `communication` or `update`, empty where no floor is known. notes: what else to know, as a
    time limit that is near.
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
    phases: dict[str, float] = Field(default_factory=dict)
    series: dict[str, Points] = Field(default_factory=dict)
    health: list[str] = Field(default_factory=list)
    environment: str = ""
    code: str = ""
    link: str = ""
    owner: str = ""
    floor_bound: str = ""
    notes: list[str] = Field(default_factory=list)


class Effect(Model):
    """A pair's ratio with its confidence interval over repeats, and what could have been seen.

    All are ratios (1.0 is equal). smallest_detectable: the smallest relative change that this many repeats
    with this spread detect with 80 % power, as a share (0.02 is 2 %). ratios: of each repeat. method: how the
    interval was computed, in words, with its prior where it has one.
    """

    estimate: float
    low: float
    high: float
    confidence: float
    repeats: int
    smallest_detectable: float | None
    ratios: list[float] = Field(default_factory=list)
    method: str = ""


class MatchedSteps(Model):
    """One repeat of a ratio, step by step: both arms' values, and the first steps that were left out."""

    repeat: int
    steps: list[int]
    left: list[float]
    right: list[float]
    trimmed: list[int] = Field(default_factory=list)


class PairCheckVerdict(Model):
    """One pair check: its state, the effect where it is a ratio, else the value as text.

    operator, limit: what the value is held against, where the check is one function of two arms.
    matched: what a ratio was computed from, where its steps were matched, or (of a repeat that is not steady)
    was to be. source: file:line of the check, where known.
    """

    expression: str
    state: State
    value: str = ""
    operator: str = ""
    limit: float | None = None
    effect: Effect | None = None
    message: str = ""
    matched: list[MatchedSteps] = Field(default_factory=list)
    source: str = ""


class PhaseDelta(Model):
    """What one phase contributes to a difference of step times, in seconds of the median step.

    The deltas of all phases sum to the step's.
    """

    phase: str
    left: float
    right: float

    @property
    def delta(self) -> float:
        """Seconds by which the right side is slower."""
        return self.right - self.left


class Attribution(Model):
    """Which arm moved against a reference, and which phase of it.

    moved: `lora-only`, `shared`, `full-only`, `none` or `unclear`. changes: of each arm, tonight over
    reference. double_ratio: (lora/full tonight) over (lora/full of the reference), in which whatever both
    arms share cancels. phases: of the arm that moved, reference against tonight. reference: what it was.
    """

    moved: Literal["lora-only", "shared", "full-only", "none", "unclear"]
    reference: str
    changes: dict[str, Effect]
    double_ratio: Effect | None = None
    phases: list[PhaseDelta] = Field(default_factory=list)
    message: str = ""


class PairVerdict(Model):
    """One pair: arms (name to case), its checks, and why it could not be judged, if so.

    state: the worst of `own_state` and the checks. own_state: MISSING where a run of an arm is lacking,
    INCOMPARABLE where the arms differ in more than the pair allows; `message` says which. source: file:line
    of the pair, where known. owner: who answers for it, empty where nobody is named.
    """

    name: str
    arms: dict[str, str]
    state: State
    own_state: State = "PASS"
    message: str = ""
    checks: list[PairCheckVerdict] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)
    attribution: Attribution | None = None
    source: str = ""
    owner: str = ""


class Night(Model):
    """One earlier run of a case: when, its value, its run id, the trainer's commit."""

    started: str
    value: float
    run_id: str = ""
    code: str = ""


class ChangePoint(Model):
    """Where a series moved to another level: the first run of the new level, the last of the old, by how
    much (a ratio), and the commits between them."""

    at: int
    first_bad: Night
    last_good: Night
    ratio: float
    detectors: list[str] = Field(default_factory=list)


class CaseHistory(Model):
    """A case's metric over time, in one environment, as far as a report shows it.

    alert: what the control chart or the drift test says of the last value, empty where nothing.
    """

    case: str
    metric: str
    environment: str
    nights: list[Night]
    changes: list[ChangePoint] = Field(default_factory=list)
    alert: str = ""


class SuiteVerdict(Model):
    """One `lora-suite run`, judged. history: of its cases, where a store was asked.

    command: what to type to run the same again. environments: the strict facts of each environment that runs
    name, as text.
    """

    schema_version: int = 2
    suite: str
    started: str
    seconds: float
    directory: str
    interrupted: bool = False
    runs: list[RunVerdict]
    pairs: list[PairVerdict]
    history: list[CaseHistory] = Field(default_factory=list)
    command: str = ""
    environments: dict[str, dict[str, str]] = Field(default_factory=dict)

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
