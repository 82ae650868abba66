# SPDX-License-Identifier: Apache-2.0
"""All data of one training, ready to be stepped through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lora_suite.config import ConfigError
from lora_suite.config.schema import Dataset, Recipe
from lora_suite.train.data.batches import GlobalBatch, plan_steps, plan_validation
from lora_suite.train.data.examples import Encoding, ExamplePool, Pool
from lora_suite.train.data.random_rows import RANDOM, RandomPool
from lora_suite.train.data.slicing import Slicing, slicing_of
from lora_suite.train.data.sources import read_rows
from lora_suite.train.data.template import template_of
from lora_suite.train.data.tokenizer import load_tokenizer


@dataclass(frozen=True)
class TrainingData:
    """Global batches of every step and of a validation, how they are cut, and what became of the rows.

    steps[k - 1] is the batch of step k, so the position in the data is the step. validation: empty without
    validation rows. counts: what became of the rows, see `ExamplePool.counts`; those of a validation set of
    its own begin with `validation_`.
    """

    steps: list[GlobalBatch]
    validation: list[GlobalBatch]
    slicing: Slicing
    validation_slicing: Slicing
    counts: dict[str, int]


def load_data(recipe: Recipe, recipe_path: Path, vocabulary: int | None = None) -> TrainingData:
    """Read the rows of a recipe, order them, and tokenize those that the steps need.

    Every rank does all of it: that the batches are the same everywhere then needs no communication, and the
    number of supervised tokens of a global batch is known before its first forward. vocabulary: of the model,
    for rows of random tokens; None where it is not known. Raises ConfigError.
    """
    policy, data, sft = recipe.policy, recipe.data, recipe.sft
    tokenizer = load_tokenizer(policy.tokenizer.name, recipe_path)
    template = template_of(recipe, tokenizer, recipe_path)
    encoding = Encoding(tokenizer, template, data.add_bos, data.add_eos, data.max_input_seq_length)

    def open_pool(dataset: Dataset, key: str) -> Pool:
        if dataset.dataset_name != RANDOM:
            return ExamplePool(read_rows(dataset, recipe_path, key), encoding)
        if vocabulary is None:
            raise ConfigError(
                f"{key}.dataset_name: {RANDOM} rows need the model's vocabulary, which is not known of "
                f"{policy.model_name}; name a folder with its config.json, or other rows"
            )
        return RandomPool(data.max_input_seq_length, vocabulary, dataset.seed)

    pool = open_pool(data.train, "data.train")
    train_rows, held_out = _split(len(pool), data.train)
    validation_pool, validation_rows = pool, held_out
    if data.validation is not None:
        validation_pool = open_pool(data.validation, "data.validation")
        validation_rows = range(len(validation_pool))

    seed = sft.seed if data.shuffle else None
    batch_size = policy.train_global_batch_size
    steps = plan_steps(pool, train_rows, batch_size, sft.max_num_steps, sft.max_num_epochs, seed)
    if not steps:
        raise ConfigError(_too_few(recipe, pool))
    validation: list[GlobalBatch] = []
    if sft.val_period or sft.val_at_start or sft.val_at_end:
        validation = plan_validation(
            validation_pool, validation_rows, sft.val_global_batch_size, sft.val_batches, tokenizer.pad_id
        )
        if not validation:
            raise ConfigError(
                f"validation: none of {len(validation_rows)} rows has a token to learn; cut later "
                f"(data.max_input_seq_length is {data.max_input_seq_length}) or give other rows"
            )
    counts = pool.counts
    if validation_pool is not pool:
        counts |= {f"validation_{name}": count for name, count in validation_pool.counts.items()}
    return TrainingData(
        steps=steps,
        validation=validation,
        slicing=slicing_of(recipe, policy.train_micro_batch_size, tokenizer.pad_id),
        validation_slicing=slicing_of(recipe, sft.val_micro_batch_size, tokenizer.pad_id),
        counts=counts,
    )


def _too_few(recipe: Recipe, pool: Pool) -> str:
    counts = pool.counts
    return (
        f"data.train: {counts['examined'] - counts['dropped_no_target']} of {counts['examined']} rows have a "
        f"token to learn, too few for one batch (policy.train_global_batch_size is "
        f"{recipe.policy.train_global_batch_size}); give more rows, or cut later "
        f"(data.max_input_seq_length is {recipe.data.max_input_seq_length})"
    )


def _split(rows: int, dataset: Dataset) -> tuple[Sequence[int], Sequence[int]]:
    """Indices of the rows to train on and of those that are held out for validation."""
    held_out = int(rows * dataset.split_validation_size)
    if not held_out:
        return range(rows), ()
    order = np.random.Generator(np.random.PCG64(dataset.seed)).permutation(rows).tolist()
    return sorted(order[held_out:]), sorted(order[:held_out])
