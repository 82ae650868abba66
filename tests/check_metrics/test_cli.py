# SPDX-License-Identifier: Apache-2.0
"""The command: its options, its exit status, and one message in place of any traceback."""

import io
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO
from xml.etree import ElementTree

import pytest

from check_metrics.cli import main
from tests.check_metrics.helpers import write_metrics

ROOT = Path(__file__).parents[2]
PASSING = 'max(data["x"]) < 3'
FAILING = 'max(data["x"]) < 2'


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    """Two steps: 1 and 2."""
    return write_metrics(tmp_path / "metrics.json", {"x": {1: 1.0, 2: 2.0}})


class Outcome:
    """Exit status and both outputs of one call."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def of(self, *arguments: str | Path) -> tuple[int, str, str]:
        """Run the command in this process."""
        with pytest.raises(SystemExit) as left:
            main([str(argument) for argument in arguments])
        assert isinstance(left.value.code, int)
        captured = self._capsys.readouterr()
        assert "Traceback" not in captured.err
        return left.value.code, captured.out, captured.err


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Outcome:
    """The command, run in this process."""
    return Outcome(capsys)


def test_exit_status(call: Outcome, metrics: Path) -> None:
    assert call.of(metrics, PASSING)[0] == 0
    assert call.of(metrics, PASSING, FAILING)[0] == 1
    assert call.of(metrics, PASSING, "nonsense")[0] == 2
    assert call.of("--help")[0] == 0


def test_table(call: Outcome, metrics: Path) -> None:
    status, out, err = call.of(metrics, PASSING, FAILING)
    lines = out.splitlines()
    assert lines[0] == "Metric Checks"
    assert lines[2].split() == ["Status", "Check", "Value", "Margin", "Message"]
    assert lines[4].split("  ")[0].strip() == "PASS"
    assert "2 < 3" in lines[4]
    assert "33.3 %" in lines[4]
    assert "FAIL" in lines[5]
    assert lines[-1] == "1 of 2 checks pass"
    assert (status, err) == (1, "")


def test_unreadable_checks_are_all_named(call: Outcome, metrics: Path) -> None:
    status, out, err = call.of(metrics, "one()", PASSING, "two()")
    assert (status, out) == (2, "")
    assert "one()" in err
    assert "two()" in err


@pytest.mark.parametrize(
    "arguments", [(), ("{}",), ("--no-such-option", "{}", PASSING), ("{}", PASSING, "--warmup", "-1")]
)
def test_usage(call: Outcome, metrics: Path, arguments: tuple[str, ...]) -> None:
    status, out, err = call.of(*(argument.replace("{}", str(metrics)) for argument in arguments))
    assert (status, out) == (2, "")
    assert "Usage: check_metrics" in err


def test_missing_file(call: Outcome, tmp_path: Path) -> None:
    status, out, err = call.of(tmp_path / "none.json", PASSING)
    assert (status, out) == (2, "")
    remedy = "name a metrics file that is there and readable"
    assert err == f"Error: {tmp_path}/none.json: No such file or directory; {remedy}\n"


def test_file_without_a_name(call: Outcome) -> None:
    for path in ("", ".", "/"):
        assert call.of(path, PASSING)[0] == 2


def test_malformed_series_is_an_unusable_file(call: Outcome, tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text('{"x": {"1": "one"}, "ray/b": {"one": 1}, "good": {"1": 1}}', encoding="utf-8")
    assert call.of(path, PASSING)[0] == 2
    assert call.of(path, 'worst("ray/*") < 3')[0] == 2
    assert call.of(path, 'max(data["good"]) < 3')[0] == 0


def test_checks_file(call: Outcome, metrics: Path, tmp_path: Path) -> None:
    checks = tmp_path / "checks.txt"
    checks.write_text(f"# limits\n\n  {PASSING}  # why\n{FAILING}\n", encoding="utf-8")
    status, out, _ = call.of(metrics, "--checks-file", checks, PASSING)
    assert status == 1
    assert "2 of 3 checks pass" in out
    checks.write_text(f"{PASSING}\n\nnonsense\n", encoding="utf-8")
    status, _, err = call.of(metrics, "--checks-file", checks)
    assert status == 2
    assert f"{checks}, line 3: check 'nonsense'" in err


def test_checks_file_without_checks(call: Outcome, metrics: Path, tmp_path: Path) -> None:
    checks = tmp_path / "checks.txt"
    checks.write_text("# none\n", encoding="utf-8")
    assert "no check given" in call.of(metrics, "--checks-file", checks)[2]
    status, _, err = call.of(metrics, "--checks-file", tmp_path / "none.txt")
    assert status == 2
    assert "name a file of checks" in err


def test_arms(call: Outcome, metrics: Path, tmp_path: Path) -> None:
    full = write_metrics(tmp_path / "full.json", {"x": {1: 2.0, 2: 4.0}})
    arms = ("--name", "lora", "--arm", f"full={full}", "--arm", f"same={metrics}")
    check = 'ratio(lora["x"], full["x"]) == 0.5 and max(data["x"]) == max(lora["x"]) == max(same["x"])'
    assert call.of(metrics, *arms, check)[0] == 0
    status, _, err = call.of(metrics, *arms, 'ratio(lora["x"], half["x"]) < 1')
    assert status == 2
    assert "'half': no such arm; there are data, full, lora, same" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--arm", "full"), "write NAME=FILE"),
        (("--arm", "full="), "write NAME=FILE"),
        (("--arm", "=x.json"), "'' cannot name a run"),
        (("--arm", "a-b=x.json"), "'a-b' cannot name a run"),
        (("--arm", "max=x.json"), "'max' cannot name a run"),
        (("--arm", "not=x.json"), "'not' cannot name a run"),
        (("--arm", "data=x.json"), "two runs are named 'data'"),
        (("--name", "a", "--arm", "a=x.json"), "two runs are named 'a'"),
        (("--name", "worst"), "'worst' cannot name a run"),
        (("--segments", "one"), "write steps from 1 on"),
        (("--segments", "0"), "write steps from 1 on"),
        (("--segments", "1,,3"), "write steps from 1 on"),
        (("--segments", "²"), "write steps from 1 on"),
        (("--segments", "9" * 5000), "write steps from 1 on"),
    ],
)
def test_wrong_options(call: Outcome, metrics: Path, arguments: tuple[str, ...], message: str) -> None:
    status, out, err = call.of(metrics, PASSING, *arguments)
    assert (status, out) == (2, "")
    assert message in err


class _Input:
    def __init__(self, content: bytes) -> None:
        self.buffer = io.BytesIO(content)


def test_standard_input(call: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", _Input(b'{"x": {"1": 1}}'))
    assert call.of("-", PASSING, "--name", "run", 'run["x"]["1"] == 1')[0] == 0
    status, _, err = call.of("-", "--arm", "other=-", PASSING)
    assert status == 2
    assert "can be read once" in err


def test_standard_input_as_an_arm(call: Outcome, metrics: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", _Input(b'{"x": {"1": 1, "2": 1}}'))
    assert call.of(metrics, "--arm", "other=-", 'ratio(data["x"], other["x"]) > 1')[0] == 0


def test_jq(call: Outcome, tmp_path: Path) -> None:
    path = tmp_path / "golden.json"
    path.write_text('{"x": {"start_step": 1, "values": {"1": 2.5}}}', encoding="utf-8")
    assert call.of(path, PASSING, "--jq", "map_values(.values)")[0] == 0
    assert call.of(path, PASSING)[0] == 2
    assert call.of(path, PASSING, "--jq", "empty")[0] == 1
    status, _, err = call.of(path, PASSING, "--jq", "nonsense(")
    assert status == 2
    assert "jq failed" in err


def test_json(call: Outcome, metrics: Path) -> None:
    status, out, _ = call.of(
        metrics, PASSING, FAILING, 'all_finite(data["x"])', 'max(data["y"]) < 1', "--json"
    )
    document = json.loads(out)
    assert status == 1
    assert (document["file"], document["status"]) == (str(metrics), "FAIL")
    assert [check["status"] for check in document["checks"]] == ["PASS", "FAIL", "PASS", "FAIL"]
    assert [check["value"] for check in document["checks"]] == [2.0, 2.0, True, None]
    first = document["checks"][0]
    assert first["check"] == PASSING
    assert first["comparisons"] == [
        {"left": 2.0, "op": "<", "right": 3.0, "holds": True, "margin_percent": pytest.approx(100 / 3)}
    ]
    assert json.loads(call.of(metrics, PASSING, "--json")[1])["status"] == "PASS"


def test_the_record_is_what_json_prints(call: Outcome, metrics: Path, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    status, table, _ = call.of(metrics, PASSING, FAILING, "--record", record)
    assert (status, table) == call.of(metrics, PASSING, FAILING)[:2]
    assert json.loads(record.read_text()) == json.loads(call.of(metrics, PASSING, FAILING, "--json")[1])
    status, _, err = call.of(metrics, PASSING, "--record", tmp_path / "none" / "record.json")
    assert status == 2
    assert "record.json" in err
    assert "can be written" in err


def test_junit(call: Outcome, metrics: Path, tmp_path: Path) -> None:
    report = tmp_path / "junit.xml"
    assert call.of(metrics, PASSING, FAILING, "--junit", report)[0] == 1
    suites = ElementTree.parse(report).getroot()
    assert suites.attrib == {"tests": "2", "failures": "1", "errors": "0", "skipped": "0"}
    passed, failed = suites.iter("testcase")
    assert passed.attrib["name"] == PASSING
    assert passed.find("failure") is None
    failure = failed.find("failure")
    assert failure is not None
    assert failure.attrib["message"] == "2 < 2; margin 0.0 %; does not hold"


def test_junit_that_cannot_be_written(call: Outcome, metrics: Path, tmp_path: Path) -> None:
    status, _, err = call.of(metrics, PASSING, "--junit", tmp_path / "none" / "junit.xml")
    assert status == 2
    assert "name a JUnit file" in err


def test_github(call: Outcome, metrics: Path) -> None:
    narrow = 'max(data["x"]) < 2.05'
    status, out, err = call.of(metrics, PASSING, narrow, FAILING, 'max(data["50 %"]) < 1', "--github")
    commands = [line for line in out.splitlines() if line.startswith("::")]
    assert (status, err) == (1, "")
    assert commands[0] == f"::warning title=margin under 5 %25::{narrow}: 2 < 2.05; margin 2.4 %25"
    assert commands[1].startswith(f"::error title=check failed::{FAILING}: ")
    assert "50 %25" in commands[2]
    assert len(commands) == 3


def test_github_leaves_json_alone(call: Outcome, metrics: Path) -> None:
    _, out, err = call.of(metrics, FAILING, "--github", "--json")
    assert json.loads(out)["status"] == "FAIL"
    assert err.startswith("::error")
    assert call.of(metrics, PASSING, "--github", "--json")[2] == ""


def test_segments_and_warmup(call: Outcome, tmp_path: Path) -> None:
    steps = {step: 9.0 if step in (1, 11) else 1.0 for step in range(1, 21)}
    path = write_metrics(tmp_path / "metrics.json", {"t": steps})
    check = 'max(data["t"]) < 2'
    assert call.of(path, check, "--segments", "1, 11", "--warmup", "1")[0] == 0
    assert call.of(path, check, "--warmup", "1")[0] == 1
    assert call.of(path, check, "--segments", "1,11")[0] == 1
    record = tmp_path / "other.json"
    record.write_text('{"segments": [1, 11]}', encoding="utf-8")
    assert call.of(path, check, "--warmup", "1", "--run-json", record)[0] == 0
    assert call.of(path, check, "--warmup", "1", "--run-json", tmp_path / "none.json")[0] == 2


def test_run_json_beside_the_file(call: Outcome, tmp_path: Path) -> None:
    steps = {step: 9.0 if step in (1, 11) else 1.0 for step in range(1, 21)}
    path = write_metrics(tmp_path / "metrics.json", {"t": steps})
    (tmp_path / "run.json").write_text('{"segments": [1, 11]}', encoding="utf-8")
    check = 'max(data["t"]) < 2'
    assert call.of(path, check, "--warmup", "1")[0] == 0
    assert call.of(path, check, "--warmup", "1", "--segments", "1")[0] == 1
    (tmp_path / "run.json").write_text("{", encoding="utf-8")
    status, _, err = call.of(path, check)
    assert status == 2
    assert "run.json: not JSON" in err


def test_run_json_of_every_arm_counts(call: Outcome, tmp_path: Path) -> None:
    arms = {}
    for arm, segments in (("lora", [1, 3]), ("full", [1])):
        folder = tmp_path / arm
        folder.mkdir()
        slow = {step: 9.0 if step in segments else 1.0 for step in range(1, 6)}
        arms[arm] = write_metrics(folder / "metrics.json", {"t": slow})
        (folder / "run.json").write_text(json.dumps({"segments": segments}), encoding="utf-8")
    check = 'ratio(lora["t"], full["t"]) == 1 and max(lora["t"]) == 1'
    options = ("--name", "lora", "--arm", f"full={arms['full']}", "--warmup", "1")
    assert call.of(arms["lora"], check, *options)[0] == 0


def test_allow_nonfinite(call: Outcome, tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text('{"x": {"1": NaN, "2": 1}}', encoding="utf-8")
    assert call.of(path, PASSING)[0] == 1
    status, out, _ = call.of(path, PASSING, "--allow-nonfinite", "x")
    assert status == 0
    assert "not finite at step 1, left out" in out


@pytest.mark.parametrize(
    "name", ["\\u001b[31mred", "a\\nb", "\\ud800", "\\u0000", "[bold]x[/bold]", "]]>", "é…"]
)
def test_odd_metric_names_break_no_output(call: Outcome, tmp_path: Path, name: str) -> None:
    path = tmp_path / "m.json"
    path.write_text(f'{{"{name}": {{"1": NaN}}}}', encoding="utf-8")
    report = tmp_path / "junit.xml"
    for options in ((), ("--json",), ("--github",)):
        status, out, _ = call.of(path, 'max(data["none"]) < 3', 'worst("*") < 3', "--junit", report, *options)
        assert status == 1
        assert "\x1b" not in out
        assert ElementTree.parse(report).getroot().attrib["failures"] == "2"


def test_markup_in_a_check_is_shown_as_it_is(call: Outcome, tmp_path: Path) -> None:
    path = write_metrics(tmp_path / "m.json", {"[red]x[/red]": {1: 1.0}})
    assert '"[red]x[/red]"' in call.of(path, 'max(data["[red]x[/red]"]) < 3')[1]


def test_full_output(metrics: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = run_module(metrics, PASSING, stdout=full)
    assert done.returncode == 2
    assert done.stderr.startswith("Error: the output cannot be written")


def test_undecodable_arguments(metrics: Path) -> None:
    for arguments in ((metrics, b"\xff < 3"), (b"\xff.json", PASSING), (metrics, PASSING, "--arm", b"\xff")):
        done = run_module(*arguments)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr


def test_ascii_only_output(tmp_path: Path) -> None:
    path = write_metrics(tmp_path / "m.json", {"é": {1: 1.0}})
    done = run_module(path, 'worst("*") < 3', PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert 'worst of 1: "\\xe9" at step 1' in done.stdout
    assert "\\u2500" not in done.stdout


def test_interrupt(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    waiting = subprocess.Popen(
        [sys.executable, "-m", "check_metrics", pipe, PASSING],
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    # opening for writing waits for the command to open for reading, which it then does until the interrupt
    with pipe.open("wb"):
        waiting.send_signal(signal.SIGINT)
        _, err = waiting.communicate(timeout=20)
    assert waiting.returncode == 130
    assert err.decode().strip() == "interrupted"


def test_help_is_quick() -> None:
    # processor time, so that other work on the machine does not count
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = run_module("--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.returncode == 0
    assert "check_metrics metrics.json" in done.stdout
    assert 0.0 < min(seconds) < 0.3


def run_module(
    *arguments: str | Path | bytes, stdout: int | BinaryIO = subprocess.PIPE, **variables: str
) -> "subprocess.CompletedProcess[str]":
    """`python -m check_metrics` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "check_metrics", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
