# SPDX-License-Identifier: Apache-2.0
"""From a suite file to a plan: every case resolved and checked, every run in its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from pathlib import Path

from lora_suite.blueprint import preflight
from lora_suite.config import ConfigError, load_recipe
from lora_suite.config.naming import check_stem, counts_cpu_processes
from lora_suite.config.nearest import nearest
from lora_suite.plan.canaries import canary_pair, slowed_case, slowed_name, slowing
from lora_suite.plan.comparability import compare_cases, planted_faults, with_faults
from lora_suite.plan.driver import read_driver
from lora_suite.plan.external.load import Moved, load_external
from lora_suite.plan.external.reading import UnreadableError
from lora_suite.plan.model import (
    AnyCase,
    Case,
    Difference,
    Pair,
    Plan,
    UnreadableCase,
)
from lora_suite.plan.order import looks_up_to, ordered_runs
from lora_suite.plan.select import parse_selection, parse_tiers
from lora_suite.plan.suite_file import (
    CanaryEntry,
    CaseEntry,
    PairEntry,
    SuiteFile,
    own_checks,
    pair_checks,
    read_suite,
)


def load_plan(
    path: Path,
    *,
    select: str | None = None,
    tiers: str | None = None,
    repeats: int | None = None,
    budget_minutes: float | None = None,
    arm_overrides: Sequence[str] = (),
    overrides: Sequence[str] = (),
    moved: Moved | None = None,
) -> Plan:
    """Resolve a suite into a plan; starts no training.

    select: an expression over case and pair names (`parse_selection`). tiers: one over their tiers
    (`parse_tiers`); what both leave is taken. repeats: runs of every case and arm,
    in place of what the suite says; with a budget, at most so many. budget_minutes: in place of the suite's.
    arm_overrides: texts ``NAME:KEY=VALUE`` for the case of every arm of that
    name. overrides: for every case of ours. The order of a case's overrides is the suite's, `overrides`,
    `arm_overrides`; for an external case they are words after its command's. moved: see `Moved`.

    Raises ConfigError for whatever is wrong with the suite, a driver, a recipe or an override.
    """
    suite = read_suite(path)
    chosen = _choose(path, suite, select, tiers)
    budget = budget_minutes or suite.budget_minutes
    by_stem = _overrides_by_stem(suite, chosen, overrides, arm_overrides)
    today = datetime.now(UTC).date()
    cases = {
        stem: replace(
            _load(path, suite.entry(stem), by_stem[stem], today, moved),
            owner=suite.entry(stem).owner or chosen.owner(stem) or suite.owner or "",
        )
        for stem in by_stem
    }
    for entry in chosen.canaries:
        if entry.kind == "slower":
            overridden = [*by_stem[entry.case], slowing(entry)]
            slowed = slowed_case(_ours(path, suite, entry, overridden, today), entry)
            cases[slowed_name(entry)] = replace(slowed, owner=suite.owner or "")
    pairs = (
        *(_pair(suite, entry, cases, repeats, budget) for entry in chosen.pairs),
        *(replace(canary_pair(suite, entry, cases), owner=suite.owner or "") for entry in chosen.canaries),
    )
    runs = tuple(ordered_runs(pairs, chosen.alone, repeats or suite.repeats))
    return Plan(
        suite=path.stem,
        path=path,
        cases=cases,
        pairs=pairs,
        runs=runs,
        budget_gpu_hours=suite.budget_gpu_hours,
        name=suite.name,
        description=suite.description,
        budget_minutes=budget,
        launcher=suite.launcher,
    )


def _ours(path: Path, suite: SuiteFile, entry: CanaryEntry, overrides: Sequence[str], today: date) -> Case:
    """The case of a canary, if it is one whose training can be slowed down."""
    of_case = suite.entry(entry.case)
    if of_case.external is not None:
        raise ConfigError(
            f"{path}: canary {entry.title}: {entry.case} is another trainer's, and nothing can slow it down; "
            f"use the kinds same and injected"
        )
    return load_case(path, of_case, overrides, today)


def _load(
    suite: Path, entry: CaseEntry, overrides: Sequence[str], today: date, moved: Moved | None
) -> AnyCase:
    """Resolve a case of either kind.

    What is wrong in our own files stops the plan. Another trainer's script or recipe that cannot be read
    makes that case's runs MISSING and nothing else: it is not ours to repair.
    """
    if entry.external is None:
        return load_case(suite, entry, overrides, today)
    try:
        return load_external(suite, entry.case, entry.external, own_checks(suite, entry), overrides, moved)
    except UnreadableError as error:
        return UnreadableCase(
            stem=entry.case,
            tree={},
            overrides=tuple(overrides),
            steps=0,
            minutes=0.0,
            checks=(),
            problem=str(error).splitlines()[0],
            source=suite,
        )


def load_case(suite: Path, entry: CaseEntry, overrides: Sequence[str], today: date) -> Case:
    """Find the recipe and driver of a case beside its suite, and resolve both with the overrides.

    A case that is another's recipe under a name of its own has a name that fits what the suite makes of it,
    and is tracked under that name.
    """
    stem = entry.recipe or entry.case
    if entry.recipe is not None:
        overrides = [f"logger.wandb.name={entry.case}", *overrides]
    recipe_path = _beside(suite, entry.case, "recipes", stem, "yaml")
    driver_path = _beside(suite, entry.case, "scripts", stem, "sh")
    record = read_driver(driver_path, overrides)
    if not record.train:
        raise ConfigError(f"{driver_path}: never calls train")
    # A driver that trains twice continues its own run: the last training says what the run has become.
    resolved = load_recipe(recipe_path, record.train[-1])
    preflight(resolved.recipe, recipe_path)
    saves = resolved.recipe.checkpointing
    if entry.segments > 1 and not (saves.enabled and saves.resume):
        raise ConfigError(
            f"{suite}: case {entry.case}: a run in segments continues from its checkpoint; set "
            f"checkpointing.enabled and checkpointing.resume to true in {recipe_path}"
        )
    if entry.recipe is not None:
        _check_name(suite, entry, recipe_path, driver_path)
    return Case(
        stem=entry.case,
        recipe_path=recipe_path,
        driver_path=driver_path,
        recipe=resolved.recipe,
        tree=resolved.tree,
        overrides=tuple(overrides),
        steps=record.steps,
        minutes=record.minutes,
        checks=record.declared_checks(driver_path, today) + own_checks(suite, entry),
        segments=entry.segments,
    )


def _check_name(suite: Path, entry: CaseEntry, recipe_path: Path, driver_path: Path) -> None:
    """Raise ConfigError where the suite's own name of a case is taken, or says what the case is not."""
    where = f"{suite}: case {entry.case}"
    own = recipe_path.with_stem(entry.case)
    if own.is_file():
        raise ConfigError(f"{where}: has a recipe of its own, {own}; give the case another name")
    # What the command line changes is no part of a name.
    record = read_driver(driver_path, entry.overrides)
    try:
        check_stem(entry.case, load_recipe(recipe_path, record.train[-1]).recipe)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


