# SPDX-License-Identifier: Apache-2.0
"""Peaks of GPUs, by the names that CUDA gives them."""

from __future__ import annotations

import pytest

from lora_suite.blueprint.hardware import find_gpu


@pytest.mark.parametrize(
    ("name", "tflops", "memory_tb", "link_gb"),
    [
        ("NVIDIA H200", 989.4, 4.8, 450),
        ("NVIDIA H100 PCIe", 756.0, 2.0, 300),
        ("NVIDIA H100 80GB HBM3", 989.4, 3.35, 450),
        ("NVIDIA GH200 480GB", 989.4, 4.0, 450),
        ("NVIDIA A100-SXM4-80GB", 312.0, 2.039, 300),
        ("NVIDIA A100-PCIE-40GB", 312.0, 1.555, 300),
        ("NVIDIA B200", 2250.0, 8.0, 900),
    ],
)
def test_peaks_are_those_of_the_data_sheets(
    name: str, tflops: float, memory_tb: float, link_gb: float
) -> None:
    gpu = find_gpu(name, "bfloat16")
    assert gpu is not None
    assert (gpu.flops, gpu.memory, gpu.link) == pytest.approx(
        (tflops * 1e12, memory_tb * 1e12, link_gb * 1e9)
    )


def test_no_figure_is_made_up() -> None:
    assert find_gpu("NVIDIA H200", "float32") is None
    assert find_gpu("AMD EPYC", "bfloat16") is None
