# SPDX-License-Identifier: Apache-2.0
"""Ends everything that a run started, and nothing else.

torch elastic starts every rank in a session of its own, so ending the launcher's process group is not enough:
ranks outlive it. A run therefore marks its environment, which every descendant inherits unless it clears it,
and what carries the mark is ended. Processes are never chosen by name.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

_POLL_SECONDS = 0.05


def marked(variable: str, value: str) -> list[int]:
    """Return the ids of living processes that were started with ``variable=value``, without this process.

    Reads ``/proc``: only processes of this machine and this user are seen.
    """
    found = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in found if pid != os.getpid() and _carries(pid, variable, value)]


def end_run(
    leader: subprocess.Popen[bytes], variable: str, value: str, *, grace: float, limit: float = 10.0
) -> list[int]:
    """End a run: SIGTERM to the leader's group and all marked processes, SIGKILL to what lives after `grace`.

    leader: first process of the run, which leads its own group. grace, limit: seconds from now; nothing is
    waited for beyond `limit`. Returns the ids of processes that still live then (stuck in the kernel),
    normally none.
    """
    start = time.monotonic()
    _signal_group(leader, signal.SIGTERM)
    for pid in marked(variable, value):
        _signal_marked(pid, variable, value, signal.SIGTERM)
    while time.monotonic() - start < limit:
        # poll() reaps the leader, which would otherwise stay as a zombie in its group.
        left = marked(variable, value)
        if leader.poll() is not None and not left:
            return []
        if time.monotonic() - start > grace:
            _signal_group(leader, signal.SIGKILL)
            for pid in left:
                _signal_marked(pid, variable, value, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
    return marked(variable, value)


@contextlib.contextmanager
def stop_signals_interrupt() -> Iterator[None]:
    """Within the block SIGTERM and SIGHUP raise KeyboardInterrupt, as SIGINT does: a cancelled job cleans up
    too.

    Outside the main thread, where Python delivers no signals, this changes nothing.
    """
    with _handling((signal.SIGTERM, signal.SIGHUP), _interrupt):
        yield


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Within the block SIGINT, SIGTERM and SIGHUP are ignored: a second Ctrl-C can't stop a clean-up."""
    with _handling((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), signal.SIG_IGN):
        yield


@contextlib.contextmanager
def _handling(signals: tuple[signal.Signals, ...], handler: signal._HANDLER) -> Iterator[None]:
    """Handle the signals by `handler` within the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Signal handler: what Ctrl-C does."""
    raise KeyboardInterrupt


def _carries(pid: int, variable: str, value: str) -> bool:
    """Whether a process was started with the variable; false once it is gone or a zombie."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return f"{variable}={value}".encode() in environment.split(b"\0")


def _signal_marked(pid: int, variable: str, value: str, number: signal.Signals) -> None:
    """Signal a process if it still is the marked one: its id may meanwhile belong to another."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        handle = os.pidfd_open(pid)
        try:
            if _carries(pid, variable, value):
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)


def _signal_group(leader: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal the group that `leader` leads, unless it is reaped: its id might then be another's."""
    if leader.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader.pid, number)
