# SPDX-License-Identifier: Apache-2.0
"""What a run of a suite takes from the history and gives to it. A store that fails changes no verdict."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lora_suite.config.errors import ConfigError
from lora_suite.history.recording import case_histories, priors, record
from lora_suite.history.store import DEFAULT_PATH, Store
from lora_suite.judge.suite import Priors
from lora_suite.judge.verdict import SuiteVerdict
from lora_suite.plan.model import Plan


@dataclass(frozen=True)
class Memory:
    """The history that a suite uses. path: None where there is none, and none was asked for."""

    path: Path | None

    @classmethod
    def of(cls, asked: Path | None) -> Memory:
        """The store that was asked for, made if need be; else the usual one where there is one."""
        return cls(asked or (DEFAULT_PATH if DEFAULT_PATH.is_file() else None))

    def priors(self, plan: Plan) -> tuple[Priors, str]:
        """What earlier nights say of the pairs' spread; and why nothing, where the store fails."""
        if self.path is None or not self.path.is_file():
            return {}, ""
        try:
            with Store(self.path) as store:
                return priors(store, plan), ""
        except ConfigError as error:
            return {}, f"no priors from the history: {error}"

    def take(self, verdict: SuiteVerdict, results: Path) -> tuple[SuiteVerdict, str]:
        """Record a suite run whose verdict is stored in `results`.

        Returns the verdict with its cases' histories, and why it has none, where the store fails.
        """
        if self.path is None:
            return verdict, ""
        try:
            with Store(self.path, create=True) as store:
                record(store, results)
                return verdict.model_copy(update={"history": case_histories(store, verdict)}), ""
        except ConfigError as error:
            return verdict, f"not recorded in the history: {error}"
