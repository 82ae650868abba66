# SPDX-License-Identifier: Apache-2.0
"""The check of the pages finds what is planted, and leaves alone what is right."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import pytest

def test_plain(): pass

@pytest.mark.parametrize("n", [1, 2])
def test_many(n): pass

class TestGroup:
    def test_inside(self): pass
"""


@pytest.fixture(scope="module")
def check() -> dict[str, Any]:
    """The names of the tool."""
    return runpy.run_path(str(ROOT / "tools" / "docs_check.py"))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one test file."""
    root = tmp_path_factory.mktemp("project")
    (root / "tests").mkdir()
    (root / "tests" / "test_a.py").write_text(TESTS, encoding="utf-8")
    return root


@pytest.fixture(scope="module")
def collected(check: dict[str, Any], project: Path) -> set[str]:
    return check["collect"](project, ["tests/test_a.py"])


def test_collection_is_pytests(collected: set[str]) -> None:
    assert collected == {
        "tests/test_a.py::test_plain",
        "tests/test_a.py::test_many[1]",
        "tests/test_a.py::test_many[2]",
        "tests/test_a.py::TestGroup::test_inside",
    }


@pytest.mark.parametrize(
    "name", ["::test_plain", "::test_many", "::test_many[2]", "::TestGroup", "::TestGroup::test_inside", ""]
)
def test_tests_that_are_collected(
    check: dict[str, Any], project: Path, collected: set[str], name: str
) -> None:
    assert list(check["missing_tests"](project, f"see `tests/test_a.py{name}`", collected)) == []


@pytest.mark.parametrize(
    ("named", "problem"),
    [
        ("tests/test_a.py::test_gone", "no test tests/test_a.py::test_gone is collected"),
        ("tests/test_a.py::test_pla", "no test tests/test_a.py::test_pla is collected"),
        ("tests/test_a.py::test_many[3]", "no test tests/test_a.py::test_many[3] is collected"),
        ("tests/test_a.py::test_inside", "no test tests/test_a.py::test_inside is collected"),
        ("tests/test_b.py::test_plain", "no test tests/test_b.py::test_plain is collected"),
        ("tests/test_b.py", "there is no tests/test_b.py"),
    ],
)
def test_tests_that_are_not(
    check: dict[str, Any], project: Path, collected: set[str], named: str, problem: str
) -> None:
    text = f"| trap | `tests/test_a.py::test_plain` |\n| trap | `{named}` |\n"
    assert list(check["missing_tests"](project, text, collected)) == [problem]


def test_tests_that_cannot_be_imported_stop_the_check(check: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text("import no_such_module_at_all", encoding="utf-8")
    with pytest.raises(SystemExit, match="no_such_module_at_all"):
        check["collect"](tmp_path, ["test_broken.py"])


@pytest.mark.parametrize(
    ("link", "problem"),
    [
        ("other.md", None),
        ("other.md#what-is-n-and-why", None),
        ("#here", None),
        ("../docs/", None),
        ("https://example.com/no/such#page", None),
        ("gone.md", "link to gone.md: no such file"),
        ("other.md#why", "link to other.md#why: no such heading"),
        ("#there", "link to #there: no such heading"),
        ("#no-heading", "link to #no-heading: no such heading"),
    ],
)
def test_links(check: dict[str, Any], tmp_path: Path, link: str, problem: str | None) -> None:
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    (page.parent / "other.md").write_text("# Other\n\n## What is `n`, and why?\n", encoding="utf-8")
    text = f"# Here\n\nSee [the\npage]({link}).\n\n```python\n# no heading\nx[0](gone)\n```\n"
    page.write_text(text, encoding="utf-8")
    assert list(check["dead_links"](page, text)) == ([problem] if problem else [])


@pytest.mark.parametrize(
    "line",
    [
        "lora-suite run suites/smoke.yaml -k fsdp2 --repeats 2 ~policy.x   # a comment with --no-such-option",
        "cd somewhere && lora-suite lint | head",
        ".venv/bin/lora-suite config show recipe.yaml --origin",
        "lora-suite --help",
        "lora-suite metrics import --help",
        "check_metrics m.json \\\n    'max(data[\"x\"]) < 3' \\\n    --warmup 2",
        "echo lora-suite fly --high",
        "lora-suites fly",
        "it isn't lora-suite",
    ],
)
def test_commands_that_parse(check: dict[str, Any], line: str) -> None:
    assert list(check["bad_commands"](f"Text\n\n```bash\n{line}\n```\n")) == []


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("lora-suite fly", "lora-suite fly: there is no command 'fly'"),
        ("lora-suite config hide", "lora-suite config hide: there is no command 'hide'"),
        ("lora-suite lint --fix", "lora-suite lint --fix: No such option"),
        ("cd x && lora-suite lint --fix", "lora-suite lint --fix: No such option"),
        (".venv/bin/lora-suite run s.yaml --repeats 0", "0 is not in the range"),
        ("lora-suite run", "Missing argument 'SUITE'"),
        ("check_metrics m.json \\\n --warmups 2", "check_metrics m.json --warmups 2: No such option"),
    ],
)
@pytest.mark.parametrize("block", ["```bash\n{}\n```\n", "```\n{}\n```\n", "    {}\n"])
def test_commands_that_do_not(check: dict[str, Any], block: str, line: str, problem: str) -> None:
    text = "Text\n\n" + block.format(line.replace("\n", "\n    " if block.startswith(" ") else "\n"))
    (found,) = check["bad_commands"](text)
    assert problem in found


def test_prose_is_no_command(check: dict[str, Any]) -> None:
    assert list(check["bad_commands"]("lora-suite fly is no command.\n")) == []


def test_the_whole_names_page_and_problem(
    check: dict[str, Any],
    project: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    main, root, docs = check["main"], tmp_path / "copy", tmp_path / "copy" / "docs"
    shutil.copytree(project, root)
    docs.mkdir()
    monkeypatch.setitem(main.__globals__, "ROOT", root)
    (docs / "a.md").write_text("`tests/test_a.py::test_plain`, [b](b.md)\n", encoding="utf-8")
    assert main() == 1
    assert capsys.readouterr().err == "docs/a.md: link to b.md: no such file\n"
    (docs / "b.md").write_text("# B\n", encoding="utf-8")
    assert main() == 0
    (docs / "a.md").write_text("no test\n", encoding="utf-8")
    assert main() == 1
    assert "no page names a test" in capsys.readouterr().err
