# SPDX-License-Identifier: Apache-2.0
"""What a trainer's own files say of a run of theirs, found without running anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_suite.config.errors import ConfigError
from lora_suite.plan.external.recipe import opaque_recipe
from lora_suite.plan.external.script import DEFAULT_GPUS_PER_NODE, Script, ScriptCheck, parse_script
from lora_suite.plan.facts import facts_of_recipe
from lora_suite.plan.model import DeclaredCheck


class UnreadableError(ConfigError):
    """A trainer's own script or recipe cannot be read; the text names file and line."""


@dataclass(frozen=True)
class Reading:
    """What was read; None where the files do not say it.

    source: the file that says it. gpus: of a node. outputs, metrics: absolute paths. facts: by the names of
    `lora_suite.plan.facts`. recipe_tree: the merged recipe. left: checks that only the script itself can
    make, each with the reason.
    """

    source: Path
    steps: int | None
    minutes: float | None
    gpus: int | None
    nodes: int | None
    outputs: tuple[Path, ...]
    metrics: Path
    checks: tuple[DeclaredCheck, ...]
    facts: dict[str, object]
    recipe_tree: dict[str, Any] | None
    left: tuple[str, ...]


def read_nemo_rl(command: Sequence[str], cwd: Path, overrides: Sequence[str], trainer: str) -> Reading:
    """Read the script that a command runs, and the recipe that the script trains.

    The script is the command's first word that ends in ``.sh``, which must be there; words after it and the
    overrides are its arguments. A run may take the minutes of all the submissions that the script counts on
    (NUM_RUNS). Checks are taken that are of the script's own metrics.json and that no condition decides about
    but how far the run came. Raises UnreadableError for a script or recipe that cannot be read, ConfigError
    for a command that gives it arguments which it does not take.
    """
    at = next(at for at, word in enumerate(command) if word.endswith(".sh"))
    try:
        script = parse_script(cwd / command[at])
    except ConfigError as error:
        raise UnreadableError(str(error)) from error
    arguments = [*command[at + 1 :], *overrides]
    if arguments and script.training is not None and script.training.arguments is None:
        raise ConfigError(
            f"{script.path}:{script.training.line}: the script does not hand on its arguments ($@)"
        )
    tree = _recipe(script, arguments)
    config = script.config
    facts = facts_of_recipe(tree if tree is not None else {}, trainer)
    gpus = config.gpus_per_node or DEFAULT_GPUS_PER_NODE
    if config.nodes is not None:
        # What is launched counts; the recipe's own numbers are compared with it apart.
        facts["ranks"] = config.nodes * gpus
    return Reading(
        source=script.path,
        steps=config.max_steps,
        minutes=None if config.minutes is None else config.minutes * (config.runs or 1),
        gpus=gpus,
        nodes=config.nodes,
        outputs=(script.results,),
        metrics=script.metrics,
        checks=tuple(
            DeclaredCheck(expression=check.expression, line=check.line, call=check.call, file=script.path)
            for check in script.checks
            if _reason_to_leave(check, script) is None
        ),
        facts=facts,
        recipe_tree=tree,
        left=tuple(
            f"{check.expression} ({script.path.name}:{check.line} {reason})"
            for check in script.checks
            if (reason := _reason_to_leave(check, script)) is not None
        ),
    )


def _recipe(script: Script, arguments: Sequence[str]) -> dict[str, Any] | None:
    """The recipe with the overrides of the script and its arguments; None where it names none."""
    if script.recipe is None:
        return None
    own = script.training.overrides if script.training is not None else ()
    line = script.training.line if script.training is not None else 1
    try:
        return opaque_recipe(script.recipe, [*own, *arguments])
    except ConfigError as error:
        text = str(error)
        # What is wrong in a file is named with it; what is wrong in an override stands in the script.
        place = f"{script.path}:{line}: " if text.startswith("override") else ""
        raise UnreadableError(f"{place}{text}") from error


def _reason_to_leave(check: ScriptCheck, script: Script) -> str | None:
    """Why a check cannot be made from outside the script, None if it can."""
    if check.metrics != str(script.metrics):
        return f"reads {check.metrics}"
    others = [block for block in check.blocks if block != check.guard]
    return f"stands in a block that begins in line {others[0].line}" if others else None
