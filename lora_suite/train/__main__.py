# SPDX-License-Identifier: Apache-2.0
"""``python -m lora_suite.train RUN_DIR``: one rank of one training, started by torchrun."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import NoReturn

from lora_suite.config import ConfigError
from lora_suite.launch.failure import Failure
from lora_suite.train.out_of_memory import ran_out_of_memory
from lora_suite.train.program import Program

CRASHED, CONFIGURATION = 1, 2


def main(run_dir: Path) -> NoReturn:
    """Train, and leave with the exit status.

    0: trained. 1: crashed. 2: the recipe or its data are wrong. 4: a resumed training was already at its end.
    143: told to stop. A failure leaves failure.RANK.json, and where memory ran out it says what was held and
    what to change. The process ends at once, without Python's tear-down: a failed rank would wait there for
    peers that wait for it.
    """
    signal.signal(signal.SIGTERM, _leave_orderly)
    program = Program(run_dir)
    try:
        status = program.run()
    except SystemExit as stop:
        status = int(stop.code or 0)
    except ConfigError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        status = _failed(program, str(error), CONFIGURATION)
    except Exception as error:
        traceback.print_exc()
        said = program.explain_memory() if ran_out_of_memory(error) else ""
        status = _failed(program, "; ".join(filter(None, (_one_line(error), said))), CRASHED)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _failed(program: Program, message: str, status: int) -> int:
    """Leave this rank's last words; return the exit status."""
    rank = int(os.environ.get("RANK", "0"))
    Failure(rank, program.step, message, time.time()).write(program.run_dir)
    return status


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0]}"


def _leave_orderly(number: int, frame: FrameType | None) -> NoReturn:
    """Let `finally` blocks run, so that what was measured is kept.

    Launcher and torchrun both send the signal; a second one must not cut these blocks short.
    """
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
