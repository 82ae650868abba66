# SPDX-License-Identifier: Apache-2.0
"""`lora-suite bisect` from commits to exit code: a git repository, its checkouts, and a stub that trains."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lora_suite.campaign import repository as git_repository
from lora_suite.campaign.probe import PairProbe, Subject
from lora_suite.campaign.repository import Commit, Repository
from lora_suite.campaign.search import BisectRequest, run_bisect
from lora_suite.config import ConfigError
from lora_suite.launch.record import Ended
from lora_suite.plan.model import Case
from tests.campaign.helpers import console, printed
from tests.judge.helpers import LORA, ROOT

# Step times scatter by half a percent; how long they are stands in a file that commits change.
TRAINER = """
import json, os, pathlib, random
if pathlib.Path("broken").exists():
    raise SystemExit("cannot train")
seconds = float(pathlib.Path("seconds").read_text())
case_and_repeat = os.environ["LORA_SUITE_RUN_DIR"].split("/")[-2:]
run = 1 + random.Random("/".join(case_and_repeat)).gauss(0, 0.005)
steps = [str(step) for step in range(1, 13)]
pathlib.Path("out").mkdir()
json.dump(
    {
        "train/loss": {step: 3.0 for step in steps},
        "train/global_valid_toks": {step: 10 for step in steps},
        "timing/train/step_time": {step: seconds * run for step in steps},
    },
    open("out/metrics.json", "w"),
)
"""
SUITE = """
name: x
repeats: 2
warmup: 1
warmup_runs: 0
cases:
- case: slim
  external: &how
    command: ['{python}', train.py]
    cwd: CWD
    outputs: [out]
    metrics: out/metrics.json
    steps: 12
    minutes: 1
    gpus: 1
    declares: {model: m, tokens_per_step: 64, lora: true}
- case: whole
  external: *how
pairs:
- name: p
  arms: {full: whole, lora: slim}
"""


# So that commits have the same hashes, and runs the same noise, whenever this is run.
DATES = {"GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z", "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z"}


def git(folder: Path, *arguments: str) -> str:
    """Run git as somebody, untouched by this machine's settings."""
    settings = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", *settings, "-C", str(folder), *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **DATES})
    return done.stdout.strip()


class Project:
    """A repository of a trainer that becomes slow, and a suite inside of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        git(root, "init", "-q")
        (root / "train.py").write_text(TRAINER)
        self.suite = root / "suite.yaml"
        self.suite.write_text(SUITE.replace("CWD", "."))
        self.shas: list[str] = []

    def commit(self, subject: str, **files: str | None) -> str:
        """Change files (None: remove) and commit; returns the hash."""
        for name, text in files.items():
            if text is None:
                (self.root / name).unlink()
            else:
                (self.root / name).write_text(text)
        git(self.root, "add", "-A")
        git(self.root, "commit", "-q", "--allow-empty", "-m", subject)
        self.shas.append(git(self.root, "rev-parse", "HEAD"))
        return self.shas[-1]

    def search(self, tmp_path: Path, suite: Path | None = None, **how: Any) -> tuple[int, list[str]]:
        """Search between the first and the last commit; exit code and lines."""
        screen = console()
        request = BisectRequest(
            suite or self.suite, self.shas[0], "HEAD", None, how.pop("budget", None), tmp_path / "results"
        )
        return run_bisect(request, console=screen, **how), printed(screen).splitlines()

    def worktrees(self) -> int:
        """Checkouts that git knows of, the repository's own among them."""
        return len(git(self.root, "worktree", "list").splitlines())


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """Seven commits; the fifth makes the trainer 30 % slower."""
    made = Project(tmp_path / "trainer")
    made.commit("fast", seconds="1.0")
    for number in range(2, 5):
        made.commit(f"tidy {number}")
    made.commit("wait for the device", seconds="1.3")
    for number in range(6, 8):
        made.commit(f"tidy {number}")
    return made


