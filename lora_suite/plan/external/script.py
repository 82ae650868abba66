# SPDX-License-Identifier: Apache-2.0
"""What a script of the NeMo-RL family declares, read from its text and never executed.

A script has a CONFIG block with its resources and steps, trains a recipe of its own name, turns event files
into a metrics.json and checks that, usually only if the last step was reached:

    # ===== BEGIN CONFIG =====
    NUM_NODES=1
    MAX_STEPS=50
    NUM_MINUTES=30
    # ===== END CONFIG =====
    uv run examples/run_sft.py --config $CONFIG_PATH sft.max_num_steps=$MAX_STEPS "$@" 2>&1 | tee $RUN_LOG
    if [[ $(jq … $JSON_METRICS) -ge $MAX_STEPS ]]; then
        uv run tests/check_metrics.py $JSON_METRICS 'mean(data["timing/train/total_step_time"], 2) < 30'
    fi

Paths follow from the script's own place as the family's `common.env` derives them: results in a folder of the
script's name beside it, the recipe in ``examples/configs/recipes`` where the script is in
``tests/test_suites`` (https://github.com/NVIDIA-NeMo/RL/tree/main/tests/test_suites). Each script is read
with variables of its own: what another script or the caller's environment sets has no part in it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lora_suite.config.errors import ConfigError
from lora_suite.plan.external.commands import Assignment, Block, Command, Comment, Pipeline, Word
from lora_suite.plan.external.expand import expand
from lora_suite.plan.external.shell import parse_shell

SUITES, RECIPES = "tests/test_suites", "examples/configs/recipes"
DEFAULT_GPUS_PER_NODE = 8
_BEGIN = re.compile(r"=+ *BEGIN CONFIG *=+")
_END = re.compile(r"=+ *END CONFIG *=+")
_STEP_GUARD = re.compile(r"(?:-ge|-gt|-eq|>=|>|==)\s*\"?\$\{?MAX_STEPS\b")
_PROGRAM = re.compile(r"(?:^|/)(?:run_[\w-]+|train[\w-]*)\.py$")
_OVERRIDE = re.compile(r"(?:\+{0,2}[A-Za-z_][\w./@-]*=|~[A-Za-z_])")
_ARGUMENTS = ("$@", "$*", "${@}", "${*}")


@dataclass(frozen=True)
class Variable:
    """One assignment: the text it is given, and its value where that can be known without running anything.

    in_config: it stands between BEGIN CONFIG and END CONFIG. conditional: only some runs come by it.
    """

    name: str
    line: int
    raw: str
    value: str | None
    in_config: bool
    conditional: bool


@dataclass(frozen=True)
class ScriptConfig:
    """The CONFIG block: what is not set, or not known without running the script, is None.

    gpus_per_node: None where the script leaves it to its launcher, whose default is 8.
    """

    nodes: int | None
    gpus_per_node: int | None
    steps_per_run: int | None
    max_steps: int | None
    runs: int | None
    minutes: float | None

    @property
    def gpus(self) -> int | None:
        """GPUs of one run on all nodes."""
        return None if self.nodes is None else self.nodes * (self.gpus_per_node or DEFAULT_GPUS_PER_NODE)


@dataclass(frozen=True)
class ScriptCheck:
    """One quoted expression after check_metrics.py.

    expression: as the checker would get it, with known variables put in. line: where it stands. call: line of
    the command. metrics: the file that is checked, as far as it is known. guard: the `if` whose condition
    asks how far the run came, without which the check runs always; blocks: all blocks around it.
    """

    expression: str
    line: int
    call: int
    metrics: str
    guard: Block | None
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class ScriptTraining:
    """The command that trains: the words of its recipe and overrides, with known variables put in.

    recipe: the file after ``--config``, None where it is not known. overrides: texts in Hydra's grammar.
    arguments: how the script hands on its own arguments (``$@``), None if it does not. unquoted: whether that
    would be split by bash.
    """

    line: int
    recipe: Path | None
    overrides: tuple[str, ...]
    arguments: str | None
    unquoted: bool


@dataclass(frozen=True)
class Source:
    """A file that the script reads in: line, and the path where it is known."""

    line: int
    path: Path | None


@dataclass(frozen=True)
class Script:
    """A script taken apart; see the fields' own types.

    name: of the experiment, ``EXP_NAME``. root: of the repository, None outside ``tests/test_suites``.
    results: the folder that a run of it writes. variables: every assignment in the order of the file.
    values: the last known value of each variable. config_lines: first and last line of the CONFIG block, None
    without one. sources: files that it reads in, and pipelines everything that it does.
    """

    path: Path
    name: str
    root: Path | None
    results: Path
    config: ScriptConfig
    config_lines: tuple[int, int] | None
    variables: tuple[Variable, ...]
    values: dict[str, str] = field(hash=False)
    training: ScriptTraining | None
    recipe: Path | None
    checks: tuple[ScriptCheck, ...]
    sources: tuple[Source, ...]
    pipelines: tuple[Pipeline, ...]
    comments: tuple[Comment, ...]

    @property
    def metrics(self) -> Path:
        """The metrics.json that the script writes and checks."""
        return Path(self.values.get("JSON_METRICS", self.results / "metrics.json"))

    @property
    def commands(self) -> Iterator[tuple[Command, Pipeline]]:
        """Every command with the pipeline it is part of, in the order of the file."""
        for pipeline in self.pipelines:
            for command in pipeline.commands:
                yield command, pipeline

    def line_of(self, name: str) -> int:
        """Line on which a variable was set last, 0 if it is not set."""
        return next((each.line for each in reversed(self.variables) if each.name == name), 0)


def parse_script(path: Path) -> Script:
    """Read one script; raises ConfigError, with file and line, for one that is not readable as bash."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    shell = parse_shell(path, text)
    config_lines = _config_lines(path, shell.comments)
    reader = _Reader(path, config_lines)
    for pipeline in shell.pipelines:
        reader.read(pipeline)
    reader.derive()
    values = reader.values
    return Script(
        path=path,
        name=values["EXP_NAME"],
        root=Path(values["PROJECT_ROOT"]) if "PROJECT_ROOT" in values else None,
        results=Path(values["EXP_DIR"]),
        config=_config(path, reader.variables),
        config_lines=config_lines,
        variables=tuple(reader.variables),
        values=values,
        training=reader.training,
        recipe=_recipe(reader),
        checks=tuple(reader.checks),
        sources=tuple(reader.sources),
        pipelines=shell.pipelines,
        comments=shell.comments,
    )


