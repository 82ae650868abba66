# SPDX-License-Identifier: Apache-2.0
"""The rows on seeded traces and recordings, the table, and the command."""

from __future__ import annotations

import io
import json
import math
import os
import random
from itertools import accumulate
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from lora_suite.campaign.selftest import references, run
from lora_suite.campaign.selftest.pairs import pair_rows
from lora_suite.campaign.selftest.recorded import recorded_rows
from lora_suite.campaign.selftest.references import reference_rows
from lora_suite.campaign.selftest.row import Row
from lora_suite.campaign.selftest.run import run_selftest, table_of
from lora_suite.cli import main
from lora_suite.config import ConfigError

DATA = Path(os.environ.get("LORA_SUITE_DATA", Path(__file__).resolve().parents[4] / "shared" / "data"))


@pytest.mark.slow
def test_every_pair_row_is_met():
    """With the command's own seeds, so that it is the command's own answer."""
    rows = pair_rows(full=False)
    assert len(rows) == 12
    assert [row.what for row in rows if not row.ok] == []


def test_every_reference_row_is_met(monkeypatch):
    monkeypatch.setattr(references, "_FEW_SEEDS", 100)
    rows = reference_rows(full=False)
    assert len(rows) == 9
    assert [row.what for row in rows if not row.ok] == []


@pytest.mark.skipif(not DATA.is_dir(), reason="no recorded runs here")
def test_recorded_trainings():
    rows = recorded_rows(DATA)
    assert [(row.what, row.measured) for row in rows if not row.ok] == []
    assert len(rows) == 6


class TestRecordings:
    """Recordings made by hand: what is found in them, and what is said where they are something else."""

    def mlperf(self, folder: Path, spread: float) -> None:
        """Three systems of ten runs, thirty times of ten steps each."""
        generator = random.Random(1)
        (folder / "mlperf_v5.1_lora").mkdir(parents=True)
        for number in range(3):
            runs = {}
            for name in range(10):
                level = 30000 * math.exp(generator.gauss(0, spread))
                steps = [level * math.exp(generator.gauss(0, 0.001)) for _ in range(30)]
                runs[str(name)] = {"time_ms": list(accumulate(steps, initial=1.7e12))}
            path = folder / "mlperf_v5.1_lora" / f"system{number}.json"
            path.write_text(json.dumps({"runs": runs}))

    def test_quiet_systems_show_1_percent(self, tmp_path):
        self.mlperf(tmp_path, 0.0005)
        quiet, found, *others = recorded_rows(tmp_path)
        assert (quiet.measured, quiet.ok) == ("0.00 %", True)
        assert (found.measured, found.ok) == ("100.00 %", True)
        assert "21 of 21" in found.notes
        assert [row.ok for row in others] == [None, None]
        assert "holds none" in others[0].notes

    def test_noisy_systems_miss_it_and_are_named(self, tmp_path):
        self.mlperf(tmp_path, 0.03)
        found = recorded_rows(tmp_path)[1]
        assert found.ok is False
        assert "not as it should be: system0 runs 1 on" in found.notes

    def test_without_a_folder_each_is_skipped_with_the_reason(self):
        rows = recorded_rows(None)
        assert [row.ok for row in rows] == [None] * 3
        assert {row.notes for row in rows} == {"no folder given with --data"}

    def pair(self, folder: Path, tokens: list[int]) -> None:
        """Twenty steps; the LoRA arm 5 % slower."""
        folder = folder / "automodel_gemma3n_pair"
        folder.mkdir(parents=True)
        for arm, factor, counts in (("full", 1.0, list(range(20))), ("lora", 1.05, tokens)):
            series = {
                "timing/train/total_step_time": {str(s): factor * (1 + s % 3) for s in range(1, 21)},
                "train/tokens": {str(s): counts[s - 1] for s in range(1, 21)},
            }
            (folder / f"{arm}.json").write_text(json.dumps(series))

    def test_a_pair_outside_the_range(self, tmp_path):
        self.pair(tmp_path, list(range(20)))
        row = recorded_rows(tmp_path)[1]
        assert (row.measured, row.ok) == ("5.00 %", False)

    def test_a_pair_of_other_batches_is_not_matched(self, tmp_path):
        self.pair(tmp_path, list(range(1, 21)))
        row = recorded_rows(tmp_path)[1]
        assert row.ok is False
        assert "different numbers of supervised tokens at step 1" in row.notes

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("mlperf_v5.1_lora/a.json", "{}"),
            ("mlperf_v5.1_lora/a.json", "nonsense"),
            ("mlperf_v5.1_lora/a.json", '{"runs": {"0": {"time_ms": [1]}, "1": {"time_ms": [1]}}}'),
            ("automodel_gemma3n_pair/full.json", "{}"),
            ("megatron_goldens/a.json", '{"lm loss": {}}'),
        ],
    )
    def test_what_is_no_recording_is_wrong_input(self, tmp_path, name, text):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match="not the recordings that are expected"):
            recorded_rows(tmp_path)


def told(*rows: Row, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    """Run the selftest with these rows alone."""
    for name in ("recorded_rows", "pair_rows", "reference_rows", "night_rows"):
        monkeypatch.setattr(run, name, lambda *_: [])
    monkeypatch.setattr(run, "pair_rows", lambda _: list(rows))
    monkeypatch.setattr(run, "silent_pass_row", lambda: Row("silent", "0", "0 of 9", "", True))
    console = Console(width=120, record=True, file=io.StringIO())
    code = run_selftest(False, None, console)
    return code, console.export_text()


def test_all_met_is_0(monkeypatch):
    code, text = told(Row("noise", "≤ 6 %", "5 %", "note", True), monkeypatch=monkeypatch)
    assert code == 0
    assert "2 of 2 requirements met, 0 missed, 0 skipped" in text
    assert "note" in text


def test_a_skipped_row_is_named_and_no_failure(monkeypatch):
    code, text = told(Row("recordings", "3 %", "not measured", "no folder", None), monkeypatch=monkeypatch)
    assert code == 0
    assert "skipped" in text
    assert "1 of 2 requirements met, 0 missed, 1 skipped" in text


def test_a_missed_row_is_1(monkeypatch):
    code, text = told(Row("noise", "≤ 6 %", "9 %", "", False), monkeypatch=monkeypatch)
    assert code == 1
    assert "NO" in text


def test_the_table_shows_every_cell():
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(table_of([Row("what it is", "≤ 1 %", "0.5 %", "how", True)]))
    text = console.export_text()
    assert all(word in text for word in ("what it is", "≤ 1 %", "0.5 %", "how", "yes"))


def test_the_command_passes_its_options_on(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(run, "run_selftest", lambda full, data, console: seen.append((full, data)) or 1)
    result = CliRunner().invoke(main, ["selftest", "--full", "--data", str(tmp_path)])
    assert (result.exit_code, seen) == (1, [(True, tmp_path)])
    monkeypatch.setenv("LORA_SUITE_DATA", str(tmp_path))
    CliRunner().invoke(main, ["selftest"])
    assert seen[1] == (False, tmp_path)


def test_a_folder_that_is_not_there_is_wrong_input():
    result = CliRunner().invoke(main, ["selftest", "--data", "/nowhere/at/all"])
    assert result.exit_code == 2
    assert "error: /nowhere/at/all: no such folder" in result.output
