# SPDX-License-Identifier: Apache-2.0
"""Each rule: what it must find, and what looks like it and is right."""

from __future__ import annotations

from fractions import Fraction

import pytest

from lora_suite.plan.audit import audit
from lora_suite.plan.audit.finding import GpuHours
from tests.plan.audit.conftest import CHECK, COMMON, CONFIG, HEAD, LORA, STEM, TRAIN

GUARD = "if [[ $(jq '.\"train/loss\" | length' $JSON_METRICS) -ge $MAX_STEPS ]]; then\n"


def check(*expressions: str) -> str:
    """A call of the checker."""
    return "check_metrics $JSON_METRICS " + " ".join(f"'{each}'" for each in expressions) + "\n"


def test_a_healthy_script(kinds):
    assert kinds() == []


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (f"{GUARD}{CHECK}fi\n", ["skipped-checks"]),
        (f"{GUARD}{CHECK}{CHECK}else\necho short\nfi\n", ["skipped-checks"]),
        (f"{GUARD}{CHECK}else\nexit 0\nfi\n", ["skipped-checks"]),
        (f"{GUARD}{CHECK}else\nexit 1\nfi\n", []),
        (f"{GUARD}{CHECK}else\nfalse\nfi\n", []),
        (f"if [[ $(jq length $JSON_METRICS) -ge 10 ]]; then\n{CHECK}fi\n", ["skipped-checks"]),
        (f"if [[ -s $JSON_METRICS ]]; then\n{CHECK}fi\n", ["skipped-checks"]),
        # What is checked otherwise, and an `else` of something else.
        (f"if [[ ! -s $JSON_METRICS ]]; then\nexit 1\nelse\n{CHECK}fi\n", []),
        (f"{GUARD}{CHECK}fi\nif [[ -d x ]]; then\necho\nelse\nexit 1\nfi\n", ["skipped-checks"]),
        (f"{GUARD}{CHECK}if false; then\nexit 1\nfi\nfi\n", ["skipped-checks"]),
        # A condition that does not ask how far the run came.
        (f"if [[ $GPU == h100 ]]; then\n{CHECK}fi\n", []),
    ],
)
def test_skipped_checks(kinds, block, expected):
    assert kinds(check=block) == expected


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        (f"exit_if_max_steps_reached\n{TRAIN}", ["exit-before-checks"]),
        (f"if [[ -f done ]]; then exit 0; fi\n{TRAIN}", ["exit-before-checks"]),
        (f"if [[ -f done ]]; then exit; fi\n{TRAIN}", ["exit-before-checks"]),
        (f"if [[ -f done ]]; then exit 1; fi\n{TRAIN}", []),
        (f"leave() {{\n  exit 0\n}}\n{TRAIN}", []),
        (f"leave_early\n{TRAIN}", ["exit-before-checks"]),
        (f"stop_badly\n{TRAIN}", []),
    ],
)
def test_exits(family, train, expected):
    functions = "leave_early() {\n  exit 0\n}\nstop_badly() {\n  exit 3\n}\n"
    (family.suite / "common.env").write_text(COMMON + functions)
    family.case(train=train)
    assert family.kinds() == expected


def test_only_an_exit_after_all_checks_is_none(kinds):
    assert kinds(check=f"{CHECK}exit 0\n") == []
    assert kinds(check=f"{CHECK}if [[ -f done ]]; then exit 0; fi\n{CHECK}") == ["exit-before-checks"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("uv run tests/json_dump_tb_logs.py $LOG_DIR || true\n", ["swallowed-failure"]),
        ("python3 -m convert $LOG_DIR || :\n", ["swallowed-failure"]),
        ("rm -r $CKPT_DIR || true\n", []),
        ("kill $PID || true\n", []),
        ("uv run convert.py || exit 1\n", []),
        ("uv run convert.py || echo 'or true'\n", []),
    ],
)
def test_swallowed_failures(kinds, line, expected):
    assert kinds(train=TRAIN + line) == expected


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ("", ["pipe-before-pipefail"]),
        ("set -e\n", ["pipe-before-pipefail"]),
        ("set -o pipefail\n", []),
        ("set -euo pipefail\n", []),
        (HEAD, []),
        ('source "$SOMEWHERE/common.env"\n', []),
        ("source absent.env\n", []),
    ],
)
def test_pipes(kinds, head, expected):
    assert kinds(head=head) == expected


