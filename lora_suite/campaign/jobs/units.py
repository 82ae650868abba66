# SPDX-License-Identifier: Apache-2.0
"""What becomes one job: a pair, whose runs must share their nodes, or a case outside of pairs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from lora_suite.config.errors import ConfigError
from lora_suite.config.naming import counts_cpu_processes
from lora_suite.launch.site import Site
from lora_suite.launch.slurm.script import Resources
from lora_suite.plan.model import AnyCase, Plan, PlannedRun, UnreadableCase

_UNFIT = re.compile(r"[^A-Za-z0-9.+-]+")


@dataclass(frozen=True)
class Unit:
    """A part of a plan that is one job at a time. name: unique in the plan, and fit for a file's name.

    segments: jobs that its one run may be spread over, one after another.
    """

    name: str
    part: Plan
    segments: int = 1

    @property
    def cases(self) -> list[AnyCase]:
        """Its cases, each once."""
        return [self.part.cases[stem] for stem in dict.fromkeys(run.case for run in self.part.runs)]

    @property
    def minutes(self) -> Fraction:
        """What the runs of one job of it may take."""
        return Fraction(str(self.part.minutes)) / self.segments

    @property
    def job(self) -> Plan:
        """Its part as one job of it carries it out: of a run in segments, each has its share of the time."""
        if self.segments == 1:
            return self.part
        whole = self.part.cases
        cases = {stem: replace(case, minutes=case.minutes / self.segments) for stem, case in whole.items()}
        return replace(self.part, cases=cases)

    def resources(self, site: Site) -> Resources:
        """What a job of it asks for: the largest of its cases, and time for all its runs."""
        nodes = max(case.nodes for case in self.cases)
        return Resources(
            nodes=nodes,
            processes=max(-(-case.gpus // case.nodes) for case in self.cases if case.nodes),
            gpus=not all(counts_cpu_processes(case.stem) for case in self.cases),
            minutes=float(self.minutes) + site.overhead_minutes,
        )

    def gpu_hours(self, site: Site) -> Fraction:
        """What its jobs cost at most: all GPUs of the allocation (CPU processes, where it has none) for the
        minutes of its runs."""
        wanted = self.resources(site)
        return wanted.nodes * wanted.processes * self.minutes * self.segments / 60


def units_of(plan: Plan) -> list[Unit]:
    """The jobs of a plan, in its order. Runs that cannot be made, of unreadable cases alone, need none.

    A run in segments is a job of its own, as each of its segments ends with its job.
    """
    groups: dict[tuple[str, str, int], list[PlannedRun]] = defaultdict(list)
    for run in plan.runs:
        alone = plan.cases[run.case].segments > 1
        key = ("pair", run.pair, 0) if run.pair else ("case", run.case, run.repeat if alone else 0)
        groups[key].append(run)
    return list(_units(plan, list(groups.values())))


def _units(plan: Plan, groups: Sequence[list[PlannedRun]]) -> Iterator[Unit]:
    for number, runs in enumerate(groups, 1):
        cases = [plan.cases[run.case] for run in runs]
        if all(isinstance(case, UnreadableCase) for case in cases):
            continue
        pair = next((pair for pair in plan.pairs if pair.name == runs[0].pair), None)
        part = replace(
            plan,
            pairs=(pair,) if pair is not None else (),
            runs=tuple(runs),
            # Each job has the whole budget: they run side by side.
            budget_minutes=plan.budget_minutes if pair is not None and pair.looks else None,
        )
        title = _UNFIT.sub("-", runs[0].pair or runs[0].case).strip("-")
        yield Unit(f"{number:03}-{title}", part, cases[0].segments if pair is None else 1)


def job_lines(units: Sequence[Unit], site: Site) -> Iterator[str]:
    """The jobs of a plan and what they cost at most, as text."""
    yield "jobs:"
    for unit in units:
        wanted = unit.resources(site)
        what = "GPUs" if wanted.gpus else "CPU processes"
        jobs = f", up to {unit.segments} of them one after another" if unit.segments > 1 else ""
        yield (
            f"  {unit.name}: {len(unit.part.runs)} runs, {wanted.nodes} nodes of {wanted.processes} {what}, "
            f"{wanted.whole_minutes} minutes, {float(unit.gpu_hours(site)):.4g} GPU-hours{jobs}"
        )
    total = sum((unit.gpu_hours(site) for unit in units), Fraction())
    yield f"{len(units)} jobs, at most {float(total):.4g} GPU-hours"


def refuse_too_large(plan: Plan, units: Sequence[Unit], site: Site) -> None:
    """Raise ConfigError for jobs that cost more than the suite may, or are longer than the site's may be."""
    total = sum((unit.gpu_hours(site) for unit in units), Fraction())
    budget = plan.budget_gpu_hours
    if budget is not None and total > Fraction(str(budget)):
        raise ConfigError(
            f"{plan.path}: the jobs cost up to {float(total):.4g} GPU-hours, and budget_gpu_hours is "
            f"{budget:g}; select less with -k, lower --repeats, or raise it"
        )
    for unit in units:
        minutes = unit.resources(site).minutes
        if site.max_minutes is not None and minutes > site.max_minutes:
            raise ConfigError(
                f"{plan.path}: {unit.name} needs a job of {minutes:g} minutes, and the site's max_minutes is "
                f"{site.max_minutes:g}; lower its repeats, or give a case outside pairs `segments`"
            )
