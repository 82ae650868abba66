# SPDX-License-Identifier: Apache-2.0
"""What a GPU can do at most, by its data sheet: dense bfloat16 matrix work, without sparsity."""

from __future__ import annotations

# Longer names first: the first that occurs in the device's name counts.
_BF16_TFLOPS = (
    ("B300", 2500.0),
    ("B200", 2250.0),
    ("GH200", 989.4),
    ("H200", 989.4),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.4),
    ("H800", 989.4),
    ("A100", 312.0),
    ("L40S", 362.0),
)


def peak_tflops(device_name: str, precision: str) -> float | None:
    """10¹² operations a second of a GPU, None where no figure is known for it in this precision."""
    if precision != "bfloat16":
        return None
    return next((tflops for name, tflops in _BF16_TFLOPS if name in device_name), None)
