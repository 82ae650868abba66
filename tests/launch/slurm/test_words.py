# SPDX-License-Identifier: Apache-2.0
"""What is said to Slurm, and how what it says is read: without a cluster."""

from __future__ import annotations

import shlex
import subprocess
from fractions import Fraction
from pathlib import Path

import pytest

from lora_suite.campaign.jobs.units import job_lines, refuse_too_large, units_of
from lora_suite.config.errors import ConfigError
from lora_suite.launch.record import Ended
from lora_suite.launch.site import Site, load_site
from lora_suite.launch.slurm.faults import ended_by, machines_fault, start_up_fault
from lora_suite.launch.slurm.scheduler import Job
from lora_suite.launch.slurm.script import JobScript, Resources
from lora_suite.launch.slurm.step import Allocation, step_command
from lora_suite.launch.snapshot import take
from lora_suite.plan.load import load_plan

ROOT = Path(__file__).resolve().parents[3]
HELD = Allocation("123456", 2, "node[1-2]")


@pytest.mark.parametrize(
    ("state", "how"),
    [
        ("TIMEOUT", "timeout"),
        ("CANCELLED", "interrupted"),
        ("OUT_OF_MEMORY", "oom"),
        ("NODE_FAIL", "killed"),
        ("PREEMPTED", "killed"),
        ("FAILED", "failed"),
        ("UNKNOWN", "killed"),
    ],
)
def test_each_end_of_a_job_has_a_kind_and_names_the_job(state: str, how: str) -> None:
    ended = ended_by(Job("12", "n", state, nodes="node3"), 35)
    assert ended.how == how
    assert "job 12 on node3" in ended.message


def test_only_the_machines_are_repeated() -> None:
    states = [
        "NODE_FAIL",
        "BOOT_FAIL",
        "PREEMPTED",
        "TIMEOUT",
        "CANCELLED",
        "FAILED",
        "OUT_OF_MEMORY",
        "UNKNOWN",
    ]
    assert [state for state in states if machines_fault(Job("1", "n", state))] == states[:3]
    said = "DistBackendError: NCCL error: ncclSystemError: socket"
    assert "ncclSystemError" in start_up_fault(Ended(how="failed", status=3, message=said))
    # After a step the same words tell of a peer that died; an interrupt is never a fault.
    assert start_up_fault(Ended(how="failed", status=3, step=3, message=said)) == ""
    assert start_up_fault(Ended(how="interrupted", status=130, message=said)) == ""


def test_one_torchrun_a_node_at_a_port_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lora_suite.launch.slurm.step.slurm", lambda *words: "node1\nnode2")
    words = step_command(HELD, 2, 8, "run-1", Path("/r"), ["--container-image=x"])
    assert words[:5] == ["srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    assert "--container-image=x" in words[: words.index("bash")]
    # 10240 + 123456 mod 22000
    place = ["--nnodes", "2", "--master-addr", "node1", "--master-port", "23696"]
    assert words[-11:] == [*place, "--nproc-per-node", "8", "-m", "lora_suite.train", "/r"]
    assert Allocation("123457", 2, "").port == 23697
    with pytest.raises(ConfigError, match="holds 2 nodes"):
        step_command(HELD, 3, 8, "run-1", Path("/r"))


def test_no_allocation_outside_of_a_job() -> None:
    assert Allocation.held({}) is None
    known = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1"}
    assert Allocation.held(known) == Allocation("7", 1, "n1")


def test_the_script_asks_for_what_the_site_wants_and_quotes() -> None:
    script = JobScript("j", Resources(2, 8, True, 30.2), ["a b", "c"], {"X": "1 2"}, Path("/l"), Path("/f g"))
    site = Site(account="team", sbatch=["--mem=0"], environment={"Y": "it's"}, srun=["--mpi=none"])
    text = script.render(site)
    options = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert {"--nodes=2", "--gpus-per-node=8", "--time=31", "--account=team", "--exclusive", "--mem=0"} <= {
        *options
    }
    shell = text[text.index("set -euo") :].replace("exec ", "printf '%s|' ").replace("cd ", "# cd ")
    done = subprocess.run(
        ["bash", "-c", f"{shell}\nprintf '%s' \"$X|$Y|$LORA_SUITE_SRUN\""],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "a b|c|1 2|it's|--mpi=none"
    cpu = JobScript("j", Resources(1, 2, False, 1), ["c"], {}, Path("/l"), Path("/f")).render(Site())
    assert "gpus" not in cpu


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("acount: x", "unknown key acount; did you mean account?"),
        ("container: {imag: x}", "did you mean image?"),
        ("retries: -1", "retries"),
        ("template: no.sh", "there is no"),
    ],
)
def test_a_wrong_site_file_is_named_with_its_key(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"site\.yaml") as caught:
        load_site(path)
    assert said in str(caught.value)


def test_jobs_cost_whole_allocations_exactly() -> None:
    """The smoke suite: two pairs of 8 runs of 3 minutes on 2 processes; the third pair reuses their runs."""
    plan = load_plan(ROOT / "suites" / "smoke.yaml")
    units, site = units_of(plan), Site()
    assert [(unit.name, len(unit.part.runs)) for unit in units] == [("001-fsdp2", 8), ("002-megatron", 8)]
    assert [unit.gpu_hours(site) for unit in units] == [Fraction(2 * 24, 60)] * 2
    assert [*job_lines(units, site)][-1] == "2 jobs, at most 1.6 GPU-hours"
    refuse_too_large(plan, units, site)
    with pytest.raises(ConfigError, match="max_minutes is 20"):
        refuse_too_large(plan, units, Site(max_minutes=20))


def test_a_snapshot_is_the_tree_with_its_changes_and_no_later_one(tmp_path: Path) -> None:
    top = tmp_path / "tree"
    (top / "suites").mkdir(parents=True)
    suite = top / "suites" / "a.yaml"
    suite.write_text("first")
    (top / ".gitignore").write_text("ignored\n")
    for words in ("init -q", "add .", "-c user.name=T -c user.email=t@example.org commit -qm x"):
        subprocess.run(["git", "-C", str(top), *shlex.split(words)], check=True)
    clean = take(suite, tmp_path / "one", [])
    assert clean.changes == ""
    suite.write_text("changed")
    (top / "new.txt").write_text("untracked")
    (top / "ignored").write_text("data")
    (top / "results").mkdir()
    (top / "results" / "log").write_text("no code")
    changed = take(suite, tmp_path / "two", [top / "results"])
    suite.write_text("later")
    assert changed.moved(suite).read_text() == "changed"
    assert (changed.folder / "new.txt").read_text() == "untracked"
    assert not (changed.folder / "ignored").exists()
    assert not (changed.folder / "results").exists()
    assert clean.moved(suite).read_text() == "first"
    assert (clean.commit, clean.changes) != (changed.commit, changed.changes)
    changed.remove()
    clean.remove()
    listed = subprocess.run(
        ["git", "-C", str(top), "worktree", "list"], capture_output=True, text=True, check=True
    )
    assert len(listed.stdout.splitlines()) == 1
