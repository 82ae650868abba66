# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter, which runs kernels on a CPU; its switch must be set before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def check_in_interpreter(script: str, seconds: float = 240) -> None:
    """Run a script under the interpreter, in a process of its own; at its end it prints "equal"."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.stdout.strip() == "equal", done.stderr[-3000:]