def test_pipefail_that_comes_too_late(kinds):
    assert kinds(head="", train=f"{TRAIN}set -o pipefail\n") == ["pipe-before-pipefail"]


def test_a_sourced_file_without_pipefail(family):
    (family.suite / "common.env").write_text("set -eu\n")
    family.case()
    assert family.kinds() == ["pipe-before-pipefail"]


@pytest.mark.parametrize("written", ["$@", "$*", "${@}"])
def test_unquoted_arguments(kinds, written):
    assert kinds(train=TRAIN.replace('"$@"', written)) == ["unquoted-arguments"]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ('data["train/loss"]["51"] < 2', ["unreachable-step"]),
        ('mean(data["train/loss"], 10, 61) < 2', ["unreachable-step"]),
        ('data["train/loss"]["50"] < 2', []),
        ('data["train/loss"] < 2', ["unparsable-check"]),
        ('min(data["train/num_valid_samples"]) >= 0', ["cannot-fail"]),
        ('mean(data["train/reward"]) >= 0', []),
        ('mean(data["train/reward"]) > -1', []),
        ('mean(data["train/loss"]) > -1', ["cannot-fail"]),
        ('mean(data["timing/train/total_step_time"], 2) < 33', []),
        ('mean(data["timing/train/total_step_time"], 2) < 34', ["minutes"]),
        ('mean(data["train/loss"]) < $LIMIT', []),
    ],
)
def test_checks(kinds, expression, expected):
    """30 minutes are 28 minutes after the start, in which 50 steps may take 33.6 s each."""
    assert kinds(check=check(expression)) == expected


def test_a_check_can_fail_where_the_steps_are_not_known(kinds):
    config = CONFIG.replace("MAX_STEPS=50\n", "")
    assert kinds(config=config, check=check('mean(data["train/loss"], 2) < 30')) == []


def test_a_chained_run_has_its_minutes_for_its_own_steps(kinds):
    config = CONFIG.replace("STEPS_PER_RUN=50", "STEPS_PER_RUN=25").replace("NUM_RUNS=1", "NUM_RUNS=2")
    limit = 'mean(data["timing/train/total_step_time"], 2) < 60'
    assert kinds(config=config, check=check(limit)) == []


@pytest.mark.parametrize(
    ("note", "limit", "expected"),
    [
        ("# TODO: revert to < 30 once the issue is fixed", 30, ["stale-note"]),
        ("# TODO: revert to < 30\n# once the issue is fixed", "30.0", ["stale-note"]),
        ("# Slow since June: back to\n# < 30 in July.", 30, ["stale-note"]),
        ("# TODO: revert to < 30 once the issue is fixed", 33, []),
        ("# The limit is < 30 since June.", 30, []),
        ("# TODO: revert to > 30 once the issue is fixed", 30, []),
    ],
)
def test_notes(kinds, note, limit, expected):
    limited = check(f'mean(data["train/step"], 2) < {limit}')
    assert kinds(check=f"{note}\n{limited}") == expected


def test_a_note_above_the_guard_of_a_long_call(kinds):
    """The note quotes the check as it is to be; the check is the last of many below."""
    others = "".join(f" \\\n  'mean(data[\"train/m{number}\"]) < {number}'" for number in range(1, 7))
    live = " \\\n  'mean(data[\"train/step\"], 2) < 30'\n"
    note = '# Revert to `mean(data["train/step"], 2) < 30` once the issue is resolved\n'
    block = f"{note}{GUARD}check_metrics $JSON_METRICS{others}{live}else\nexit 1\nfi\n"
    assert kinds(check=block) == ["stale-note"]


