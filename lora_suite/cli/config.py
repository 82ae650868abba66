# SPDX-License-Identifier: Apache-2.0
"""`lora-suite config`."""

from __future__ import annotations

from pathlib import Path

import click


@click.group()
def config() -> None:
    """Look at recipes.

    \b
    Example:
      lora-suite config show recipes/sft-tiny-llama-1n2c-fsdp2-lora.yaml
    """


@config.command(short_help="Print a recipe: inherited, overridden, checked.")
@click.argument("recipe", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[OVERRIDE]...")
@click.option("--origin", is_flag=True, help="Name the file and line that set each key.")
def show(recipe: Path, overrides: tuple[str, ...], origin: bool) -> None:
    """Print RECIPE as it resolves: inherited, overridden, interpolated, checked.

    \b
    Example:
      lora-suite config show recipes/sft-tiny-llama-1n2c-fsdp2.yaml ~policy.tokenizer.chat_template
    """
    from lora_suite.config import show as render

    click.echo(render(recipe, list(overrides), origin).rstrip("\n"))
