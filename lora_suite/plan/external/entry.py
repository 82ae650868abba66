# SPDX-License-Identifier: Apache-2.0
"""The `external:` block of a suite, as it is written."""

from __future__ import annotations

import shlex
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Name = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]


class _Part(BaseModel):
    """Strict, closed to unknown keys."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Declares(_Part):
    """What the suite says of a training, for the comparison of arms; see `lora_suite.plan.facts`.

    tokens_per_step: in place of global_batch_size × sequence_length (rows, slots of a row).
    """

    trainer: Name | None = None
    model: Name | None = None
    global_batch_size: Count | None = None
    sequence_length: Count | None = None
    tokens_per_step: Count | None = None
    dtype: Name | None = None
    optimizer: Name | None = None
    lora: bool | None = None
    lora_rank: Count | None = None

    @model_validator(mode="after")
    def _one_size_of_a_step(self) -> Declares:
        """Rows and their length belong together, and make tokens_per_step."""
        sizes = (self.global_batch_size, self.sequence_length)
        if (None in sizes) != (sizes == (None, None)):
            raise ValueError("global_batch_size and sequence_length belong together; write both")
        if self.tokens_per_step is not None and sizes != (None, None):
            raise ValueError("tokens_per_step is global_batch_size × sequence_length; write one or the other")
        return self

    def facts(self) -> dict[str, object]:
        """What is declared, by the names of facts."""
        found = self.model_dump(exclude_none=True, exclude={"global_batch_size", "sequence_length"})
        if self.global_batch_size is not None and self.sequence_length is not None:
            found["tokens_per_step"] = self.global_batch_size * self.sequence_length
        return found


class ExternalEntry(_Part):
    """A command of another trainer.

    command: words, or one text that is split as a shell splits it; the word ``{python}`` is the Python that
    runs this program. cwd: from the suite's folder. outputs: files and folders that a run creates, and
    metrics, one of them or below one: from cwd. steps, minutes, gpus (a node; on CPU machines processes):
    where the dialect does not read them from the trainer's own files.
    """

    command: list[Name]
    cwd: Name = "."
    outputs: list[Name] = []
    metrics: Name | None = None
    dialect: Name = "common"
    steps: Count | None = None
    minutes: Annotated[float, Field(gt=0)] | None = None
    gpus: Count | None = None
    nodes: Count | None = None
    declares: Declares = Declares()

    @field_validator("command", mode="before")
    @classmethod
    def _split(cls, command: Any) -> Any:
        """A text is words as a shell reads them."""
        return shlex.split(command) if isinstance(command, str) else command

    @field_validator("command")
    @classmethod
    def _not_empty(cls, command: list[str]) -> list[str]:
        """There is a program to run."""
        if not command:
            raise ValueError("write the program and its arguments")
        return command
