# SPDX-License-Identifier: Apache-2.0
"""A rank finds its device, or says why there is none for it."""

from __future__ import annotations

import pytest
import torch

from lora_suite.config import ConfigError
from lora_suite.train.process import local_device


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """A machine that shows two GPUs; collects the device that is chosen."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("LOCAL_RANK", "1")
    return chosen


def test_a_rank_takes_the_gpu_of_its_local_rank(
    two_gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert local_device() == torch.device("cuda", 1)
    assert two_gpus == [torch.device("cuda", 1)]


def test_more_ranks_than_gpus_are_refused_with_the_key(
    two_gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(ConfigError, match=r"cluster\.gpus_per_node: 8 GPUs are asked for.* sees 2"):
        local_device()
    assert two_gpus == []


def test_without_a_gpu_every_rank_computes_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert local_device() == torch.device("cpu")