def test_a_note_far_from_the_check_is_about_something_else(kinds):
    limited = check('mean(data["train/step"]) < 30')
    note = "# revert to < 30 when that is fixed\n"
    assert kinds(check=note + "echo\n" * 6 + limited) == []
    assert kinds(check=note + "echo\n" * 5 + limited) == ["stale-note"]


@pytest.mark.parametrize(
    ("stem", "config", "recipe", "expected"),
    [
        ("sft-tiny-2n8g-fsdp2", {}, "", ["resources"]),
        ("sft-tiny-1n4g-fsdp2", {}, "", ["resources"]),
        ("sft-tiny-1n4g-fsdp2", {"GPUS_PER_NODE=8": "GPUS_PER_NODE=4"}, "", []),
        ("sft-tiny-1n8g-fsdp2-lora", {}, "", ["resources"]),
        ("sft-tiny-1n8g-fsdp2", {}, LORA, ["resources"]),
        ("sft-tiny-1n8g-fsdp2-lora", {}, LORA, []),
        ("sft-tiny-1n8g-FSDP2-LoRA", {}, LORA, []),
        ("sft-tiny", {}, LORA, []),
    ],
)
def test_names(kinds, stem, config, recipe, expected):
    text = CONFIG
    for old, new in config.items():
        text = text.replace(old, new)
    assert kinds(stem=stem, config=text, recipe=recipe) == expected


def test_the_default_of_gpus_per_node_is_8(kinds):
    assert kinds(config=CONFIG.replace("GPUS_PER_NODE=8\n", "")) == []


@pytest.mark.parametrize(
    ("changes", "exact", "floored", "unknown"),
    [
        ({}, 4, 4, 0),
        ({"NUM_RUNS=1": "NUM_RUNS=3", "STEPS_PER_RUN=50": "STEPS_PER_RUN=20"}, 12, 12, 0),
        ({"NUM_RUNS=1\n": ""}, 4, 4, 0),
        ({"NUM_MINUTES=30": "NUM_MINUTES=33.75"}, Fraction(9, 2), 4, 0),
        ({"NUM_MINUTES=30": "NUM_MINUTES=33"}, Fraction(22, 5), 4, 0),
        ({"NUM_MINUTES=30\n": ""}, 0, 0, 1),
        ({"NUM_NODES=1\n": ""}, 0, 0, 1),
    ],
)
def test_cost(family, changes, exact, floored, unknown):
    """8 GPUs × 30 minutes are 4 hours. Half an hour that is lost is a finding, less is none."""
    config = CONFIG
    for old, new in changes.items():
        config = config.replace(old, new)
    family.case(config=config)
    report = audit(family.root)
    assert report.gpu_hours["all scripts"] == GpuHours(Fraction(exact), floored, unknown)
    assert ("gpu-hours" in family.kinds()) == (exact - floored >= Fraction(1, 2))


def test_a_leak(family):
    family.case("sft-tiny-1n4g-fsdp2", config=CONFIG.replace("GPUS_PER_NODE=8", "GPUS_PER_NODE=4"))
    family.case("sft-tiny-1n8g-fsdp2", config=CONFIG.replace("GPUS_PER_NODE=8\n", ""))
    (found,) = family.findings()
    assert (found.kind, found.file.name) == ("leaking-variable", "sft-tiny-1n8g-fsdp2.sh")
    assert found.message == (
        "does not set GPUS_PER_NODE: sourced after tests/test_suites/llm/sft-tiny-1n4g-fsdp2.sh it has "
        "4 in place of 8"
    )


