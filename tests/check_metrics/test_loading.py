# SPDX-License-Identifier: Apache-2.0
"""Files, standard input, jq and run.json: what is read, and what each unusable input is told."""

import io
import math
import os
import stat
import sys
from pathlib import Path

import pytest

from check_metrics import MetricsError, load_metrics
from check_metrics.loading import STDIN, open_metrics, run_segments


def load_text(path: Path, text: str | bytes) -> dict[str, object]:
    """Series of a file with this text."""
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return dict(load_metrics(path))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a test writes its metrics."""
    return tmp_path / "metrics.json"


def test_steps_come_in_order(path: Path) -> None:
    path.write_text('{"x": {"10": 1, "2": 2.5, "1": 3}, "y": {}}', encoding="utf-8")
    metrics = load_metrics(path)
    assert metrics["x"].steps == (1, 2, 10)
    assert metrics["x"].values == (3.0, 2.5, 1.0)
    assert metrics["y"].steps == ()
    assert list(metrics) == ["x", "y"]


def test_values_of_every_kind(path: Path) -> None:
    text = '{"x": {"1": null, "2": "nan", "3": "-inf", "4": "2.5", "5": 7, "6": NaN, "7": HUGE}}'
    path.write_text(text.replace("HUGE", "1" + "0" * 400), encoding="utf-8")
    values = load_metrics(path)["x"].values
    assert [math.isnan(value) for value in values] == [True, True, False, False, False, True, False]
    assert values[2:5] == (-math.inf, 2.5, 7.0)
    assert math.isinf(values[6])


def test_a_whole_number_beyond_the_range_is_infinite(path: Path) -> None:
    path.write_text('{"x": {"1": 1, "2": -HUGE}}'.replace("HUGE", "1" + "0" * 400), encoding="utf-8")
    assert load_metrics(path)["x"].nonfinite_steps() == (2,)


def test_equal_steps_are_shared(path: Path) -> None:
    path.write_text('{"x": {"1": 1, "2": 2}, "y": {"1": 3, "2": 4}}', encoding="utf-8")
    metrics = load_metrics(path)
    assert metrics["x"].steps is metrics["y"].steps


def test_a_series_is_converted_when_it_is_read(path: Path) -> None:
    path.write_text('{"good": {"1": 1}, "bad": {"1": "one"}}', encoding="utf-8")
    metrics = open_metrics(path)
    assert metrics["good"].values == (1.0,)
    assert metrics["good"] is metrics["good"]
    assert "bad" in metrics
    assert len(metrics) == 2
    assert metrics.get("none") is None
    with pytest.raises(MetricsError):
        metrics["bad"]


def test_byte_order_mark(path: Path) -> None:
    assert "x" in load_text(path, b'\xef\xbb\xbf{"x": {"1": 1}}')


@pytest.mark.parametrize("text", ["", " \n"])
def test_an_empty_file_has_no_metrics(path: Path, text: str) -> None:
    assert load_text(path, text) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ('{"x": {"1": 1}} trailing', "not JSON"),
        ("[1, 2]", "no JSON object at the top"),
        ("3", "no JSON object at the top"),
        ("[" * 100_000, "not usable as JSON"),
        ('{"x": {"1": ' + "1" * 5000 + "}}", "not usable as JSON"),
        ('{"x": {"1": 1, "1": 1}}', "'1' stands twice"),
        ('{"x": [1, 2]}', '"x" is no object of steps'),
        ('{"x": 0.9}', '"x" is no object of steps'),
        ('{"x": null}', '"x" is no object of steps'),
        ('{"x": {"start_step": 1, "values": {}}}', "step 'start_step' is no whole number"),
        ('{"x": {"1.5": 1}}', "step '1.5' is no whole number"),
        ('{"x": {"-1": 1}}', "step '-1' is no whole number"),
        ('{"x": {"": 1}}', "step '' is no whole number"),
        ('{"x": {"٣": 1}}', "step '٣' is no whole number"),
        ('{"x": {"1": 1, "01": 1}}', "two values for one step"),
        ('{"x": {"' + "9" * 16 + '": 1}}', "a step is larger than"),
        ('{"x": {"' + "9" * 5000 + '": 1}}', "a step is larger than"),
        ('{"x": {"1": "one"}}', "the value at step 1 is no number but 'one'"),
        ('{"x": {"1": true}}', "the value at step 1 is no number but True"),
        ('{"x": {"1": {"2": 3}}}', "the value at step 1 is no number"),
        (b'{"x": {"1": 1}, "\xff": {}}', "not UTF-8"),
    ],
)
def test_unusable_files(path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(MetricsError) as caught:
        load_text(path, text)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(MetricsError, match="No such file"):
        load_metrics(tmp_path / "none.json")
    with pytest.raises(MetricsError, match="Is a directory"):
        load_metrics(tmp_path)
    with pytest.raises(MetricsError, match="null byte"):
        load_metrics(tmp_path / "a\0b")


class _Input:
    """A standard input with these bytes."""

    def __init__(self, content: bytes) -> None:
        self.buffer = io.BytesIO(content)


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", _Input(b'{"x": {"1": 1}}'))
    assert open_metrics(STDIN)["x"].values == (1.0,)
    monkeypatch.setattr(sys, "stdin", _Input(b"\xff"))
    with pytest.raises(MetricsError, match="not UTF-8"):
        open_metrics(STDIN)
    monkeypatch.setattr(sys, "stdin", _Input(b"{"))
    with pytest.raises(MetricsError, match="standard input: not JSON"):
        open_metrics(STDIN)


# jq


def test_jq_reshapes(path: Path) -> None:
    path.write_text('{"lm loss": {"start_step": 1, "values": {"1": 2.5, "2": NaN}}}', encoding="utf-8")
    metrics = open_metrics(path, "map_values(.values)")
    assert metrics["lm loss"].steps == (1, 2)
    assert metrics["lm loss"].nonfinite_steps() == (2,)


def test_jq_of_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", _Input(b'{"a": {"x": {"1": 1}}}'))
    assert open_metrics(STDIN, ".a")["x"].values == (1.0,)


@pytest.mark.parametrize("jq_filter", ["empty", ".none", "null"])
def test_a_filter_that_gives_nothing(path: Path, jq_filter: str) -> None:
    path.write_text('{"x": {"1": 1}}', encoding="utf-8")
    assert len(open_metrics(path, jq_filter)) == 0


@pytest.mark.parametrize(
    ("jq_filter", "message"),
    [
        (".x |", "jq failed"),
        ('error("no")', "jq failed"),
        (".x.y.z.a", "jq failed"),
        (".x, .x", "gives 2 values"),
        (".x[]", "gives 2 values"),
        ('.x["1"]', "no JSON object at the top"),
        ("-1", "no JSON object at the top"),
        (".\0", "could not be started"),
    ],
)
def test_filters_that_fail(path: Path, jq_filter: str, message: str) -> None:
    path.write_text('{"x": {"1": 1, "y": 3}}', encoding="utf-8")
    with pytest.raises(MetricsError) as caught:
        open_metrics(path, jq_filter)
    assert message in str(caught.value)


def test_jq_of_an_empty_and_of_a_broken_file(path: Path) -> None:
    path.write_text("", encoding="utf-8")
    assert len(open_metrics(path, ".")) == 0
    path.write_text("{", encoding="utf-8")
    with pytest.raises(MetricsError, match="not JSON"):
        open_metrics(path, ".")


def test_absent_jq(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text('{"x": {"1": 1}}', encoding="utf-8")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MetricsError, match="jq is not installed"):
        open_metrics(path, ".")


def test_jq_that_does_not_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text("{}", encoding="utf-8")
    monkeypatch.setattr("check_metrics.loading._JQ_SECONDS", 0.2)
    with pytest.raises(MetricsError, match="does the filter end"):
        open_metrics(path, "def f: f; f")


# run.json


def test_segments(tmp_path: Path) -> None:
    record = tmp_path / "run.json"
    record.write_text('{"segments": [31, 1, 31]}', encoding="utf-8")
    assert run_segments(record) == (1, 31)
    record.write_text('{"run_id": "a"}', encoding="utf-8")
    assert run_segments(record) == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "no JSON object"),
        ("", "not JSON"),
        ('{"segments": 3}', "must be a list of steps"),
        ('{"segments": [true]}', "must be a list of steps"),
        ('{"segments": [0]}', "must be a list of steps"),
        ('{"segments": ["1"]}', "must be a list of steps"),
    ],
)
def test_unusable_run_json(tmp_path: Path, text: str, message: str) -> None:
    record = tmp_path / "run.json"
    record.write_text(text, encoding="utf-8")
    with pytest.raises(MetricsError, match=message):
        run_segments(record)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_run_json(tmp_path: Path) -> None:
    record = tmp_path / "run.json"
    record.write_text("{}", encoding="utf-8")
    record.chmod(stat.S_IWUSR)
    with pytest.raises(MetricsError, match="Permission denied"):
        run_segments(record)
