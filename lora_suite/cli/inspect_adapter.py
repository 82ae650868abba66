# SPDX-License-Identifier: Apache-2.0
"""`lora-suite inspect-adapter`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import click

from lora_suite.cli.common import FINDINGS


@click.command("inspect-adapter", short_help="Show what an adapter folder holds, and what is wrong.")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
def inspect_adapter(directory: Path, as_json: bool) -> None:
    """Show what an adapter folder holds, and what is wrong with it.

    DIRECTORY is a folder of PEFT, a distributed checkpoint of torch (its metadata is a pickle: read only what
    you trust), or a checkpoint of `lora-suite train`.
    Exit: 0 nothing is wrong, 1 defects, 2 unreadable.

    \b
    Example:
      lora-suite inspect-adapter results/adapter --json
    """
    from importlib.util import find_spec

    from lora_suite.config.errors import ConfigError

    if find_spec("torch") is None:
        raise ConfigError("adapters are read with torch, which is missing: pip install 'lora-suite[train]'")
    from lora_suite.train.lora.adapter_files import read_adapter
    from lora_suite.train.lora.inspection import inspect, inspection_lines

    found = inspect(read_adapter(directory))
    if as_json:
        click.echo(json.dumps(asdict(found), indent=1))
    else:
        for line in inspection_lines(found):
            click.echo(line)
    sys.exit(FINDINGS if found.defects else 0)