class TestArms:
    """LoRA scripts against their twins."""

    def arms(self, family, lora: str, twin: str = STEM, recipe: str = LORA, **config: str):
        """Audit a LoRA script with this recipe, and a twin of that name."""
        text = CONFIG
        for name, value in config.items():
            text = text.replace(f"{name}=50", f"{name}={value}")
        family.case(twin)
        family.case(lora, config=text, recipe=recipe)
        return [each for each in family.findings() if each.kind == "incomparable-arms"]

    def test_arms_that_differ_in_lora_alone(self, family):
        more = "logger: {wandb: {name: x}}\ncheckpointing: {checkpoint_dir: x}\n"
        assert self.arms(family, f"{STEM}-lora", recipe=LORA + more) == []

    def test_checkpoints_are_part_of_a_step_s_time(self, family):
        (found,) = self.arms(family, f"{STEM}-lora", recipe=f"{LORA}checkpointing: {{enabled: false}}\n")
        assert found.details == ("checkpointing.enabled: False and '(absent)'",)

    def test_a_key_of_the_recipe(self, family):
        batch = LORA.replace("policy: {", "policy: {train_global_batch_size: 128, ")
        (found,) = self.arms(family, f"{STEM}-lora", recipe=batch)
        assert found.details == ("policy.train_global_batch_size: 128 and 32",)
        assert found.subject == f"{STEM}: policy.train_global_batch_size"

    def test_a_figure_of_the_config_block(self, family):
        (found,) = self.arms(family, f"{STEM}-lora", MAX_STEPS="20", STEPS_PER_RUN="20")
        assert found.details == ("MAX_STEPS: 20 and 50",)

    def test_an_override_of_the_script(self, family):
        family.case()
        train = TRAIN.replace('"$@"', 'policy.train_global_batch_size=16 "$@"')
        family.case(f"{STEM}-lora", train=train, recipe=LORA)
        (found,) = family.findings()
        assert found.details == ("policy.train_global_batch_size: 16 and 32",)

    def test_the_nearest_name_is_the_twin(self, family):
        family.case("sft-tiny-1n8g-fsdp2tp8-long")
        (found,) = self.arms(family, "sft-tiny-2n8g-fsdp2-lora", MAX_STEPS="20")
        assert found.message.startswith(f"against {STEM} it differs in")

    def test_of_two_alike_the_one_of_the_same_size_is_the_twin(self, family):
        """The other comes first by name, and shares as many words."""
        family.case("sft-tiny-1n4g-fsdp2-a", config=CONFIG.replace("GPUS_PER_NODE=8", "GPUS_PER_NODE=4"))
        (found,) = self.arms(family, f"{STEM}-a-b-lora", twin=f"{STEM}-b", MAX_STEPS="20")
        assert found.message.startswith(f"against {STEM}-b it differs in MAX_STEPS")

    def test_gpus_of_the_config_block(self, family):
        family.case("sft-tiny-1n4g-fsdp2", config=CONFIG.replace("GPUS_PER_NODE=8", "GPUS_PER_NODE=4"))
        family.case(f"{STEM}-lora", recipe=LORA)
        (found,) = family.findings()
        assert found.details == ("GPUS_PER_NODE: 8 and 4",)

    def test_an_arm_without_a_recipe_is_compared_by_its_config_block(self, family):
        family.case(config=CONFIG.replace("=50", "=20"), check="")
        (family.recipes / f"{STEM}.yaml").unlink()
        family.case(f"{STEM}-lora", recipe=LORA)
        assert family.kinds() == ["incomparable-arms", "missing-recipe"]

    @pytest.mark.parametrize(("keys", "shown"), [(4, ""), (5, " and 1 more")])
    def test_the_message_shows_four_keys_and_the_details_all(self, family, keys, shown):
        extra = "".join(f"k{number}: 1\n" for number in range(keys))
        (found,) = self.arms(family, f"{STEM}-lora", recipe=LORA + extra)
        assert len(found.details) == keys
        assert found.message.endswith(f"k3: 1 and '(absent)'{shown}")

    def test_another_model_or_backend_is_no_twin(self, family):
        family.case("sft-small-1n8g-fsdp2")
        assert self.arms(family, "sft-tiny-2n8g-megatron-lora") == []


def test_a_recipe_that_many_inherit_is_one_finding(family):
    family.case()
    family.case(f"{STEM}-long")
    (family.recipes / "base.yaml").write_text("policy: [\n")
    (found,) = family.findings()
    assert (found.kind, found.file.name) == ("unreadable-recipe", "base.yaml")
    assert str(family.root) not in found.message
