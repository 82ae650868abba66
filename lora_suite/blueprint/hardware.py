# SPDX-License-Identifier: Apache-2.0
"""What a GPU can do at most, by its data sheet.

Sources: NVIDIA's data sheets of the A100, L40S, H100, H200, GH200 and HGX B200/B300, and for the network the
DGX systems' (one adapter a GPU: ConnectX-6 with 200 Gb/s beside the A100, ConnectX-7 with 400 Gb/s beside the
H100, H200 and B200, ConnectX-8 with 800 Gb/s beside the B300).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """Peaks of one GPU.

    flops: dense bfloat16 operations a second, without sparsity. memory: bytes a second from its own memory,
    reads and writes together. link: bytes a second that it receives from GPUs of its node while it sends as
    many (half of what data sheets call NVLink bandwidth). network: the same from other nodes.
    """

    flops: float
    memory: float
    link: float
    network: float


def _gpu(tflops: float, memory_tb: float, link_gb: float, network_gb: float = 50.0) -> Gpu:
    return Gpu(tflops * 1e12, memory_tb * 1e12, link_gb * 1e9, network_gb * 1e9)


# Longer names first: the first that occurs in the device's name counts.
_GPUS = (
    ("B300", _gpu(2500.0, 8.0, 900.0, 100.0)),
    ("B200", _gpu(2250.0, 8.0, 900.0)),
    ("GH200 144G", _gpu(989.4, 4.9, 450.0)),
    ("GH200", _gpu(989.4, 4.0, 450.0)),
    ("H200", _gpu(989.4, 4.8, 450.0)),
    ("H100 PCIe", _gpu(756.0, 2.0, 300.0)),
    ("H100 NVL", _gpu(835.0, 3.9, 300.0)),
    ("H100", _gpu(989.4, 3.35, 450.0)),
    ("H800", _gpu(989.4, 3.35, 200.0)),
    ("A100-SXM4-80GB", _gpu(312.0, 2.039, 300.0, 25.0)),
    ("A100 80GB", _gpu(312.0, 1.935, 300.0, 25.0)),
    ("A100", _gpu(312.0, 1.555, 300.0, 25.0)),
    ("L40S", _gpu(362.0, 0.864, 32.0)),
)


def find_gpu(device_name: str, precision: str) -> Gpu | None:
    """The peaks of a GPU by its name, None where no figure is known for it in this precision."""
    if precision != "bfloat16":
        return None
    return next((gpu for name, gpu in _GPUS if name in device_name), None)
