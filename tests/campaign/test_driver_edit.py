# SPDX-License-Identifier: Apache-2.0
"""Limits put into drivers: what changes, what stays, and that git takes the patch."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lora_suite.campaign.driver_edit import Machine, patch, put_limits

H200 = Machine("H200", "NVIDIA H200")
TIME, NEW = 'mean(data["t"], 2) < 30', 'mean(data["t"], 2) < 21.5'
HEAD = "#!/usr/bin/env bash\n# A driver.\n"


def edited(text: str, limits: dict[str, str] | None = None, added: tuple[str, ...] = ()) -> str:
    """The driver after its head, with a new limit of the time."""
    whole = put_limits(Path("d.sh"), HEAD + text, H200, {TIME: NEW} if limits is None else limits, added)
    assert whole.startswith(HEAD)
    return whole.removeprefix(HEAD)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (f"check '{TIME}'\n", f"check --on H200 '{NEW}'\n"),
        # What has no machine keeps holding everywhere.
        (f"check 'a < 1' '{TIME}' 'b < 2'\n", f"check 'a < 1' 'b < 2'\ncheck --on H200 '{NEW}'\n"),
        (f"check 'a < 1' \\\n  '{TIME}'\nx=1\n", f"check 'a < 1'\ncheck --on H200 '{NEW}'\nx=1\n"),
        (f"check --when k=v '{TIME}'\n", f"check --when k=v --on H200 '{NEW}'\n"),
        (
            f"check --when k=v 'a < 1' '{TIME}'\n",
            f"check --when k=v 'a < 1'\ncheck --when k=v --on H200 '{NEW}'\n",
        ),
        # Limits of this machine are replaced, those of others stay.
        (f"check --on H200 '{TIME}'\n", f"check --on H200 '{NEW}'\n"),
        (f"check --on H200 'a < 1' '{TIME}'\n", f"check --on H200 'a < 1' '{NEW}'\n"),
        (
            f"check --when k=v 'a < 1' 'b < 2' '{TIME}'\n",
            f"check --when k=v 'a < 1' 'b < 2'\ncheck --when k=v --on H200 '{NEW}'\n",
        ),
        (
            f"check 'a <\n  1' '{TIME}' 'b <\n  2'\nx=1\n",
            f"check 'a <\n  1' 'b <\n  2'\ncheck --on H200 '{NEW}'\nx=1\n",
        ),
        (f"check --on h200 '{TIME}'\n", f"check --on h200 '{NEW}'\n"),
        (f"check --on H100 '{TIME}'\n", f"check --on H100 '{TIME}' --on H200 '{NEW}'\n"),
        (
            f"check --on H200 '{TIME}' --on H100 '{TIME}'\n",
            f"check --on H200 '{NEW}' --on H100 '{TIME}'\n",
        ),
        (
            f"check --on H100 '{TIME}' --on A100 'b < 60'\n",
            f"check --on H100 '{TIME}' --on A100 'b < 60' --on H200 '{NEW}'\n",
        ),
        (f"check 'a < 1'  # {TIME}\n", f"check 'a < 1'  # {TIME}\n"),
        (f"echo '{TIME}'\n", f"echo '{TIME}'\n"),
        ("check \"data['t']['1'] < 30\"\n", "check \"data['t']['1'] < 30\"\n"),
    ],
)
def test_calls(before, after):
    assert edited(before) == after


def test_a_call_with_two_machines_gets_one_alternative():
    text = f"check --on H100 '{TIME}' --on A100 'mean(data[\"t\"], 2) < 60'\n"
    limits = {TIME: NEW, 'mean(data["t"], 2) < 60': NEW}
    assert edited(text, limits).count("--on H200") == 1


def test_new_limits_stand_at_the_end():
    assert edited("train\n", {}, ("c < 3",)) == "train\ncheck --on H200 'c < 3'\n"


def test_a_long_call_is_broken():
    long = "median(data['timing/train/step_time'], 4) < 1"
    text = edited("check 'a < 1' 'b < 2' 'c < 3'\n", {"a < 1": long * 1, "b < 2": long, "c < 3": long})
    assert text.count("\n") == 3
    kept = "x" * 60
    assert edited(f"check '{kept}' '{kept}y' 'a < 1'\n", {"a < 1": "a < 2"}) == (
        f"check '{kept}' \\\n  '{kept}y'\ncheck --on H200 'a < 2'\n"
    )


def test_an_expression_with_quotes_stays_one_word(tmp_path):
    text = edited("check \"data['t']['1'] < 30\"\n", {"data['t']['1'] < 30": "data['t']['1'] < 2"})
    script = tmp_path / "show.sh"
    script.write_text(f'check() {{ printf "%s\\n" "$@"; }}\n{text}')
    shown = subprocess.run(["bash", script], capture_output=True, text=True, check=True).stdout
    assert shown == "--on\nH200\ndata['t']['1'] < 2\n"


@pytest.mark.parametrize("end", ["\n", ""])
@pytest.mark.parametrize("folder", [".", "below/here"])
def test_git_applies_the_patch(tmp_path, end, folder):
    driver = tmp_path / folder / "scripts" / "d.sh"
    driver.parent.mkdir(parents=True)
    before = f"{HEAD}check '{TIME}'{end}"
    driver.write_text(before)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    after = put_limits(driver, before, H200, {TIME: NEW}, ())
    (tmp_path / "limits.diff").write_text(patch(driver, before, after))
    subprocess.run(["git", "apply", "limits.diff"], cwd=tmp_path, check=True)
    assert driver.read_text() == after == f"{HEAD}check --on H200 '{NEW}'\n"
