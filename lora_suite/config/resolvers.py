# SPDX-License-Identifier: Apache-2.0
"""Interpolation: ``${key}`` and the few functions that recipes may call in it.

``${add:a,b}``, ``${sub:a,b}``, ``${mul:a,b}``, ``${div:a,b}``, ``${max:a,b}`` compute; they are the ones that
the field's recipes use. ``${tokenizer:INIT,MODEL}`` is ``bytes`` for a random initialisation and MODEL
otherwise, so that ``policy.init=random`` alone makes a recipe free of the network.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import InterpolationKeyError, MissingMandatoryValue, OmegaConfBaseException

from lora_suite.config.errors import ConfigError

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


def resolve(
    tree: Mapping[str, Any], origins: Mapping[str, str], deleted: Mapping[str, str]
) -> dict[str, Any]:
    """Return the tree with every interpolation replaced by its value.

    Raises ConfigError naming the key, where it was set, and, if what it refers to was deleted, by what.
    """
    for name, function in _RESOLVERS.items():
        OmegaConf.register_new_resolver(name, function, replace=True)
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(dict(tree)), resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        key = error.full_key or "?"
        raise ConfigError(f"{origins.get(key, '')}: {key} is '???': it must be given a value") from error
    except OmegaConfBaseException as error:
        raise ConfigError(_explain(error, origins, deleted)) from error
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def _explain(error: OmegaConfBaseException, origins: Mapping[str, str], deleted: Mapping[str, str]) -> str:
    """Say which key could not be interpolated, and why."""
    key = str(error.full_key or "")
    reason = str(error.msg or error).strip().splitlines()[0]
    if isinstance(error, InterpolationKeyError):
        for gone, override in deleted.items():
            if f"'{gone}'" in reason or f"'{gone}." in reason:
                reason = f"it refers to {gone}, which override {override!r} deleted; set {key} as well"
    where = origins.get(key)
    return f"{where + ': ' if where else ''}{key} cannot be resolved: {reason}"
