# SPDX-License-Identifier: Apache-2.0
"""The order in which a pair's arms run, so that a drifting machine does not favour one of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def interleave(arms: Sequence[str], repeats: int, first: int = 1) -> Iterator[tuple[int, str]]:
    """Yield ``(repeat, arm)`` in ABBA BAAB order: repeats `first` to ``first + repeats - 1``, all arms in
    each.

    A repeat runs the arms forwards or backwards; which of the two follows the Thue-Morse sequence. Over every
    4 repeats of two arms both arms then have the same mean position and the same mean squared position, so
    that a linear drift of the machine cancels after 2 repeats, a quadratic one after 4 (E. F. Thue; see
    https://oeis.org/A010060). With `first` a caller continues a sequence that it began.
    """
    for repeat in range(first, first + repeats):
        backwards = (repeat - 1).bit_count() % 2 == 1
        for arm in reversed(arms) if backwards else arms:
            yield repeat, arm