@dataclass(frozen=True)
class _Chosen:
    """What a selection leaves: pairs, canaries, and the cases that run alone."""

    pairs: list[PairEntry]
    canaries: list[CanaryEntry]
    alone: list[str]

    @property
    def stems(self) -> list[str]:
        """Every stem that is needed, in order."""
        return list(
            dict.fromkeys(
                [
                    *(stem for pair in self.pairs for stem in pair.arms.values()),
                    *(canary.case for canary in self.canaries),
                    *self.alone,
                ]
            )
        )

    def owner(self, stem: str) -> str | None:
        """Who answers for the first pair that a case is an arm of, and so for a case that names nobody."""
        return next((pair.owner for pair in self.pairs if pair.owner and stem in pair.arms.values()), None)


def _choose(path: Path, suite: SuiteFile, select: str | None, tiers: str | None) -> _Chosen:
    """Apply a selection. A pair is taken whole, if the expression holds of its name and its arms' stems.

    A pair that reuses runs is taken by its own name, or where what is taken already makes all its runs; taken
    by name or tier alone, it makes its runs itself. The canaries of one case are taken together. Of what has
    a tier that is not wanted nothing is taken; of an arm's case the pair's tier decides.
    """
    matches = parse_selection(select) if select is not None else lambda names: True
    wanted = parse_tiers(tiers) if tiers is not None else lambda tier: True

    def due(entry: CaseEntry | PairEntry | CanaryEntry) -> bool:
        return wanted(entry.tier or suite.tier)

    makers = [
        pair
        for pair in suite.pairs
        if not pair.reuse and due(pair) and matches([pair.name, *pair.arms.values()])
    ]
    paired = {stem for pair in suite.pairs if not pair.reuse for stem in pair.arms.values()}
    alone = [
        entry.case
        for entry in suite.cases
        if entry.case not in paired and due(entry) and matches([entry.case])
    ]
    made = {stem for pair in makers for stem in pair.arms.values()} | set(alone)
    pairs = []
    for pair in filter(due, suite.pairs):
        needs = set(pair.arms.values()) - made
        if not pair.reuse:
            pairs += [pair] if pair in makers else []
        elif needs and select is None and tiers is None:
            raise ConfigError(
                f"{path}: pair {pair.name} reuses runs, but nothing else runs {', '.join(sorted(needs))}"
            )
        elif matches([pair.name]):
            pairs.append(pair.model_copy(update={"reuse": False}) if needs else pair)
        elif not needs and matches([pair.name, *pair.arms.values()]):
            pairs.append(pair)
    canaries = [
        canary
        for canary in suite.canaries
        if due(canary)
        and matches([canary.case, *(each.title for each in suite.canaries if each.case == canary.case)])
    ]
    if not pairs and not alone and not canaries:
        names = [
            *(pair.name for pair in suite.pairs),
            *(canary.title for canary in suite.canaries),
            *(entry.case for entry in suite.cases),
        ]
        asked = " ".join(f"{option} {text!r}" for option, text in (("-k", select), ("-m", tiers)) if text)
        raise ConfigError(f"{path}: {asked} matches nothing; there are {', '.join(names)}")
    return _Chosen(pairs, canaries, alone)