class _Reader:
    """Goes through a script from top to bottom with the values that its variables have by then."""

    def __init__(self, path: Path, config_lines: tuple[int, int] | None) -> None:
        self._path = Path(os.path.abspath(path))
        self._config_lines = config_lines
        self.values = {
            "0": str(self._path),
            "BASH_SOURCE": str(self._path),
            "BASH_SOURCE[0]": str(self._path),
        }
        self.variables: list[Variable] = []
        self.checks: list[ScriptCheck] = []
        self.sources: list[Source] = []
        self.training: ScriptTraining | None = None

    def read(self, pipeline: Pipeline) -> None:
        for command in pipeline.commands:
            for assignment in _assignments(command):
                self._assign(assignment, command, pipeline)
            if command.name in ("source", "."):
                self._source(command)
            elif (at := _position(command, "check_metrics.py", "check_metrics")) is not None:
                self._check(command, at, pipeline)
            elif _trains(command):
                self._train(command)

    def derive(self) -> None:
        """Set what `common.env` derives from the script's place, unless the script sets it itself."""
        folder = self._path.parent
        values = self.values
        values.setdefault("SCRIPT_DIR", str(folder))
        before, found, _ = f"{folder.as_posix()}/".partition(f"/{SUITES}/")
        if found:
            values.setdefault("PROJECT_ROOT", before or "/")
        values.setdefault("EXP_NAME", self._path.stem)
        values.setdefault("EXP_DIR", f"{values['SCRIPT_DIR']}/{values['EXP_NAME']}")
        for name, below in (
            ("LOG_DIR", "logs"),
            ("CKPT_DIR", "ckpts"),
            ("JSON_METRICS", "metrics.json"),
            ("RUN_LOG", "run.log"),
        ):
            values.setdefault(name, f"{values['EXP_DIR']}/{below}")
        recipe = f"{values['SCRIPT_DIR']}/{values['EXP_NAME']}.yaml"
        values.setdefault("CONFIG_PATH", recipe.replace(SUITES, RECIPES, 1))

    def _assign(self, assignment: Assignment, command: Command, pipeline: Pipeline) -> None:
        text, known = expand(assignment.value, self.values)
        # A command's own environment is no variable of the script.
        if command.words and command.name not in ("export", "declare", "readonly", "local"):
            return
        conditional = bool(pipeline.blocks)
        if conditional or assignment.append or not known:
            self.values.pop(assignment.name, None)
            value = None if assignment.append or not known else text
        else:
            self.values[assignment.name] = value = text
        first, last = self._config_lines or (0, 0)
        self.variables.append(
            Variable(
                name=assignment.name,
                line=assignment.value.line,
                raw=assignment.value.raw,
                value=value,
                in_config=first < assignment.value.line < last,
                conditional=conditional,
            )
        )

    def _source(self, command: Command) -> None:
        self.derive()
        path: Path | None = None
        if len(command.words) > 1:
            text, known = expand(command.words[1], self.values)
            path = self._path.parent / text if known else None
        self.sources.append(Source(command.line, path))

    def _check(self, command: Command, at: int, pipeline: Pipeline) -> None:
        self.derive()
        words = [word for word in command.words[at + 1 :] if not word.raw.startswith("--")]
        if not words:
            return
        metrics, _ = expand(words[0], self.values)
        ifs = [block for block in pipeline.blocks if block.kind == "if" and block.branch != "if"]
        guard = next((block for block in reversed(ifs) if _STEP_GUARD.search(block.text)), None)
        for word in words[1:]:
            expression, _ = expand(word, self.values)
            self.checks.append(
                ScriptCheck(
                    expression=expression.strip(),
                    line=word.line,
                    call=command.line,
                    metrics=metrics,
                    guard=guard,
                    blocks=pipeline.blocks,
                )
            )

    def _train(self, command: Command) -> None:
        if self.training is not None:
            # What a script runs after its training (a conversion, an evaluation) is none.
            return
        self.derive()
        words = [expand(word, self.values) for word in command.words]
        overrides = tuple(text for text, _ in words if _OVERRIDE.match(text))
        arguments = next((word for word in command.words if word.raw.strip('"') in _ARGUMENTS), None)
        self.training = ScriptTraining(
            line=command.line,
            recipe=self._named_recipe(words),
            overrides=overrides,
            arguments=arguments.raw if arguments else None,
            unquoted=arguments is not None and not arguments.raw.startswith('"'),
        )

    def _named_recipe(self, words: list[tuple[str, bool]]) -> Path | None:
        """The file after ``--config``, as the training sees it, which runs at the root of the repository."""
        root = Path(self.values.get("PROJECT_ROOT", self._path.parent))
        for at, (text, known) in enumerate(words):
            if text == "--config" and at + 1 < len(words):
                text, known = words[at + 1]
            elif text.startswith("--config="):
                text = text.removeprefix("--config=")
            else:
                continue
            return Path(os.path.normpath(root / text)) if known else None
        return None


