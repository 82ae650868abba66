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
from lora_suite.train.program import Program

CRASHED, CONFIGURATION = 1, 2


def main(run_dir: Path) -> NoReturn:
    """Train, and leave with the exit status.

    0: trained. 1: crashed. 2: the recipe or its data are wrong. 4: a resumed training was already at its end.
    A failure leaves failure.RANK.json. The process ends at once, without Python's tear-down: a failed rank
    would wait there for peers that wait for it.
    """
    signal.signal(signal.SIGTERM, _leave_orderly)
    program = Program(run_dir)
    try:
        status = program.run()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        status = _failed(program, error, CONFIGURATION)
    except Exception as error:
        traceback.print_exc()
        status = _failed(program, error, CRASHED)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _failed(program: Program, error: Exception, status: int) -> int:
    text = str(error).strip() or "no message"
    message = text.splitlines()[0] if not isinstance(error, ConfigError) else text
    kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
    failure = Failure(int(os.environ.get("RANK", "0")), program.step, kind + message, time.time())
    failure.write(program.run_dir)
    return status


def _leave_orderly(number: int, frame: FrameType | None) -> NoReturn:
    """Let `finally` blocks run, so that what was measured is kept."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
