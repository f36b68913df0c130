"""Extracts the answer of a solution: after `####`, as in GSM8K, or from the last `\\boxed{}`."""

from __future__ import annotations

import re

from posttrain.latex import last_box

THINK_TAGS = re.compile(r"</?think>")
# also what a chat template has begun (it ends without having begun here), and what was cut off
THINKING = re.compile(r"\A(?:(?!<think>).)*?</think>\s*|<think>.*?(?:</think>\s*|\Z)", re.DOTALL)


def without_think_tags(text: str, strip: bool) -> str:
    """A solution for a template with tags of its own: without `<think>` and `</think>`; with `strip` also without what
    is between them."""
    return THINK_TAGS.sub("", THINKING.sub("", text) if strip else text)


def working_and_answer(solution: str, answer: str) -> tuple[str, str]:
    """A problem's working and answer, from a solution and an answer, one of which may be empty."""
    if "####" in answer:
        working, _, last = answer.rpartition("####")
        return solution or working.rstrip(), last
    if not answer:
        if boxed := last_box(solution):
            return solution, boxed
        working, mark, last = solution.rpartition("####")
        if mark and last.strip() and "\n" not in last.strip():  # else it is a heading
            return working.rstrip(), last
        return "", solution
    if boxed := last_box(answer):
        alone = answer.strip().removeprefix("\\boxed{").removesuffix("}").strip() == boxed
        return solution or ("" if alone else answer), boxed
    return solution, answer
