# SPDX-License-Identifier: Apache-2.0
"""What a driver declares, found by running it in plan mode, where it starts nothing."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from datetime import date
from functools import lru_cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from lora_suite.config.errors import ConfigError
from lora_suite.plan.model import DeclaredCheck, Waiver

TIMEOUT_SECONDS = 20.0


class _Waiver(BaseModel):
    """A waiver as `scripts/common.sh` writes it."""

    model_config = ConfigDict(extra="forbid")

    reason: str
    issue: str
    owner: str
    until: date
    revert_to: str
    line: int


class _Check(BaseModel):
    """A check as `scripts/common.sh` writes it."""

    model_config = ConfigDict(extra="forbid")

    expression: str
    line: int
    when: str | None
    on: str | None
    waiver: _Waiver | None


class DriverRecord(BaseModel):
    """A driver's declarations: steps, minutes, the overrides of each training it starts, its checks."""

    model_config = ConfigDict(extra="forbid")

    steps: int
    minutes: float
    train: list[list[str]]
    checks: list[_Check]

    def declared_checks(self, driver: Path, today: date) -> tuple[DeclaredCheck, ...]:
        """The checks that count today: where a waiver has expired, the limit that it had relaxed."""
        lines = driver.read_text(encoding="utf-8").splitlines()
        declared = []
        for check in self.checks:
            waiver = Waiver(**check.waiver.model_dump()) if check.waiver else None
            expired = waiver is not None and waiver.expired(today)
            declared.append(
                DeclaredCheck(
                    expression=waiver.revert_to if waiver and expired else check.expression,
                    line=_line_of(check.expression, lines, check.line),
                    when=check.when,
                    on=check.on,
                    call=check.line,
                    file=driver,
                    waiver=waiver,
                )
            )
        return tuple(declared)


def read_driver(driver: Path, overrides: Sequence[str] = ()) -> DriverRecord:
    """Run `driver` in plan mode with the overrides it is to get; raises ConfigError if it does not plan.

    The driver runs in an empty folder that is removed afterwards, and for at most `TIMEOUT_SECONDS`. One that
    was read before is not run again, unless it or the `common.sh` beside it has changed: a suite is planned
    and linted in one go.
    """
    texts = tuple(path.read_bytes() for path in (driver, driver.with_name("common.sh")) if path.is_file())
    return _read_driver(driver, tuple(overrides), texts)


@lru_cache(maxsize=4096)
def _read_driver(driver: Path, overrides: tuple[str, ...], texts: tuple[bytes, ...]) -> DriverRecord:
    """Run the driver; texts: what else the answer depends on."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith("LORA_SUITE_")}
    with tempfile.TemporaryDirectory(prefix="lora-suite-plan-") as folder:
        try:
            done = subprocess.run(
                ["bash", str(driver.resolve()), *overrides],
                cwd=folder,
                env={**environment, "LORA_SUITE_PLAN": "1"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ConfigError(
                f"{driver}: planning took more than {TIMEOUT_SECONDS:g} s; a driver may only train and check"
            ) from error
        except FileNotFoundError as error:
            raise ConfigError("bash is missing, and drivers are bash scripts: install it") from error
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise ConfigError(f"{driver}: does not plan: {said[0]}")
    try:
        return DriverRecord.model_validate_json((done.stdout.strip().splitlines() or [""])[-1])
    except ValidationError as error:
        detail = error.errors()[0]
        at = ".".join(str(part) for part in detail["loc"])
        raise ConfigError(
            f"{driver}: planning did not end with a record of what the driver declares "
            f"({at + ': ' if at else ''}{detail['msg']}); "
            f"does it source common.sh, and print nothing at its end?"
        ) from error


def _line_of(expression: str, lines: Sequence[str], start: int) -> int:
    """The line on which the expression stands, from the line where its `check` call begins."""
    for number in range(start, len(lines) + 1):
        if expression.splitlines()[0] in lines[number - 1]:
            return number
    return start
