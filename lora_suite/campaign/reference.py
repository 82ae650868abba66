# SPDX-License-Identifier: Apache-2.0
"""`lora-suite run --ref COMMIT`: every case as it is against the same case as a commit has it, in turn."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from lora_suite.campaign.probe import Subject
from lora_suite.campaign.repository import Commit, Repository
from lora_suite.campaign.request import Request
from lora_suite.config.naming import counts_cpu_processes
from lora_suite.plan.comparability import compare_cases
from lora_suite.plan.metric_names import STEP_TIME
from lora_suite.plan.model import Case, ExternalCase, Pair, Plan
from lora_suite.plan.order import looks_up_to, ordered_runs

HEAD, REF = "head", "ref"
REPEATS = 4
_ON_GPUS, _ON_CPUS = 1.02, 1.5
"""Largest ratio of step times at which a case counts as no slower than the commit's."""


@contextlib.contextmanager
def against(
    request: Request, plan: Plan, checkout: Path | None = None
) -> Iterator[tuple[Plan, dict[str, Path]]]:
    """The plan that is carried out of a request, and the checkouts that the launcher needs for its cases.

    plan: of the request. With a commit to compare with, every case of it becomes a pair of its own. checkout:
    of that commit, where there is one already; else it is made, and gone after the block. Raises ConfigError.
    """
    if request.ref is None:
        yield plan, {}
        return
    subjects = [case for case in plan.cases.values() if isinstance(case, Case | ExternalCase)]
    repository = Repository(_folder(subjects[0]))
    commit = repository.commit(request.ref)
    with contextlib.ExitStack() as stack:
        folder = checkout or stack.enter_context(repository.checkout(commit))
        yield _paired(plan, subjects, repository, commit, folder, request)


def _paired(
    plan: Plan,
    subjects: list[Case | ExternalCase],
    repository: Repository,
    commit: Commit,
    folder: Path,
    request: Request,
) -> tuple[Plan, dict[str, Path]]:
    pairs, cases, checkouts = [], dict(plan.cases), {}
    for case in subjects:
        pair = _pair(case, commit, request)
        subject = Subject(plan.path, pair, HEAD, STEP_TIME, "<", case)
        other = subject.case_at(repository, folder, commit)
        differing = compare_cases(case, other, ()).refused
        pairs.append(replace(pair, arms={HEAD: case.stem, REF: other.stem}, not_comparable=differing))
        cases[other.stem] = other
        checkouts[other.stem] = folder
    runs = tuple(ordered_runs(pairs, [], 1))
    used = {run.case for run in runs}
    chosen = {stem: case for stem, case in cases.items() if stem in used}
    return replace(plan, cases=chosen, pairs=tuple(pairs), runs=runs), checkouts


def _pair(case: Case | ExternalCase, commit: Commit, request: Request) -> Pair:
    on_cpus = counts_cpu_processes(case.stem)
    looks = looks_up_to(request.repeats) if request.budget_minutes is not None else ()
    limit = _ON_CPUS if on_cpus else _ON_GPUS
    return Pair(
        name=f"{case.stem} against {commit.sha[:10]}",
        arms={},
        checks=(f'ratio({HEAD}["{STEP_TIME}"], {REF}["{STEP_TIME}"]) < {limit}',),
        repeats=looks[-1] if looks else request.repeats or REPEATS,
        reuse=False,
        warmup_runs=0 if on_cpus else 1,
        looks=looks,
    )


def _folder(case: Case | ExternalCase) -> Path:
    """Where the repository lies: an external command's folder, else the driver's."""
    return case.cwd if isinstance(case, ExternalCase) else case.driver_path.resolve().parent
