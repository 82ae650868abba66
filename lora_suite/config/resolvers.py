# SPDX-License-Identifier: Apache-2.0
"""Interpolation: ``${key}`` and the few functions that recipes may call in it.

``${add:a,b}``, ``${sub:a,b}``, ``${mul:a,b}``, ``${div:a,b}``, ``${max:a,b}`` compute; they are the ones that
the field's recipes use. ``${tokenizer:INIT,MODEL}`` is ``bytes`` for a random initialisation and MODEL
otherwise, so that ``policy.init=random`` alone makes a recipe free of the network.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, MissingMandatoryValue, OmegaConfBaseException

BYTES_TOKENIZER = "bytes"


def _numbers(name: str, *values: Any) -> None:
    """Refuse anything but numbers, as a text times two is a longer text."""
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name} takes numbers, not {value!r}")


def _add(a: Any, b: Any) -> Any:
    _numbers("add", a, b)
    return a + b


def _sub(a: Any, b: Any) -> Any:
    _numbers("sub", a, b)
    return a - b


def _mul(a: Any, b: Any) -> Any:
    _numbers("mul", a, b)
    return a * b


def _div(a: Any, b: Any) -> Any:
    """Divide; whole numbers that divide exactly stay whole, so that the result fits a key that counts."""
    _numbers("div", a, b)
    if b == 0:
        raise ValueError("div by zero")
    return a // b if isinstance(a, int) and isinstance(b, int) and a % b == 0 else a / b


def _max(a: Any, b: Any) -> Any:
    _numbers("max", a, b)
    return max(a, b)


def _tokenizer(init: Any, model: Any) -> Any:
    return BYTES_TOKENIZER if init == "random" else model


_RESOLVERS = {"add": _add, "sub": _sub, "mul": _mul, "div": _div, "max": _max, "tokenizer": _tokenizer}


def resolve(config: DictConfig, deleted: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return plain values with interpolations replaced by what they mean, and why some could not be.

    deleted: keys that overrides deleted, with the override. The second result maps each key without a value
    to its reason; such keys are missing in the first.
    """
    for name, function in _RESOLVERS.items():
        OmegaConf.register_new_resolver(name, function, replace=True)
    failures: dict[str, str] = {}
    return _resolve_block(config, "", failures, deleted), failures


def _resolve_block(
    block: DictConfig, prefix: str, failures: dict[str, str], deleted: Mapping[str, str]
) -> dict[str, Any]:
    """Resolve one block and those below it; note what fails and go on."""
    resolved: dict[str, Any] = {}
    for name in block:
        key = prefix + str(name)
        try:
            value = block[name]
            if isinstance(value, DictConfig):
                resolved[str(name)] = _resolve_block(value, f"{key}.", failures, deleted)
            else:
                is_list = isinstance(value, ListConfig)
                resolved[str(name)] = OmegaConf.to_container(value, resolve=True) if is_list else value
        except MissingMandatoryValue:
            failures[key] = f"{key} is '???': it must be given a value"
        except OmegaConfBaseException as error:
            failures[key] = _explain(key, error, deleted)
    return resolved


def _explain(key: str, error: OmegaConfBaseException, deleted: Mapping[str, str]) -> str:
    """Say why a key cannot be resolved; if what it refers to was deleted, by which override."""
    reason = str(error.msg or error).strip().splitlines()[0]
    if isinstance(error, InterpolationKeyError):
        for gone, override in deleted.items():
            if f"'{gone}'" in reason or f"'{gone}." in reason:
                reason = f"it refers to {gone}, which override {override!r} deleted; set {key} as well"
    return f"{key} cannot be resolved: {reason}"
