# SPDX-License-Identifier: Apache-2.0
"""What was wrong with the machine while a run went on, from the health that its record holds.

A flag never drops a run: whoever reads the verdict is told, and decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lora_suite.launch.record import RunRecord

# NVML's reasons for lower clocks than asked for (nvml.h, nvmlClocksEventReason*). Not among them, as they are
# nobody's trouble: idle (0x1), clocks set by an application (0x2), boost in step with other GPUs (0x10),
# clocks set for a display (0x100).
THROTTLE_REASONS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "heat (driver)",
    0x40: "heat (hardware)",
    0x80: "power brake",
}


def health_flags(record: RunRecord) -> list[str]:
    """Flags of a run, one line each; none where its record has no health or nothing was wrong.

    health: `before` and `after` are one look each, `during` a list of GPUs' counts over the run
    (`lora_suite.train.watch.GpuWatch`).
    """
    health = record.health
    looks = [look for name in ("before", "after") if isinstance(look := health.get(name), Mapping)]
    during = [gpu for gpu in health.get("during") or [] if isinstance(gpu, Mapping)]
    return [
        *(_sampled(during) if during else _seen(looks)),
        *_processes(during),
        *_load(looks, record.environment.soft.get("cpus") if record.environment else None),
    ]


def _sampled(during: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Throttling by how often it was seen while the run went on."""
    for gpu in during:
        for bit, name in THROTTLE_REASONS.items():
            count = (gpu.get("throttled") or {}).get(str(bit), 0)
            if count:
                yield f"{_name(gpu)} throttled: {name} during {count} of {gpu['samples']} samples"


def _seen(looks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Throttling right before or after a run that was not sampled."""
    found: Counter[tuple[int, str]] = Counter()
    for look in looks:
        for number, gpu in enumerate(look.get("gpus") or []):
            mask = gpu.get("throttle_reasons") or 0
            found.update((number, name) for bit, name in THROTTLE_REASONS.items() if mask & bit)
    for (number, name), count in sorted(found.items()):
        yield f"GPU {number} throttled: {name} in {count} of {len(looks)} looks before and after"


def _processes(during: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for gpu in during:
        pids = ", ".join(str(pid) for pid in gpu.get("other_pids") or [])
        if pids:
            yield f"another process on {_name(gpu)}: pid {pids}"
        elif gpu.get("others", 0) > 0:
            yield f"another process on {_name(gpu)} ({gpu['others']} besides this run's)"


def _name(gpu: Mapping[str, Any]) -> str:
    """The GPU in words; its node only where that is not the first."""
    node = f"node {gpu['node']} " if gpu.get("node") else ""
    return f"{node}GPU {gpu['gpu']}"


def _load(looks: Sequence[Mapping[str, Any]], cpus: object) -> Iterator[str]:
    loads = [look["load_average"][0] for look in looks if look.get("load_average")]
    if isinstance(cpus, int) and loads and max(loads) > cpus:
        yield f"load average {max(loads):.1f} on {cpus} cores"
