#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the family's trainer: reads its command line, writes event files, trains nothing."""

from __future__ import annotations

import sys
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

VALIDATE_EVERY = 10


def main(words: list[str]) -> None:
    """Write the events of a training that takes 5 s a step, 7 s where it validates."""
    given = dict(word.split("=", 1) for word in words if "=" in word)
    if not Path(words[words.index("--config") + 1]).is_file():
        sys.exit("there is no such recipe")
    folder = Path(given["logger.log_dir"]) / "tensorboard"
    writer = EventFileWriter(str(folder))
    log(writer, 0, {"validation/val_loss": 4.0})
    for step in range(1, int(given["sft.max_num_steps"]) + 1):
        validates = step % VALIDATE_EVERY == 0
        log(
            writer,
            step,
            {
                "train/loss": 4.0 / (1.0 + 0.2 * step),
                "train/grad_norm": 1.0,
                "train/global_valid_toks": 1000.0 + step,
                "timing/train/total_step_time": 7.0 if validates else 5.0,
                **({"validation/val_loss": 4.0 / (1.0 + 0.2 * step)} if validates else {}),
                **({"timing/validation/total_validation_time": 2.0} if validates else {}),
            },
        )
        print(f"step {step}")
    writer.close()


def log(writer: EventFileWriter, step: int, values: dict[str, float]) -> None:
    """Write one step's scalars."""
    summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
    writer.add_event(Event(wall_time=1.0e9 + step, step=step, summary=summary))


if __name__ == "__main__":
    main(sys.argv[1:])
