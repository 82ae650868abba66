# SPDX-License-Identifier: Apache-2.0
"""LoRA of a tiny Llama with plain transformers and PEFT, in a loop of its own: an example of another trainer.

It knows nothing of lora-suite and imports nothing of it. It reads the architecture and the rows that the
native recipes use, sees the same batches (rows in the order of the file, as with data.shuffle=false), and
leaves ``out/metrics.json`` of the common shape, {metric: {step: value}}.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
OUTPUT = Path("out")
ROWS, MICRO_BATCH, LENGTH = 16, 4, 64
BEGIN, END, PADDING, IGNORED = 256, 257, 258, -100
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def rows() -> Iterator[tuple[list[int], list[int]]]:
    """Token ids and labels of every row: one token a byte, the prompt not supervised."""
    for line in (RECIPES / "data" / "quickstart.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        prompt = [BEGIN, *row["input"].encode()]
        response = [*row["output"].encode(), END]
        yield prompt + response, [IGNORED] * len(prompt) + response


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and labels of each step, [ROWS, LENGTH]."""
    source = rows()
    while True:
        tokens = torch.full((ROWS, LENGTH), PADDING)
        labels = torch.full((ROWS, LENGTH), IGNORED)
        for index, (ids, targets) in zip(range(ROWS), source, strict=False):
            tokens[index, : len(ids)] = torch.tensor(ids[:LENGTH])
            labels[index, : len(targets)] = torch.tensor(targets[:LENGTH])
        yield tokens, labels


def build(architecture: Path, dtype: torch.dtype, attention: str = "sdpa") -> torch.nn.Module:
    """A model with random weights, and PEFT's adapters on all of its linears but the head.

    architecture: JSON as in config.json. attention: as transformers calls it.
    """
    torch.manual_seed(42)
    config = AutoConfig.for_model(**json.loads(architecture.read_text(encoding="utf-8")))
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    return get_peft_model(
        model, LoraConfig(r=8, lora_alpha=32, target_modules=TARGETS, task_type="CAUSAL_LM")
    )


def loss_of(model: torch.nn.Module, tokens: torch.Tensor, labels: torch.Tensor, total: int) -> torch.Tensor:
    """Cross-entropy summed over supervised tokens, over those of the global batch."""
    logits = model(input_ids=tokens, attention_mask=tokens != PADDING).logits[:, :-1]
    targets = labels[:, 1:]
    summed = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return summed / total


def train(steps: int, slow: float) -> dict[str, dict[str, float]]:
    """Train, and return the metrics."""
    model = build(RECIPES / "models" / "tiny-llama.json", torch.float32)
    trainable = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=5e-3, weight_decay=0.01, eps=1e-8, betas=(0.9, 0.98))
    names = ("train/loss", "train/grad_norm", "train/lr", "train/global_valid_toks")
    metrics: dict[str, dict[str, float]] = {name: {} for name in (*names, "timing/train/total_step_time")}
    for step, (tokens, labels) in zip(range(1, steps + 1), batches(), strict=False):
        start = time.perf_counter()
        total = int((labels[:, 1:] != IGNORED).sum())
        loss = 0.0
        for first in range(0, ROWS, MICRO_BATCH):
            part = slice(first, first + MICRO_BATCH)
            share = loss_of(model, tokens[part], labels[part], total)
            share.backward()
            loss += share.item()
        norm = torch.nn.utils.clip_grad_norm_(trainable, 1.0).item()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep((slow - 1.0) * (time.perf_counter() - start))
        seconds = time.perf_counter() - start
        values = (loss, norm, optimizer.param_groups[0]["lr"], total, seconds)
        for series, value in zip(metrics.values(), values, strict=True):
            series[str(step)] = value
    return metrics


def leave(metrics: dict[str, dict[str, float]]) -> None:
    """Write the metrics where the suite looks for them."""
    OUTPUT.mkdir(exist_ok=True)
    (OUTPUT / "metrics.json").write_text(json.dumps(metrics), encoding="utf-8")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--slow", type=float, default=1.0, help="every step takes this many times as long")
    arguments = parser.parse_args()
    leave(train(arguments.steps, arguments.slow))


if __name__ == "__main__":
    main()
