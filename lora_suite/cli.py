# SPDX-License-Identifier: Apache-2.0
"""The command line: one thin group.

Each command imports its room when it is called, so that `--help` starts fast and the light parts stay light.
"""

from __future__ import annotations

import io
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import click

from lora_suite import __version__

FINDINGS = 1
USAGE_ERROR = 2
INTERRUPTED = 130


class _Group(click.Group):
    """Ends every command in one message where it cannot go on: a configuration error, an interrupt."""

    def invoke(self, ctx: click.Context) -> Any:
        from lora_suite.config.errors import ConfigError

        _print_what_can_be_printed()
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            click.echo(f"error: {error}", err=True)
            ctx.exit(USAGE_ERROR)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(INTERRUPTED)


def _leave(code: int) -> NoReturn:
    """Exit with `code`, also where the reader of the output has gone and it cannot be flushed any more."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _print_what_can_be_printed() -> None:
    """Let a terminal that lacks a character show a question mark: a log line must not end a suite."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


# Options that several commands take.
_SELECT = click.option("-k", "select", metavar="EXPR", help="Only cases and pairs whose name matches EXPR.")
_RESULTS = click.option(
    "--results",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("results"),
    show_default=True,
    help="Folder for results.",
)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="lora-suite")
def main() -> None:
    """Tells whether LoRA fine-tuning is still right and still fast.

    \b
    Example:
      lora-suite init my-suite && cd my-suite
      lora-suite run suites/smoke.yaml
    """


@main.command()
@click.argument("suite", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[OVERRIDE]...")
@_SELECT
@click.option("--plan", "plan_only", is_flag=True, help="Print what would run and its cost; run nothing.")
@click.option("--repeats", type=click.IntRange(min=1), help="Runs of every arm, in place of the suite's.")
@_RESULTS
@click.option("--keep", is_flag=True, help="Keep checkpoints of runs that passed.")
@click.option(
    "--arm", "arms", metavar="NAME:KEY=VALUE", multiple=True, help="Override one arm. May be repeated."
)
def run(
    suite: Path,
    overrides: tuple[str, ...],
    select: str | None,
    plan_only: bool,
    repeats: int | None,
    results: Path,
    keep: bool,
    arms: tuple[str, ...],
) -> None:
    """Run SUITE: train every case in turn, judge the runs and their pairs, print and store the verdict.

    OVERRIDE is Hydra's (key=value, +new=value, ~key) and goes to every case.

    \b
    Exit: 0 all passed, 1 a check or pair failed, 2 wrong input (nothing ran),
    3 a run broke, 4 incomplete, 5 inconclusive or not comparable, 130 interrupted.

    \b
    Examples:
      lora-suite run suites/smoke.yaml
      lora-suite run suites/llama_8b_1n8g.yaml --plan
      lora-suite run suites/smoke.yaml -k fsdp2 --arm lora:debug.faults.slow_step=3.0
    """
    from lora_suite.campaign.run import Request, run_suite

    request = Request(
        suite=suite,
        overrides=overrides,
        arm_overrides=arms,
        select=select,
        repeats=repeats,
        results=results,
        keep=keep,
    )
    if plan_only:
        from lora_suite.campaign.preview import preview

        _leave(preview(request))
    _leave(run_suite(request))


@main.command()
@click.argument("suite", type=click.Path(path_type=Path))
@click.option("--repeats", type=click.IntRange(min=3), required=True, help="Runs of every case, 5 or more.")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File for the patch; else it is printed.",
)
@_SELECT
@_RESULTS
def calibrate(suite: Path, repeats: int, output: Path | None, select: str | None, results: Path) -> None:
    """Run SUITE several times, and propose limits of time and memory for this machine's GPU model.

    The proposal is a patch of the drivers, for `git apply`. Nothing is proposed from runs that broke, were
    throttled or not steady.
    Exit: 0 proposed, 1 a run is wrong, 2 wrong input, 3 a run broke, 4 incomplete, 5 refused,
    130 interrupted.

    \b
    Example:
      lora-suite calibrate suites/llama_8b_1n8g.yaml --repeats 5 --output limits.diff
      git apply limits.diff
    """
    from lora_suite.campaign.calibrate import calibrate as propose
    from lora_suite.campaign.run import Request, run_campaign

    done = run_campaign(Request(suite=suite, select=select, repeats=repeats, results=results))
    proposal = propose(done.plan, done.verdict)
    for line in proposal.lines:
        click.echo(line)
    for refusal in proposal.refusals:
        click.echo(f"refused: {refusal}", err=True)
    patch = "".join(proposal.patches)
    if output is None:
        click.echo(patch, nl=False)
    elif patch:
        _write(output, patch)
        click.echo(f"{output}: apply it with `git apply`")
    _leave(proposal.exit_code)


