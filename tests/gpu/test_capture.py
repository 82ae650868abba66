# SPDX-License-Identifier: Apache-2.0
"""What cannot be recorded is told from what fails by itself, and leaves the GPU to what comes after it."""

from __future__ import annotations

import pytest
import torch

from lora_suite.train.batch import MicroBatch
from lora_suite.train.fast.capture import CapturedPass, NotCaptured

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def waiting(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return ids.sum() + int(labels.sum().item())


def failing(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return ids @ labels


def summed(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return ids.sum() + labels.sum()


def test_a_pass_that_waits_for_the_host_is_not_captured() -> None:
    batch = MicroBatch(torch.arange(8).view(2, 4).cuda(), torch.ones(2, 4, dtype=torch.int64).cuda())
    stream = torch.cuda.current_stream()
    with pytest.raises(NotCaptured):
        CapturedPass(waiting, batch, lambda: None, [], torch.cuda.graph_pool_handle())
    assert torch.cuda.current_stream() == stream
    captured = CapturedPass(summed, batch, lambda: None, [], torch.cuda.graph_pool_handle())
    assert captured(batch).item() == 36


def test_what_fails_by_itself_is_no_matter_of_capturing() -> None:
    batch = MicroBatch(torch.ones(2, 4).cuda(), torch.ones(2, 4).cuda())
    with pytest.raises(RuntimeError) as caught:
        CapturedPass(failing, batch, lambda: None, [], torch.cuda.graph_pool_handle())
    assert not isinstance(caught.value, NotCaptured)
