# SPDX-License-Identifier: Apache-2.0
"""What a script declares, read without running it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from lora_suite.config import ConfigError
from lora_suite.plan.external.script import ScriptConfig, parse_script
from tests.plan.external.conftest import CHECKS, CONFIG, HEAD, TRAIN, WHOLE, Repository

NAME = "sft-a-2n8g-fsdp2-lora"


def test_config_block_with_its_arithmetic(repository: Repository) -> None:
    script = parse_script(repository.script(NAME))
    assert script.config == ScriptConfig(
        nodes=2, gpus_per_node=None, steps_per_run=20, max_steps=50, runs=3, minutes=30.0
    )
    # The launcher's default is 8 GPUs a node.
    assert script.config.gpus == 16
    assert script.config_lines == (5, 11)
    assert script.line_of("NUM_RUNS") == 9


def test_gpus_per_node_and_fractions_of_minutes(repository: Repository) -> None:
    text = WHOLE.replace("NUM_NODES=2", "NUM_NODES=2\nGPUS_PER_NODE=4").replace("MINUTES=30", "MINUTES=0.5")
    config = parse_script(repository.script(NAME, text)).config
    assert (config.gpus, config.minutes) == (8, 0.5)


def test_checks_with_lines_and_variables_put_in(repository: Repository) -> None:
    script = parse_script(repository.script(NAME))
    assert [(check.line, check.expression) for check in script.checks] == [
        (27, 'data["train/loss"]["1"] < 1.0'),
        (28, "data['train/loss']['50'] < 0.8"),
        (29, 'mean(data["timing/train/total_step_time"], 2) < 30'),
    ]
    assert {check.call for check in script.checks} == {26}
    lines = script.path.read_text().splitlines()
    assert all("<" in lines[check.line - 1] for check in script.checks)
    assert {check.metrics for check in script.checks} == {str(script.metrics)}


def test_guard_is_the_block_that_asks_how_far_the_run_came(repository: Repository) -> None:
    script = parse_script(repository.script(NAME))
    guards = {check.guard for check in script.checks}
    assert len(guards) == 1
    (guard,) = guards
    assert guard is not None
    assert (guard.kind, guard.line) == ("if", 25)
    bare = HEAD + CONFIG + TRAIN + "uv run tests/check_metrics.py $JSON_METRICS 'min(data[\"x\"]) > 0'\n"
    assert parse_script(repository.script("b", bare)).checks[0].guard is None
    other = CHECKS.replace(
        "$(jq '.\"train/loss\" | keys | map(tonumber) | max' $JSON_METRICS) -ge $MAX_STEPS", "-n $CI"
    )
    (check, *_) = parse_script(repository.script("c", HEAD + CONFIG + TRAIN + other)).checks
    assert check.guard is None
    assert [block.kind for block in check.blocks] == ["if"]


def test_training_with_recipe_and_overrides(repository: Repository) -> None:
    script = parse_script(repository.script(NAME))
    assert script.training is not None
    assert script.training.recipe == repository.root / f"examples/configs/recipes/llm/{NAME}.yaml"
    assert script.recipe == script.training.recipe
    assert script.training.overrides == (
        "sft.max_num_steps=50",
        f"logger.log_dir={script.results}/logs",
        "~policy.tokenizer.chat_template",
    )
    assert (script.training.arguments, script.training.unquoted) == ("$@", True)
    quoted = parse_script(repository.script("b", WHOLE.replace("$@", '"$@"')))
    assert quoted.training is not None
    assert not quoted.training.unquoted


def test_places_are_those_that_bash_derives(repository: Repository) -> None:
    """`common.env` in the family's words, run by bash, against what is read without running it."""
    folder = repository.script(
        NAME, HEAD + 'echo "$EXP_DIR" "$LOG_DIR" "$JSON_METRICS" "$CONFIG_PATH" "$PROJECT_ROOT"'
    ).parent
    (folder / "common.env").write_text(
        "PROJECT_ROOT=$(realpath $SCRIPT_DIR/../../..)\nEXP_NAME=${EXP_NAME:-$(basename $0 .sh)}\n"
        "EXP_DIR=$SCRIPT_DIR/$EXP_NAME\nLOG_DIR=$EXP_DIR/logs\nJSON_METRICS=$EXP_DIR/metrics.json\n"
        "CONFIG_PATH=$(echo $SCRIPT_DIR/$EXP_NAME.yaml |"
        " sed 's#tests/test_suites#examples/configs/recipes#')\n"
    )
    path = folder / f"{NAME}.sh"
    environment = {name: value for name, value in os.environ.items() if name != "EXP_NAME"}
    said = subprocess.run(
        ["bash", path], env=environment, capture_output=True, text=True, check=True
    ).stdout.split()
    script = parse_script(path)
    values = script.values
    assert said == [
        str(script.results),
        values["LOG_DIR"],
        str(script.metrics),
        str(script.recipe),
        str(script.root),
    ]
    assert [(each.line, each.path) for each in script.sources] == [(3, folder / "common.env")]


