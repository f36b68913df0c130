"""Finding the answer in a solution: after `####`, as GSM8K has it, or in the last `\\boxed{}`."""

from __future__ import annotations


def working_and_answer(solution: str, answer: str) -> tuple[str, str]:
    """A problem's working and its answer, from a solution and an answer of which one may be empty and hold both."""
    if "####" in answer:
        working, _, last = answer.rpartition("####")
        return solution or working.rstrip(), last
    if not answer:
        if boxed := last_boxed(solution):
            return solution, boxed
        working, mark, last = solution.rpartition("####")
        if mark and last.strip() and "\n" not in last.strip():  # else it is a heading
            return working.rstrip(), last
        return "", solution
    if boxed := last_boxed(answer):
        alone = answer.strip() == f"\\boxed{{{boxed}}}"
        return solution or ("" if alone else answer), boxed
    return solution, answer


def last_boxed(solution: str) -> str | None:
    """What the last balanced `\\boxed{…}` holds."""
    start = solution.rfind("\\boxed{")
    depth = 0
    for index in range(start + 6, len(solution)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(solution[index], 0)
        if depth == 0:
            return solution[start + 7 : index]
    return None
