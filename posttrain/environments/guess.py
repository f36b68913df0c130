"""A guessing game as an environment of messages: find a whole number in as few guesses as possible."""

import re
from typing import Any

from posttrain.environments import Step


class Guess:
    """`contract: messages`. Each row gives `secret`, and may give `low` and `high` (default 1 and 100). The reward is 1
    for the secret, less 0.05 for each guess before it."""

    COST = 0.05

    def reset(self, secret: int, low: int = 1, high: int = 100, **row: Any) -> list[dict[str, Any]]:
        self.secret, self.guesses = int(secret), list[int]()
        return [{"role": "user", "content": f"Guess my number from {low} to {high}."}]

    def step(self, message: dict[str, Any]) -> Step:
        numbers = re.findall(r"-?\d+", message["content"])
        if not numbers:
            return Step([{"role": "user", "content": "Answer with a number."}], -self.COST)
        guess = int(numbers[-1][:18])
        self.guesses.append(guess)
        if guess == self.secret:
            return Step([], 1.0, done=True, metrics={"guesses": float(len(self.guesses))})
        return Step([{"role": "user", "content": "higher" if guess < self.secret else "lower"}], -self.COST)
