# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on disk: whole or invisible, which ones are kept, and what is refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_suite.config import ConfigError
from lora_suite.config.schema import Checkpointing
from lora_suite.train.checkpoint import Checkpoints, Meta, layout_of, metric_of
from lora_suite.train.topology import Axis, Topology
from tests.train.conftest import Run, small_recipe

LAYOUT = {"backend": "dtensor", "world_size": 1, "dp": 1, "tp": 1, "pp": 1}
ONE = Axis(0, 1)


def checkpoints(folder: Path, **settings: Any) -> Checkpoints:
    config = Checkpointing.model_validate(
        {
            "enabled": True,
            "checkpoint_dir": "ckpts",
            "metric_name": None,
            "higher_is_better": False,
            "keep_top_k": None,
            "save_period": 10,
            "resume": True,
        }
        | settings
    )
    return Checkpoints(folder / "ckpts", config, Topology(0, 1, torch.device("cpu"), ONE, ONE, ONE))


def meta(step: int, metric: float | None = None, lora: dict[str, Any] | None = None) -> Meta:
    return Meta(step, LAYOUT, lora, "recipe", "batch", metric)


def kept(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (folder / "ckpts").iterdir())


def test_every_period_and_the_last_step() -> None:
    saves = checkpoints(Path("unused"))
    assert [step for step in range(1, 26) if saves.due(step, 25)] == [10, 20, 25]
    assert not checkpoints(Path("unused"), enabled=False).due(10, 10)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    saves = checkpoints(tmp_path)
    saves.save(meta(10, 1.5), {"tensor": torch.arange(3), "nested": {"list": [1, 2.0]}})
    newest = saves.newest()
    assert newest == tmp_path / "ckpts" / "step_10"
    loaded, state = saves.load(newest, LAYOUT, None)
    assert loaded == meta(10, 1.5)
    assert state["tensor"].tolist() == [0, 1, 2]
    assert state["nested"] == {"list": [1, 2.0]}


def test_a_save_that_was_cut_short_is_never_loaded_and_goes_with_the_next(tmp_path: Path) -> None:
    saves = checkpoints(tmp_path)
    saves.save(meta(10), {})
    cut = tmp_path / "ckpts" / "step_20.tmp"
    cut.mkdir()
    (cut / "rank_0.pt").write_bytes(b"half")
    (tmp_path / "ckpts" / "step_30").mkdir()
    newest = saves.newest()
    assert newest is not None
    assert newest.name == "step_10"
    saves.save(meta(40), {})
    assert not cut.exists()


def test_steps_are_numbers_not_words(tmp_path: Path) -> None:
    saves = checkpoints(tmp_path)
    for step in (9, 10, 100):
        saves.save(meta(step), {})
    newest = saves.newest()
    assert newest is not None
    assert newest.name == "step_100"


def test_no_checkpoint(tmp_path: Path) -> None:
    assert checkpoints(tmp_path).newest() is None


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1, 2, 3, 4, 5]),
        ({"keep_top_k": 2}, [4, 5]),
        ({"keep_top_k": 2, "metric_name": "val:val_loss"}, [1, 3, 5]),
        ({"keep_top_k": 1, "metric_name": "val:val_loss"}, [1, 5]),
        ({"keep_top_k": 2, "metric_name": "val:accuracy", "higher_is_better": True}, [2, 5]),
    ],
)
def test_the_best_and_the_newest_are_kept(
    tmp_path: Path, settings: dict[str, Any], expected: list[int]
) -> None:
    saves = checkpoints(tmp_path, **settings)
    for step, value in ((1, 0.1), (2, 0.9), (3, 0.2), (4, None), (5, 0.5)):
        saves.save(meta(step, value), {})
    assert kept(tmp_path) == expected


def test_a_metric_that_is_missing_or_not_finite_is_the_worst(tmp_path: Path) -> None:
    saves = checkpoints(tmp_path, keep_top_k=1, metric_name="train:loss")
    saves.save(meta(1, 3.0), {})
    saves.save(meta(2, None), {})
    saves.save(meta(3, 4.0), {})
    assert kept(tmp_path) == [1, 3]


def test_names_of_the_field() -> None:
    assert metric_of("val:val_loss") == "validation/loss"
    assert metric_of("train:loss") == "train/loss"
    assert metric_of(None) is None


