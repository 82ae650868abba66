# SPDX-License-Identifier: Apache-2.0
"""`lora-suite train`: one training on this machine, or on the nodes of the Slurm allocation it is called in,
from a recipe to the processes of torchrun.

The launching process stays light: it validates, starts torchrun and watches it, and never imports torch.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import pty
import secrets
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from lora_suite.blueprint import preflight
from lora_suite.config import ConfigError, ResolvedRecipe, load_recipe
from lora_suite.config.schema import Cluster
from lora_suite.launch.ending import TorchrunReport, crash, last_lines, plain, rank_exits, record_end
from lora_suite.launch.failure import CONFIGURATION, NOTHING_TO_DO
from lora_suite.launch.processes import end_run, stop_signals_interrupt, undisturbed
from lora_suite.launch.record import Ended, RunDir, write_json_atomically
from lora_suite.launch.slurm.step import Allocation, cancel_steps, site_words, step_command
from lora_suite.launch.starter import root

MARK = "LORA_SUITE_TRAINING_ID"
CRASHED, INTERRUPTED = 3, 130
GRACE_SECONDS = 3.0
_CHUNK = 65536
_KEPT_BYTES = 1 << 20
_SILENCE_SECONDS = 0.5


def train(config: Path | None, overrides: Sequence[str]) -> int:
    """Train one recipe and return the exit status of `lora-suite train`.

    config: None starts from the starter set's ``recipes/sft.yaml``. The run goes to ``LORA_SUITE_RUN_DIR``
    (default ``results/manual/<time>-<recipe>``). Returns 0; 2 for what is wrong before the first step; 3 if
    a rank failed, with the reason in run.json and on stderr; 4 if a continued run had nothing left to do;
    130 if interrupted.
    """
    try:
        training = _prepare(config or root() / "recipes" / "sft.yaml", overrides)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return CONFIGURATION
    ended = _run(training)
    if ended.status == NOTHING_TO_DO:
        # The record there is of the run that did it all; it stays as it is.
        print(f"{training.run_dir}: nothing to do, the last step was reached before", file=sys.stderr)
        return NOTHING_TO_DO
    record_end(
        training.run_dir,
        ended,
        run_id=training.run_id,
        case=training.case,
        tree=training.resolved.tree,
    )
    if ended.status != 0:
        place = f"rank {ended.rank}, step {ended.step}: " if ended.rank is not None else ""
        print(f"error: {place}{ended.message}", file=sys.stderr)
    return ended.status


@dataclass(frozen=True)
class _Training:
    """A training that may start: recipe, where it goes, under which id and name, the words that start it.

    allocation: whose nodes it takes, as a job step; None for a training on this machine.
    """

    resolved: ResolvedRecipe
    run_dir: Path
    run_id: str
    case: str
    allocation: Allocation | None
    command: list[str]


def _prepare(config: Path, overrides: Sequence[str]) -> _Training:
    """Validate everything that can be validated without torch, and write recipe.json for the ranks."""
    resolved = load_recipe(config, overrides)
    recipe = resolved.recipe
    preflight(recipe, config)
    if recipe.cluster.num_nodes > 1 and Allocation.held() is None:
        raise ConfigError(
            f"cluster.num_nodes={recipe.cluster.num_nodes}: outside a Slurm job `lora-suite train` uses "
            f"this machine only; run a suite with --launcher slurm, or set cluster.num_nodes=1"
        )
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("torch is missing, and training needs it: pip install 'lora-suite[all]'")
    now = datetime.now().strftime("%Y%m%d-%H%M%S")
    default = Path("results", "manual", f"{now}-{config.stem}")
    run_dir = Path(os.environ.get("LORA_SUITE_RUN_DIR") or default).absolute()
    _refuse_old_metrics(resolved, run_dir)
    run_id = os.environ.get("LORA_SUITE_RUN_ID") or f"{config.stem}-{secrets.token_hex(4)}"
    allocation, command = _start(recipe.cluster, run_id, run_dir)
    training = _Training(
        resolved=resolved,
        run_dir=run_dir,
        run_id=run_id,
        case=os.environ.get("LORA_SUITE_CASE") or config.stem,
        allocation=allocation,
        command=command,
    )
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        write_json_atomically(
            run_dir / "recipe.json",
            {
                "case": training.case,
                "run_id": training.run_id,
                "recipe_path": str(config.absolute()),
                "tree": resolved.tree,
            },
        )
    except OSError as error:
        raise ConfigError(
            f"{run_dir}: cannot be written ({error.strerror}); set LORA_SUITE_RUN_DIR"
        ) from error
    return training


def _start(cluster: Cluster, run_id: str, run_dir: Path) -> tuple[Allocation | None, list[str]]:
    """The words that start torchrun, and the allocation whose nodes it takes; see `_Training`."""
    words, allocation = site_words(), Allocation.held()
    if allocation is not None and (words is not None or cluster.num_nodes > 1):
        command = step_command(
            allocation, cluster.num_nodes, cluster.gpus_per_node, run_id, run_dir, words or []
        )
        return allocation, command
    return None, [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(cluster.gpus_per_node)),
        *("-m", "lora_suite.train", str(run_dir)),
    ]


def _end_steps(allocation: Allocation, run_id: str) -> None:
    """End what a training may have left on other nodes; how it ended is known already."""
    try:
        cancel_steps(allocation, run_id)
    except ConfigError as error:
        print(f"warning: processes may be left on {allocation.nodelist}: {error}", file=sys.stderr)


def _refuse_old_metrics(resolved: ResolvedRecipe, run_dir: Path) -> None:
    """Raise ConfigError if the run directory holds another run's metrics and this one does not go on."""
    if not RunDir(run_dir).metrics.exists():
        return
    settings = resolved.recipe.checkpointing
    folder = run_dir / settings.checkpoint_dir
    continues = settings.enabled and settings.resume and folder.is_dir() and any(folder.iterdir())
    if not continues:
        raise ConfigError(
            f"{run_dir}: holds metrics.json of another run, and there is no checkpoint to continue it from "
            f"(checkpointing.enabled and checkpointing.resume); set LORA_SUITE_RUN_DIR to a new folder"
        )