@main.command()
@click.option("--config", type=click.Path(path_type=Path), help="Recipe; without it, recipes/sft.yaml.")
@click.argument("overrides", nargs=-1, metavar="[OVERRIDE]...")
def train(config: Path | None, overrides: tuple[str, ...]) -> None:
    """Train one recipe on this machine through torchrun.

    Writes to $LORA_SUITE_RUN_DIR, or to a new folder under results/manual/.

    \b
    Example:
      lora-suite train --config recipes/sft-tiny-llama-1n2c-fsdp2-lora.yaml sft.max_num_steps=5
    """
    from lora_suite.launch.training import train as launch

    sys.exit(launch(config, list(overrides)))


@main.group()
def config() -> None:
    """Look at recipes.

    \b
    Example:
      lora-suite config show recipes/sft-tiny-llama-1n2c-fsdp2-lora.yaml
    """


@config.command()
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


@main.group()
def metrics() -> None:
    """Bring metrics of other trainers into the common shape.

    \b
    Example:
      lora-suite metrics import logs/tensorboard -o metrics.json
    """


@metrics.command("import")
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


@main.command()
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print findings as JSON.")
def lint(paths: tuple[Path, ...], as_json: bool) -> None:
    """Find what is wrong in recipes, drivers and suites without running them.

    PATH is a file or folder; without any, recipes/, scripts/ and suites/ here.
    Exit: 0 nothing found, 1 findings, 2 unreadable input.

    \b
    Example:
      lora-suite lint suites/smoke.yaml
    """
    from lora_suite.plan.lint import lint as find

    findings = find(paths)
    if as_json:
        click.echo(
            json.dumps([asdict(finding) | {"file": str(finding.file)} for finding in findings], indent=1)
        )
    else:
        for finding in findings:
            click.echo(finding)
    sys.exit(FINDINGS if findings else 0)


@main.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--baseline",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Findings recorded there are known: only new ones are shown and count.",
)
@click.option(
    "--write-baseline",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Record today's findings there, and exit with 0.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the audit as JSON.")
@click.option(
    "--markdown",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write every finding as Markdown, too.",
)
def audit(
    directory: Path, baseline: Path | None, write_baseline: Path | None, as_json: bool, markdown: Path | None
) -> None:
    """Find what lets a regression pass in the scripts and recipes of another repository. Nothing is run.

    DIRECTORY is a repository in the shape of NeMo-RL, with tests/test_suites/ and examples/configs/recipes/,
    or any folder of such scripts.
    Exit: 0 nothing (new) found, 1 findings, 2 unreadable input.

    \b
    Example:
      lora-suite audit ../RL --write-baseline audit.json
      lora-suite audit ../RL --baseline audit.json --markdown audit.md
    """
    from lora_suite.plan.audit import audit as look
    from lora_suite.plan.audit import baseline as known
    from lora_suite.report import audit as shown

    report = look(directory)
    compared = known.compare(baseline, report.findings) if baseline else known.Compared(report.findings, 0, 0)
    if as_json:
        click.echo(json.dumps(shown.as_json(report, compared), indent=1))
    else:
        for line in shown.text_lines(report, compared):
            click.echo(line)
    if markdown is not None:
        _write(markdown, shown.markdown(report, compared))
    if write_baseline is not None:
        known.write_baseline(write_baseline, report.findings)
    _leave(FINDINGS if compared.new and write_baseline is None else 0)


def _write(path: Path, text: str) -> None:
    """Write a file that was asked for; raises ConfigError."""
    from lora_suite.config.errors import ConfigError

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


@main.command("inspect-adapter")
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


@main.command()
@click.argument("directory", type=click.Path(path_type=Path))
def init(directory: Path) -> None:
    """Copy the starter recipes, drivers and suites into DIRECTORY.

    \b
    Example:
      lora-suite init my-suite
    """
    from lora_suite.launch.starter import init as copy

    for path in copy(directory):
        click.echo(path)
