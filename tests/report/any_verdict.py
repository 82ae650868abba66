# SPDX-License-Identifier: Apache-2.0
"""Verdicts by chance: whatever the model allows and JSON can hold."""

from __future__ import annotations

import inspect
import sys

from hypothesis import strategies as st

from lora_suite.judge import verdict as model
from lora_suite.judge.verdict import Model, SuiteVerdict

_FINITE = st.floats(allow_nan=False, allow_infinity=False)
_WORDS = ("full", "lora", "train/loss", "timing/train/step_time", "ray/node.0.gpu.0.mem_gb", "optimizer")
_CHECK = 'ratio(lora["timing/train/step_time"], full["timing/train/step_time"]) < 2.0'
_TEXT = st.sampled_from([*_WORDS, _CHECK]) | st.text(max_size=12)


def any_verdict() -> st.SearchStrategy[SuiteVerdict]:
    """Suite verdicts of every shape, with texts that the code looks for among their texts."""
    st.register_type_strategy(float, _FINITE)
    st.register_type_strategy(int, st.integers(-2, 40))
    st.register_type_strategy(str, _TEXT)
    for name, part in inspect.getmembers(sys.modules[model.__name__], inspect.isclass):
        if issubclass(part, Model) and name != "Model":
            st.register_type_strategy(part, _part)
    return st.from_type(SuiteVerdict)


def _part(kind: type[Model]) -> st.SearchStrategy[Model]:
    fields = {name: st.from_type(field.annotation) for name, field in kind.model_fields.items()}
    return st.builds(kind, **fields)
