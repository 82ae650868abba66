# SPDX-License-Identifier: Apache-2.0
"""`lora-suite adapter`: adapters to files that other libraries read, and into weights."""

from __future__ import annotations

from pathlib import Path

import click

_SOURCE = click.argument("source", type=click.Path(path_type=Path))
_OUTPUT = click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, help="New folder to write."
)


@click.group()
def adapter() -> None:
    """Export a trained adapter, or merge it into its base.

    \b
    Example:
      lora-suite adapter export results/manual/run/ckpts/step_50 -o adapter
    """


@adapter.command()
@_SOURCE
@_OUTPUT
@click.option("--base", help="Name or folder of the base model, for PEFT to find; default: the recipe's.")
def export(source: Path, output: Path, base: str | None) -> None:
    """Write the adapters of a checkpoint in PEFT's format.

    SOURCE is a checkpoint of `lora-suite train` (a step_N folder), of any layout, or another adapter folder.
    `PeftModel.from_pretrained` loads what is written; factors are the float32 masters.

    \b
    Example:
      lora-suite adapter export results/manual/run/ckpts/step_50 -o adapter
    """
    _check(output)
    from lora_suite.train.lora.adapter_files import read_adapter
    from lora_suite.train.lora.export import export_adapter

    count = export_adapter(read_adapter(source), output, base)
    click.echo(f"{output}: {count} adapters")


@adapter.command()
@_SOURCE
@_OUTPUT
@click.option("--base", required=True, help="Name or folder of the pretrained model that was adapted.")
def merge(source: Path, output: Path, base: str) -> None:
    """Add an adapter into the weights of its base and write the model.

    SOURCE is an adapter folder of PEFT or a checkpoint of `lora-suite train`. Sums are made in float32 and
    rounded to the base's dtype.

    \b
    Example:
      lora-suite adapter merge adapter --base meta-llama/Llama-3.2-1B -o merged
    """
    _check(output)
    from lora_suite.train.lora.adapter_files import read_adapter
    from lora_suite.train.lora.merge import merge_adapter

    count = merge_adapter(read_adapter(source), base, output)
    click.echo(f"{output}: {count} adapters merged")


def _check(output: Path) -> None:
    """Refuse to write over what is there, and to begin without torch; raises ConfigError."""
    from importlib.util import find_spec

    from lora_suite.config.errors import ConfigError

    if find_spec("torch") is None:
        raise ConfigError("adapters are read with torch, which is missing: pip install 'lora-suite[train]'")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"{output}: is there already; name a new folder")
