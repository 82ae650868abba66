# SPDX-License-Identifier: Apache-2.0
"""The command line: one thin group, a module a command.

Each command imports its room when it is called, so that `--help` starts fast and the light parts stay light.
"""

from __future__ import annotations

import io
import sys
from typing import Any

import click

from lora_suite import __version__
from lora_suite.cli.ack import ack
from lora_suite.cli.adapter import adapter
from lora_suite.cli.attach import attach
from lora_suite.cli.audit import audit
from lora_suite.cli.baseline import baseline
from lora_suite.cli.bisect import bisect
from lora_suite.cli.calibrate import calibrate
from lora_suite.cli.cancel import cancel
from lora_suite.cli.common import INTERRUPTED, USAGE_ERROR
from lora_suite.cli.compare import compare
from lora_suite.cli.config import config
from lora_suite.cli.doctor import doctor
from lora_suite.cli.explain import explain
from lora_suite.cli.history import history
from lora_suite.cli.init import init
from lora_suite.cli.inspect_adapter import inspect_adapter
from lora_suite.cli.lint import lint
from lora_suite.cli.metrics import metrics
from lora_suite.cli.nightly import nightly
from lora_suite.cli.report import report
from lora_suite.cli.run import run
from lora_suite.cli.selftest import selftest
from lora_suite.cli.train import train
from lora_suite.cli.trend import trend


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


def _print_what_can_be_printed() -> None:
    """Let a terminal that lacks a character show a question mark: a log line must not end a suite."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="lora-suite")
def main() -> None:
    """Tells whether LoRA fine-tuning is still right and still fast.

    \b
    Example:
      lora-suite init my-suite && cd my-suite
      lora-suite run suites/smoke.yaml
    """


for _command in (
    adapter,
    ack,
    attach,
    audit,
    baseline,
    bisect,
    calibrate,
    cancel,
    compare,
    config,
    doctor,
    explain,
    history,
    init,
    inspect_adapter,
    lint,
    metrics,
    nightly,
    report,
    run,
    selftest,
    train,
    trend,
):
    main.add_command(_command)
