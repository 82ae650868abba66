# SPDX-License-Identifier: Apache-2.0
"""Writes quickstart.jsonl and quickstart-validation.jsonl: short tasks with one right answer each.

    python make_quickstart.py [FOLDER]

Six kinds of task in turn (sums, differences, copies, reversals, counts, capitals), drawn from a fixed seed,
so that the files can be made again bit by bit. A row is ``{"input", "output"}``, together at most 64 bytes.
No prompt stands twice, so validation rows are never trained on.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

SEED = 20240
ROWS = {"quickstart.jsonl": 640, "quickstart-validation.jsonl": 64}
MAX_BYTES = 64

CAPITALS = {
    "Austria": "Vienna", "Belgium": "Brussels", "Bulgaria": "Sofia", "Canada": "Ottawa", "Chile": "Santiago",
    "China": "Beijing", "Croatia": "Zagreb", "Cuba": "Havana", "Denmark": "Copenhagen", "Egypt": "Cairo",
    "Estonia": "Tallinn", "Finland": "Helsinki", "France": "Paris", "Germany": "Berlin", "Ghana": "Accra",
    "Greece": "Athens", "Hungary": "Budapest", "Iceland": "Reykjavik", "India": "New Delhi", "Iran": "Tehran",
    "Iraq": "Baghdad", "Ireland": "Dublin", "Italy": "Rome", "Japan": "Tokyo", "Kenya": "Nairobi",
    "Latvia": "Riga", "Lithuania": "Vilnius", "Mexico": "Mexico City", "Morocco": "Rabat",
    "Nepal": "Kathmandu", "Norway": "Oslo", "Peru": "Lima", "Poland": "Warsaw", "Portugal": "Lisbon",
    "Romania": "Bucharest", "Russia": "Moscow", "Serbia": "Belgrade", "Slovakia": "Bratislava",
    "Slovenia": "Ljubljana", "Spain": "Madrid", "Sweden": "Stockholm", "Thailand": "Bangkok",
    "Tunisia": "Tunis", "Turkey": "Ankara", "Ukraine": "Kyiv", "Uruguay": "Montevideo", "Vietnam": "Hanoi",
    "Zambia": "Lusaka",
}  # fmt: skip
CAPITAL_FORMS = ("The capital of {} is", "Capital of {}?", "Name the capital of {}:")


def _word(rng: random.Random, letters: str, shortest: int, longest: int) -> str:
    return "".join(rng.choice(letters) for _ in range(rng.randint(shortest, longest)))


def _sum(rng: random.Random) -> str:
    return f"{rng.randint(0, 99)} + {rng.randint(0, 99)} ="


def _difference(rng: random.Random) -> str:
    low, high = sorted(rng.randint(0, 99) for _ in range(2))
    return f"{high} - {low} ="


def _copy(rng: random.Random) -> str:
    return f"Copy: {_word(rng, 'abcdefghij', 3, 8)}"


def _reversal(rng: random.Random) -> str:
    return f"Reverse: {_word(rng, 'abcdefghij', 3, 6)}"


def _count(rng: random.Random) -> str:
    return f"How many a in {_word(rng, 'ab', 3, 9)}?"


def _capital(rng: random.Random) -> str:
    return rng.choice(CAPITAL_FORMS).format(rng.choice(sorted(CAPITALS)))


TASKS: tuple[Callable[[random.Random], str], ...] = (_sum, _difference, _copy, _reversal, _count, _capital)


def answer(prompt: str) -> str:
    """Return the right response to a prompt of any of the tasks. Raises ValueError for other prompts."""
    words = prompt.split()
    if prompt.endswith(" ="):
        left, sign, right = int(words[0]), words[1], int(words[2])
        return f" {left + right if sign == '+' else left - right}"
    if prompt.startswith("Copy: "):
        return f" {words[1]}"
    if prompt.startswith("Reverse: "):
        return f" {words[1][::-1]}"
    if prompt.startswith("How many a in "):
        return f" {words[-1].count('a')}"
    for country, capital in CAPITALS.items():
        if country in words or f"{country}?" in words or f"{country}:" in words:
            return f" {capital}"
    raise ValueError(f"no task has the prompt {prompt!r}")


def check(row: dict[str, str]) -> bool:
    """Whether a row's output is the right response to its input."""
    return row["output"] == answer(row["input"])


def make_rows() -> dict[str, list[dict[str, str]]]:
    """Return the rows of each file; the same on every call, no prompt twice in all of them."""
    rng = random.Random(SEED)
    prompts: dict[str, None] = {}
    spare = 0
    total = sum(ROWS.values())
    while len(prompts) < total:
        prompt = TASKS[(len(prompts) + spare) % len(TASKS)](rng)
        if prompt in prompts:
            spare += 1  # go on with the next task rather than wait for a new prompt of this one
        prompts[prompt] = None
    rows = [{"input": prompt, "output": answer(prompt)} for prompt in prompts]
    files, start = {}, 0
    for name, count in ROWS.items():
        files[name] = rows[start : start + count]
        start += count
    return files


def main(folder: Path) -> None:
    """Write both files into `folder`."""
    for name, rows in make_rows().items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / name).write_text(text, encoding="utf-8")
        print(f"{folder / name}: {len(rows)} rows")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
