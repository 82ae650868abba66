# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/lora.md have each key of the two LoRA blocks, with the default that it really has."""

from __future__ import annotations

import re

import pytest
import yaml

from lora_suite.config import load_recipe
from tests.config.helpers import ROOT, SFT

PAGE = (ROOT / "docs" / "lora.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("heading", "block"),
    [("dtensor", "dtensor_cfg"), ("Megatron", "megatron_cfg")],
    ids=["dtensor", "megatron"],
)
def test_keys_and_defaults_are_those_of_the_recipe(heading, block):
    (section,) = re.findall(rf"^## {heading}\n(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)
    told = {}
    for keys, defaults in re.findall(r"^\| (`[^|]*`) \| (`[^|]*`) \|", section, re.MULTILINE):
        names, values = (re.findall(r"`([^`]*)`", cell) for cell in (keys, defaults))
        told |= dict(zip(names, values, strict=True))
    real = load_recipe(SFT).tree["policy"][block]["lora_cfg"]
    assert {key: yaml.safe_load(value) for key, value in told.items()} == real
