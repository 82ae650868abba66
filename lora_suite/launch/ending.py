# SPDX-License-Identifier: Apache-2.0
"""Names how a run ended: from what its ranks wrote, from torchrun's summary, from its log."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from lora_suite.config.tree import recipe_hash
from lora_suite.launch.failure import first_failure
from lora_suite.launch.progress import Progress
from lora_suite.launch.record import Ended, RunDir, RunRecord

LAST_LINES = 20
_TAIL_BYTES = 65536
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|out of memory|Cannot allocate memory|can't allocate memory|MemoryError"
)
# torchrun's summary of failed ranks, one block a rank (torch/distributed/elastic/multiprocessing/errors).
_RANK_EXIT = re.compile(r"rank\s*: (\d+) \(local_rank: \d+\)\s*\n\s*exitcode\s*: (-?\d+)")
_ELASTIC = re.compile(r"^[IWEF]\d{4} .*torch/distributed/(elastic|run)")
_MAYBE_ELASTIC = re.compile(rb"[IWEF](\d|$)")


class TorchrunReport:
    """Takes torchrun's report of failed ranks out of a stream of output, and lets the rest through at once.

    What torchrun logs begins a line with a severity and a date; with its error that a rank failed begins a
    report, a traceback of torchrun's own, after which the training writes nothing any more.
    """

    def __init__(self) -> None:
        self._begun = b""
        self._reporting = False

    def without(self, chunk: bytes) -> bytes:
        """What of a chunk is to be shown; a line that may become torchrun's is held until it is whole."""
        lines = (self._begun + chunk).splitlines(keepends=True)
        self._begun = b""
        shown = []
        for line in lines:
            if self._reporting:
                break
            if _MAYBE_ELASTIC.match(line) and not line.endswith(b"\n"):
                self._begun = line
            elif not _ELASTIC.match(line.decode("utf-8", errors="replace")):
                shown.append(line)
            else:
                self._reporting = line.startswith(b"E")
        return b"".join(shown)


@dataclass(frozen=True)
class RankExit:
    """A rank's exit status as torchrun reports it; negative for a signal."""

    rank: int
    status: int


def read_tail(path: Path) -> str:
    """Return the end of a log as plain text; empty if there is no log."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return plain(stream.read())
    except OSError:
        return ""


def plain(output: bytes) -> str:
    """Return terminal output as text: no colours, and of a redrawn line what it said last."""
    text = _ESCAPES.sub("", output.decode("utf-8", errors="replace")).replace("\r\n", "\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))


def last_lines(text: str, count: int = LAST_LINES) -> list[str]:
    """Return the last lines that a training itself wrote: torchrun's report of its ranks' end is left out."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    ends = [at for at, line in enumerate(lines) if _ELASTIC.match(line)]
    own = lines[: ends[0]] if ends else lines
    return (own or lines)[-count:]


def rank_exits(text: str) -> list[RankExit]:
    """Return the failed ranks that torchrun's summary names; empty if there is no summary."""
    return [RankExit(int(rank), int(status)) for rank, status in _RANK_EXIT.findall(text)]


def crash(run_dir: Path, text: str, status: int) -> Ended:
    """Name the crash of a training that ended with `status` and wrote `text`.

    A rank that a signal ended explains the errors of the others (a closed connection), so it comes first;
    then the earliest error that a rank wrote down.
    """
    exits = rank_exits(text)
    killed = next((exit for exit in exits if exit.status < 0 and -exit.status != signal.SIGTERM), None)
    failure = first_failure(run_dir)
    lines = last_lines(text)
    how: Literal["killed", "oom", "failed"]
    rank: int | None
    if killed is not None:
        how, rank, step, message = "killed", killed.rank, _step_in_progress(run_dir), _killed_message(killed)
    elif failure is not None:
        rank, step, message = failure.rank, failure.step, failure.message
        how = "oom" if _OUT_OF_MEMORY.search(message) else "failed"
    else:
        rank, step = (exits[-1].rank if exits else None), _step_in_progress(run_dir)
        message = lines[-1] if lines else f"ended with status {status} and wrote nothing"
        how = "oom" if _OUT_OF_MEMORY.search("\n".join(lines)) else "failed"
    return Ended(how=how, status=status, rank=rank, step=step, message=message, last_lines=lines)


def by_signal(ended: Ended, what: str) -> Ended:
    """`ended`, as killed if its status says that a signal ended `what` and nothing else explains the end."""
    if ended.how != "failed" or ended.status <= 128:
        return ended
    message = f"{what} was ended by signal {ended.status - 128}"
    return ended.model_copy(update={"how": "killed", "message": message})


def record_end(run_dir: Path, ended: Ended, *, run_id: str, case: str, tree: dict[str, Any]) -> None:
    """Add how the run ended to its run.json; write a minimal record if this run has not written one."""
    path = RunDir(run_dir).record
    record = read_record(run_dir, run_id)
    if record is None:
        record = RunRecord(
            run_id=run_id,
            case=case,
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            recipe=tree,
            recipe_hash=recipe_hash(tree),
        )
    record.model_copy(update={"ended": ended}).write(path)


def read_record(run_dir: Path, run_id: str) -> RunRecord | None:
    """Return the run's record, None if there is none of this run."""
    try:
        record = RunRecord.read(RunDir(run_dir).record)
    except (OSError, ValidationError):
        return None
    return record if record.run_id == run_id else None


def _step_in_progress(run_dir: Path) -> int | None:
    """The step that the training was in, None if it had not begun to step or had done them all."""
    progress = Progress.read(run_dir)
    if progress is None or progress.step >= progress.steps:
        return None
    return progress.step + 1


def _killed_message(killed: RankExit) -> str:
    """Which signal ended the rank, and who usually sends it."""
    try:
        name = signal.Signals(-killed.status).name
    except ValueError:
        name = f"signal {-killed.status}"
    hint = " (the kernel sends it when memory runs out)" if name == "SIGKILL" else ""
    return f"ended by {name}{hint}"