def _assignments(command: Command) -> Iterator[Assignment]:
    """The assignments of a command, those after `export` and its like included."""
    yield from command.assignments
    if command.name in ("export", "declare", "readonly", "local"):
        for word in command.words[1:]:
            name, equals, _ = word.raw.partition("=")
            if equals and re.fullmatch(r"[A-Za-z_]\w*", name):
                first, *others = word.fragments
                rest = type(first)(first.text.partition("=")[2], first.quote)
                yield Assignment(name, Word((rest, *others), word.line, word.raw[len(name) + 1 :]), False)


def _position(command: Command, *programs: str) -> int | None:
    """Where one of the programs stands among the words, by its file name."""
    for at, word in enumerate(command.words):
        if word.raw.strip("\"'").rpartition("/")[2] in programs:
            return at
    return None


def _trains(command: Command) -> bool:
    """Whether the command starts a training program of the family."""
    return any(_PROGRAM.search(word.raw.strip("\"'")) for word in command.words)


def _recipe(reader: _Reader) -> Path | None:
    """What the script's training names; of a script that leaves training to another, the one of its name."""
    if reader.training is not None:
        return reader.training.recipe
    return Path(reader.values["CONFIG_PATH"])


def _config_lines(path: Path, comments: tuple[Comment, ...]) -> tuple[int, int] | None:
    """First and last line of the CONFIG block; ConfigError for one that never ends."""
    begin = next((each.line for each in comments if _BEGIN.search(each.text)), None)
    if begin is None:
        return None
    end = next((each.line for each in comments if each.line > begin and _END.search(each.text)), None)
    if end is None:
        raise ConfigError(f"{path}:{begin}: the CONFIG block that begins here has no END CONFIG line")
    return begin, end


def _config(path: Path, variables: list[Variable]) -> ScriptConfig:
    """The block's figures; ConfigError for one that is no number above zero."""
    found = {each.name: each for each in variables if each.in_config}

    def number(name: str) -> float | None:
        variable = found.get(name)
        if variable is None or variable.value is None or variable.conditional:
            return None
        try:
            value = float(variable.value)
        except ValueError:
            value = 0.0
        if not 0 < value < 1e9 or (name != "NUM_MINUTES" and not value.is_integer()):
            raise ConfigError(f"{path}:{variable.line}: {name}={variable.raw} is no number above 0")
        return value

    def count(name: str) -> int | None:
        value = number(name)
        return None if value is None else int(value)

    return ScriptConfig(
        nodes=count("NUM_NODES"),
        gpus_per_node=count("GPUS_PER_NODE"),
        steps_per_run=count("STEPS_PER_RUN"),
        max_steps=count("MAX_STEPS"),
        runs=count("NUM_RUNS"),
        minutes=number("NUM_MINUTES"),
    )
