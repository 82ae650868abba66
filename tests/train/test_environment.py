# SPDX-License-Identifier: Apache-2.0
"""What a run says of the machine it ran on."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch

from lora_suite.train import environment
from lora_suite.train.environment import cpu_model, fingerprint, health, peak_resident_gib
from lora_suite.train.nvml import Gpus
from tests.train.conftest import small_recipe

MEGATRON = ("policy.dtensor_cfg.enabled=false", "policy.megatron_cfg.enabled=true")


def test_strict_facts_are_those_that_make_runs_comparable() -> None:
    strict = fingerprint(small_recipe(), Gpus()).strict
    assert strict["torch"] == torch.__version__
    assert strict["transformers"] == importlib.metadata.version("transformers")
    assert "megatron-core" not in strict
    assert strict["dtype"] == "float64"
    assert strict["world_size"] == 1
    assert "host" not in strict
    megatron = fingerprint(small_recipe(*MEGATRON), Gpus()).strict
    assert megatron["megatron-core"] == importlib.metadata.version("megatron-core")


def test_a_cpu_has_a_name_and_health_is_plain_data() -> None:
    assert cpu_model()
    before = health(Gpus())
    assert len(before["load_average"]) == 3


def test_peak_memory_is_in_gib() -> None:
    with open("/proc/self/status", encoding="utf-8") as status:
        (line,) = [line for line in status if line.startswith("VmHWM")]
    kib = int(line.split()[1])
    assert abs(peak_resident_gib() - kib / 2**20) < 0.05


def test_the_trainers_commit_is_noted_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for commit, soft in (("0123abc+", {"code": "0123abc+"}), (None, {})):
        monkeypatch.setattr(environment, "commit_of", lambda folder, commit=commit: commit)
        found = fingerprint(small_recipe(), Gpus())
        assert {key: value for key, value in found.soft.items() if key == "code"} == soft
        assert "code" not in found.strict
