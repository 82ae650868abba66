# SPDX-License-Identifier: Apache-2.0
"""The metrics a run can leave, with their units: one list for who writes, checks and lints them."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class MetricName:
    """A metric's name (`N`, `M` stand for indices), its unit, and what it measures.

    high: largest value that is possible at all (None: unbounded), for lint of checks that cannot fail.
    """

    name: str
    unit: str
    meaning: str
    high: float | None = None


LOSS = "train/loss"
GRAD_NORM = "train/grad_norm"
LR = "train/lr"
VALID_TOKENS = "train/global_valid_toks"
VALIDATION_LOSS = "validation/loss"
TOTAL_STEP_TIME = "timing/train/total_step_time"
STEP_TIME = "timing/train/step_time"
FLOOR_TIME = "performance/floor_seconds"
FLOOR_RATIO = "performance/floor_ratio"
RECEIVED = "traffic/received_gib"
LEAST_RECEIVED = "traffic/floor_gib"
INVARIANTS_TIME = "timing/train/invariants"
PHASES = ("data", "forward_backward", "grad_sync", "optimizer", "validation", "checkpointing")

CATALOG: tuple[MetricName, ...] = (
    MetricName(LOSS, "nats", "mean over the global batch's supervised tokens"),
    MetricName(GRAD_NORM, "", "norm of the trainable gradients before clipping"),
    MetricName(LR, "", "learning rate of this step"),
    MetricName(VALID_TOKENS, "tokens", "supervised tokens of the global batch"),
    MetricName(VALIDATION_LOSS, "nats", "mean over the validation batches' supervised tokens"),
    MetricName(TOTAL_STEP_TIME, "s", "the whole step as the wall clock saw it"),
    MetricName(STEP_TIME, "s", "the step less validation and checkpointing: what speed checks should use"),
    *(MetricName(f"timing/train/{phase}", "s", f"{phase} phase of the step") for phase in PHASES),
    MetricName("data/truncated", "rows", "rows cut at the longest length, of those that the run looked at"),
    MetricName("data/dropped_no_target", "rows", "rows of these that had nothing left to learn"),
    MetricName(INVARIANTS_TIME, "s", "spent on LoRA invariants beside the step; no phase of it"),
    MetricName("performance/slots_per_sec_per_gpu", "1/s", "padded token slots"),
    MetricName("performance/tokens_per_sec_per_gpu", "1/s", "tokens that are not padding"),
    MetricName("performance/supervised_tokens_per_sec_per_gpu", "1/s", "tokens that carry loss"),
    MetricName("performance/model_tflops_per_gpu", "TFLOP/s", "LoRA-aware arithmetic over step time"),
    MetricName(FLOOR_TIME, "s", "what no implementation of the step can beat on this GPU"),
    MetricName(FLOOR_RATIO, "", "step time over the analytical floor of the GPU model"),
    MetricName(
        RECEIVED, "GiB", "received over NVLink by the first rank's GPU in the step, as the driver counts"
    ),
    MetricName(LEAST_RECEIVED, "GiB", "the same by the floor's formulas, on one node"),
    MetricName("ray/node.N.gpu.M.mem_gb", "GiB", "device memory in use, sampled; keyed by seconds"),
    MetricName("memory/peak_allocated_gib", "GiB", "peak allocated, maximum over ranks; on CPU the peak RSS"),
    MetricName("memory/peak_reserved_gib", "GiB", "peak reserved by the allocator, maximum over ranks"),
    MetricName("lora/adapters", "", "number of adapted linears"),
    MetricName("lora/trainable_params", "", "trainable parameters"),
    MetricName("lora/layer_coverage", "", "share of layers that carry an adapter", high=1.0),
    MetricName("lora/grad_coverage", "", "share of adapters that received a gradient so far", high=1.0),
)

_PATTERNS = tuple(re.compile(re.sub(r"\\?\b[NM]\b", r"\\d+", re.escape(entry.name))) for entry in CATALOG)


def known(name: str) -> MetricName | None:
    """Return the catalogue's entry of a metric name, or None if no run of ours writes such a metric."""
    for entry, pattern in zip(CATALOG, _PATTERNS, strict=True):
        if pattern.fullmatch(name):
            return entry
    return None
