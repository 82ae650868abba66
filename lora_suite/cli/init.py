# SPDX-License-Identifier: Apache-2.0
"""`lora-suite init`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(short_help="Copy the starter recipes, drivers and suites.")
@click.argument("directory", type=click.Path(path_type=Path))
def init(directory: Path) -> None:
    """Copy the starter recipes, drivers, suites and nightly job into DIRECTORY.

    \b
    Example:
      lora-suite init my-suite
    """
    from lora_suite.launch.starter import init as copy

    for path in copy(directory):
        click.echo(path)
    click.echo(f"next: lora-suite run {directory / 'suites' / 'smoke.yaml'}")
