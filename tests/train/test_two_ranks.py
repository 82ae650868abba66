# SPDX-License-Identifier: Apache-2.0
"""Two data parallel ranks make the same training as one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.train.conftest import LORA, Run

RANK_PROGRAM = """
import sys
from pathlib import Path
import torch
from lora_suite.train.program import Program
from tests.train.fake_backend import build
torch.set_num_threads(1)
sys.exit(Program(Path(sys.argv[1]), build).run())
"""
SAVE = ("checkpointing.enabled=true", "checkpointing.metric_name=null")


@pytest.mark.slow
def test_two_ranks_train_like_one(new_run: Callable[[str], Run], tmp_path: Path) -> None:
    one, two = new_run("one"), new_run("two")
    validation = ("sft.val_period=2", "sft.val_at_start=true", "sft.val_batches=0")
    one.train(LORA, *validation)
    two.write_job(LORA, *validation, *SAVE, "cluster.gpus_per_node=2")
    script = tmp_path / "rank.py"
    script.write_text(RANK_PROGRAM)
    root = Path(__file__).resolve().parents[2]
    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *(str(script), str(two.folder)),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)},
        cwd=root,
        timeout=120,
        check=True,
    )
    assert two.record.batches == one.record.batches
    for name in ("train/loss", "train/grad_norm", "validation/loss"):
        assert two.metrics[name] == {
            step: pytest.approx(value, rel=1e-9) for step, value in one.metrics[name].items()
        }
    assert list(two.metrics["validation/loss"]) == ["0", "2", "4"]
    assert two.metrics["train/global_valid_toks"] == one.metrics["train/global_valid_toks"]
    verdicts = {each.name: each.ok for each in two.record.invariants}
    assert verdicts.pop("trainable_params") is False  # the formula is another model's
    assert all(verdicts.values())
    files = sorted(path.name for path in (two.folder / "ckpts" / "step_4").iterdir())
    assert files == ["meta.json", "rank_0.pt", "rank_1.pt"]
