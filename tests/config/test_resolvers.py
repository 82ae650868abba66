# SPDX-License-Identifier: Apache-2.0
"""Interpolation and the functions that recipes may call in it."""

from __future__ import annotations

import pytest

from tests.config.helpers import SFT, child, load, refusal


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("${add:2,3}", 5),
        ("${sub:7,3}", 4),
        ("${mul:${policy.train_micro_batch_size}, ${cluster.gpus_per_node}}", 1),
        ("${div:12,4}", 3),
        ("${max:2,9}", 9),
        ("${sft.val_period}", 10),
    ],
)
def test_whole_results_fit_whole_numbers(tmp_path, expression, value):
    path = child(tmp_path, f'policy: {{scheduler: {{warmup_steps: "{expression}"}}}}\n')
    assert load(path=path).recipe.policy.scheduler.warmup_steps == value


def test_inexact_division_is_a_float(tmp_path):
    path = child(tmp_path, 'policy: {optimizer: {kwargs: {lr: "${div:1,4}"}}}\n')
    assert load(path=path).recipe.policy.optimizer.kwargs.lr == 0.25


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("${mul:'2',3}", "mul takes numbers, not '2'"),
        ("${add:true,3}", "add takes numbers, not True"),
        ("${div:1,0}", "div by zero"),
        ("${nope:1}", "Unsupported interpolation type nope"),
        ("${policy.nope}", "Interpolation key 'policy.nope' not found"),
        ("???", "must be given a value"),
    ],
)
def test_what_cannot_be_resolved_names_place_and_key(tmp_path, expression, message):
    path = child(tmp_path, f'policy:\n  scheduler:\n    warmup_steps: "{expression}"\n')
    text = refusal(path)
    assert message in text
    assert text.startswith(f"{path}:4: policy.scheduler.warmup_steps")


def test_a_wrong_type_is_reported_rather_than_what_it_breaks():
    text = refusal(SFT, ["policy.optimizer.kwargs.lr='1e-5'"])
    assert text.startswith("override")
    assert 'policy.optimizer.kwargs.lr must be a number, not "1e-5"; write 1e-5, without quotes' in text
    assert "min_lr" not in text


def test_random_weights_alone_bring_the_bytes_tokenizer():
    assert load().recipe.policy.tokenizer.name == "meta-llama/Llama-3.2-1B"
    assert load("policy.init=random").recipe.policy.tokenizer.name == "bytes"
    assert load("policy.init=random", "policy.tokenizer.name=x/y").recipe.policy.tokenizer.name == "x/y"


def test_megatron_follows_the_shared_optimizer_keys():
    resolved = load(
        "policy.optimizer.kwargs.lr=0.25", "policy.scheduler.min_lr_ratio=0.1", "policy.max_grad_norm=3.0"
    )
    optimizer = resolved.recipe.policy.megatron_cfg.optimizer
    assert (optimizer.lr, optimizer.min_lr, optimizer.clip_grad) == (0.25, pytest.approx(0.025), 3.0)
    assert (optimizer.adam_beta1, optimizer.adam_beta2, optimizer.adam_eps) == (0.9, 0.98, 1e-5)
