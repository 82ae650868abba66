# SPDX-License-Identifier: Apache-2.0
"""Verdicts by chance: whatever the model allows and JSON can hold."""

from __future__ import annotations

from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from hypothesis import strategies as st

from lora_suite.judge.verdict import Model, SuiteVerdict

_WORDS = ("full", "lora", "train/loss", "timing/train/step_time", "ray/node.0.gpu.0.mem_gb", "optimizer")
_CHECK = 'ratio(lora["timing/train/step_time"], full["timing/train/step_time"]) < 2.0'
_PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    str: st.sampled_from([*_WORDS, _CHECK]) | st.text(max_size=8),
    int: st.integers(-2, 40),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
    NoneType: st.none(),
}
_MOST_ITEMS = 4


def any_verdict() -> st.SearchStrategy[SuiteVerdict]:
    """Suite verdicts of every shape, with texts that the code looks for among their texts."""
    return _values(SuiteVerdict)


@cache
def _values(kind: Any) -> st.SearchStrategy[Any]:
    """Values that a field of this type may have."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind in _PLAIN:
        return _PLAIN[kind]
    if origin is Literal:
        return st.sampled_from(inner)
    if origin in (Union, UnionType):
        return st.one_of(*map(_values, inner))
    if origin is list:
        return st.lists(_values(inner[0]), max_size=_MOST_ITEMS)
    if origin is dict:
        return st.dictionaries(*map(_values, inner), max_size=_MOST_ITEMS)
    assert issubclass(kind, Model), kind
    return st.builds(kind, **{name: _values(field.annotation) for name, field in kind.model_fields.items()})
