# SPDX-License-Identifier: Apache-2.0
"""Fuzzes the parser and the evaluation behind it: `python fuzz_parser.py --seconds 600 [--seed N]`.

Texts are token soup, mutations of real checks, and splices of two of them. Each one must be refused with an
ExpressionError, or be judged; anything else ends the program with the text and the seed that made it.
"""

import argparse
import random
import string
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    # Run as a script, the folder of this file would hide the package of the same name.
    sys.path[0] = str(Path(__file__).parents[2])

from check_metrics import CheckResult, Expression, ExpressionError, Series, evaluate, parse

CHECKS = (
    'data["train/loss"]["50"] < 0.8',
    'mean(data["timing/train/total_step_time"], -6, -1) < 0.6',
    'mean(data["train/loss"], range_start=2, ignore_top_p=0.05) < 1.5',
    'ratio_above(data["train/loss"], 1.05, 2) < 0.02',
    '(data["train/loss"]["1"] - median(data["train/loss"])) / data["train/loss"]["1"] > 0.20',
    'worst("ray/node.*.gpu.*.mem_gb", 10) < 60 and all_finite(data["train/loss"])',
    'ratio(data["train/loss"], full["train/loss"]) ** 2 <= max(0.8, 1, abs(-3))',
    'not (0 < percentile(data["train/loss"], 95, 1, 0) < 3 or slope(data["train/loss"]) >= 0)',
    'max_rel_diff(data["train/loss"], full["train/loss"]) == std(data["train/loss"]) // 1 % 7',
    '"50" in data["train/loss"] and not "51" in data["train/loss"] or len(data["train/loss"]) == 50',
)
TOKENS = (
    *"()[]{},.:;=<>+-*/%@&|^~!#'\"\\ \n\t0123456789",
    *("data", "full", "mean", "max", "worst", "ratio", "abs", "all_finite", "and", "or", "not", "if", "else"),
    *("lambda", "is", "in", "for", "await", "yield", "None", "True", "__import__", "f'", "b'", "'''"),
    *(":=", "**", "//", "==", "!=", "<=", "<<", "->", "...", "*data", "**data", "range_start="),
    *("1e999", "0x", "1_0", "1j", "9" * 400, '["train/loss"]', '["1"]', '("ray/*")', "(" * 250, "-" * 500),
    *("\x00", "\ud800", "é", "\u2028", "\ufeff", "٣"),
)
SLOWEST_SECONDS = 2.0

STEPS = tuple(range(1, 51))
ARMS = {
    arm: {
        "train/loss": Series("train/loss", STEPS, tuple(scale / step for step in STEPS)),
        "timing/train/total_step_time": Series("timing/train/total_step_time", STEPS, (1.0,) * len(STEPS)),
        "ray/node.0.gpu.0.mem_gb": Series("ray/node.0.gpu.0.mem_gb", (0, 10), (1.0, float("nan"))),
    }
    for arm, scale in (("data", 1.0), ("full", -2.0))
}


def soup(generator: random.Random) -> str:
    """Random tokens in a row."""
    return "".join(generator.choice(TOKENS) for _ in range(generator.randint(1, 30)))


def mutation(generator: random.Random) -> str:
    """A real check with a few characters or tokens deleted, doubled or put in."""
    text = generator.choice(CHECKS)
    for _ in range(generator.randint(1, 4)):
        start = generator.randrange(len(text) + 1)
        stop = min(len(text), start + generator.randint(0, 6))
        new = generator.choice((text[start:stop] * 2, "", generator.choice(TOKENS), random_text(generator)))
        text = text[:start] + new + text[stop:]
    return text


def splice(generator: random.Random) -> str:
    """The head of one check and the tail of another, or one inside the other."""
    first, second = generator.choice(CHECKS), generator.choice(CHECKS)
    at = generator.randrange(len(first))
    tail = first[at:] if generator.random() < 0.5 else ""
    return first[:at] + second[generator.randrange(len(second)) :] + tail


def random_text(generator: random.Random) -> str:
    """A few characters of any kind."""
    if generator.random() < 0.5:
        return "".join(generator.choices(string.printable, k=generator.randint(1, 4)))
    return "".join(chr(generator.randrange(sys.maxunicode)) for _ in range(generator.randint(1, 3)))


def judge(text: str) -> bool:
    """Parse and evaluate one text; True where it is an expression. Raises whatever is not foreseen."""
    start = time.process_time()
    try:
        expression = parse(text)
    except ExpressionError:
        return False
    facts(expression)
    if expression.arms <= ARMS.keys():
        result = evaluate(expression, ARMS, warmup=1, segments=(1, 31))
        assert isinstance(result, CheckResult)
        assert result.status == "FAIL" or not any(name.startswith("ray/") for _, name in expression.metrics)
    assert time.process_time() - start < SLOWEST_SECONDS
    return True


def facts(expression: Expression) -> None:
    """What an expression says of itself must fit together."""
    assert expression.metrics
    assert expression.arms == {arm for arm, _ in expression.metrics}
    assert {(arm, metric) for arm, metric, _ in expression.steps} <= expression.metrics
    assert expression.max_step >= max(
        (step for _, name, step in expression.steps if "ray/" not in name), default=0
    )
    assert expression.pair is None or len(expression.arms) == 2


def fuzz(seconds: float, seed: int) -> tuple[int, int]:
    """Texts tried and expressions among them."""
    generator = random.Random(seed)
    tried = accepted = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        text = generator.choice((soup, mutation, mutation, splice))(generator)
        try:
            accepted += judge(text)
        except BaseException:
            print(f"seed {seed}, text {tried}: {text!a}", file=sys.stderr)
            raise
        tried += 1
    return tried, accepted


def main() -> None:
    """Fuzz for a time and say how much was tried."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--seconds", type=float, default=60.0)
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    tried, accepted = fuzz(given.seconds, given.seed)
    print(f"{tried} texts, {accepted} of them expressions, seed {given.seed}: nothing unforeseen")


if __name__ == "__main__":
    main()
