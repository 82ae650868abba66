# SPDX-License-Identifier: Apache-2.0
"""Rules about nodes, GPUs and minutes: what names say, what leaks between scripts, what all of it costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path

from lora_suite.plan.audit.finding import AuditFinding, GpuHours
from lora_suite.plan.audit.names import ScriptName, lora_enabled, parse_name
from lora_suite.plan.audit.repository import Repository
from lora_suite.plan.external.script import DEFAULT_GPUS_PER_NODE, SUITES, Script

_LEAKING = ("NUM_NODES", "GPUS_PER_NODE", "STEPS_PER_RUN", "MAX_STEPS", "NUM_RUNS", "NUM_MINUTES")
_DEFAULTS = {"GPUS_PER_NODE": str(DEFAULT_GPUS_PER_NODE)}


def lint_resources(repository: Repository, script: Script) -> Iterator[AuditFinding]:
    """Yield where a script's name disagrees with its CONFIG block or recipe."""
    file = repository.shown(script.path)
    name = parse_name(script.name)
    if name is None:
        return
    for subject, message in (*_sizes(script, name), *_lora(repository, script, name)):
        yield AuditFinding("resources", file, script.line_of(subject), subject, message)


def _sizes(script: Script, name: ScriptName) -> Iterator[tuple[str, str]]:
    config = script.config
    gpus = config.gpus_per_node or DEFAULT_GPUS_PER_NODE
    for variable, said, used in (("NUM_NODES", name.nodes, config.nodes), ("GPUS_PER_NODE", name.gpus, gpus)):
        if used is not None and said != used:
            yield variable, f"the name says {name.nodes}n{name.gpus}g, but {variable} is {used}"


def _lora(repository: Repository, script: Script, name: ScriptName) -> Iterator[tuple[str, str]]:
    tree = repository.tree(script)
    enabled = lora_enabled(tree) if tree is not None else None
    if enabled is not None and enabled != name.lora:
        has = "has" if name.lora else "lacks"
        yield "lora", f"the name {has} -lora, but LoRA is {'on' if enabled else 'off'} in the recipe"


def lint_leaks(repository: Repository) -> Iterator[AuditFinding]:
    """Yield each script that leaves a resource to whatever another script has set in the same shell."""
    for variable in _LEAKING:
        setters = [script for script in repository.scripts if _set(script, variable) is not None]
        default = _DEFAULTS.get(variable)
        foreign = next((each for each in setters if _set(each, variable) != default), None)
        if foreign is None:
            continue
        for script in repository.scripts:
            if script.config_lines is not None and _set(script, variable) is None:
                message = (
                    f"does not set {variable}: sourced after {repository.shown(foreign.path)} it has "
                    f"{_set(foreign, variable)}{f' in place of {default}' if default else ''}"
                )
                file = repository.shown(script.path)
                yield AuditFinding("leaking-variable", file, script.config_lines[0], variable, message)


def _set(script: Script, variable: str) -> str | None:
    """What the CONFIG block sets a variable to."""
    found = (each for each in script.variables if each.name == variable and each.in_config)
    return next((each.value or each.raw for each in found), None)


def gpu_hours(repository: Repository) -> dict[str, GpuHours]:
    """The cost of all scripts, and of each list of scripts (``*.txt``) beside them."""
    by_path = {script.path.resolve(): script for script in repository.scripts}
    hours = {"all scripts": _cost(repository.scripts)}
    for path in sorted((repository.root / SUITES).glob("*.txt")):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        words = [line.partition("#")[0].strip() for line in lines]
        named = [_found(repository.root, word, by_path) for word in words if word]
        listed = [script for script in named if script is not None]
        if listed:
            hours[path.name] = _cost(listed)
    return hours


def _found(root: Path, word: str, by_path: dict[Path, Script]) -> Script | None:
    """The script that a line of a list names, from the root of the repository."""
    return by_path.get((root / word).resolve())


def lint_cost(hours: GpuHours) -> Iterator[AuditFinding]:
    """Yield that whole hours a script hide a part of the cost, if a half hour or more in all."""
    if hours.exact - hours.floored >= Fraction(1, 2):
        message = f"{float(hours.exact):g} GPU-hours, of which {hours.floored} are counted"
        yield AuditFinding("gpu-hours", Path(), 0, "all scripts", message)


def _cost(scripts: Sequence[Script]) -> GpuHours:
    """GPUs × minutes × runs, exactly and as the family's launcher rounds it down for each script."""
    known = [hours for hours in map(_hours, scripts) if hours is not None]
    return GpuHours(
        exact=sum(known, Fraction(0)),
        floored=sum(int(hours) for hours in known),
        unknown=len(scripts) - len(known),
    )


def _hours(script: Script) -> Fraction | None:
    config = script.config
    if config.gpus is None or config.minutes is None:
        return None
    return config.gpus * Fraction(str(config.minutes)) * (config.runs or 1) / 60
