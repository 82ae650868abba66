# SPDX-License-Identifier: Apache-2.0
"""Suite YAML as it is written: which cases and pairs, how often, at what cost."""

from __future__ import annotations

import re
from keyword import iskeyword
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from check_metrics.language import CALLABLE
from lora_suite.config.errors import ConfigError
from lora_suite.config.nearest import similar_file
from lora_suite.plan.external.entry import Declares, ExternalEntry
from lora_suite.plan.model import DeclaredCheck
from lora_suite.plan.yaml_model import Blocks, read_model

Name = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]
WarmupRuns = Annotated[int, Field(ge=0, le=1)]
Tier = Literal["pr", "nightly", "release"]
DEFAULT_TIER: Tier = "nightly"
_FOLDER_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*")
STEP_TIME_BELOW_FULL = 'ratio(lora["timing/train/step_time"], full["timing/train/step_time"]) < 1.00'


class Entry(BaseModel):
    """Base of the parts of such a file: strict, closed to unknown keys."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class CaseEntry(Entry):
    """A case of the suite: `case` is the stem; more checks than its driver has; overrides of its recipe.

    segments: jobs that one run may be spread over on a cluster; each continues from the checkpoint of the one
    before.
    With `external` the case is a command of another trainer: `case` is a name of its own, and the overrides
    are words after the command's. With `recipe` it is another case's recipe and driver, of that stem, under a
    name of its own, and the overrides are in what they differ. limits: further checks by the GPU model that
    they are limits for; on a model that is not listed the run is INCONCLUSIVE. owner, tier: see `SuiteFile`,
    of this case alone; the arms of a pair have the pair's.
    """

    case: Name
    recipe: Name | None = None
    checks: list[Name] = []
    limits: dict[Name, Annotated[list[Name], Field(min_length=1)]] = {}
    overrides: list[Name] = []
    segments: Count = 1
    external: ExternalEntry | None = None
    owner: Name | None = None
    tier: Tier | None = None

    @model_validator(mode="after")
    def _name_is_a_folder(self) -> CaseEntry:
        """A name that no file has becomes a folder of the results all the same."""
        if (self.external or self.recipe) and not _FOLDER_NAME.fullmatch(self.case):
            raise ValueError(f"the name {self.case!r} becomes a folder: write letters, digits and . _ + -")
        return self

    @model_validator(mode="after")
    def _has_one_origin(self) -> CaseEntry:
        """A case is a recipe or another trainer's command."""
        if self.external is not None and self.recipe is not None:
            raise ValueError("recipe and external stand together; keep one")
        return self


class PairEntry(Entry):
    """A pair: `arms` maps names to stems; checks read the arms by name.

    A pair of arms `full` and `lora` without checks must have LoRA's step time below full SFT's.
    allow: key prefixes in which the arms may differ, besides those that every pair allows.
    batches: `different` where the arms are meant to see different rows; steps are then not matched, and
    ratios are those of whole runs' medians. comparable: false where the arms are shown because they are no
    pair; the verdict stays INCOMPARABLE, and lint objects only once they have become one.
    reuse: judged on runs that other pairs and cases of the suite make. warmup_runs: runs before the measured
    ones that are discarded; None: one, where the pair has two repeats or more and no arm counts CPU
    processes. owner, tier: see `SuiteFile`, of this pair.
    """

    name: Name
    arms: Annotated[dict[Name, Name], Field(min_length=2)]
    repeats: Count | None = None
    checks: list[Name] = []
    allow: list[Name] = []
    batches: Literal["equal", "different"] = "equal"
    comparable: bool = True
    reuse: bool = False
    warmup_runs: WarmupRuns | None = None
    owner: Name | None = None
    tier: Tier | None = None

    @field_validator("arms")
    @classmethod
    def _names_fit_expressions(cls, arms: dict[str, str]) -> dict[str, str]:
        """Arms are names in check expressions, and each is a case of its own."""
        for name in arms:
            if not name.isidentifier() or iskeyword(name) or name == "data":
                raise ValueError(
                    f"the arm name {name!r} cannot be used in a check: write letters, digits and _"
                )
            if name in CALLABLE:
                raise ValueError(f"the arm name {name!r} is a function of checks: write {name}_ or another")
        if len(set(arms.values())) < len(arms):
            raise ValueError("two arms are the same case; an arm needs a recipe and driver of its own")
        return arms


class CanaryEntry(Entry):
    """A canary: a pair whose answer is known, on a case of ours, which tells whether the detector works.

    kind: `same` (both arms are the case), `slower` (one is slowed down by `debug.faults.slow_step`) or
    `injected` (one's recorded step times are multiplied; judged on the runs of the `same` canary of this
    case). factor: of the slowdown; for `same`, the smallest ratio that would be a false alarm. Without one it
    is what `lora_suite.plan.canaries.factor_of` says.
    """

    kind: Literal["same", "slower", "injected"]
    case: Name
    name: Name | None = None
    factor: Annotated[float, Field(gt=1)] | None = None
    repeats: Annotated[int, Field(ge=2)] = 4
    tier: Tier | None = None

    @property
    def title(self) -> str:
        """The pair's name."""
        return self.name or f"canary {self.kind} {self.case}"


