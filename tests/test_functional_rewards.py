"""posttrain.functional's reward functions: the course's three values, for whatever a model writes, in time."""

import pytest

from posttrain import functional as pf
from posttrain.functional import steps
from posttrain.rewards.rules import RULES

RIGHT = {"reward": 1.0, "format_reward": 1.0, "answer_reward": 1.0}
WRONG = {"reward": 0.0, "format_reward": 1.0, "answer_reward": 0.0}
UNFORMATTED = {"reward": 0.0, "format_reward": 0.0, "answer_reward": 0.0}


@pytest.mark.parametrize(
    ("response", "truth", "want"),
    [
        ("2 + 2 is 4.</think> <answer>4</answer>", "4", RIGHT),
        (r"so</think> <answer>\boxed{\frac{2}{4}}</answer>", "0.5", RIGHT),
        (r"so</think> <answer>\frac{\sqrt{2}}{2}</answer>", r"\frac{1}{\sqrt{2}}", RIGHT),
        ("so</think> <answer>4</answer>", 4, RIGHT),
        ("so</think> <answer>0.5</answer>", 0.5, RIGHT),
        ("so</think> <answer>4</answer>", ["3", 4], RIGHT),
        ("so</think> <answer>4</answer>", r"Twice two is $\boxed{4}$.", RIGHT),
        ("so</think> <answer>5</answer>", "4", WRONG),
        ("so</think> <answer>5</answer>", ["3", "4"], WRONG),
        ("so</think><answer>4</answer>", "4", UNFORMATTED),  # the space belongs to the form
        ("The answer is 4.", "4", UNFORMATTED),  # a right answer in another form earns nothing
        ("", "4", UNFORMATTED),
    ],
)
def test_r1_zero(response, truth, want):
    assert pf.r1_zero_reward_fn(response, truth) == want


@pytest.mark.parametrize(
    ("response", "want"),
    [(r"It is \boxed{4}.", RIGHT), (r"It is \boxed{5}.", WRONG), ("It is 4.", UNFORMATTED), (r"\boxed{4", UNFORMATTED)],
)
def test_question_only(response, want):
    assert pf.question_only_reward_fn(response, "4", fast=False) == want


def test_a_truth_that_nothing_equals_is_refused():
    for truth, match in (
        ("", "no answer to compare with"),
        ([], "ground_truth is empty"),
        (["4", " "], "ground_truth ' '"),
    ):
        with pytest.raises(ValueError, match=match):
            pf.r1_zero_reward_fn("</think> <answer>4</answer>", truth)


@pytest.mark.parametrize(("rule", "reason"), [("HANG", r"timeout \(no answer within 0.5 s"), ("LEAVE", "crashed")])
def test_no_verdict_counts_as_wrong_with_a_warning(monkeypatch, rule, reason):
    monkeypatch.setitem(RULES, "r1_zero", f"grading_rules:{rule}")
    monkeypatch.setattr(steps, "DEADLINE_S", 0.5)
    with pytest.warns(RuntimeWarning, match=reason):
        assert pf.r1_zero_reward_fn("4", "4") == UNFORMATTED


def test_it_is_a_reward_function_of_groups():
    responses = ["</think> <answer>4</answer>", "</think> <answer>5</answer>"]
    advantages, raw, metadata = pf.compute_group_normalized_rewards(
        pf.r1_zero_reward_fn, responses, ["4", "4"], group_size=2, advantage_eps=0.0, normalize_by_std=False
    )
    assert (advantages.tolist(), raw.tolist(), metadata["format_reward"]) == ([0.5, -0.5], [1, 0], 1)
