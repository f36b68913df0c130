"""Built-in tasks, which need no download: arithmetic with worked solutions, generated from a seed. Train and test are
disjoint by construction: a hash of the problem determines its split."""

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from posttrain.base.errors import DataError

Compose = Callable[[str, str], str]  # (working, answer) -> a reply in the template's format
MOST_ROWS = 200_000  # a third of all problems, so that sampling a new one is quick


def arithmetic_problems(split: str, rows: int, seed: int) -> Iterator[dict[str, str]]:
    """Yield distinct sums and differences of 2 or 3 numbers up to 99: `problem`, `solution` (the working), `answer`."""
    if rows > MOST_ROWS:
        raise DataError(f"builtin:arithmetic has at most {MOST_ROWS:,} rows, not {rows:,}: lower max_rows")
    rng = np.random.default_rng([seed, zlib.crc32(split.encode())])
    seen: set[str] = set()
    while len(seen) < rows:
        problem, solution, answer = _sample(rng)
        if problem in seen or split != ("test" if zlib.crc32(problem.encode()) % 10 == 0 else "train"):
            continue
        seen.add(problem)
        yield {"problem": problem, "solution": solution, "answer": str(answer)}


def arithmetic_preference(split: str, rows: int, seed: int, compose: Compose) -> Iterator[dict[str, Any]]:
    """`builtin:arithmetic-preference`: `chosen` is the correct reply, `rejected` a reply with a wrong last step."""
    rng = np.random.default_rng([seed, zlib.crc32(split.encode()), 1])
    for row in arithmetic_problems(split, rows, seed):
        answer = int(row["answer"])
        wrong = answer + int(rng.choice([-11, -10, -9, -2, -1, 1, 2, 9, 10, 11]))
        working = row["solution"].removesuffix(row["answer"]) + str(wrong)
        chosen, rejected = compose(row["solution"], row["answer"]), compose(working, str(wrong))
        yield {"prompt": row["problem"], "chosen": chosen, "rejected": rejected}


def arithmetic_kto(split: str, rows: int, seed: int, compose: Compose) -> Iterator[dict[str, Any]]:
    """`builtin:arithmetic-kto`: one reply per problem, with the `label` true if it is correct and false if not."""
    rng = np.random.default_rng([seed, zlib.crc32(split.encode()), 2])
    for pair in arithmetic_preference(split, rows, seed, compose):
        label = bool(rng.integers(2))
        yield {"prompt": pair["prompt"], "completion": pair["chosen" if label else "rejected"], "label": label}


TASKS: dict[str, Callable[[str, int, int, Compose], Iterator[dict[str, Any]]]] = {
    "builtin:arithmetic": lambda split, rows, seed, compose: arithmetic_problems(split, rows, seed),
    "builtin:arithmetic-preference": arithmetic_preference,
    "builtin:arithmetic-kto": arithmetic_kto,
}


def _sample(rng: np.random.Generator) -> tuple[str, str, int]:
    a, b, c = (int(n) for n in rng.integers(0, 100, size=3))
    kind = rng.random()
    if kind < 0.35:
        return f"What is {a} + {b}?", _step(a, "+", b), a + b
    if kind < 0.7:
        a, b = max(a, b), min(a, b)
        return f"What is {a} - {b}?", _step(a, "-", b), a - b
    c = min(c, a + b)
    return f"What is {a} + {b} - {c}?", f"{_step(a, '+', b)}\n{_step(a + b, '-', c)}", a + b - c


def _step(a: int, sign: str, b: int) -> str:
    """The working of one operation, with the tens of the second number first: 47 + 38 = 77 + 8 = 85."""
    result = a + b if sign == "+" else a - b
    tens, ones = b - b % 10, b % 10
    if not tens or not ones:
        return f"{a} {sign} {b} = {result}"
    return f"{a} {sign} {b} = {a + tens if sign == '+' else a - tens} {sign} {ones} = {result}"
