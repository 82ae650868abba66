# SPDX-License-Identifier: Apache-2.0
"""The comment on a pull request: short, whole, and safe in GitHub's Markdown."""

from __future__ import annotations

import re

import pytest

from lora_suite.report.markdown import ROWS, marker, render
from tests.report.helpers import CASES, check, pair, run, suite
from tests.report.nights import night

# GitHub's limit of a comment, in characters.
MOST = 65_536


def rows(text: str) -> list[list[str]]:
    """The cells of the first table, less its head."""
    table = re.search(r"\n\| state \| what .*?\n\n", text, re.DOTALL)
    assert table is not None
    return [re.split(r"(?<!\\)\|", line)[1:-1] for line in table[0].strip().splitlines()[2:]]


def broken(count: int, message: str = "crashed"):
    """A suite of which `count` runs broke, each in its own way."""
    runs = [
        run(f"case-{number}", state="ERROR", own_state="ERROR", message=f"{number}: {message}", checks=[])
        for number in range(count)
    ]
    return suite(runs=runs, pairs=[])


def test_it_starts_with_a_marker_that_is_the_same_every_night():
    first, second = render(night(pairs=1)), render(night(pairs=2, seed=8))
    assert first.splitlines()[0] == second.splitlines()[0] == "<!-- lora-suite: nightly -->"
    assert marker("a --> b") == "<!-- lora-suite: a-----b -->"


def test_a_green_suite_is_a_headline_and_folded_tables():
    text = render(suite())
    assert "### PASS: smoke\n\n19 PASS (16 runs, 3 pairs, 3 min 12 s, exit 0)" in text
    assert "| state | what" not in text
    unfolded = re.sub(r"<details>.*?</details>", "", text, flags=re.DOTALL)
    assert len(unfolded.strip().splitlines()) == 5


def test_what_did_not_pass_is_a_row_with_its_evidence():
    found = rows(render(night(pairs=3)))
    assert [cells[0].strip() for cells in found] == ["FAIL", "FAIL", "ERROR", "MISSING"]
    _, place, why, change, nights = (cell.strip() for cell in found[0])
    assert place == r"llama3.1-8b-1n8g-fsdp2: lora/full step\_time"
    assert r"0.8447 \[0.8408, 0.8487\] is beyond the limit \< 0.8<br>`│" in why
    assert "**cause:** only the LoRA arm moved" in why
    assert change == "full 0.3196 → lora 0.27 s"
    assert nights.endswith("▇█████`")


@pytest.mark.parametrize(("count", "shown"), [(ROWS, ROWS), (ROWS + 1, ROWS), (200, ROWS)])
def test_never_more_than_ten_rows(count, shown):
    found = rows(render(broken(count)))
    assert len(found) == shown
    told = found[-1][1].strip()
    assert (told == f"and {count - ROWS + 1} ERROR more in report.html") is (count > ROWS)


def test_it_says_how_to_run_it_again_and_where_it_ran():
    text = render(night(pairs=1))
    assert "```sh\nlora-suite run suites/nightly.yaml policy.init=random\n```" in text
    assert "5f1c2a90: device NVIDIA H200" in text
    assert "code: c03d5e7a" in text
    assert "lora-suite run suites/smoke.yaml" in render(suite())


def test_the_machine_is_told_on():
    assert "run 2: GPU 3 was throttled for heat in 12 of 40 samples" in render(night(pairs=1))


def test_a_log_is_folded_and_cannot_leave_its_block():
    log = "\n".join(["crashed: x", "  ```", "  </details> @everyone", "  ````"])
    text = render(suite(runs=[run(state="ERROR", own_state="ERROR", message=log, checks=[])], pairs=[]))
    assert "`````text\n  ```\n  </details> @everyone\n  ````\n`````" in text


def test_nothing_in_a_name_or_message_becomes_markup_or_calls_somebody():
    evil = "<script>x</script> | @octocat #1 `a` [b](c) <!-- & *d* _e_"
    text = render(
        suite(
            runs=[run(evil, checks=[check("FAIL", name=evil, value=evil, message=evil)], health=[evil])],
            pairs=[pair(evil, checks=[])],
        )
    )
    assert "@octocat" not in text
    assert not re.search(r"(?<!\\)<script", text)
    assert not re.search(r"(?<!\\)#1", text)
    assert [len(cells) for cells in rows(text)] == [5]


@pytest.mark.parametrize("length", [10, 20_000])
def test_it_fits_a_comment(length):
    message = "x" * length + "\n" + "\n".join("  log " + "y" * length for _ in range(300))
    verdict = broken(40, message)
    verdict.pairs = [pair(f"pair-{'z' * 200}-{number}") for number in range(500)]
    for each in verdict.runs:
        each.health = ["h" * 1000]
    assert len(render(verdict)) < MOST


def test_pairs_are_all_there():
    text = render(suite())
    assert text.count("| PASS | ") == 4
    assert r"| PASS | fsdp2: lora/full step\_time | 0.931 | \[0.880, 0.985\] | \< 2 | ≥ 7.5 % |" in text
    assert CASES[0] not in text
