# SPDX-License-Identifier: Apache-2.0
"""The command `check_metrics METRICS.json CHECK…`.

Exit status: 0 all checks hold; 1 one does not, or the data to decide it is missing; 2 the call, a file or an
expression is not usable; 130 interrupted.
"""

import io
import keyword
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TextIO

import click

from check_metrics.errors import ExpressionError, MetricsError
from check_metrics.language import CALLABLE, parse
from check_metrics.loading import STDIN, Metrics, open_metrics, read_text, run_segments
from check_metrics.series import matches
from check_metrics.syntax import Expression
from check_metrics.text import printable
from check_metrics.verdict import CheckResult, evaluate, require_arms

DATA = "data"
RUN_JSON = "run.json"
USAGE = 2
INTERRUPTED = 130

_EPILOG = """\b
Examples:
  check_metrics metrics.json 'data["train/loss"]["50"] < 0.8'
  check_metrics metrics.json 'mean(data["timing/train/step_time"], 2) < 30' \\
      'worst("ray/node.*.gpu.*.mem_gb") < 60'
  check_metrics lora.json --name lora --arm full=full.json \\
      'ratio(lora["timing/train/step_time"], full["timing/train/step_time"]) < 0.8'
  check_metrics metrics.json --checks-file limits.txt --junit junit.xml --warmup 2
"""
_STEP = re.compile("[1-9][0-9]{0,14}")
_PATH = click.Path(path_type=Path)


@click.command(epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True))
@click.argument("checks", nargs=-1, metavar="[CHECK]...")
@click.option(
    "--checks-file",
    "checks_files",
    type=_PATH,
    multiple=True,
    metavar="FILE",
    help="More checks, one a line; blank lines and # comments are skipped.",
)
@click.option("--name", metavar="NAME", help="A name for FILE's series in checks, beside data.")
@click.option("--arm", "arms", multiple=True, metavar="NAME=FILE", help="Another run, read as NAME[…].")
@click.option("--jq", "jq_filter", metavar="FILTER", help="Pass each file through this jq filter first.")
@click.option("--segments", metavar="1,31", help="First step of the run and of each resume.")
@click.option(
    "--warmup",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Leave out the first N steps of each segment.",
)
@click.option(
    "--run-json",
    type=_PATH,
    metavar="FILE",
    help="Where the segments are written. [default: run.json beside each metrics file, if there]",
)
@click.option(
    "--allow-nonfinite",
    multiple=True,
    metavar="NAME",
    help="Leave out null, NaN and infinities of this metric (or glob) instead of failing.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON in place of the table.")
