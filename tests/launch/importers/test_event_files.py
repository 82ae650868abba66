# SPDX-License-Identifier: Apache-2.0
"""TensorBoard folders: scalars of both kinds, runs that overlap after a resume, damaged files."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path

import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from lora_suite.config import ConfigError
from lora_suite.launch.importers import Imported, import_metrics
from tests.launch.importers.event_samples import (
    float32,
    numbers,
    restart,
    scalar,
    tensor,
    version,
    write_events,
    write_records,
    write_run,
)

NAME = "events.out.tfevents.{}.host.1.0"
FIRST = {step: 10.0 + step for step in range(1, 7)}
SECOND = {step: 20.0 + step for step in range(4, 9)}
JOINED = {"1": 11.0, "2": 12.0, "3": 13.0, "4": 24.0, "5": 25.0, "6": 26.0, "7": 27.0, "8": 28.0}


def resumed(folder: Path) -> tuple[Path, Path]:
    """Steps 1 to 6, and a second run that was resumed at 4 and went on to 8 with other values."""
    return (
        write_run(folder / NAME.format(1000), 1000, {"train/loss": FIRST}),
        write_run(folder / NAME.format(2000), 2000, {"train/loss": SECOND}),
    )


def test_scalars_of_every_tag_in_every_folder(tmp_path: Path) -> None:
    write_run(tmp_path / NAME.format(1), 1, {"train/loss": {1: 0.1, 2: 0.5}, "train/lr": {1: 1e-5}})
    write_run(tmp_path / "deep" / "er" / NAME.format(2), 2, {"validation/loss": {2: 3.0}})
    imported = import_metrics(tmp_path)
    assert imported == Imported(
        metrics={
            "train/loss": {"1": float32(0.1), "2": 0.5},
            "train/lr": {"1": float32(1e-5)},
            "validation/loss": {"2": 3.0},
        },
        warnings=(),
        segments=(1,),
    )


def test_one_file_alone(tmp_path: Path) -> None:
    first, _ = resumed(tmp_path)
    assert import_metrics(first).metrics == {"train/loss": {str(step): FIRST[step] for step in FIRST}}


def test_tensor_scalars_count_and_what_is_no_scalar_does_not(tmp_path: Path) -> None:
    histogram = Summary.Value(tag="weights", histo=HistogramProto(bucket=[1.0], bucket_limit=[2.0]))
    write_events(
        tmp_path / NAME.format(1),
        version(1),
        tensor(2, 1, "float", numbers("float32", 2.5)),
        tensor(2, 1, "double", numbers("float64", 0.1)),
        tensor(2, 1, "half", numbers("float16", 1.5)),
        tensor(2, 1, "whole", numbers("int64", 7)),
        tensor(2, 1, "nan", numbers("float32", math.nan)),
        tensor(2, 1, "vector", numbers("float32", 1.0, 2.0)),
        tensor(2, 1, "text", "3.5"),
        tensor(2, 1, "complex", numbers("complex64", 1.0)),
        Event(wall_time=2, step=1, summary=Summary(value=[histogram, Summary.Value(tag="hparams")])),
    )
    assert import_metrics(tmp_path).metrics == {
        "double": {"1": 0.1},
        "float": {"1": 2.5},
        "half": {"1": 1.5},
        "nan": {"1": None},
        "whole": {"1": 7.0},
    }


def test_what_tensorboards_own_writer_leaves(tmp_path: Path) -> None:
    writer = EventFileWriter(str(tmp_path))
    for step in (1, 2, 3):
        writer.add_event(scalar(step, step, "a", step / 4))
    writer.close()
    assert import_metrics(tmp_path).metrics == {"a": {"1": 0.25, "2": 0.5, "3": 0.75}}


# Files that overlap after a resume (https://github.com/tensorflow/tensorboard/issues/3732,
# https://github.com/tensorflow/tensorboard/issues/1272, https://github.com/pytorch/pytorch/issues/42379,
# https://github.com/tensorflow/tensorboard/issues/544)


def test_the_later_run_start_wins(tmp_path: Path) -> None:
    resumed(tmp_path)
    imported = import_metrics(tmp_path)
    assert imported.metrics == {"train/loss": JOINED}
    assert imported.segments == (1, 4)
    (warning,) = imported.warnings
    assert NAME.format(2000) in warning
    assert "goes on at step 4; 3 earlier values" in warning


def test_neither_the_time_of_the_file_nor_its_name_decides(tmp_path: Path) -> None:
    first, second = resumed(tmp_path / "from")
    shutil.copy(second, tmp_path / NAME.format(1))
    shutil.copy(first, tmp_path / NAME.format(3000))
    os.utime(tmp_path / NAME.format(1), (10, 10))
    shutil.rmtree(tmp_path / "from")
    assert import_metrics(tmp_path).metrics == {"train/loss": JOINED}


def test_stale_steps_beyond_the_resume_go_even_where_nothing_replaces_them(tmp_path: Path) -> None:
    # the second run ends at 5, so that step 6 of the first and its validation at 6 are of no training
    write_run(tmp_path / NAME.format(1), 1000, {"train/loss": FIRST, "validation/loss": {3: 3.0, 6: 6.0}})
    write_run(tmp_path / NAME.format(2), 2000, {"train/loss": {4: 24.0, 5: 25.0}})
    assert import_metrics(tmp_path).metrics == {
        "train/loss": {"1": 11.0, "2": 12.0, "3": 13.0, "4": 24.0, "5": 25.0},
        "validation/loss": {"3": 3.0},
    }


def test_three_runs_of_which_the_last_went_back_furthest(tmp_path: Path) -> None:
    resumed(tmp_path)
    write_run(tmp_path / "exp_003" / NAME.format(3000), 3000, {"train/loss": {3: 33.0, 4: 34.0}})
    imported = import_metrics(tmp_path)
    assert imported.metrics == {"train/loss": {"1": 11.0, "2": 12.0, "3": 33.0, "4": 34.0}}
    assert imported.segments == (1, 3)


def test_a_validation_before_the_first_step_of_a_resume_costs_no_training_step(tmp_path: Path) -> None:
    write_run(tmp_path / NAME.format(1), 1000, {"train/loss": FIRST, "validation/loss": {0: 9.0, 3: 3.0}})
    write_run(tmp_path / NAME.format(2), 2000, {"train/loss": SECOND, "validation/loss": {0: 8.0, 6: 6.0}})
    imported = import_metrics(tmp_path)
    assert imported.metrics == {
        "train/loss": JOINED,
        "validation/loss": {"0": 8.0, "3": 3.0, "6": 6.0},
    }
    assert imported.segments == (1, 4)


def test_a_file_that_shares_no_metric_is_no_resume(tmp_path: Path) -> None:
    # torch's add_hparams writes a file of its own at the end, at step 0
    write_run(tmp_path / NAME.format(1), 1000, {"train/loss": FIRST})
    write_run(tmp_path / "1760000000.1" / NAME.format(2), 2000, {"hparam/accuracy": {0: 0.5}})
    imported = import_metrics(tmp_path)
    assert list(imported.metrics["train/loss"]) == ["1", "2", "3", "4", "5", "6"]
    assert (imported.segments, imported.warnings) == ((1,), ())


def test_a_step_that_the_writer_names_is_where_the_run_goes_on(tmp_path: Path) -> None:
    # the first step after the resume was not logged yet, and what the first run made of it is stale
    write_run(tmp_path / NAME.format(1), 1000, {"train/loss": FIRST})
    write_run(tmp_path / NAME.format(2), 2000, {"train/loss": {5: 25.0}}, restart(2000, 4))
    imported = import_metrics(tmp_path)
    assert imported.metrics == {"train/loss": {"1": 11.0, "2": 12.0, "3": 13.0, "5": 25.0}}
    assert imported.segments == (1, 4)


def test_a_step_that_one_of_two_writers_names(tmp_path: Path) -> None:
    write_run(tmp_path / NAME.format(1), 1000, {"train/loss": FIRST})
    write_run(tmp_path / "a" / NAME.format(2), 2000, {"train/loss": {5: 25.0, 6: 26.0}})
    write_run(tmp_path / "b" / NAME.format(2), 2001, {"rank/time": {5: 1.0}}, restart(2001, 4))
    imported = import_metrics(tmp_path)
    assert list(imported.metrics["train/loss"]) == ["1", "2", "3", "5", "6"]
    assert imported.segments == (1, 4)


def test_a_session_that_starts_anew_within_a_file(tmp_path: Path) -> None:
    write_events(
        tmp_path / NAME.format(1),
        version(1),
        *(scalar(step, step, "a", value) for step, value in FIRST.items()),
        restart(10, 4),
        *(scalar(10 + step, step, "a", value) for step, value in SECOND.items()),
    )
    assert import_metrics(tmp_path).metrics == {"a": JOINED}


def test_files_that_this_project_writes(tmp_path: Path) -> None:
    from lora_suite.train.sinks import TensorBoardSink

    for keep_until, steps in ((None, (1, 2, 3)), (2, (3, 4))):
        sink = TensorBoardSink(tmp_path, keep_until)
        for step in steps:
            sink.log(step, {"train/loss": 0.5 * step if keep_until is None else 10.0 * step})
        sink.close()
    imported = import_metrics(tmp_path)
    assert imported.metrics == {"train/loss": {"1": 0.5, "2": 1.0, "3": 30.0, "4": 40.0}}
    assert imported.segments == (1, 3)


def test_seconds_of_a_resumed_run_hide_no_earlier_sample(tmp_path: Path) -> None:
    memory = "ray/node.0.gpu.0.mem_gb"
    first = {"train/loss": FIRST, memory: {0: 5.0, 10: 70.0}}
    write_run(tmp_path / NAME.format(1), 1000, first)
    write_run(tmp_path / NAME.format(2), 2000, {"train/loss": SECOND, memory: {0: 5.0, 10: 40.0}})
    assert import_metrics(tmp_path).metrics[memory] == {"0": 5.0, "10": 70.0, "1000": 5.0, "1010": 40.0}


def test_strict_names_metric_step_and_both_files(tmp_path: Path) -> None:
    first, second = resumed(tmp_path)
    with pytest.raises(ConfigError) as refused:
        import_metrics(tmp_path, strict=True)
    for part in ("'train/loss'", "step 4", f"14.0 in {first}", f"24.0 in {second}", "without --strict"):
        assert part in str(refused.value)


def test_strict_accepts_duplicates_that_agree(tmp_path: Path) -> None:
    same = {"a": {3: 1.0, 4: math.nan}}
    write_run(tmp_path / NAME.format(1), 1000, same)
    write_run(tmp_path / NAME.format(2), 2000, same)
    assert import_metrics(tmp_path, strict=True).metrics == {"a": {"3": 1.0, "4": None}}


def test_strict_within_one_file(tmp_path: Path) -> None:
    twice = [scalar(1, 1, "a", 1.0), scalar(2, 1, "a", 2.0)]
    write_events(tmp_path / NAME.format(1), version(1), *twice)
    assert import_metrics(tmp_path).metrics == {"a": {"1": 2.0}}
    with pytest.raises(ConfigError, match=r"'a' has two values at step 1: 1.0 in .* and 2.0 in"):
        import_metrics(tmp_path, strict=True)


def test_two_runs_at_the_same_time_are_never_mixed(tmp_path: Path) -> None:
    full = write_run(tmp_path / "full" / NAME.format(1), 1000, {"train/loss": FIRST})
    lora = write_run(tmp_path / "lora" / NAME.format(1), 1002, {"train/loss": SECOND})
    with pytest.raises(ConfigError) as refused:
        import_metrics(tmp_path)
    for part in ("step 4", str(full), str(lora), "import one of them alone"):
        assert part in str(refused.value)


def test_files_side_by_side_with_other_metrics_or_equal_values_are_one_run(tmp_path: Path) -> None:
    write_run(tmp_path / "rank0" / NAME.format(1), 1000, {"train/loss": FIRST})
    write_run(tmp_path / "rank1" / NAME.format(1), 1001, {"train/loss": FIRST, "rank/time": {1: 2.0}})
    imported = import_metrics(tmp_path)
    assert imported.metrics["train/loss"] == {str(step): value for step, value in FIRST.items()}
    assert imported.metrics["rank/time"] == {"1": 2.0}
    assert (imported.segments, imported.warnings) == ((1,), ())


def test_files_of_one_run_need_not_all_overlap_each_other(tmp_path: Path) -> None:
    # 1000 to 1002, 1001 to 1009, 1008 to 1010
    write_run(tmp_path / "a" / NAME.format(1), 1000, {"a": {1: 1.0, 2: 2.0}})
    write_run(tmp_path / "b" / NAME.format(2), 1001, {"b": dict.fromkeys(range(1, 9), 1.0)})
    write_run(tmp_path / "c" / NAME.format(3), 1008, {"b": {1: 1.0, 2: 1.0}})
    imported = import_metrics(tmp_path)
    assert list(imported.metrics["b"]) == ["1", "2", "3", "4", "5", "6", "7", "8"]
    assert (imported.segments, imported.warnings) == ((1,), ())


def test_a_training_that_counts_from_0_has_segments_from_1_on(tmp_path: Path) -> None:
    write_run(tmp_path / NAME.format(1), 1000, {"a": {0: 1.0, 1: 1.0, 2: 1.0}})
    write_run(tmp_path / NAME.format(2), 2000, {"a": {2: 1.0, 3: 1.0}})
    assert import_metrics(tmp_path).segments == (1, 2)


# Damage


def test_a_record_that_a_killed_run_cut_off_is_a_warning(tmp_path: Path) -> None:
    path = write_run(tmp_path / NAME.format(1), 1000, {"a": {1: 1.0, 2: 2.0, 3: 3.0}})
    whole = path.read_bytes()
    last = len(write_run(tmp_path / "short", 1000, {"a": {1: 1.0, 2: 2.0}}).read_bytes())
    (tmp_path / "short").unlink()
    for length in range(last + 1, len(whole)):
        path.write_bytes(whole[:length])
        imported = import_metrics(tmp_path)
        assert imported.metrics == {"a": {"1": 1.0, "2": 2.0}}
        assert imported.warnings == (
            f"{path}: the last record is cut off and is left out; was the run killed?",
        )
    path.write_bytes(whole[:last])
    assert import_metrics(tmp_path).warnings == ()


def test_any_damaged_byte_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = write_run(tmp_path / NAME.format(1), 1000, {"a": {1: 1.0, 2: 2.0}})
    write_run(tmp_path / NAME.format(2), 2000, {"a": {3: 3.0}})
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        with pytest.raises(ConfigError, match="damaged, the record at byte") as refused:
            import_metrics(tmp_path)
        assert str(path) in str(refused.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"this is no event file, but long enough for a record", "has a wrong length"),
        (b"\0" * 64, "has a wrong length"),
    ],
)
def test_what_is_no_event_file_is_named(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / NAME.format(1)
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=reason) as refused:
        import_metrics(tmp_path)
    assert str(path) in str(refused.value)


def test_a_record_that_is_no_event(tmp_path: Path) -> None:
    write_records(tmp_path / NAME.format(1), version(1).SerializeToString(), b"\xff\xff no event")
    with pytest.raises(ConfigError, match="holds no event"):
        import_metrics(tmp_path)


@pytest.mark.parametrize("time", [math.nan, math.inf, -1.0, 1e300])
def test_a_time_that_is_none(tmp_path: Path, time: float) -> None:
    write_run(tmp_path / NAME.format(1), 1000, {"ray/node.0.gpu.0.mem_gb": {0: 5.0}})
    write_events(tmp_path / NAME.format(2), scalar(time, 1, "ray/node.0.gpu.0.mem_gb", 1.0))
    with pytest.raises(ConfigError, match="damaged, the record at byte 0 has the time"):
        import_metrics(tmp_path)


def test_a_tensor_that_lacks_its_content(tmp_path: Path) -> None:
    short = numbers("float64", 1.0)
    made = tensor(1, 1, "a", short)
    made.summary.value[0].tensor.tensor_content = b"\0\0"
    write_events(tmp_path / NAME.format(1), version(1), made)
    with pytest.raises(ConfigError, match="no readable value of 'a'"):
        import_metrics(tmp_path)


def test_a_step_below_zero_is_refused(tmp_path: Path) -> None:
    write_events(tmp_path / NAME.format(1), version(1), scalar(1, -1, "a", 1.0))
    with pytest.raises(ConfigError, match="'a' has step -1"):
        import_metrics(tmp_path)


@pytest.mark.parametrize("content", [b"", None])
def test_files_without_a_scalar_are_an_error(tmp_path: Path, content: bytes | None) -> None:
    path = write_events(tmp_path / NAME.format(1), version(1))
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="no number to import"):
        import_metrics(tmp_path)


def test_an_empty_file_beside_a_full_one_is_fine(tmp_path: Path) -> None:
    write_events(tmp_path / NAME.format(1), version(1))
    write_run(tmp_path / NAME.format(2), 2, {"a": {1: 1.0}})
    assert import_metrics(tmp_path).metrics == {"a": {"1": 1.0}}


def test_a_folder_without_event_files_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.json").write_text("{}")
    with pytest.raises(ConfigError, match="no event files") as refused:
        import_metrics(tmp_path)
    assert str(tmp_path) in str(refused.value)
