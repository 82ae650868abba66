# SPDX-License-Identifier: Apache-2.0
"""`lora-suite explain`."""

from __future__ import annotations

from pathlib import Path

import click

from lora_suite.cli.common import leave

_FOLDER = click.Path(path_type=Path)


@click.command(short_help="Say why one run's step takes longer than another's.")
@click.argument("left", type=_FOLDER)
@click.argument("right", type=_FOLDER, required=False)
@click.option("-k", "select", metavar="EXPR", help="Case of two suite runs, or pair of one.")
@click.option("--left-trace", type=_FOLDER, help="Trace of torch's profiler for LEFT, if not in its folder.")
@click.option("--right-trace", type=_FOLDER, help="The same for RIGHT.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def explain(
    left: Path,
    right: Path | None,
    select: str | None,
    left_trace: Path | None,
    right_trace: Path | None,
    as_json: bool,
) -> None:
    """Say why RIGHT's step takes longer than LEFT's: by phase, by kernel, and what else differs.

    LEFT and RIGHT are folders of runs, or of two runs of a suite, of which -k picks a case. With one run of a
    suite -k picks a pair, whose arms are compared. Kernels need runs made with --profile, or traces.

    \b
    Examples:
      lora-suite explain results/smoke/20260301-0210*/sft-tiny-llama-1n2c-fsdp2{,-lora}/1
      lora-suite explain results/smoke/LAST_NIGHT results/smoke/TONIGHT -k fsdp2-lora
      lora-suite explain results/smoke/TONIGHT -k fsdp2
    """
    from rich.console import Console

    from lora_suite.campaign.explain import explain_paths
    from lora_suite.report.explain import render

    explanation = explain_paths(left, right, select, left_trace, right_trace)
    if as_json:
        click.echo(explanation.model_dump_json(indent=1))
    else:
        render(explanation, Console())
    leave(0)
