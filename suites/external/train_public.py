# SPDX-License-Identifier: Apache-2.0
"""LoRA as fast as public tools make it: transformers and PEFT, compiled whole, its step one CUDA graph.

What somebody gets who writes no kernels: transformers' model and loss, PEFT's layers with adapters in float32
under autocast, torch.compile of the whole forward and backward pass, the fastest attention that torch has,
its fused AdamW, and on a GPU one graph of all that, update included. It shares no code with lora-suite. Rows
are full of random tokens, every one supervised; there are few, so that a step that trains shows in the loss.
It leaves ``out/metrics.json`` of the common shape, and says the median step last.

    python train_public.py --model llama-3.2-1b --rows 1 --length 2048 --steps 60 --compile
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import cycle

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from train_peft import RECIPES, build, leave
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

# Steps whose kernels Python launches one by one, before the graph; steps that the median leaves out.
BEFORE_GRAPH, WARMUP = 3, 10
BATCHES = 4
LEARNING_RATE, LARGEST_NORM = 1e-4, 1.0
# Under an attention of this name transformers makes no mask. Of its own "sdpa" it makes one of all pairs of
# tokens while it is compiled, since it looks for packed rows in the positions and then cannot see that there
# are none; and with a mask torch has no flash kernel (https://github.com/huggingface/transformers/issues/48925).
UNMASKED = "unmasked_sdpa"
AttentionInterface.register(UNMASKED, sdpa_attention_forward)
# The fastest on Hopper first, which is not torch's order; the first that can do what is asked is used.
KERNELS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def full_rows(vocabulary: int, number: int, length: int) -> Iterator[torch.Tensor]:
    """Tokens of each step, [number, length]: random ones, a few batches again and again."""
    generator = torch.Generator().manual_seed(0)
    return cycle([torch.randint(vocabulary, (number, length), generator=generator) for _ in range(BATCHES)])


class Step:
    """One step after another of a model's adapters, each on tokens of one shape.

    model: on its device. compiled: forward and backward pass by torch.compile, and on a GPU the whole step
    as a CUDA graph from the fourth step on.
    """

    def __init__(self, model: torch.nn.Module, shape: tuple[int, int], *, compiled: bool) -> None:
        self._model = model
        self._adapters = [each for each in model.parameters() if each.requires_grad]
        self._device = self._adapters[0].device
        self._tokens = torch.zeros(shape, dtype=torch.int64, device=self._device)
        on_gpu = self._device.type == "cuda"
        self._optimizer = torch.optim.AdamW(
            self._adapters,
            lr=LEARNING_RATE,
            weight_decay=0.1,
            betas=(0.9, 0.98),
            eps=1e-5,
            fused=True,
            capturable=on_gpu,
        )
        self._loss = self._forward
        if compiled:
            self._loss = torch.compile(self._forward, fullgraph=True, dynamic=False)
        self._until_graph = BEFORE_GRAPH if compiled and on_gpu else None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._figures = torch.zeros(2, device=self._device)

    def __call__(self, tokens: torch.Tensor) -> tuple[float, float]:
        """Train on tokens [rows, length]; returns loss and gradient norm, for which the host waits once."""
        self._tokens.copy_(tokens, non_blocking=True)
        if self._until_graph == 0 and self._graph is None:
            self._capture()
        if self._graph is not None:
            self._graph.replay()
        else:
            self._figures = self._train()
            if self._until_graph is not None:
                self._until_graph -= 1
        loss, norm = self._figures.tolist()
        return loss, norm

    def _forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16, cache_enabled=False):
            return self._model(input_ids=tokens, labels=tokens, use_cache=False).loss

    def _train(self) -> torch.Tensor:
        """Loss and gradient norm, both still on the device."""
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._loss(self._tokens)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._adapters, LARGEST_NORM)
        self._optimizer.step()
        return torch.stack((loss.detach(), norm))

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            # A graph is captured on the stream that the steps before it ran on.
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                self._figures = self._train()
        except RuntimeError as error:
            error.add_note("this happened while the compiled step was captured as a CUDA graph")
            raise
        self._graph = graph


def attention_kernel(attention: str) -> AbstractContextManager[None]:
    """In which order torch tries its kernels of attention."""
    return sdpa_kernel(KERNELS, set_priority=True) if attention == "cudnn" else nullcontext()


def own_stream(device: torch.device) -> AbstractContextManager[None]:
    """Training on a stream of its own, as a graph must be captured on another than the default one."""
    if device.type != "cuda":
        return nullcontext()
    torch.cuda.synchronize()
    return torch.cuda.stream(torch.cuda.Stream())


def train(arguments: argparse.Namespace, device: torch.device) -> dict[str, dict[str, float]]:
    """Train, and return the metrics."""
    with device:
        model = build(
            RECIPES / "models" / f"{arguments.model}.json",
            torch.bfloat16,
            "sdpa" if arguments.attention == "masked" else UNMASKED,
        )
    shape = (arguments.rows, arguments.length)
    batches = full_rows(model.config.vocab_size, *shape)
    names = ("train/loss", "train/grad_norm", "timing/train/total_step_time", "memory/peak_allocated_gib")
    metrics: dict[str, dict[str, float]] = {name: {} for name in names[: 4 if device.type == "cuda" else 3]}
    with attention_kernel(arguments.attention), own_stream(device):
        step = Step(model, shape, compiled=arguments.compile)
        for number, tokens in zip(range(1, arguments.steps + 1), batches, strict=False):
            start = time.perf_counter()
            loss, norm = step(tokens)
            values = [loss, norm, time.perf_counter() - start]
            if device.type == "cuda":
                values.append(torch.cuda.max_memory_allocated() / 2**30)
                torch.cuda.reset_peak_memory_stats()
            for series, value in zip(metrics.values(), values, strict=True):
                series[str(number)] = value
    return metrics


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny-llama", help="a file of recipes/models, without .json")
    parser.add_argument("--rows", type=int, default=1, help="rows of a step")
    parser.add_argument("--length", type=int, default=64, help="tokens of a row")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument(
        "--compile", action="store_true", help="compile, and on a GPU capture the step as a graph"
    )
    parser.add_argument(
        "--attention",
        choices=("cudnn", "torch", "masked"),
        default="cudnn",
        help="cuDNN's kernel where it can do it (the default), torch's own choice, or that with the mask of "
        "transformers",
    )
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    metrics = train(arguments, device)
    leave(metrics)
    losses = list(metrics["train/loss"].values())
    seconds = list(metrics["timing/train/total_step_time"].values())
    print(f"loss of the first step {losses[0]:.3f}, of the last {losses[-1]:.3f}")
    if "memory/peak_allocated_gib" in metrics:
        peaks = list(metrics["memory/peak_allocated_gib"].values())
        print(f"peak allocated {max(peaks):.2f} GiB, in the last step {peaks[-1]:.2f}")
    print(f"first step {seconds[0]:.1f} s")
    print(f"median step {1000 * statistics.median(seconds[WARMUP:] or seconds):.2f} ms")


if __name__ == "__main__":
    main()