def _overrides_by_stem(
    suite: SuiteFile, chosen: _Chosen, overrides: Sequence[str], arm_overrides: Sequence[str]
) -> dict[str, list[str]]:
    """Return what each case's driver is to be started with."""
    by_arm: dict[str, list[str]] = {arm: [] for pair in chosen.pairs for arm in pair.arms}
    for text in arm_overrides:
        arm, colon, override = text.partition(":")
        if not colon or not override:
            raise ConfigError(f"--arm {text!r}: write NAME:KEY=VALUE, as in lora:debug.faults.slow_step=3.0")
        if arm not in by_arm:
            known = ", ".join(by_arm) or "none"
            raise ConfigError(f"--arm {text!r}: no pair has an arm {arm!r}; there are: {known}")
        by_arm[arm].append(override)
    found = {}
    for stem in chosen.stems:
        entry = suite.entry(stem)
        # Another trainer does not know our keys: its command gets what is said for it alone.
        everywhere = overrides if entry.external is None else ()
        arms = dict.fromkeys(arm for pair in chosen.pairs for arm, case in pair.arms.items() if case == stem)
        found[stem] = [*entry.overrides, *everywhere, *(text for arm in arms for text in by_arm[arm])]
    return found


def _pair(
    suite: SuiteFile,
    entry: PairEntry,
    cases: dict[str, AnyCase],
    repeats: int | None,
    budget: float | None,
) -> Pair:
    """Build one pair, with what makes its arms incomparable; every arm is compared with the first.

    With a budget its repeats are those of the last look, whatever the suite says.
    """
    first, *others = [cases[stem] for stem in entry.arms.values()]
    found: dict[str, Difference] = {}
    faults: dict[str, Difference] = {}
    unknown: dict[str, None] = {}
    for other in others:
        compared = compare_cases(first, other, entry.allow)
        found |= {each.key: each for each in compared.refused}
        unknown |= dict.fromkeys(compared.unknown)
        faults |= {fault.key: fault for fault in planted_faults(with_faults(first), with_faults(other))}
    looks = looks_up_to(repeats) if budget is not None else ()
    number = looks[-1] if looks else repeats or entry.repeats or suite.repeats
    return Pair(
        name=entry.name,
        arms=dict(entry.arms),
        checks=pair_checks(entry),
        repeats=number,
        reuse=entry.reuse,
        warmup=suite.warmup,
        allow=tuple(entry.allow),
        different_batches=entry.batches == "different",
        not_comparable=tuple(found.values()),
        comparable=entry.comparable,
        faults=tuple(faults.values()),
        not_compared=tuple(unknown),
        warmup_runs=_warmup_runs(suite, entry, number),
        looks=looks,
        owner=entry.owner or suite.owner or "",
    )


def _warmup_runs(suite: SuiteFile, entry: PairEntry, repeats: int) -> int:
    """How many runs of a pair are discarded: what it says, else what the suite says, else see `PairEntry`."""
    said = suite.warmup_runs if entry.warmup_runs is None else entry.warmup_runs
    if said is not None:
        return said
    return int(repeats > 1 and not any(counts_cpu_processes(stem) for stem in entry.arms.values()))


def _beside(suite: Path, case: str, folder: str, stem: str, suffix: str) -> Path:
    """Return ``../<folder>/<stem>.<suffix>`` as seen from the suite file, or say which stem comes near."""
    path = suite.resolve().parent.parent / folder / f"{stem}.{suffix}"
    if not path.is_file():
        close = nearest(stem, (other.stem for other in path.parent.glob(f"*.{suffix}")))
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"{suite}: case {case}: there is no {path}{hint}")
    return path