def test_another_layout_names_both(tmp_path: Path) -> None:
    saves = checkpoints(tmp_path)
    saves.save(meta(1), {})
    newest = saves.newest()
    assert newest is not None
    with pytest.raises(ConfigError, match=r"step_1: the checkpoint's layout .*\(tp is 1 there and 2 here\)"):
        saves.load(newest, LAYOUT | {"tp": 2}, None)


def test_another_number_of_replicas_names_both(tmp_path: Path) -> None:
    # On the same ranks: HSDP's shards are of other sizes than FSDP's.
    recipe = small_recipe("cluster.gpus_per_node=2")
    replicated, sharded = (
        layout_of(recipe, Topology(0, 2, torch.device("cpu"), Axis(0, 2), ONE, ONE, dp_replicas=size))
        for size in (2, 1)
    )
    saves = checkpoints(tmp_path)
    saves.save(replace(meta(1), layout=replicated), {})
    with pytest.raises(ConfigError, match=r"layout .* \(dp_replicas is 2 there and 1 here\)"):
        saves.load(tmp_path / "ckpts" / "step_1", sharded, None)
    assert saves.load(tmp_path / "ckpts" / "step_1", replicated, None)[0].step == 1


def test_lora_on_one_side_only_is_refused(tmp_path: Path) -> None:
    saves = checkpoints(tmp_path)
    saves.save(meta(1), {})
    saves.save(meta(2, lora={"enabled": True, "dim": 8}), {})
    with pytest.raises(ConfigError, match="enabled is False there and True here"):
        saves.load(tmp_path / "ckpts" / "step_1", LAYOUT, {"enabled": True, "dim": 8})
    with pytest.raises(ConfigError, match="enabled is True there and False here"):
        saves.load(tmp_path / "ckpts" / "step_2", LAYOUT, None)


def test_other_targets_name_both(tmp_path: Path) -> None:
    saves = checkpoints(tmp_path)
    block = {"enabled": True, "dim": 8, "target_modules": ["q_proj"]}
    saves.save(meta(1, lora=block), {})
    with pytest.raises(ConfigError, match=r"target_modules is \['q_proj'\] there and \['v_proj'\] here"):
        saves.load(tmp_path / "ckpts" / "step_1", LAYOUT, block | {"target_modules": ["v_proj"]})


@pytest.mark.parametrize("rest", [0, 1, 100, 400])
def test_a_damaged_file_is_one_clear_error(tmp_path: Path, rest: int) -> None:
    saves = checkpoints(tmp_path)
    saves.save(meta(1), {"tensor": torch.arange(1000)})
    path = tmp_path / "ckpts" / "step_1" / "rank_0.pt"
    path.write_bytes(path.read_bytes()[:rest])
    with pytest.raises(ConfigError, match=r"rank_0\.pt: the checkpoint is damaged .* remove .*step_1"):
        saves.load(path.parent, LAYOUT, None)
    path.unlink()
    with pytest.raises(ConfigError, match="damaged"):
        saves.load(path.parent, LAYOUT, None)


def test_what_is_dropped_disappears_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves = checkpoints(tmp_path, keep_top_k=1)
    saves.save(meta(1), {})

    def killed(path: Path, ignore_errors: bool = False) -> None:
        if path.exists():
            (path / "rank_0.pt").unlink()
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        saves.save(meta(2), {})
    names = sorted(path.name for path in (tmp_path / "ckpts").iterdir())
    assert names == ["step_1.tmp", "step_2"]
    newest = saves.newest()
    assert newest is not None
    assert newest.name == "step_2"


@pytest.mark.parametrize("metric", ["val:val_loss", "train:loss"])
def test_a_training_keeps_its_best_and_its_newest(run: Run, metric: str) -> None:
    run.train(
        "checkpointing.enabled=true",
        "checkpointing.save_period=2",
        "checkpointing.keep_top_k=1",
        f"checkpointing.metric_name={metric}",
        "sft.max_num_steps=8",
        "sft.val_period=2",
        # Large enough to overshoot, so that the best is not the last.
        "policy.optimizer.kwargs.lr=0.3",
    )
    series = run.metrics[{"val:val_loss": "validation/loss", "train:loss": "train/loss"}[metric]]
    saved = {step: series[str(step)] for step in (2, 4, 6, 8)}
    best = min(saved, key=lambda step: saved[step])
    assert best != 8
    assert kept(run.folder) == sorted({best, 8})
