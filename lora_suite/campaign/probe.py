# SPDX-License-Identifier: Apache-2.0
"""A probe of `lora-suite bisect`: one commit's arm against the good commit's, as a small pair."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from check_metrics import parse
from lora_suite.campaign.bisect import Answer
from lora_suite.campaign.execute import Launcher, execute
from lora_suite.campaign.repository import Commit, Repository
from lora_suite.config.errors import ConfigError
from lora_suite.judge.verdict import PairVerdict, SuiteVerdict
from lora_suite.launch.local import LocalLauncher, modules_of
from lora_suite.plan.driver import read_driver
from lora_suite.plan.load import load_plan
from lora_suite.plan.model import Case, ExternalCase, Pair, Plan
from lora_suite.plan.order import LOOKS, ordered_runs

GOOD, CANDIDATE = "good", "candidate"
# What resolves a recipe in whichever version of this program is found: its path, then overrides.
_RESOLVE = (
    "import json, pathlib, sys\n"
    "from lora_suite.config import load_recipe\n"
    "json.dump(load_recipe(pathlib.Path(sys.argv[1]), sys.argv[2:]).tree, sys.stdout)\n"
)
_WORSE_IF_MORE = ("<", "<=")

Launchers = Callable[[Mapping[str, Path]], Launcher]
"""Makes a launcher whose cases, by name, run the code of these checkouts."""


@dataclass(frozen=True)
class Subject:
    """What is compared over commits: an arm of a pair, by the metric of the pair's first ratio check.

    operator: of that check; `<` where more is worse.
    """

    suite: Path
    pair: Pair
    arm: str
    metric: str
    operator: str
    case: Case | ExternalCase

    @classmethod
    def of(cls, suite: Path, select: str | None) -> Subject:
        """The subject of the one pair that `select` chooses; raises ConfigError."""
        plan = load_plan(suite, select=select)
        pairs = [pair for pair in plan.pairs if pair.canary is None]
        if len(pairs) != 1:
            names = ", ".join(pair.name for pair in pairs) or "none"
            chosen = f"-k {select!r} chooses" if select is not None else "there are"
            raise ConfigError(f"{suite}: bisect follows one pair, and {chosen} {names}; name one with -k")
        (pair,) = pairs
        forms = [parse(text).pair for text in pair.checks]
        form = next((each for each in forms if each is not None and each.function == "ratio"), None)
        if form is None:
            raise ConfigError(
                f"{suite}: pair {pair.name}: no check is a ratio, so there is nothing to follow"
            )
        arm, metric = form.left
        case = plan.cases[pair.arms[arm]]
        if not isinstance(case, Case | ExternalCase):
            raise ConfigError(f"{suite}: pair {pair.name}: {case.stem} cannot be read: {case.problem}")
        return cls(suite.resolve(), pair, arm, metric, form.op, case)

    @property
    def folder(self) -> Path:
        """Where the repository lies that is searched: an external command's folder, else the driver's."""
        case = self.case
        return case.cwd if isinstance(case, ExternalCase) else case.driver_path.resolve().parent

    def case_at(self, repository: Repository, checkout: Path, commit: Commit) -> Case | ExternalCase:
        """The arm's case as a commit has it, under a name that tells it; raises ConfigError.

        Which pair and which overrides is what the suite says now. Of another trainer the command's folder is
        the commit's, of ours the driver, the recipe and the code that resolves it.
        """
        case = self.case
        if isinstance(case, ExternalCase):
            found: Case | ExternalCase = replace(case, cwd=_moved(case.cwd, repository, checkout))
        else:
            found = _own_case(
                case,
                _moved(case.driver_path, repository, checkout),
                _moved(case.recipe_path, repository, checkout),
                checkout,
            )
        # Whether the arm's own limits hold is not what is asked.
        return replace(found, stem=f"{case.stem}@{commit.sha[:10]}", checks=(), driver_judges=False)


def _moved(path: Path, repository: Repository, checkout: Path) -> Path:
    """Where a path of the working tree lies in a checkout; raises ConfigError where the commit has none."""
    whole = path.resolve()
    if not whole.is_relative_to(repository.top):
        raise ConfigError(f"{path}: lies outside of {repository.top}")
    moved = checkout / whole.relative_to(repository.top)
    if not moved.exists():
        raise ConfigError(f"the commit has no {moved.relative_to(checkout)}")
    return moved


def _own_case(case: Case, driver: Path, recipe: Path, checkout: Path) -> Case:
    """A case of ours with another version's driver and recipe, resolved by that version's own code.

    Versions differ in the keys that a recipe must have, so this program could not read every one.
    """
    record = read_driver(driver, case.overrides)
    if not record.train:
        raise ConfigError(f"{driver}: never calls train")
    done = subprocess.run(
        [sys.executable, "-c", _RESOLVE, str(recipe), *record.train[-1]],
        cwd=checkout,
        env={**os.environ, **modules_of(checkout)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise ConfigError((done.stderr.strip().splitlines() or [f"{recipe}: does not resolve"])[-1])
    return replace(
        case,
        driver_path=driver,
        recipe_path=recipe,
        tree=json.loads(done.stdout),
        steps=record.steps,
        minutes=record.minutes,
    )


class PairProbe:
    """Probes commits. Use as a context manager: the good commit's checkout lives as long as it does.

    results: folder for the runs. budget_minutes: of all probes together, None without end. launchers: see
    `Launchers`.
    """

    def __init__(
        self,
        subject: Subject,
        repository: Repository,
        good: Commit,
        results: Path,
        console: Console,
        budget_minutes: float | None,
        launchers: Launchers = LocalLauncher,
    ) -> None:
        self._subject = subject
        self._repository = repository
        self._good = good
        self._results = results
        self._console = console
        self._budget = budget_minutes
        self._launchers = launchers
        self._began = time.monotonic()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> PairProbe:
        """Check the good commit out; raises ConfigError if its suite does not plan."""
        with contextlib.ExitStack() as stack:
            self._checkout = stack.enter_context(self._repository.checkout(self._good))
            self._case = self._subject.case_at(self._repository, self._checkout, self._good)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def __call__(self, commit: Commit, limit: float) -> Answer:
        """Whether a commit's arm is worse than the good one's by more than `limit`.

        Raises KeyboardInterrupt where its runs were interrupted.
        """
        left = self._minutes_left()
        if left is not None and left <= 0.0:
            return Answer("no time", f"the budget of {self._budget:g} minutes is over")
        with self._repository.checkout(commit) as checkout:
            try:
                case = self._subject.case_at(self._repository, checkout, commit)
            except ConfigError as error:
                return Answer("skipped", f"does not plan: {str(error).splitlines()[0]}")
            # The good commit is probed against itself, too, and the runs of one case have one place.
            case = replace(case, stem=f"{case.stem}-{CANDIDATE}") if commit == self._good else case
            plan = self._plan(case, limit, left)
            launcher = self._launchers({self._case.stem: self._checkout, case.stem: checkout})
            folder = self._results / f"{commit.sha[:10]}"
            verdict = execute(plan, folder, launcher, self._console, keep=False)
        if verdict.interrupted:
            raise KeyboardInterrupt
        return _answer(verdict, case.stem)

    def _minutes_left(self) -> float | None:
        if self._budget is None:
            return None
        return self._budget - (time.monotonic() - self._began) / 60.0

    def _plan(self, case: Case | ExternalCase, limit: float, minutes: float | None) -> Plan:
        subject = self._subject
        worse = limit if subject.operator in _WORSE_IF_MORE else 1.0 / limit
        ratio = f'ratio({CANDIDATE}["{subject.metric}"], {GOOD}["{subject.metric}"])'
        pair = Pair(
            name=f"{subject.pair.name} {subject.arm}",
            arms={GOOD: self._case.stem, CANDIDATE: case.stem},
            checks=(f"{ratio} {subject.operator} {worse:.6g}",),
            repeats=LOOKS[-1],
            reuse=False,
            warmup=subject.pair.warmup,
            warmup_runs=subject.pair.warmup_runs,
            looks=LOOKS,
        )
        return Plan(
            suite="bisect",
            path=subject.suite,
            cases={self._case.stem: self._case, case.stem: case},
            pairs=(pair,),
            runs=tuple(ordered_runs([pair], [], 1)),
            budget_gpu_hours=None,
            budget_minutes=minutes,
        )


def _answer(verdict: SuiteVerdict, candidate: str) -> Answer:
    (pair,) = verdict.pairs
    broken = next((run for run in verdict.runs if run.case == candidate and run.state != "PASS"), None)
    if broken is not None:
        return Answer("skipped", f"does not run: {broken.state} {broken.message.partition(chr(10))[0]}")
    if pair.state in ("PASS", "FAIL") and pair.checks[0].effect is not None:
        return Answer(
            "good" if pair.state == "PASS" else "bad", pair.checks[0].value, pair.checks[0].effect.estimate
        )
    return Answer("unclear", _why(pair))


def _why(pair: PairVerdict) -> str:
    """What kept a pair from being decided."""
    return pair.message or next((check.message for check in pair.checks if check.message), pair.state)
