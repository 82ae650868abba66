# SPDX-License-Identifier: Apache-2.0
"""Golden values of Megatron-LM."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from check_metrics import load_metrics
from lora_suite.config import ConfigError
from lora_suite.launch.importers import import_metrics

DATA = Path(os.environ.get("LORA_SUITE_DATA", Path(__file__).parents[3].parent / "shared" / "data"))


def golden(values: dict[str, Any], **declared: Any) -> dict[str, Any]:
    """An entry as Megatron-LM writes it."""
    return {"start_step": 1, "end_step": 50, "step_interval": 5, **declared, "values": values}


def write(path: Path, document: Any) -> Path:
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def test_values_by_step_and_words_that_are_not_finite(tmp_path: Path) -> None:
    document = {
        "lm loss": golden({"1": 10.92335, "5": 10.9, "10": "nan", "15": "inf"}),
        "num-zeros": golden({"1": 2091, "5": "NaN"}),
    }
    imported = import_metrics(write(tmp_path / "golden.json", document))
    assert imported.metrics == {
        "lm loss": {"1": 10.92335, "5": 10.9, "10": None, "15": None},
        "num-zeros": {"1": 2091.0, "5": None},
    }
    assert imported.warnings == (
        "lm loss is not finite at step 10, 15, which becomes null",
        "num-zeros is not finite at step 5, which becomes null",
    )


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (golden({"1": "fast"}), "the value at step 1 is no number but 'fast'"),
        (golden({"1": True}), "the value at step 1 is no number but True"),
        (golden({"first": 1.0}), "step 'first' is no whole number"),
        (golden({"-1": 1.0}), "step '-1' is no whole number"),
        (golden({"55": 1.0}), "step 55 is not in 1 to 50"),
        (golden({"1": 1.0}, start_step="one"), "step 1 is not in one to 50"),
        (golden({"1": 1.0, "01": 2.0}), "two values at step 1"),
        ({"values": [10.9, 9.7]}, "does not name its steps"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, entry: dict[str, Any], reason: str) -> None:
    path = write(tmp_path / "golden.json", {"lm loss": entry})
    with pytest.raises(ConfigError, match=reason) as refused:
        import_metrics(path)
    assert f"{path}: 'lm loss'" in str(refused.value)


@pytest.mark.parametrize("document", [{}, {"lm loss": {"1": 10.9}}, [1], {"lm loss": 3}])
def test_other_shapes_are_refused(tmp_path: Path, document: Any) -> None:
    with pytest.raises(ConfigError, match="no golden values"):
        import_metrics(write(tmp_path / "golden.json", document), "megatron-golden")


@pytest.mark.slow
@pytest.mark.skipif(not DATA.exists(), reason="recorded series are not there")
def test_recorded_golden_values_come_out_as_they_are_recorded(tmp_path: Path) -> None:
    # the recorded files are reduced to the common shape, with "nan" in quotes
    recorded = sorted((DATA / "megatron_goldens").glob("*.json"))
    assert len(recorded) == 20
    for path in recorded:
        series = json.loads(path.read_text(encoding="utf-8"))
        steps = [int(step) for values in series.values() for step in values]
        document = {
            metric: golden(values, start_step=min(steps), end_step=max(steps))
            for metric, values in series.items()
        }
        imported = import_metrics(write(tmp_path / "golden.json", document))
        written = write(tmp_path / "metrics.json", imported.metrics)
        as_read = {name: repr((s.steps, s.values)) for name, s in load_metrics(written).items()}
        assert as_read == {name: repr((s.steps, s.values)) for name, s in load_metrics(path).items()}
