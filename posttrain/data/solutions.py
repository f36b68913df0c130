"""Extracts the answer of a solution: after `####`, as in GSM8K, or from the last `\\boxed{}`."""

from __future__ import annotations

from posttrain.latex import last_box


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