@pytest.mark.slow
def test_the_commit_is_found_and_nothing_is_left(project: Project, tmp_path: Path) -> None:
    before = git(project.root, "status", "--porcelain")
    code, lines = project.search(tmp_path)
    assert code == 0
    assert f"first bad commit: {project.shas[4][:10]} wait for the device" in lines
    assert lines[0] == (f"6 commits, timing/train/step_time of arm lora, against {project.shas[0][:10]} fast")
    assert project.worktrees() == 1
    assert git(project.root, "status", "--porcelain") == before
    assert git(project.root, "rev-parse", "HEAD") == project.shas[-1]


@pytest.mark.slow
def test_a_suite_outside_follows_the_commands_repository(project: Project, tmp_path: Path) -> None:
    """And a commit that does not run is left aside: here the one that is looked for."""
    elsewhere = tmp_path / "suites" / "theirs.yaml"
    elsewhere.parent.mkdir()
    elsewhere.write_text(SUITE.replace("CWD", str(project.root)))
    project.shas = project.shas[:1]
    git(project.root, "reset", "-q", "--hard", project.shas[0])
    project.commit("break", broken="", seconds="1.3")
    project.commit("repair", broken=None)
    code, lines = project.search(tmp_path, suite=elsewhere)
    assert code == 5
    assert "the first bad commit is one of these 2:" in lines
    assert any("break: skipped, does not run: ERROR" in line for line in lines)
    assert any(line.startswith(f"  {project.shas[2][:10]} repair: bad, 1.") for line in lines)


def test_equal_end_points_are_said(tmp_path: Path) -> None:
    project = Project(tmp_path / "trainer")
    project.commit("one", seconds="1.0")
    project.commit("two")
    code, lines = project.search(tmp_path)
    assert code == 5
    assert any(line.startswith("cannot be searched: the bad commit does not differ") for line in lines)


def test_an_interrupt_leaves_no_checkout(project: Project, tmp_path: Path) -> None:
    class Interrupted:
        def __init__(self, checkouts: Mapping[str, Path]) -> None:
            assert all(folder.is_dir() for folder in checkouts.values())

        def run(self, *arguments: Any, **options: Any) -> Ended:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        project.search(tmp_path, launchers=Interrupted)
    assert project.worktrees() == 1


def test_a_budget_that_is_over_begins_no_probe(project: Project, tmp_path: Path, monkeypatch: Any) -> None:
    repository = Repository(project.root)
    good, bad = (repository.commit(sha) for sha in (project.shas[0], project.shas[-1]))
    subject = Subject.of(project.suite, None)
    with PairProbe(subject, repository, good, tmp_path, console(), 1e-9) as probe:
        answer = probe(bad, 1.0)
    assert (answer.state, answer.message) == ("no time", "the budget of 1e-09 minutes is over")


def test_a_commit_without_the_commands_folder_is_skipped(project: Project, tmp_path: Path) -> None:
    (project.root / "loop").mkdir()
    project.commit("move", **{"loop/train.py": TRAINER, "suite.yaml": SUITE.replace("CWD", "loop")})
    repository = Repository(project.root)
    good, before = (repository.commit(revision) for revision in ("HEAD", "HEAD~1"))
    with PairProbe(Subject.of(project.suite, None), repository, good, tmp_path, console(), None) as probe:
        answer = probe(before, 1.0)
    assert (answer.state, answer.message) == ("skipped", "does not plan: the commit has no loop")


@pytest.fixture
def ours(tmp_path: Path) -> tuple[Subject, Repository, Commit]:
    """A case of ours in a repository of recipes, drivers and a suite, and its only commit."""
    root = tmp_path / "ours"
    for name in ("recipes", "scripts"):
        shutil.copytree(ROOT / name, root / name)
    (root / "suites").mkdir()
    shutil.copy(ROOT / "suites" / "smoke.yaml", root / "suites")
    git(tmp_path, "init", "-q", str(root))
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "first")
    repository = Repository(root)
    return Subject.of(root / "suites" / "smoke.yaml", "fsdp2"), repository, repository.commit("HEAD")


