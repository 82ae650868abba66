# SPDX-License-Identifier: Apache-2.0
"""The command line: what each command hands on, its help, its errors, its start-up time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import lora_suite
from lora_suite.campaign import preview as preview_module
from lora_suite.campaign import run as campaign
from lora_suite.cli import main
from lora_suite.config.errors import ConfigError
from lora_suite.plan import lint as lint_module
from lora_suite.plan.lint import Finding


def invoke(*words: str):
    """Call the command line in this process."""
    return CliRunner().invoke(main, list(words))


def every_command(group: click.Group = main, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of each command, groups among them."""
    for name, command in sorted(group.commands.items()):
        yield (*path, name)
        if isinstance(command, click.Group):
            yield from every_command(command, (*path, name))


@pytest.mark.parametrize("command", every_command(), ids=" ".join)
def test_every_command_has_help_with_an_example(command):
    result = invoke(*command, "--help")
    assert result.exit_code == 0
    assert f"lora-suite {' '.join(command)}" in result.output.split("Example", 1)[1]


@pytest.mark.parametrize("command", every_command(), ids=" ".join)
def test_every_option_says_what_it_is_for(command):
    found = main
    for word in command:
        found = found.commands[word]
    assert [each.name for each in found.params if isinstance(each, click.Option) and not each.help] == []


def test_commands_are_listed_in_whole_sentences():
    """Where a list has no room for one, it is cut."""
    _, commands = invoke("--help").output.split("Commands:")
    assert [line for line in commands.splitlines() if line.endswith("...")] == []


def test_version():
    assert invoke("--version").output == f"lora-suite, version {lora_suite.__version__}\n"


class TestRun:
    """`lora-suite run` builds a request and exits with what the campaign says."""

    @pytest.fixture
    def requests(self, monkeypatch):
        """The requests that reach the campaign, which answers 5; previews answer 0."""
        seen = []
        monkeypatch.setattr(campaign, "run_suite", lambda request: seen.append(("run", request)) or 5)
        monkeypatch.setattr(preview_module, "preview", lambda request: seen.append(("plan", request)) or 0)
        return seen

    def test_defaults(self, requests):
        assert invoke("run", "suites/smoke.yaml").exit_code == 5
        ((kind, request),) = requests
        assert kind == "run"
        assert request == campaign.Request(suite=Path("suites/smoke.yaml"))
        assert (request.results, request.keep, request.repeats) == (Path("results"), False, None)

    def test_every_option_is_handed_on(self, requests, tmp_path):
        words = ["run", "s.yaml", "-k", "fsdp2 and not lora", "--repeats", "2", "--results", str(tmp_path)]
        words += ["--keep", "--arm", "lora:debug.faults.slow_step=3.0", "--arm", "full:a=b"]
        words += ["~policy.tokenizer.chat_template", "+a.b=c", "policy.optimizer.name=torch.optim.Adam"]
        assert invoke(*words).exit_code == 5
        assert requests[0][1] == campaign.Request(
            suite=Path("s.yaml"),
            overrides=("~policy.tokenizer.chat_template", "+a.b=c", "policy.optimizer.name=torch.optim.Adam"),
            arm_overrides=("lora:debug.faults.slow_step=3.0", "full:a=b"),
            select="fsdp2 and not lora",
            repeats=2,
            results=tmp_path,
            keep=True,
        )

    def test_options_may_follow_overrides(self, requests):
        invoke("run", "s.yaml", "a=b", "--keep", "~c")
        assert requests[0][1].overrides == ("a=b", "~c")
        assert requests[0][1].keep

    def test_plan_runs_nothing(self, requests):
        assert invoke("run", "s.yaml", "--plan").exit_code == 0
        assert [kind for kind, _ in requests] == ["plan"]

    @pytest.mark.parametrize(
        "words",
        [["run"], ["run", "s.yaml", "--repeats", "0"], ["run", "s.yaml", "--no-such-option"], ["walk"]],
    )
    def test_wrong_usage_is_exit_2(self, requests, words):
        result = invoke(*words)
        assert result.exit_code == 2
        assert requests == []

    def test_a_configuration_error_is_one_message_and_exit_2(self, monkeypatch):
        def refuse(request):
            raise ConfigError("suites/a.yaml: no case 'x'; did you mean y?")

        monkeypatch.setattr(campaign, "run_suite", refuse)
        result = invoke("run", "suites/a.yaml")
        assert result.exit_code == 2
        assert result.stderr == "error: suites/a.yaml: no case 'x'; did you mean y?\n"
        assert result.stdout == ""


def test_an_interrupt_before_anything_runs_is_exit_130(monkeypatch):
    def interrupt(request):
        raise KeyboardInterrupt

    monkeypatch.setattr(campaign, "run_suite", interrupt)
    result = invoke("run", "suites/a.yaml")
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")


@pytest.mark.parametrize(
    "words",
    [
        ["run", "no/such/suite.yaml"],
        ["run", "no/such/suite.yaml", "--plan"],
        ["config", "show", "no/such/recipe.yaml"],
        ["train", "--config", "no/such/recipe.yaml"],
    ],
    ids=" ".join,
)
def test_a_missing_file_is_named(words):
    result = invoke(*words)
    assert result.exit_code == 2
    assert "no/such/" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_config_show_prints_the_resolved_recipe():
    recipe = Path(__file__).parents[1] / "recipes" / "sft-tiny-llama-1n2c-fsdp2-lora.yaml"
    result = invoke("config", "show", str(recipe), "sft.max_num_steps=7", "~policy.tokenizer.chat_template")
    assert result.exit_code == 0
    assert "max_num_steps: 7" in result.output


