# SPDX-License-Identifier: Apache-2.0
"""A trace as bytes: where its steps are evenly spaced, four bytes a value and eight in all for the steps.

Layout, little endian: first step and stride as 32-bit integers, then the values as 32-bit floats. A stride of
0 says that the steps are not even: a count follows, then as many steps, then the values.
"""

from __future__ import annotations

import struct

from lora_suite.history.facts import Trace


def pack(trace: Trace) -> bytes:
    """The bytes of a trace of at least one step."""
    steps, count = trace.steps, len(trace.steps)
    stride = steps[1] - steps[0] if count > 1 else 1
    values = struct.pack(f"<{count}f", *trace.values)
    if steps == list(range(steps[0], steps[0] + stride * count, stride)):
        return struct.pack("<ii", steps[0], stride) + values
    return struct.pack(f"<iii{count}i", steps[0], 0, count, *steps) + values


def unpack(data: bytes) -> Trace:
    """The trace of some bytes."""
    first, stride = struct.unpack_from("<ii", data)
    if stride:
        count = (len(data) - 8) // 4
        steps = list(range(first, first + stride * count, stride))
    else:
        (count,) = struct.unpack_from("<i", data, 8)
        steps = list(struct.unpack_from(f"<{count}i", data, 12))
    values = struct.unpack_from(f"<{count}f", data, len(data) - 4 * count)
    return Trace(steps=steps, values=list(values))