class SuiteFile(Entry):
    """A whole suite.

    repeats: runs of every case, and of every arm of a pair that does not say otherwise. warmup: first steps
    of each run that pair statistics leave out. warmup_runs: see `PairEntry`, of every pair that does not say
    otherwise. overrides: of the recipe of every case of ours, before the case's own. budget_gpu_hours: what
    one run of the suite may cost at most. budget_minutes: wall-clock time within which pairs are repeated
    until they are decided. owner: who answers for what fails. tier: when what does not say otherwise is due
    (`pr`, `nightly`, `release`; without a word `nightly`); `-m` chooses by it. launcher: what runs it, where
    the command line does not say.
    """

    name: Name
    description: str = ""
    repeats: Count = 1
    warmup: Annotated[int, Field(ge=0)] = 3
    warmup_runs: WarmupRuns | None = None
    budget_gpu_hours: Annotated[float, Field(gt=0)] | None = None
    budget_minutes: Annotated[float, Field(gt=0)] | None = None
    owner: Name | None = None
    tier: Tier = DEFAULT_TIER
    launcher: Literal["local", "slurm"] = "local"
    overrides: list[Name] = []
    cases: list[CaseEntry] = []
    pairs: list[PairEntry] = []
    canaries: list[CanaryEntry] = []

    @field_validator("cases", mode="before")
    @classmethod
    def _stems_are_cases(cls, cases: Any) -> Any:
        """A bare stem is a case without extras."""
        if not isinstance(cases, list):
            return cases
        return [{"case": entry} if isinstance(entry, str) else entry for entry in cases]

    def entry(self, stem: str) -> CaseEntry:
        """What the suite says of a case, whether or not it is listed; the suite's overrides come first."""
        entry = next((each for each in self.cases if each.case == stem), CaseEntry(case=stem))
        if entry.external is not None:
            return entry
        return entry.model_copy(update={"overrides": [*self.overrides, *entry.overrides]})


_BLOCKS: Blocks = {
    "cases": CaseEntry,
    "pairs": PairEntry,
    "canaries": CanaryEntry,
    "external": ExternalEntry,
    "declares": Declares,
}


def read_suite(path: Path) -> SuiteFile:
    """Read and check one suite file; raises ConfigError naming file, line and key."""
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such suite{similar_file(path)}")
    suite = read_model(path, SuiteFile, _BLOCKS)
    _refuse_repeated(path, "case", [entry.case for entry in suite.cases])
    _refuse_segments(path, suite)
    _refuse_repeated(
        path, "pair", [*(pair.name for pair in suite.pairs), *(canary.title for canary in suite.canaries)]
    )
    same = {canary.case for canary in suite.canaries if canary.kind == "same"}
    for canary in suite.canaries:
        if canary.kind == "injected" and canary.case not in same:
            raise ConfigError(
                f"{path}: canary {canary.title}: it is judged on the runs of a canary of kind same and of "
                f"its own case, and there is none; add that one"
            )
    if not suite.cases and not suite.pairs and not suite.canaries:
        raise ConfigError(f"{path}: the suite has neither cases nor pairs nor canaries; list at least one")
    for pair in suite.pairs:
        if not pair_checks(pair):
            raise ConfigError(
                f"{path}: pair {pair.name}: checks are missing; "
                f"only a pair of arms `full` and `lora` has a default"
            )
    return suite


def own_checks(suite: Path, entry: CaseEntry) -> tuple[DeclaredCheck, ...]:
    """What a suite asks of a case besides its driver: its checks, then its limits by GPU, as one call."""
    checks = [DeclaredCheck(text, line=0, file=suite) for text in entry.checks]
    limits = [
        DeclaredCheck(text, line=0, on=gpu, call=1, file=suite)
        for gpu, texts in entry.limits.items()
        for text in texts
    ]
    return (*checks, *limits)


def pair_checks(pair: PairEntry) -> tuple[str, ...]:
    """The pair's own checks, or the default of a full/lora pair; empty if it has neither."""
    if not pair.checks and set(pair.arms) == {"full", "lora"}:
        return (STEP_TIME_BELOW_FULL,)
    return tuple(pair.checks)


def _refuse_segments(path: Path, suite: SuiteFile) -> None:
    """Raise for a case in segments whose runs cannot be: a pair's must stay on one allocation."""
    paired = {stem for pair in suite.pairs for stem in pair.arms.values()}
    for entry in suite.cases:
        if entry.segments > 1 and (entry.case in paired or entry.external is not None):
            why = "it is another trainer's" if entry.external is not None else "a pair's runs share one job"
            raise ConfigError(f"{path}: case {entry.case}: segments cannot be more than 1, because {why}")


def _refuse_repeated(path: Path, what: str, names: list[str]) -> None:
    """Raise for a name that stands twice."""
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{path}: the {what} {name} stands twice; keep one")
