"""Reward functions of a response and its ground truth, graded in a process that is killed at a deadline."""

import warnings
from collections.abc import Sequence

from posttrain.grading.pool import DEADLINE_S, Pool
from posttrain.grading.verdict import GradeRequest
from posttrain.rewards.rules import RULES, modules_of

PATIENT_S = 5 * DEADLINE_S  # the deadline of one comparison with `fast=False`
Truth = str | int | float | Sequence[str | int | float]


def r1_zero_reward_fn(response: str, ground_truth: Truth, fast: bool = True) -> dict[str, float]:
    """The reward of a response of format `…</think> <answer>…</answer>`: `reward`, `format_reward`, `answer_reward`.

    | format | format_reward | answer_reward | reward |
    |---|---|---|---|
    | correct, with the correct answer (in a box or not) | 1 | 1 | 1 |
    | correct, with another answer | 1 | 0 | 0 |
    | wrong, with any answer | 0 | 0 | 0 |

    The rule is the reward `r1_zero` of the recipes (posttrain/rewards/maths.py); tags and values are those of
    "Understanding R1-Zero-Like Training" (arXiv 2503.20783). `ground_truth` is the answer, a complete
    solution with a `\\boxed{}`, a number, or a list of them, any of which is accepted.

    A worker process grades: no response can run code in this process, and each ground truth takes at most 2 seconds, or
    10 with `fast=False`. A response without a verdict by then, or one that crashes the worker, counts as wrong, with a
    RuntimeWarning; the recipes exclude such completions instead. The first call takes seconds to start the worker,
    later calls milliseconds; the worker ends a minute after the last call.

    Raises ValueError for a ground truth that no answer can be compared with.
    """
    return _graded("r1_zero", response, ground_truth, fast)


def question_only_reward_fn(response: str, ground_truth: Truth, fast: bool = True) -> dict[str, float]:
    """The reward of a response whose format is a `\\boxed{…}`; otherwise as in `r1_zero_reward_fn`."""
    return _graded("question_only", response, ground_truth, fast)


def _graded(name: str, response: str, ground_truth: Truth, fast: bool) -> dict[str, float]:
    truths = [ground_truth] if isinstance(ground_truth, str | int | float) else list(ground_truth)
    if not truths:
        raise ValueError("ground_truth is empty: give at least one answer")
    with Pool(1, DEADLINE_S if fast else PATIENT_S, modules=modules_of([name])) as pool:
        grades = pool.grade([GradeRequest(RULES[name], response, str(truth)) for truth in truths], count=False)
    graded = [grade for grade in grades if grade.counts]
    for truth, grade in zip(truths, grades, strict=True):
        if grade.verdict == "bad_gold":
            raise ValueError(f"ground_truth {truth!r:.80}: {grade.reason}")
    if len(graded) < len(grades) and not any(grade.score for grade in graded):
        reasons = ", ".join(f"{grade.verdict} ({grade.reason})" for grade in grades if not grade.counts)
        warnings.warn(f"counted as wrong without a verdict: {reasons}", RuntimeWarning, stacklevel=3)
    reward = max((grade.score or 0.0 for grade in graded), default=0.0)
    formatted = max((grade.parts["format"] for grade in graded), default=0.0)
    return {"reward": reward, "format_reward": formatted, "answer_reward": reward}
