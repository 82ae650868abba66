# SPDX-License-Identifier: Apache-2.0
"""Importing as a whole: telling formats apart, the written file, the command, what it imports itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from check_metrics import evaluate, load_metrics, parse
from lora_suite.cli import main
from lora_suite.cli.metrics import import_ as command
from lora_suite.config import ConfigError
from lora_suite.launch.importers import FORMATS, import_metrics
from tests.launch.importers.event_samples import write_run

STATE = '{"log_history": [{"step": 1, "loss": 2.5}]}'
GOLDEN = '{"lm loss": {"start_step": 1, "end_step": 1, "step_interval": 1, "values": {"1": 2.5}}}'
LINES = '{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 2.0}\n'


def call(*words: str | Path) -> Result:
    return CliRunner().invoke(main, ["metrics", "import", *map(str, words)])


@pytest.mark.parametrize(
    ("text", "metric"),
    [
        (STATE, "train/loss"),
        (json.dumps(json.loads(STATE), indent=2), "train/loss"),
        (GOLDEN, "lm loss"),
        (json.dumps(json.loads(GOLDEN), indent=4), "lm loss"),
        (LINES, "loss"),
        (LINES.splitlines()[0], "loss"),
        ("\n" + LINES, "loss"),
    ],
)
def test_the_format_is_told_by_the_content(tmp_path: Path, text: str, metric: str) -> None:
    path = tmp_path / "source"
    path.write_text(text, encoding="utf-8")
    assert list(import_metrics(path).metrics) == [metric]


def test_a_folder_or_a_name_of_tensorboard(tmp_path: Path) -> None:
    path = write_run(tmp_path / "events.out.tfevents.1.host", 1, {"a": {1: 1.0}})
    assert import_metrics(tmp_path) == import_metrics(path) == import_metrics(path, "tensorboard")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("loss: 2.5", "not JSON"),
        ("", "not JSON"),
        ("[1, 2]", "looks like no known format; give --format"),
        ('{"a": 1}', "looks like no known format; give --format"),
        ('{"train/loss": {"1": 2.5}}', "check_metrics reads .* as it is"),
    ],
)
def test_what_looks_like_no_format_is_named(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "source"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=reason) as refused:
        import_metrics(path)
    assert str(path) in str(refused.value)


def test_an_unknown_format_names_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"'csv'; there are auto, {', '.join(FORMATS)}"):
        import_metrics(tmp_path, "csv")


@pytest.mark.parametrize("format", ["auto", *FORMATS])
def test_a_source_that_is_not_there_is_named(tmp_path: Path, format: str) -> None:
    with pytest.raises(ConfigError, match="No such file") as refused:
        import_metrics(tmp_path / "gone", format)
    assert str(tmp_path / "gone") in str(refused.value)


def test_a_step_key_is_for_lines_alone(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_text(STATE, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"--step-key .* is read as trainer-state"):
        import_metrics(path, step_key="step")


def test_the_written_file_is_what_the_checker_reads(tmp_path: Path) -> None:
    write_run(tmp_path / "tb" / "x.tfevents.1", 1000, {"t": {1: 9.0, 2: 1.0, 3: 1.0, 4: 1.0}})
    write_run(tmp_path / "tb" / "x.tfevents.2", 2000, {"t": {4: 9.0, 5: 1.0, 6: float("nan")}})
    result = call(tmp_path / "tb", "-o", tmp_path / "metrics.json")
    assert result.exit_code == 0
    assert result.stdout == f"{tmp_path / 'metrics.json'}: 1 metrics\n"
    assert "warning: t is not finite at step 6, which becomes null\n" in result.stderr
    assert f"check_metrics {tmp_path / 'metrics.json'} --segments 1,4\n" in result.stderr
    data = {"data": load_metrics(tmp_path / "metrics.json")}
    judged = evaluate(parse('mean(data["t"], 1, 6) < 2'), data, segments=(1, 4), warmup=1)
    assert (judged.status, judged.value) == ("PASS", 1.0)
    assert evaluate(parse('mean(data["t"]) < 99'), data).status == "FAIL"


def test_a_run_that_was_not_resumed_needs_no_hint(tmp_path: Path) -> None:
    source = tmp_path / "log"
    source.write_text(LINES, encoding="utf-8")
    assert call(source, "-o", tmp_path / "metrics.json").stderr == ""


def test_every_option_reaches_the_import(tmp_path: Path) -> None:
    source = tmp_path / "log"
    source.write_text('{"at": 1, "a": 1}\n{"at": 1, "a": 2}\n', encoding="utf-8")
    words = (source, "-o", tmp_path / "metrics.json", "--format", "jsonl", "--step-key", "at")
    assert call(*words).exit_code == 0
    assert json.loads((tmp_path / "metrics.json").read_text()) == {"a": {"1": 2.0}}
    refused = call(*words, "--strict")
    assert refused.exit_code == 2
    assert "two values at step 1" in refused.stderr
    (choice,) = [option for option in command.params if option.name == "format_"]
    assert tuple(choice.to_info_dict()["type"]["choices"]) == ("auto", *FORMATS)


def test_an_error_writes_nothing_and_keeps_what_is_there(tmp_path: Path) -> None:
    output = tmp_path / "metrics.json"
    output.write_text("old", encoding="utf-8")
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"step": 1}\n{"step": 2}\n', encoding="utf-8")
    result = call(empty, "-o", output)
    assert result.exit_code == 2
    assert "no number to import" in result.stderr
    assert output.read_text(encoding="utf-8") == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.jsonl", "metrics.json"]


def test_an_earlier_import_is_replaced(tmp_path: Path) -> None:
    source = tmp_path / "log"
    source.write_text(LINES, encoding="utf-8")
    output = tmp_path / "metrics.json"
    output.write_text("old", encoding="utf-8")
    assert call(source, "-o", output).exit_code == 0
    assert json.loads(output.read_text()) == {"loss": {"1": 2.5, "2": 2.0}}


def test_the_source_is_never_overwritten(tmp_path: Path) -> None:
    source = tmp_path / "log"
    source.write_text(LINES, encoding="utf-8")
    (tmp_path / "sub").mkdir()
    result = call(source, "-o", tmp_path / "sub" / ".." / "log")
    assert result.exit_code == 2
    assert "is the source itself" in result.stderr
    assert source.read_text(encoding="utf-8") == LINES


def test_an_output_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    source = tmp_path / "log"
    source.write_text(LINES, encoding="utf-8")
    result = call(source, "-o", tmp_path / "gone" / "metrics.json")
    assert result.exit_code == 2
    assert str(tmp_path / "gone" / "metrics.json") in result.stderr
    assert "cannot be written" in result.stderr


@pytest.mark.parametrize("words", [["metrics"], ["metrics", "import"]])
def test_help_has_an_example(words: list[str]) -> None:
    shown = CliRunner().invoke(main, [*words, "--help"])
    assert shown.exit_code == 0
    assert "lora-suite metrics import" in shown.output.split("Example", 1)[1]


def test_neither_torch_nor_tensorflow_is_imported(tmp_path: Path) -> None:
    write_run(tmp_path / "x.tfevents", 1, {"a": {1: 1.0}})
    code = (
        "import sys; from pathlib import Path\n"
        "from lora_suite.launch.importers import import_metrics\n"
        "before = [n for n in ('tensorboard', 'numpy') if n in sys.modules]\n"
        "import_metrics(Path(sys.argv[1]))\n"
        "print(before, [n for n in ('torch', 'tensorflow', 'transformers') if n in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "[] []\n"