class TestLint:
    """`lora-suite lint`: findings on stdout, 1 with any, 2 for what cannot be read."""

    FINDING = Finding(Path("scripts/a.sh"), 6, "error", "steps", "beyond the last step")

    @pytest.fixture
    def found(self, monkeypatch):
        """What lint finds, and the paths that it was given."""
        findings, paths = [], []
        monkeypatch.setattr(lint_module, "lint", lambda given: paths.append(given) or findings)
        return findings, paths

    def test_nothing_found(self, found):
        result = invoke("lint")
        assert (result.exit_code, result.output) == (0, "")
        assert found[1] == [()]

    def test_findings_are_lines(self, found):
        found[0].append(self.FINDING)
        result = invoke("lint", "scripts", "suites/a.yaml")
        assert result.exit_code == 1
        assert result.stdout == "scripts/a.sh:6: error: beyond the last step [steps]\n"
        assert found[1] == [(Path("scripts"), Path("suites/a.yaml"))]

    def test_or_json(self, found):
        found[0].append(self.FINDING)
        result = invoke("lint", "--json")
        assert result.exit_code == 1
        assert json.loads(result.stdout) == [
            {"file": "scripts/a.sh", "line": 6, "severity": "error", "rule": "steps"}
            | {"message": "beyond the last step"}
        ]

    def test_what_cannot_be_read_is_exit_2(self):
        result = invoke("lint", "no/such/file.yaml")
        assert result.exit_code == 2
        assert "no/such/file.yaml" in result.stderr


def test_init_lists_what_it_copied(tmp_path):
    result = invoke("init", str(tmp_path / "mine"))
    assert result.exit_code == 0
    smoke = str(tmp_path / "mine" / "suites" / "smoke.yaml")
    assert smoke in result.output.splitlines()
    assert result.output.splitlines()[-1] == f"next: lora-suite run {smoke}"
    again = invoke("init", str(tmp_path / "mine"))
    assert again.exit_code == 2
    assert again.stderr.startswith("error: ")


def test_train_exits_with_the_status_of_the_training(monkeypatch):
    from lora_suite.launch import training

    seen = []
    monkeypatch.setattr(training, "train", lambda config, overrides: seen.append((config, overrides)) or 3)
    assert invoke("train", "sft.max_num_steps=5", "~a").exit_code == 3
    assert invoke("train", "--config", "r.yaml").exit_code == 3
    assert seen == [(None, ["sft.max_num_steps=5", "~a"]), (Path("r.yaml"), [])]


@pytest.fixture
def project(tmp_path):
    """A suite of one case whose driver does what `deed.sh` says, in place of training."""
    root = Path(__file__).parents[1]
    for folder in ("recipes", "scripts", "suites"):
        (tmp_path / folder).mkdir()
    stem = "sft-tiny-llama-1n2c-fsdp2"
    recipe = root / "recipes" / f"{stem}.yaml"
    (tmp_path / "recipes" / f"{stem}.yaml").write_text(f"defaults: {recipe}\n")
    driver = tmp_path / "scripts" / f"{stem}.sh"
    plan = '{"steps": 30, "minutes": 1, "train": [[]], "checks": []}'
    driver.write_text(
        textwrap.dedent(
            f"""\
            [[ ${{LORA_SUITE_PLAN:-0}} == 1 ]] && {{ echo '{plan}'; exit; }}
            source {tmp_path}/deed.sh
            """
        )
    )
    (tmp_path / "suites" / "one.yaml").write_text(f"name: One case\ncases: [{stem}]\n")
    return tmp_path


def run_in(project: Path, *words: str) -> subprocess.Popen[str]:
    """Start the command in the project."""
    command = [sys.executable, "-m", "lora_suite", "run", "suites/one.yaml", *words]
    environment = {**os.environ, "COLUMNS": "80"}
    return subprocess.Popen(
        command, cwd=project, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_a_real_run_of_a_driver_that_fails(project):
    (project / "deed.sh").write_text("echo what a pity; exit 7\n")
    process = run_in(project)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 3
    assert "what a pity" in out
    assert out.splitlines()[-1].startswith("ERROR (exit 3)")
    assert "Traceback" not in out + err
    assert len(list(project.glob("results/one/*/verdict.json"))) == 1
    assert len(list(project.glob("results/one/*/junit.xml"))) == 1


def test_output_that_cannot_be_encoded_ends_nothing(project, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    (project / "deed.sh").write_text("echo 'schade: ünlesbar …'; exit 7\n")
    process = run_in(project)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 3
    assert "schade: ?nlesbar ?" in out
    assert "Traceback" not in err


def test_a_reader_that_goes_away_changes_no_verdict(project):
    (project / "deed.sh").write_text("exit 0\n")
    process = run_in(project)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(timeout=60) == 4
    assert len(list(project.glob("results/one/*/verdict.json"))) == 1


def test_a_driver_that_does_nothing_does_not_pass(project):
    (project / "deed.sh").write_text("exit 0\n")
    process = run_in(project)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 4
    assert "MISSING" in out.splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_stops_everything_and_reports(project, number):
    (project / "deed.sh").write_text("echo $$ > pid; touch started; sleep 60\n")
    process = run_in(project)
    deadline = time.monotonic() + 60
    while not (project / "started").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=15)
    assert process.returncode == 130
    assert out.splitlines()[-1] == "INTERRUPTED (exit 130): 1 MISSING"
    assert "Traceback" not in err
    with pytest.raises(ProcessLookupError):
        os.kill(int((project / "pid").read_text()), 0)
