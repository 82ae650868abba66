# SPDX-License-Identifier: Apache-2.0
"""Which path a run took: a slow path measured, or compared with a fast one, is another program."""

from __future__ import annotations

from collections.abc import Iterable

from lora_suite.judge.block import Block
from lora_suite.judge.verdict import CheckVerdict, State
from lora_suite.launch.record import RunRecord

FAST_PATH = "fast_path"


def judge_fast_path(record: RunRecord) -> CheckVerdict:
    """The verdict on a run with `policy.require_fast_path`; MISSING where its record does not say."""
    path = record.fast_path
    state: State
    if path is None:
        state, message = "MISSING", "not in run.json"
    elif path.taken:
        state, message = "PASS", "taken"
    else:
        state, message = "FAIL", f"policy.require_fast_path is true, but it was not taken: {path.reason}"
    return CheckVerdict(kind="invariant", name=FAST_PATH, state=state, message=message)


def paths_note(blocks: Iterable[Block]) -> str | None:
    """What to say of a pair of whose arms some took the fast path and some did not; None where all agree.

    Arms whose records do not say, as of another trainer, have no part in it.
    """
    slow: dict[str, str] = {}
    fast: dict[str, None] = {}
    for block in blocks:
        for arm, run in block.arms.items():
            path = run.record.fast_path
            if path is not None and path.taken:
                fast[arm] = None
            elif path is not None:
                slow[arm] = path.reason
    if not slow or not fast:
        return None
    told = ", ".join(f"{arm} did not ({reason})" for arm, reason in slow.items())
    return f"{', '.join(fast)} took the fast path, {told}: part of what the arms differ by is the path"
