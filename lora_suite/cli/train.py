# SPDX-License-Identifier: Apache-2.0
"""`lora-suite train`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from lora_suite.cli.common import PROFILE, PROFILING


@click.command()
@click.option("--config", type=click.Path(path_type=Path), help="Recipe; without it, recipes/sft.yaml.")
@PROFILE
@click.argument("overrides", nargs=-1, metavar="[OVERRIDE]...")
def train(config: Path | None, profile: bool, overrides: tuple[str, ...]) -> None:
    """Train one recipe on this machine through torchrun.

    Writes to $LORA_SUITE_RUN_DIR, or to a new folder under results/manual/.

    \b
    Example:
      lora-suite train --config recipes/sft-tiny-llama-1n2c-fsdp2-lora.yaml sft.max_num_steps=5
    """
    from lora_suite.launch.training import train as launch

    sys.exit(launch(config, [*overrides, *([PROFILING] if profile else [])]))
