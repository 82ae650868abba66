# SPDX-License-Identifier: Apache-2.0
"""Bash text taken apart, held to what bash itself makes of the same text."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_suite.config import ConfigError
from lora_suite.plan.external.commands import Pipeline
from lora_suite.plan.external.expand import arithmetic, expand
from lora_suite.plan.external.shell import parse_shell

VALUES = {"MAX_STEPS": "50", "STEPS_PER_RUN": "20", "NAME": "a b", "EMPTY": "", "DIR": "/r/tests/llm"}

WORDS = [
    "plain",
    "'single $NAME'",
    '"double $NAME"',
    '"${NAME}x"',
    "a\\ b",
    "\\$NAME",
    '"\\$NAME \\" \\\\"',
    "'a'\"b\"c",
    "\"data['train/loss']['$MAX_STEPS'] < 1.05\"",
    '\'data["train/loss"]["1"] < 3\'',
    "x=${UNSET:-4}",
    "${EMPTY:-7}",
    "${MAX_STEPS:-7}",
    "${UNSET:-$MAX_STEPS}",
    "$((MAX_STEPS + 1))",
    "$(( (MAX_STEPS + STEPS_PER_RUN - 1) / STEPS_PER_RUN ))",
    "$(( -7 / 2 ))",
    "$(( -7 % 3 ))",
    "$(( ($MAX_STEPS - 1) * 2 ))",
    '$(basename "$DIR/sft-a.sh" .sh)',
    "$(dirname $DIR)",
    '"$(dirname "$DIR")/x"',
    '"line one\\\nline two"',
]


def only(text: str) -> Pipeline:
    (pipeline,) = parse_shell(Path("a.sh"), text).pipelines
    return pipeline


@pytest.fixture(scope="module")
def bash_says() -> list[str]:
    """What bash expands every word to, in one call."""
    settings = "; ".join(f"{name}='{value}'" for name, value in VALUES.items())
    script = settings + "\n" + "\n".join(f"printf '%s\\0' {word}" for word in WORDS)
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


@pytest.mark.parametrize("index", range(len(WORDS)), ids=WORDS)
def test_word_means_what_bash_makes_of_it(index: int, bash_says: list[str]) -> None:
    (command,) = only(f"echo {WORDS[index]}").commands
    assert len(command.words) == 2
    assert expand(command.words[1], VALUES) == (bash_says[index], True)


@pytest.mark.parametrize(
    "word",
    ["$UNSET", "$(date)", "`date`", "${NAME%b}", "$@", '"$(jq . file)"', "$(( UNSET + 1 ))", "$((1/0))"],
)
def test_what_only_a_run_can_tell_stays_as_it_is(word: str) -> None:
    (command,) = only(f"echo {word}").commands
    text, known = expand(command.words[1], VALUES)
    assert (text, known) == (word.strip('"'), False)


def test_the_planners_environment_has_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROM_OUTSIDE", "3")
    (command,) = only("echo ${FROM_OUTSIDE:-8} $FROM_OUTSIDE").commands
    assert [expand(word, {}) for word in command.words[1:]] == [("8", True), ("$FROM_OUTSIDE", False)]


@pytest.mark.parametrize("text", ["9**9**9", "__import__('os')", "1.5", "'a'", "True", ""])
def test_arithmetic_is_integers_and_nothing_else(text: str) -> None:
    assert arithmetic(text, {}) is None


def test_line_numbers_over_continuations_quotes_and_here_documents() -> None:
    text = "cat <<EOF\n|| true\nEOF\na \\\n  'x\ny' \\\n  z\nb # note\n# alone\n"
    shell = parse_shell(Path("a.sh"), text)
    assert [(each.line, each.commands[0].name) for each in shell.pipelines] == [
        (1, "cat"),
        (4, "a"),
        (8, "b"),
    ]
    assert [word.line for word in shell.pipelines[1].commands[0].words] == [4, 5, 7]
    assert [(each.line, each.text, each.alone) for each in shell.comments] == [
        (8, "note", False),
        (9, "alone", True),
    ]


def test_pipes_and_connectors() -> None:
    text = "a | b 2>&1 | tee log || true\nc && d; e &\n"
    found = parse_shell(Path("a.sh"), text).pipelines
    assert [([command.name for command in each.commands], each.connector) for each in found] == [
        (["a", "b", "tee"], "||"),
        (["true"], ";"),
        (["c"], "&&"),
        (["d"], ";"),
        (["e"], "&"),
    ]
    assert [operator for operator, _ in found[0].commands[1].redirections] == ["2>&"]


def test_blocks_with_their_conditions() -> None:
    text = (
        "if [[ $(jq '.a | max' f) -ge $N ]]; then\n  a\nelif x; then b\nelse\n"
        "  for i in 1 2; do c; done\nfi\nf() {\n  d\n}\nwhile read -r x; do e; done < file\n(g; h)\n"
        "case $1 in\n  a|b) i ;;\n  *) j ;;\nesac\nk\n"
        "for i in 1; do l; done | tee log\n"
    )
    found = parse_shell(Path("a.sh"), text).pipelines
    where = {
        each.commands[0].name: [(block.kind, block.branch) for block in each.blocks]
        for each in found
        if each.commands[0].name
    }
    assert where["a"] == [("if", "then")]
    assert where["b"] == [("if", "then")]
    assert where["c"] == [("if", "else"), ("loop", "")]
    assert where["d"] == [("function", "")]
    assert where["e"] == [("loop", "")]
    assert where["g"] == where["h"] == [("group", "")]
    assert where["i"] == where["j"] == [("case", "")]
    assert where["k"] == []
    (test, *_) = (each for each in found if each.commands[0].name == "[[")
    assert test.commands[0].words[1].raw == "$(jq '.a | max' f) -ge $N"
    (whole,) = (each for each in found if each.commands[-1].name == "tee")
    assert (whole.commands[0].name, whole.blocks) == ("done", ())


def test_assignments_lists_and_operators_in_tests() -> None:
    text = "A=1 B='x y' run\nLIST=(a 'b c'\n  d) # note\n[[ $x =~ ^(a|b)$ && $y < 3 ]] && z\n(( i++ ))\n"
    run, lists, test, z, count = parse_shell(Path("a.sh"), text).pipelines
    assert [each.name for each in run.commands[0].assignments] == ["A", "B"]
    assert lists.commands[0].assignments[0].value.raw == "(a 'b c'\n  d)"
    assert (test.commands[0].name, test.connector, z.commands[0].name) == ("[[", "&&", "z")
    assert (count.line, count.commands[0].name) == (5, "((")


@given(st.text(alphabet="ab$(){}[]'\"`\\|&;<>#=\n !", max_size=40))
@settings(max_examples=400, deadline=None)
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        shell = parse_shell(Path("a.sh"), text)
    except ConfigError:
        return
    for pipeline in shell.pipelines:
        for command in pipeline.commands:
            assert 1 <= command.line <= text.count("\n") + 1
            for word in command.words:
                expand(word, VALUES)


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("a\nb 'c\nd\n", 2, "quote ' never ends"),
        ('a\nb "c\nd\n', 2, 'quote " never ends'),
        ("a\nif b; then\n  c\n", 2, "if block that begins here never ends"),
        ("a\nfi\n", 2, "fi closes nothing"),
        ("a\nb $(c\n", 2, "substitution $( never ends"),
        ("cat <<EOF\nx\n", 2, "here-document never reaches EOF"),
        ("a >\n", 1, "nothing follows >"),
        ("a\n| b\n", 2, "nothing stands before |"),
        ("[[ a\n", 1, "[[ never ends"),
        ("then\n", 1, "then has no beginning"),
        ("A=(b\n", 1, "list ( never ends"),
        ("a (b)\n", 1, "parenthesis"),
    ],
)
def test_what_is_no_bash_is_named_with_its_line(text: str, line: int, what: str) -> None:
    assert (
        subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).returncode or "EOF" in text
    )
    with pytest.raises(ConfigError) as caught:
        parse_shell(Path("dir/a.sh"), text)
    assert str(caught.value).startswith(f"dir/a.sh:{line}: not readable as bash: ")
    assert what in str(caught.value)
