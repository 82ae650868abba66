# SPDX-License-Identifier: Apache-2.0
"""Import and export: repeatable, in parallel, and without a silent gap."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import date

import pytest

from lora_suite.config.errors import ConfigError
from lora_suite.history.answers import Answer, acknowledge
from lora_suite.history.baselines import set_baseline
from lora_suite.history.exchange import export_lines, import_paths
from lora_suite.history.store import Store
from tests.history.folders import suite_run
from tests.history.helpers import CASE, fill, noisy

IMPORT = (
    "import sys; from pathlib import Path\n"
    "from lora_suite.history.exchange import import_paths; from lora_suite.history.store import Store\n"
    "with Store(Path(sys.argv[1]), create=True) as store:\n"
    "    print(import_paths(store, [Path(sys.argv[2])]).new)\n"
)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Three suite runs."""
    root = tmp_path_factory.mktemp("results")
    for _ in range(3):
        suite_run(root)
    return root


def lines(store):
    """The export, sorted."""
    return sorted(export_lines(store))


def test_importing_again_changes_nothing(results, tmp_path):
    with Store(tmp_path / "history.db", create=True) as store:
        first = import_paths(store, [results])
        before = lines(store)
        again = import_paths(store, [results, next(results.iterdir())])
        assert (first.new, first.known) == (3, 0)
        assert (again.new, again.known) == (0, 4)
        assert lines(store) == before


def test_processes_may_import_the_same_at_once(results, tmp_path):
    path = tmp_path / "history.db"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", IMPORT, str(path), str(results)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    said = [process.communicate(timeout=120) for process in processes]
    assert [error for _, error in said] == [""] * 4
    assert sum(int(output) for output, _ in said) == 3
    with Store(path) as store, Store(tmp_path / "alone.db", create=True) as alone:
        import_paths(alone, [results])
        assert lines(store) == lines(alone)


def test_an_export_is_read_back_whole(results, tmp_path):
    export = tmp_path / "history.jsonl"
    with Store(tmp_path / "one.db", create=True) as store:
        import_paths(store, [results])
        fill(store, [*noisy(20), 0.2])
        acknowledge(store, CASE, Answer("real", "known", "me", date(2100, 1, 1)))
        set_baseline(store, "release", next(results.iterdir()), "as released", "me")
        whole = lines(store)
        export.write_text("\n".join(whole))
    with Store(tmp_path / "two.db", create=True) as other:
        done = import_paths(other, [export])
        assert (done.new, done.problems) == (26, [])
        assert lines(other) == whole


def test_what_is_damaged_is_named_and_stops_nothing_else(results, tmp_path):
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "verdict.json").write_text("{")
    export = tmp_path / "export.jsonl"
    export.write_text(json.dumps({"kind": "session", "suite": 3}) + "\n")
    with Store(tmp_path / "history.db", create=True) as store:
        done = import_paths(store, [damaged, export, results])
        assert done.new == 3
    assert len(done.problems) == 2
    assert str(damaged) in done.problems[0]
    assert "export.jsonl: line 1: session.suite" in done.problems[1]


def test_a_path_without_anything_is_refused(tmp_path):
    with Store(tmp_path / "history.db", create=True) as store:
        with pytest.raises(ConfigError, match="no suite run here"):
            import_paths(store, [tmp_path])
        (tmp_path / "notes.txt").write_text("")
        assert "neither" in import_paths(store, [tmp_path / "notes.txt"]).problems[0]