def test_a_script_that_delegates_has_its_own_recipe_and_checks(repository: Repository) -> None:
    text = HEAD + CONFIG + 'bash "$SCRIPT_DIR/base.sh" "$@"\n' + CHECKS
    script = parse_script(repository.script("sft-b", text))
    assert script.training is None
    assert script.recipe == repository.root / "examples/configs/recipes/llm/sft-b.yaml"
    assert len(script.checks) == 3


def test_a_script_outside_the_suites_that_finds_itself(tmp_path: Path) -> None:
    text = (
        'SCRIPT_DIR=$( cd -- "$( dirname -- "${BASH_SOURCE[0]}" )" &> /dev/null && pwd)\n'
        "PROJECT_ROOT=$(realpath $SCRIPT_DIR/../..)\nEXP_NAME=$(basename $0 .sh)\n"
        "EXP_DIR=$SCRIPT_DIR/$EXP_NAME\n"
        'uv run coverage run -a $PROJECT_ROOT/examples/run_sft.py cluster.gpus_per_node=2 "$@"\n'
    )
    path = tmp_path / "tests" / "functional" / "sft_lora.sh"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    script = parse_script(path)
    assert script.results == tmp_path / "tests" / "functional" / "sft_lora"
    assert script.root == tmp_path
    assert script.recipe is None
    assert script.config.gpus is None
    assert script.training is not None
    assert script.training.overrides == ("cluster.gpus_per_node=2",)


def test_variables_do_not_leak_from_script_to_script(repository: Repository, monkeypatch) -> None:
    monkeypatch.setenv("GPUS_PER_NODE", "2")
    first = parse_script(repository.script("a", WHOLE.replace("NUM_NODES=2", "NUM_NODES=2\nGPUS_PER_NODE=4")))
    second = parse_script(repository.script("b"))
    assert (first.config.gpus, second.config.gpus) == (8, 16)


def test_a_value_that_only_a_run_can_tell_is_not_guessed(repository: Repository) -> None:
    text = WHOLE.replace("NUM_NODES=2", "NUM_NODES=$(nodes)").replace(
        "NUM_MINUTES=30", "if [[ $CI ]]; then NUM_MINUTES=30; fi"
    )
    script = parse_script(repository.script(NAME, text))
    assert (script.config.nodes, script.config.minutes, script.config.max_steps) == (None, None, 50)
    assert {each.name for each in script.variables if each.conditional} == {"NUM_MINUTES"}


@pytest.mark.parametrize(
    ("old", "new", "line", "what"),
    [
        ("MAX_STEPS=50", "MAX_STEPS=fifty", 8, "MAX_STEPS=fifty is no number above 0"),
        ("NUM_NODES=2", "NUM_NODES=0", 6, "NUM_NODES=0 is no number above 0"),
        ("# ===== END CONFIG =====\n", "", 5, "has no END CONFIG line"),
        ("fi\n", "", 25, "the if block that begins here never ends"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_line(
    repository: Repository, old: str, new: str, line: int, what: str
) -> None:
    path = repository.script(NAME, WHOLE.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        parse_script(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert what in str(caught.value)


def test_missing_script_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.sh: cannot be read"):
        parse_script(tmp_path / "gone.sh")


def test_nothing_is_executed(repository: Repository, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    text = (
        WHOLE.replace("NUM_NODES=2", f"NUM_NODES=$(touch {trap}; echo 2)").replace("EXP_NAME", "EXP_NAME")
        + f"touch {trap}\n`touch {trap}`\n"
    )
    parse_script(repository.script(NAME, text))
    assert not trap.exists()
