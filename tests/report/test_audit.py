# SPDX-License-Identifier: Apache-2.0
"""An audit as text, Markdown, JSON, and the command that prints it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from lora_suite.cli import main
from lora_suite.plan.audit.finding import KINDS

MINIATURE = Path(__file__).resolve().parents[1] / "miniature"


def invoke(*words: object):
    return CliRunner().invoke(main, ["audit", *map(str, words)])


def test_text_groups_by_kind():
    result = invoke(MINIATURE)
    assert result.exit_code == 1
    lines = result.output.splitlines()
    at = lines.index("skipped-checks: 1 × checks that a short or missing run skips, with exit status 0")
    assert lines[at + 1].startswith(
        "  tests/test_suites/llm/sft-tiny-llama-1n8g-megatron.sh:26: 2 checks run"
    )
    assert lines[at + 2] == f"  remedy: {KINDS['skipped-checks'].remedy}"
    assert lines[-1] == f"12 scripts, 24 checks: {len(KINDS)} findings"
    assert "GPU-hours of nightly.txt: 29.67; 29 where each is rounded down" in lines


def test_three_examples_stand_for_many(tmp_path):
    for number in range(5):
        check = "check_metrics m.json 'mean(data[\"train/loss\"]) < 2'\n"
        (tmp_path / f"case{number}.sh").write_text(f"uv run run_sft.py --config=x $@\n{check}")
    lines = invoke(tmp_path).output.splitlines()
    at = next(place for place, line in enumerate(lines) if line.startswith("unquoted-arguments: 5 ×"))
    assert [line.strip().split(":")[0] for line in lines[at + 1 : at + 4]] == [
        "case0.sh",
        "case1.sh",
        "case2.sh",
    ]
    assert lines[at + 4] == "  and 2 more"


def test_json():
    content = json.loads(invoke(MINIATURE, "--json").output)
    assert content["counts"] == dict.fromkeys(KINDS, 1)
    assert content["gpu_hours"]["nightly.txt"]["floored"] == 29
    (pair,) = [each for each in content["findings"] if each["kind"] == "incomparable-arms"]
    assert pair["details"][0] == "NUM_NODES: 2 and 1"
    assert pair["remedy"] == KINDS["incomparable-arms"].remedy


def test_markdown(tmp_path):
    invoke(MINIATURE, "--markdown", tmp_path / "audit.md")
    text = (tmp_path / "audit.md").read_text()
    assert "| [stale-note](#stale-note) | 1 |" in text
    assert "## incomparable-arms" in text
    assert "  - policy.dtensor\\_cfg.expert\\_parallel\\_size: 1 and 8" in text
    assert text.count("\n- `") == len(KINDS)


def test_a_baseline_makes_it_green(tmp_path):
    path = tmp_path / "baseline.json"
    assert invoke(MINIATURE, "--write-baseline", path).exit_code == 0
    again = invoke(MINIATURE, "--baseline", path)
    assert again.exit_code == 0
    assert again.output.splitlines()[-1] == f"12 scripts, 24 checks: 0 findings, {len(KINDS)} in the baseline"
    content = json.loads(path.read_text())
    content["findings"].append({"kind": "minutes", "file": "gone.sh", "subject": "x"})
    del content["findings"][0]
    path.write_text(json.dumps(content))
    changed = invoke(MINIATURE, "--baseline", path)
    assert changed.exit_code == 1
    assert changed.output.splitlines()[0].startswith("skipped-checks: 1 ×")
    assert changed.output.splitlines()[-1].endswith("; 1 of the baseline are gone, record it anew")


@pytest.mark.parametrize(
    "words",
    [
        ["absent"],
        [MINIATURE / "examples"],
        [MINIATURE, "--baseline", "absent.json"],
        [MINIATURE, "--markdown", "absent/x.md"],
    ],
)
def test_what_cannot_be_used_is_exit_2(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke(*words)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