def _run(training: _Training) -> Ended:
    """Start torchrun, forward what it writes, and name how the training ended."""
    mark = secrets.token_hex(8)
    tail = bytearray()
    interrupted = False
    with stop_signals_interrupt():
        reader, writer = _channel()
        process = subprocess.Popen(
            training.command,
            env={**_environment(training), MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=writer,
            stderr=writer,
            # A session of its own: Ctrl-C reaches this process alone, which then ends the ranks in order.
            start_new_session=True,
        )
        os.close(writer)
        try:
            _forward(process, reader, tail)
            process.wait()
        except KeyboardInterrupt:
            interrupted = True
        with undisturbed():
            end_run(process, MARK, mark, grace=GRACE_SECONDS)
            if training.allocation is not None:
                _end_steps(training.allocation, training.run_id)
        os.close(reader)
    text = plain(bytes(tail))
    if interrupted:
        return Ended(
            how="interrupted", status=INTERRUPTED, message="interrupted", last_lines=last_lines(text)
        )
    if process.returncode == 0:
        return Ended(how="done", status=0)
    # torchrun ends the other ranks by SIGTERM once the first has ended.
    statuses = {rank.status for rank in rank_exits(text)} - {-signal.SIGTERM, 128 + signal.SIGTERM}
    expected = next((status for status in (CONFIGURATION, NOTHING_TO_DO) if statuses == {status}), CRASHED)
    return crash(training.run_dir, text, expected)


def _environment(training: _Training) -> dict[str, str]:
    """The ranks' environment: this one, threads that share the cores, then the recipe's own variables."""
    recipe = training.resolved.recipe
    policy = recipe.policy
    block = policy.dtensor_cfg if policy.backend == "dtensor" else policy.megatron_cfg
    threads = max(1, len(os.sched_getaffinity(0)) // recipe.cluster.gpus_per_node)
    return {"OMP_NUM_THREADS": str(threads), **os.environ, **block.env_vars}


def _channel() -> tuple[int, int]:
    """A pipe for the ranks' output, or a terminal if ours goes to one, so that progress bars are drawn."""
    if not sys.stdout.isatty():
        return os.pipe()
    reader, writer = pty.openpty()
    termios.tcsetwinsize(writer, termios.tcgetwinsize(sys.stdout.fileno()))
    return reader, writer


def _forward(process: subprocess.Popen[bytes], reader: int, tail: bytearray) -> None:
    """Pass on output as it comes, until the process has ended and no more comes, and keep its end.

    torchrun's report of failed ranks is kept and not passed on: `train` says the same in one line. A process
    that a rank left behind may hold the channel open, so its end is not waited for.
    """
    listening = True
    report = TorchrunReport()
    while True:
        ready, _, _ = select.select([reader], [], [], _SILENCE_SECONDS)
        if not ready:
            if process.poll() is not None:
                return
            continue
        chunk = _read(reader)
        if not chunk:
            return
        tail += chunk
        del tail[:-_KEPT_BYTES]
        if listening:
            try:
                sys.stdout.buffer.write(report.without(chunk))
                sys.stdout.buffer.flush()
            except BrokenPipeError:
                # Nobody reads any more (`| head`); the training goes on.
                listening = False


def _read(reader: int) -> bytes:
    """The next output, empty at its end."""
    try:
        return os.read(reader, _CHUNK)
    except OSError as error:
        # How a terminal says that nobody writes to it any more.
        if error.errno == errno.EIO:
            return b""
        raise
