# SPDX-License-Identifier: Apache-2.0
"""Whether a run that must take its backend's fast path did: a slow path measured would be another program."""

from __future__ import annotations

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
