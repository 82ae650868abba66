# SPDX-License-Identifier: Apache-2.0
"""`lora-suite metrics`."""

from __future__ import annotations

from pathlib import Path

import click


@click.group()
def metrics() -> None:
    """Bring metrics of other trainers into the common shape.

    \b
    Example:
      lora-suite metrics import logs/tensorboard -o metrics.json
    """


@metrics.command("import", short_help="Write metrics as {metric: {step: value}}.")
@click.argument("source", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="File to write.")
@click.option(
    "--format",
    "format_",
    type=click.Choice(["auto", "tensorboard", "megatron-golden", "jsonl", "trainer-state"]),
    default="auto",
    show_default=True,
    help="What SOURCE is; auto tells by its content.",
)
@click.option("--step-key", metavar="KEY", help="Key of the step in a JSONL line.")
@click.option("--strict", is_flag=True, help="Refuse two different values for one step.")
def import_(source: Path, output: Path, format_: str, step_key: str | None, strict: bool) -> None:
    """Write the metrics of SOURCE as {metric: {step: value}}, which check_metrics reads.

    SOURCE is a folder of TensorBoard event files, a log of one JSON object a line, golden values of
    Megatron-LM, or a trainer_state.json of transformers.

    \b
    Examples:
      lora-suite metrics import logs/tensorboard -o metrics.json
      lora-suite metrics import train.jsonl --step-key _step --strict -o metrics.json
    """
    from lora_suite.launch.importers import import_to_file

    imported = import_to_file(source, output, format_, strict, step_key)
    for warning in imported.warnings:
        click.echo(f"warning: {warning}", err=True)
    if len(imported.segments) > 1:
        segments = ",".join(map(str, imported.segments))
        click.echo(f"The training was resumed: check_metrics {output} --segments {segments}", err=True)
    click.echo(f"{output}: {len(imported.metrics)} metrics")