@click.option("--record", type=_PATH, metavar="FILE", help="Also write what --json prints.")
@click.option("--junit", type=_PATH, metavar="FILE", help="Also write JUnit XML.")
@click.option("--github", is_flag=True, help="Also print GitHub annotations.")
def command(
    file: Path,
    checks: tuple[str, ...],
    checks_files: tuple[Path, ...],
    name: str | None,
    arms: tuple[str, ...],
    jq_filter: str | None,
    segments: str | None,
    warmup: int,
    run_json: Path | None,
    allow_nonfinite: tuple[str, ...],
    as_json: bool,
    record: Path | None,
    junit: Path | None,
    github: bool,
) -> int:
    """Check thresholds on the metrics of a training run.

    FILE holds {"metric": {"step": value}}; - reads standard input. A CHECK compares functions of series,
    which are read as data["metric"].

    Exit status: 0 every check holds, 1 one fails or its data is missing, 2 the input is not usable.
    """
    expressions = _expressions(checks, checks_files)
    files = _files(file, name, arms)
    for expression in expressions:
        require_arms(expression, files)
    metrics = _open(files, jq_filter)
    known = _segments(segments, run_json, files)
    _convert(metrics, expressions)
    results = [
        evaluate(expression, metrics, segments=known, warmup=warmup, allow_nonfinite=allow_nonfinite)
        for expression in expressions
    ]
    _report(results, str(file), as_json=as_json, record=record, junit=junit, github=github)
    return 0 if all(result.status == "PASS" for result in results) else 1


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command and leave with its exit status; bad input is one message, never a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        status = command.main(args=args, prog_name="check_metrics", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        status = error.exit_code
    except (MetricsError, ExpressionError) as error:
        click.echo(f"Error: {printable(str(error))}", err=True)
        status = USAGE
    except click.Abort:
        click.echo("interrupted", err=True)
        status = INTERRUPTED
    sys.exit(status)


def _expressions(checks: Sequence[str], files: Sequence[Path]) -> list[Expression]:
    """Every check parsed; one UsageError that lists all the unreadable ones."""
    listed = [("", check) for check in checks]
    for path in files:
        listed += _checks_of(path)
    if not listed:
        raise click.UsageError("no check given; write one behind FILE or name a --checks-file")
    expressions: list[Expression] = []
    errors: list[str] = []
    for place, check in listed:
        try:
            expressions.append(parse(check))
        except ExpressionError as error:
            errors.append(place + printable(str(error)))
    if errors:
        raise click.UsageError("\n".join(errors))
    return expressions


def _checks_of(path: Path) -> list[tuple[str, str]]:
    lines = read_text(path, "a file of checks").splitlines()
    return [
        (f"{path}, line {number}: ", line.strip())
        for number, line in enumerate(lines, start=1)
        if line.strip() and not line.strip().startswith("#")
    ]


def _files(file: Path, name: str | None, arms: Sequence[str]) -> dict[str, Path]:
    """File of each arm; FILE is `data`, and `name` too."""
    files = {DATA: file}
    if name is not None:
        _require_name(name, ())
        files[name] = file
    inputs = [file]
    for given in arms:
        arm, separator, path = given.partition("=")
        if not separator or not path:
            raise click.UsageError(f"--arm {given!r}: write NAME=FILE, for example full=full/metrics.json")
        _require_name(arm, files)
        files[arm] = Path(path)
        inputs.append(files[arm])
    if inputs.count(STDIN) > 1:
        raise click.UsageError("standard input (-) can be read once; give the other runs as files")
    return files


def _require_name(arm: str, taken: Collection[str]) -> None:
    if not arm.isidentifier() or keyword.iskeyword(arm) or arm in CALLABLE:
        raise click.UsageError(f"{arm!r} cannot name a run; take letters and digits, no function's name")
    if arm in taken:
        raise click.UsageError(f"two runs are named {arm!r}; name each run once")


def _segments(given: str | None, run_json: Path | None, files: Mapping[str, Path]) -> tuple[int, ...]:
    """Starts of segments: as given, or of the run.json named, or of those beside the files (of all arms)."""
    if given is not None:
        parts = given.split(",")
        if not all(_STEP.fullmatch(part.strip()) for part in parts):
            raise click.UsageError(f"--segments {given!r}: write steps from 1 on, for example 1,31")
        return tuple(sorted({int(part) for part in parts}))
    if run_json is not None:
        return run_segments(run_json)
    beside = {path.parent / RUN_JSON for path in files.values() if path != STDIN}
    return tuple(sorted({step for path in beside if path.exists() for step in run_segments(path)}))


def _open(files: Mapping[str, Path], jq_filter: str | None) -> dict[str, Metrics]:
    """Metrics of each arm; two names of one file share what is read."""
    opened: dict[Path, Metrics] = {}
    for path in files.values():
        if path not in opened:
            opened[path] = open_metrics(path, jq_filter)
    return {arm: opened[path] for arm, path in files.items()}


def _convert(metrics: Mapping[str, Metrics], expressions: Sequence[Expression]) -> None:
    """Convert what the checks read, so that a malformed series is an unusable file and not a failed check."""
    for arm, pattern in {read for expression in expressions for read in expression.metrics}:
        for name in metrics[arm]:
            if matches(name, pattern):
                metrics[arm][name]


def _report(
    results: Sequence[CheckResult],
    source: str,
    *,
    as_json: bool,
    record: Path | None,
    junit: Path | None,
    github: bool,
) -> None:
    from check_metrics import render

    document = render.json_text(results, source) if as_json or record is not None else ""
    if record is not None:
        _write(record, f"{document}\n".encode(), "file for the record")
    if junit is not None:
        _write(junit, render.junit_bytes(results, source), "JUnit file")
    _print(document if as_json else render.table_text(results), sys.stdout)
    if github:
        # The runner reads both streams; standard output stays one JSON document under --json.
        lines = "\n".join(render.github_lines(results))
        _print(lines, sys.stderr if as_json else sys.stdout)


def _write(path: Path, content: bytes, what: str) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise MetricsError(f"{path}: {error.strerror}; name a {what} that can be written") from None


def _print(text: str, stream: TextIO) -> None:
    """Write a text; a reader that has gone away (`| head`) doesn't change the verdict."""
    try:
        stream.write(text.rstrip("\n") + "\n" if text else "")
        stream.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except OSError as error:
        raise MetricsError(f"the output cannot be written: {error.strerror}") from None
