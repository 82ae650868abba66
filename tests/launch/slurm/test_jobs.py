# SPDX-License-Identifier: Apache-2.0
"""A suite on a Slurm cluster: what queues, what is judged, what faults of trainers and machines become."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from tests.launch.slurm.conftest import Project, states

pytestmark = [pytest.mark.train, pytest.mark.slow, pytest.mark.timeout(400)]

RATIO = 'ratio(b["timing/train/step_time"], a["timing/train/step_time"]) < 1.5'


def test_cases_are_jobs_of_their_own_and_a_pair_is_one(project: Project) -> None:
    pair = {"name": "two", "arms": {"a": "one", "b": "two"}, "repeats": 2, "checks": [RATIO]}
    suite = project.suite({"one": "ok", "two": "ok", "alone": "ok"}, nodes=2, pairs=[pair], warmup_runs=0)
    status, verdict, output = project.run(suite)
    assert status == 0, output
    assert states(verdict) == dict.fromkeys(["one 1", "two 1", "two 2", "one 2", "alone 1"], "PASS")
    ran = project.ran()
    # ABBA on one job's nodes, then the lone case as another job.
    assert [case for case, _, _ in ran] == ["one", "two", "two", "one", "alone"]
    assert len({job for _, job, _ in ran[:4]}) == 1
    assert ran[4][1] != ran[0][1]
    assert {nodes for _, _, nodes in ran} == {"node[1-2]"}
    assert verdict["pairs"][0]["state"] == "PASS"


def test_what_a_trainer_does_is_judged_and_never_repeated(project: Project) -> None:
    suite = project.suite({"crash": "crash", "nan": "nan", "hang": "hang"}, minutes=0.05)
    status, verdict, output = project.run(suite)
    assert status == 3, output
    assert states(verdict) == {"crash 1": "ERROR", "nan 1": "FAIL", "hang 1": "ERROR"}
    messages = {run["case"]: run["message"] for run in verdict["runs"]}
    assert messages["crash"].startswith("crashed: RuntimeError: no such kernel")
    assert messages["hang"].startswith("timeout: ran longer than 0.05 minutes")
    assert sorted(case for case, _, _ in project.ran()) == ["crash", "hang", "nan"]


def test_processes_that_do_not_find_each_other_start_again_and_the_verdict_says_so(project: Project) -> None:
    status, verdict, output = project.run(project.suite({"one": "nccl"}))
    assert status == 0, output
    assert verdict["runs"][0]["health"] == [
        "started again: processes did not find each other: ncclSystemError"
    ]
    assert len(project.ran()) == 2


def test_cancel_ends_just_its_own_jobs(project: Project) -> None:
    process = project.submit(project.suite({"one": "hang", "two": "hang", "three": "hang"}))
    project.await_(lambda: len(project.ran()) == 2)
    words = ("--parsable", "--wrap=sleep 60", "--job-name=somebody", "--output=/dev/null")
    other = project.slurm("sbatch", *words)
    ended = project.start("cancel", str(project.results()))
    said, _ = ended.communicate()
    assert ended.returncode == 0, said
    assert said.count("cancelled: job") == 3
    status, verdict, output = project.ended(process, "stub")
    assert status == 130, output
    assert set(states(verdict).values()) == {"MISSING"}
    assert any("was cancelled" in run["message"] for run in verdict["runs"])
    assert [(number, name) for number, _, name in project.queue()] == [(other, "somebody")]
    project.slurm("scancel", other)


def test_a_job_cancelled_by_others_is_missing(project: Project) -> None:
    process = project.submit(project.suite({"one": "hang"}))
    project.await_(project.ran)
    (job, _, _) = project.queue()[0]
    project.slurm("scancel", job)
    status, verdict, output = project.ended(process, "stub")
    assert status == 4, output
    assert "was cancelled" in verdict["runs"][0]["message"]


def test_a_requeued_job_begins_anew_and_says_so(project: Project) -> None:
    process = project.submit(project.suite({"one": "hang-once"}))
    project.await_(project.ran)
    (job, _, _) = project.queue()[0]
    project.slurm("scontrol", "requeue", job)
    # Slurm lets a job that is put back wait for two minutes. Less will do, but after its SIGTERM a node sends
    # SIGKILL when KillWait (2 s here) is over, by the job's number alone: no second life may have begun then.
    project.await_(lambda: [state for _, state, _ in project.queue()] == ["PENDING"])
    time.sleep(6.0)
    project.slurm("scontrol", "update", f"jobid={job}", "starttime=now")
    status, verdict, output = project.ended(process, "stub")
    assert status == 0, output
    assert verdict["runs"][0]["health"] == [f"job {job} was put back into the queue by Slurm 1 times"]
    assert len(project.ran()) == 2
    assert len(list((project.results() / "attempts").glob("*/*"))) == 1


def test_a_node_that_goes_down_is_repeated_as_another_job(project: Project) -> None:
    project.site(sbatch=["--no-requeue"])
    process = project.submit(project.suite({"one": "hang-once"}))
    ((_, job, node),) = project.await_(project.ran)
    with project.down(node):
        status, verdict, output = project.ended(process, "stub")
    assert status == 0, output
    (reason,) = verdict["runs"][0]["health"]
    assert reason.startswith(f"repeated: a node went down (NODE_FAIL, job {job}")
    assert [ran[1] for ran in project.ran()] != [job, job]


def test_no_more_than_the_site_retries(project: Project) -> None:
    project.site(sbatch=["--no-requeue"], retries=0)
    process = project.submit(project.suite({"one": "hang"}))
    ((_, job, node),) = project.await_(project.ran)
    with project.down(node):
        status, verdict, output = project.ended(process, "stub")
    assert status == 3, output
    assert verdict["runs"][0]["message"].startswith(f"killed: a node went down (NODE_FAIL, job {job}")


def test_the_login_process_may_die_and_attach_judges(project: Project) -> None:
    process = project.submit(project.suite({"one": "ok", "two": "ok", "three": "ok"}, nodes=2))
    project.await_(project.ran)
    process.send_signal(signal.SIGKILL)
    process.wait()
    results = project.results()
    assert not (results / "verdict.json").exists()
    status, verdict, output = project.ended(project.start("attach", str(results)), "stub")
    assert status == 0, output
    assert set(states(verdict).values()) == {"PASS"}
    assert sorted(case for case, _, _ in project.ran()) == ["one", "three", "two"]
    again = project.start("attach", str(results))
    assert "3 PASS" in again.communicate()[0]
    assert again.returncode == 0


def test_dying_between_submission_and_its_note_submits_nothing_twice(project: Project) -> None:
    process = project.submit(project.suite({"one": "ok"}))
    project.await_(project.ran)
    process.send_signal(signal.SIGKILL)
    process.wait()
    journal = project.results() / "jobs.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    assert json.loads(lines[-1])["event"] == "submitted"
    journal.write_text("".join(lines[:-1]))
    status, _, output = project.ended(project.start("attach", str(project.results())), "stub")
    assert status == 0, output
    assert len(project.ran()) == 1


def test_ctrl_c_leaves_the_jobs_and_names_attach(project: Project) -> None:
    process = project.submit(project.suite({"one": "ok"}))
    project.await_(project.ran)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate()
    assert process.returncode == 130
    assert "the jobs go on: lora-suite attach results/stub/" in output
    status, _, _ = project.ended(project.start("attach", str(project.results())), "stub")
    assert status == 0


def test_two_suites_at_once(project: Project) -> None:
    suites = [project.suite({name: "ok"}, name=name) for name in ("left", "right")]
    processes = [project.submit(suite) for suite in suites]
    for suite, process in zip(suites, processes, strict=True):
        status, verdict, output = project.ended(process, suite.stem)
        assert status == 0, output
        assert states(verdict) == {f"{suite.stem} 1": "PASS"}
    assert len({job for _, job, _ in project.ran()}) == 2


def test_a_site_of_its_own_way(project: Project) -> None:
    """A template that hands the command to a wrapper, as sites with Ray or containers do."""
    wrapper = project.folder / "wrapper.sh"
    wrapper.write_text('echo "wrapped $WRAPPED_NODES $1" >> wrapped.txt; shift; eval "$WRAPPED_COMMAND"\n')
    (project.folder / "job.sh.j2").write_text(
        "#!/bin/bash\n#SBATCH --job-name={{ name }} --nodes={{ nodes }} --output={{ log }}\n"
        "{% for name, value in environment.items() %}export {{ name }}={{ value | quote }}\n{% endfor %}"
        "export WRAPPED_NODES={{ nodes }} WRAPPED_COMMAND={{ command | quote }}\n"
        f"cd {project.folder}\n. {wrapper} {{{{ gpus }}}}\n"
    )
    project.site(template="job.sh.j2", environment={"SITE_SAYS": "a b"})
    status, _, output = project.run(project.suite({"one": "ok"}, nodes=2))
    assert status == 0, output
    assert (project.folder / "wrapped.txt").read_text() == "wrapped 2 2\n"


def test_only_what_failed_runs_again(project: Project) -> None:
    suite = project.suite({"good": "ok", "bad": "crash"})
    assert project.run(suite)[0] == 3
    first = project.results()
    project.suite({"good": "ok", "bad": "ok"})
    status, verdict, output = project.run(suite, "--rerun-failed", str(first))
    assert status == 0, output
    assert states(verdict) == {"bad 1": "PASS"}
    done = project.start("run", str(suite), "-k", "bad", "--rerun-failed", str(project.results()))
    assert "everything passed there" in done.communicate()[0]


def test_everything_inside_an_allocation_that_is_held(project: Project, tmp_path: Path) -> None:
    suite = project.suite({"one": "ok", "two": "ok"})
    words = ["python", "-m", "lora_suite", "run", str(suite), "--inside-allocation"]
    script = tmp_path / "held.sh"
    script.write_text(f"#!/bin/bash\ncd {project.folder}\n{' '.join(words)} > out.txt 2>&1\n")
    project.slurm("sbatch", "--wait", "--nodes=2", "--output=/dev/null", str(script))
    verdict = json.loads((project.results() / "verdict.json").read_text())
    assert set(states(verdict).values()) == {"PASS"}
    assert len({job for _, job, _ in project.ran()}) == 1


def test_the_budget_counts_whole_allocations(project: Project) -> None:
    suite = project.suite({"one": "ok"}, nodes=2, minutes=30, budget_gpu_hours=1.9)
    process = project.submit(suite)
    output, _ = process.communicate()
    assert process.returncode == 2
    assert "GPU-hours" in output
    assert project.queue() == []


def test_slurms_time_limit_is_a_timeout(project: Project) -> None:
    """The shortest limit that Slurm keeps is a minute."""
    project.site(sbatch=["--time=1"])
    status, verdict, output = project.run(project.suite({"one": "hang"}, minutes=5, repeats=2))
    assert status == 3, output
    assert states(verdict) == {"one 1": "ERROR", "one 2": "MISSING"}
    assert verdict["runs"][0]["message"].startswith("timeout: job ")
    assert len(project.ran()) == 1
