# SPDX-License-Identifier: Apache-2.0
"""All data of one training, ready to be stepped through."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lora_suite.config import ConfigError
from lora_suite.config.schema import Recipe
from lora_suite.train.data.batches import (
    GlobalBatch,
    Slicing,
    plan_steps,
    plan_validation,
    slicing_of,
)
from lora_suite.train.data.examples import Encoding, encode_rows
from lora_suite.train.data.rows import Row, read_rows
from lora_suite.train.data.tokenizer import load_tokenizer


@dataclass(frozen=True)
class TrainingData:
    """Global batches of every step and of a validation, how they are cut, and what became of the rows.

    steps[k - 1] is the batch of step k, so the position in the data is the step. validation: empty without
    validation rows. counts: rows, truncated, dropped_no_target, and the same of the validation rows.
    """

    steps: list[GlobalBatch]
    validation: list[GlobalBatch]
    slicing: Slicing
    validation_slicing: Slicing
    counts: dict[str, int]


def load_data(recipe: Recipe, recipe_path: Path) -> TrainingData:
    """Read, tokenize and order the rows of a recipe.

    Every rank loads all of it: that the batches are the same everywhere then needs no communication, and the
    number of supervised tokens of a global batch is known before its first forward. Raises ConfigError.
    """
    policy, data = recipe.policy, recipe.data
    tokenizer = load_tokenizer(policy.tokenizer.name, recipe_path)
    encoding = Encoding(tokenizer, data.add_bos, data.add_eos, data.max_input_seq_length)
    train_rows, validation_rows = _rows(recipe, recipe_path)
    train = encode_rows(train_rows, encoding)
    validation = encode_rows(validation_rows, encoding)
    batch_size = policy.train_global_batch_size
    if len(train.kept) < batch_size:
        raise ConfigError(
            f"data.train: {len(train.kept)} of {train.rows} rows have something to learn, but "
            f"policy.train_global_batch_size is {batch_size}; give more rows, a smaller batch, or a larger "
            f"data.max_input_seq_length (now {data.max_input_seq_length})"
        )
    if validation.rows and not validation.kept:
        raise ConfigError(
            f"data.validation: none of {validation.rows} rows has something to learn; "
            f"data.max_input_seq_length is {data.max_input_seq_length}"
        )
    sft = recipe.sft
    seed = sft.seed if data.shuffle else None
    counts = {"rows": train.rows, "truncated": train.truncated, "dropped_no_target": train.dropped_no_target}
    if validation.rows:
        counts |= {
            "validation_rows": validation.rows,
            "validation_truncated": validation.truncated,
            "validation_dropped_no_target": validation.dropped_no_target,
        }
    return TrainingData(
        steps=plan_steps(train.kept, batch_size, sft.max_num_steps, sft.max_num_epochs, seed),
        validation=plan_validation(
            validation.kept, sft.val_global_batch_size, sft.val_batches, tokenizer.pad_id
        ),
        slicing=slicing_of(recipe, policy.train_micro_batch_size, tokenizer.pad_id),
        validation_slicing=slicing_of(recipe, sft.val_micro_batch_size, tokenizer.pad_id),
        counts=counts,
    )


def _rows(recipe: Recipe, recipe_path: Path) -> tuple[list[Row], list[Row]]:
    """Training and validation rows; the latter are cut off the training rows where the recipe says so."""
    data = recipe.data
    train = read_rows(data.train, recipe_path, "data.train")
    if data.validation is not None:
        return train, read_rows(data.validation, recipe_path, "data.validation")
    held_out = int(len(train) * data.train.split_validation_size)
    if not held_out:
        return train, []
    generator = np.random.Generator(np.random.PCG64(data.train.seed))
    order = generator.permutation(len(train)).tolist()
    return [train[row] for row in sorted(order[held_out:])], [train[row] for row in sorted(order[:held_out])]
