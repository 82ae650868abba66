# SPDX-License-Identifier: Apache-2.0
"""Writes short-answers.jsonl and long-chat.jsonl: rows as long as those of two public data sets.

    python make_synthetic.py [FOLDER]

What a data set costs a trainer is how long its rows are and how much their lengths differ. These files have
about the lengths of SQuAD (short answers to a paragraph) and of the Tulu-3 SFT mixture (chat with a long
tail), need no network, and are small tasks that a model can learn. A row has as many bytes as a row of the
public data set has tokens, so that the built-in byte tokenizer, with one token a byte, meets those lengths.

The means come from the data sets' cards: SQuAD's training split has 79,346,108 bytes in 87,599 rows, 906 each
(https://huggingface.co/datasets/rajpurkar/squad), the mixture 2,914,250,827 in 939,343, 3102 each
(https://huggingface.co/datasets/allenai/tulu-3-sft-mixture), ids and keys included. At 4.5 bytes a token,
usual for English with a vocabulary of 128,000, that is about 190 and 680 tokens. The spreads are assumptions:
narrow for paragraphs that were chosen to be alike, wide for a mixture. Lengths are lognormal; the chat's end
at 4096, the longest row that the mixture's authors trained on (https://arxiv.org/abs/2411.15124).
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any, NamedTuple

SEED = 8128
ROWS = 512


class Lengths(NamedTuple):
    """Lognormal lengths: exp of a normal with mean ln(median) and deviation `sigma`, cut at both ends."""

    median: float
    sigma: float
    shortest: int
    longest: int

    def draw(self, rng: random.Random) -> int:
        """One length."""
        length = round(self.median * rng.lognormvariate(0.0, self.sigma))
        return min(max(length, self.shortest), self.longest)


# Median × exp(sigma² / 2) is the mean before the cut: 191 and 681.
SHORT = Lengths(median=180, sigma=0.35, shortest=60, longest=480)
CHAT = Lengths(median=372, sigma=1.1, shortest=40, longest=4096)
ANSWER = Lengths(median=5, sigma=0.6, shortest=2, longest=24)
TURNS = (1, 1, 1, 2, 3)


def _word(rng: random.Random, length: int) -> str:
    return "".join(rng.choice("abcdefghijklmnop") for _ in range(length))


def question(rng: random.Random) -> dict[str, Any]:
    """A row in SQuAD's shape: facts, a question for one of them, its answer; as long as drawn."""
    length, answer = SHORT.draw(rng), _word(rng, ANSWER.draw(rng))
    asked = _word(rng, 4)
    text = f"What is {asked}?"
    facts = [f"{asked} is {answer}."]
    room = length - len(text) - len(facts[0])
    while room > 12:
        fact = f"{_word(rng, 4)} is {_word(rng, min(ANSWER.draw(rng), room - 10))}."
        facts.append(fact)
        room -= len(fact) + 1
    rng.shuffle(facts)
    context = " ".join(facts)
    return {"context": context, "question": text, "answers": {"text": [answer], "answer_start": []}}


def conversation(rng: random.Random) -> dict[str, Any]:
    """A chat row: asked to say some words again and again, the assistant does; as long as drawn in all."""
    turns = rng.choice(TURNS)
    length = CHAT.draw(rng) // turns
    messages = []
    for _ in range(turns):
        words = [_word(rng, rng.randint(2, 7)) for _ in range(max(1, min(length // 30, 40)))]
        request = f"Say in turn: {' '.join(words)}"
        reply, spoken = "", 0
        while len(request) + len(reply) < length - 4 or not reply:
            reply += (" " if reply else "") + words[spoken % len(words)]
            spoken += 1
        messages += [{"role": "user", "content": request}, {"role": "assistant", "content": reply}]
    return {"messages": messages}


def make_rows() -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each file; the same on every call."""
    rng = random.Random(SEED)
    return {
        "short-answers.jsonl": [question(rng) for _ in range(ROWS)],
        "long-chat.jsonl": [conversation(rng) for _ in range(ROWS)],
    }


def main(folder: Path) -> None:
    """Write both files into `folder`."""
    for name, rows in make_rows().items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / name).write_text(text, encoding="utf-8")
        print(f"{folder / name}: {len(rows)} rows")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