def test_a_case_of_ours_is_resolved_as_the_commit_has_it(ours: tuple[Subject, Repository, Commit]) -> None:
    subject, repository, first = ours
    recipe = repository.top / "recipes" / f"{LORA}.yaml"
    recipe.write_text(recipe.read_text() + "\ncluster: {gpus_per_node: 1}\n")
    with repository.checkout(first) as checkout:
        case = subject.case_at(repository, checkout, first)
        assert isinstance(case, Case)
        assert case.driver_path == checkout / "scripts" / f"{LORA}.sh"
        assert case.tree["cluster"]["gpus_per_node"] == 2
    assert case.stem == f"{LORA}@{first.sha[:10]}"
    assert (case.steps, case.checks, case.driver_judges) == (30, (), False)


def test_a_recipe_that_its_commit_cannot_read_is_said(ours: tuple[Subject, Repository, Commit]) -> None:
    subject, repository, _ = ours
    (repository.top / "recipes" / f"{LORA}.yaml").write_text("no_such_key: 1\n")
    git(repository.top, "commit", "-q", "-a", "-m", "break")
    broken = repository.commit("HEAD")
    with repository.checkout(broken) as checkout, pytest.raises(ConfigError, match="no_such_key"):
        subject.case_at(repository, checkout, broken)


def test_commits_between_follow_the_first_parents(project: Project) -> None:
    repository = Repository(project.suite)
    good, bad = (repository.commit(sha) for sha in (project.shas[0], "HEAD"))
    assert [each.sha for each in repository.between(good, bad)] == project.shas[1:]
    git(project.root, "checkout", "-q", "-b", "side", project.shas[0])
    project.commit("aside")
    git(project.root, "checkout", "-q", "-")
    git(project.root, "merge", "-q", "--no-ff", "-m", "merge", "side")
    merged = repository.between(good, repository.commit("HEAD"))
    assert [each.subject for each in merged[-2:]] == ["tidy 7", "merge"]


@pytest.mark.parametrize(
    ("good", "bad", "said"),
    [
        ("HEAD", "HEAD~1", "is no ancestor"),
        ("HEAD", "HEAD", "are the same commit"),
        ("nowhere", "HEAD", "is no commit"),
    ],
)
def test_commits_that_cannot_be_searched(
    project: Project, tmp_path: Path, good: str, bad: str, said: str
) -> None:
    request = BisectRequest(project.suite, good, bad, None, None, tmp_path / "results")
    with pytest.raises(ConfigError, match=said):
        run_bisect(request, console=console())


def test_what_is_followed_is_the_first_ratio_of_one_pair(project: Project, tmp_path: Path) -> None:
    subject = Subject.of(project.suite, "p")
    assert (subject.arm, subject.metric, subject.operator) == ("lora", "timing/train/step_time", "<")
    two = SUITE.replace("CWD", ".") + "- {name: q, arms: {full: slim, lora: whole}}\n"
    (project.root / "two.yaml").write_text(two)
    with pytest.raises(ConfigError, match="follows one pair"):
        Subject.of(project.root / "two.yaml", None)
    no_ratio = SUITE.replace("CWD", ".").replace(
        "lora: slim}", 'lora: slim}\n  checks: [\'max_rel_diff(full["train/loss"], lora["train/loss"]) < 1\']'
    )
    (project.root / "none.yaml").write_text(no_ratio)
    with pytest.raises(ConfigError, match="no check is a ratio"):
        Subject.of(project.root / "none.yaml", None)


def test_outside_git_there_is_nothing_to_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="lies in no git repository"):
        Repository(tmp_path)

    def absent(*arguments: object, **options: object) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(git_repository.subprocess, "run", absent)
    with pytest.raises(ConfigError, match="git is missing"):
        Repository(tmp_path)


def test_a_commit_is_named_as_people_do() -> None:
    assert str(Commit("0123456789abcdef", "fix it")) == "0123456789 fix it"
