# SPDX-License-Identifier: Apache-2.0
"""The public trainer of the speed suites against a plain loop of transformers and PEFT, on CPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import fx
from torch.nn import attention
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[2]
STEPS, ROWS, LENGTH = 8, 2, 64
VOCABULARY = json.loads((ROOT / "recipes/models/tiny-llama.json").read_text())["vocab_size"]


@pytest.fixture
def public(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The trainer as its command loads it, in an empty folder; what it learns in a few steps should show."""
    monkeypatch.syspath_prepend(str(ROOT / "suites" / "external"))
    monkeypatch.chdir(tmp_path)
    import train_public

    monkeypatch.setattr(train_public, "LEARNING_RATE", 5e-3)
    return train_public


@pytest.fixture
def start(
    public: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[dict[str, list[float]], str]]:
    """Run its command line; returns its metrics and its last line."""

    def run(*words: str) -> tuple[dict[str, list[float]], str]:
        sizes = ["--rows", str(ROWS), "--length", str(LENGTH), "--steps", str(STEPS)]
        monkeypatch.setattr(sys, "argv", ["train_public.py", *sizes, *words])
        public.main()
        written = json.loads(Path("out/metrics.json").read_text())
        steps = [str(step) for step in range(1, STEPS + 1)]
        assert all(list(series) == steps for series in written.values())
        return {name: list(series.values()) for name, series in written.items()}, capsys.readouterr().out

    return run


def plain_losses(batches: Iterator[torch.Tensor]) -> list[float]:
    """Losses of the same training in eager mode, with a causal mask of its own and a loss written out."""
    torch.manual_seed(42)
    config = AutoConfig.for_model(**json.loads((ROOT / "recipes/models/tiny-llama.json").read_text()))
    model: Any = get_peft_model(
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager"),
        LoraConfig(
            r=8,
            lora_alpha=32,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        ),
    )
    adapters = [each for name, each in model.named_parameters() if "lora_" in name]
    optimizer = torch.optim.AdamW(adapters, lr=5e-3, weight_decay=0.1, betas=(0.9, 0.98), eps=1e-5)
    losses = []
    for tokens in islice(batches, STEPS):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids=tokens).logits
        logarithms = logits[:, :-1].double().log_softmax(-1)
        loss = -logarithms.gather(-1, tokens[:, 1:, None]).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.stack([each.grad.norm() for each in adapters]).norm()
        for each in adapters:
            each.grad *= min(1.0, 1.0 / (norm + 1e-6))
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_it_trains_like_a_plain_loop_compiled_or_not(
    public: ModuleType, start, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = plain_losses(public.full_rows(VOCABULARY, ROWS, LENGTH))
    # It learns, by more than what bfloat16 may differ.
    assert plain[-1] < plain[0] - 0.5
    eager, said = start()
    assert eager["train/loss"] == pytest.approx(plain, abs=0.01)
    assert said.splitlines()[-1].startswith("median step ")
    # What is asked of the compiler (one graph, no breaks) without the time that its code generator takes.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    compiled, _ = start("--compile")
    assert compiled["train/loss"] == pytest.approx(plain, abs=0.01)
    assert compiled["train/grad_norm"] == pytest.approx(eager["train/grad_norm"], rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("words", "masked"), [((), False), (("--attention", "masked"), True)])
def test_compiled_attention_has_no_mask_unless_asked_for(
    start, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], masked: bool
) -> None:
    """With a mask of all pairs of tokens torch has no flash kernel."""
    calls: list[dict[str, Any]] = []

    def backend(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        calls.extend(dict(node.kwargs) for node in graph.graph.nodes if "scaled_dot" in str(node.target))
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    start("--compile", *words)
    assert calls
    assert {call["attn_mask"] is not None for call in calls} == {masked}
    assert {call["is_causal"] for call in calls} == {not masked}


@pytest.mark.parametrize(("words", "first"), [((), "CUDNN_ATTENTION"), (("--attention", "torch"), None)])
def test_the_fastest_kernel_of_attention_comes_first_unless_asked_not_to(
    public: ModuleType, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], first: str | None
) -> None:
    order = partial(attention._cur_sdpa_kernel_backends, with_priority=True)
    before, seen = order(), []

    def rows(vocabulary: int, *shape: int) -> Iterator[torch.Tensor]:
        seen.append(order())
        yield torch.zeros(shape, dtype=torch.int64)

    monkeypatch.setattr(public, "full_rows", rows)
    monkeypatch.setattr(sys, "argv", ["train_public.py", "--length", "8", "--steps", "1", *words])
    public.main()
    # Whoever has no such kernel falls back on the others.
    assert seen[0] == before if first is None else seen[0][0].name == first
    assert {"FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"} <= {each.name for each in seen[0]}


def test_rows_are_random_tokens_and_come_again(public: ModuleType) -> None:
    rows = public.full_rows(1000, 3, 2000)
    steps = [next(rows) for _ in range(6)]
    assert {tuple(step.shape) for step in steps} == {(3, 2000)}
    assert [torch.equal(steps[0], step) for step in steps] == [True, False, False, False, True, False]
    # 24 of each id in four batches, with a deviation of 4.9: none of 1000 is six deviations off.
    counts = torch.bincount(torch.cat(steps[:4]).flatten(), minlength=1000)
    assert counts.shape == (1000,)
    assert (counts - 24).abs().max() < 30
