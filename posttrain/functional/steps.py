"""Masked means and training steps, one microbatch at a time: rewards, advantages, the loss of each token, gradients.

Elements outside a mask may have any value, including NaN and −∞.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from posttrain.grading.pool import DEADLINE_S, Pool
from posttrain.grading.verdict import GradeRequest
from posttrain.losses import nll
from posttrain.losses.advantage import group_advantages
from posttrain.losses.policy import grpo_clip, policy_gradient
from posttrain.rewards.rules import RULES, modules_of

LossType = Literal["no_baseline", "reinforce_with_baseline", "grpo_clip"]
REWARDS = ("reward", "format_reward", "answer_reward")
PATIENT_S = 5 * DEADLINE_S  # the deadline of one comparison with `fast=False`
Truth = str | int | float | Sequence[str | int | float]


def masked_mean(tensor: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of the elements where `mask` is 1, along `dim`, or over all elements.

        mean_i = Σ_j m_ij x_ij / Σ_j m_ij

    `mask` has the tensor's shape, or one that broadcasts to it; bool, or numbers that are 0 or 1. As with
    `tensor.mean`, `dim` is removed from the result, and an empty mean (a row whose mask is all 0) is NaN.

    GRPO averages over each response in this way (arXiv 2402.03300, eq. 3): a token of a short response has more weight
    than a token of a long response. `masked_normalize` gives all tokens the same weight.
    """
    kept = _kept(tensor, mask)
    total, count = (x.sum() if dim is None else x.sum(dim) for x in (_only(tensor, kept), kept))
    return total / count


def masked_normalize(tensor: Tensor, mask: Tensor, dim: int | None = None, normalize_constant: float = 1.0) -> Tensor:
    """Sum of the elements where `mask` is 1, along `dim` or over all elements, divided by a constant.

        s_i = Σ_j m_ij x_ij / c

    `mask` is as in `masked_mean`; an empty sum is 0. If c is the same for every batch (in Dr. GRPO, arXiv 2503.20783,
    the maximum completion length), every token has the same weight, however long its response.

    Raises ValueError for a constant of 0.
    """
    if normalize_constant == 0:
        raise ValueError("normalize_constant is 0: the sum cannot be divided by it")
    kept = _only(tensor, _kept(tensor, mask))
    return (kept.sum() if dim is None else kept.sum(dim)) / normalize_constant


def _kept(tensor: Tensor, mask: Tensor) -> Tensor:
    """The mask as bool, expanded to the tensor's shape."""
    try:
        return mask.bool().expand_as(tensor)
    except RuntimeError:
        raise ValueError(f"mask {list(mask.shape)} does not fit tensor {list(tensor.shape)}") from None


def _only(tensor: Tensor, kept: Tensor) -> Tensor:
    """The tensor with 0 where the mask is 0; multiplication by the mask would turn an infinity into NaN."""
    return torch.where(kept, tensor, torch.zeros((), dtype=tensor.dtype, device=tensor.device))


def sft_microbatch_train_step(
    policy_log_probs: Tensor, response_mask: Tensor, gradient_accumulation_steps: int, normalize_constant: float = 1.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood of the responses of one microbatch, and its gradients.

        loss = 1 / (B · k) Σ_b 1/c Σ_t m_bt · (−log π(y_bt | x_b, y_b<t))

    policy_log_probs (B, L), log π of every label, from `get_response_log_probs`; response_mask (B, L), 1 on response
    tokens; k = gradient_accumulation_steps, the number of microbatches per optimizer step; c = normalize_constant.

    Calls backward: the gradients of k microbatches add up to those of one batch of k · B sequences. Returns the loss, a
    detached scalar already divided by k, and the metadata `nll`, the mean over the response tokens.

    Raises ValueError if the shapes differ or k is below 1.
    """
    _check_microbatch(policy_log_probs, response_mask, gradient_accumulation_steps)
    loss_BL = nll(policy_log_probs.flatten()).view_as(policy_log_probs)
    loss = masked_normalize(loss_BL, response_mask, -1, normalize_constant).mean() / gradient_accumulation_steps
    loss.backward()
    return loss.detach(), {"nll": masked_mean(loss_BL.detach(), response_mask)}


def _check_microbatch(policy_log_probs: Tensor, response_mask: Tensor, gradient_accumulation_steps: int) -> None:
    if policy_log_probs.ndim != 2 or policy_log_probs.shape != response_mask.shape:
        raise ValueError(
            "policy_log_probs and response_mask must both be (B, L), not "
            f"{list(policy_log_probs.shape)} and {list(response_mask.shape)}"
        )
    if gradient_accumulation_steps < 1:
        raise ValueError(f"gradient_accumulation_steps is {gradient_accumulation_steps}: it must be 1 or more")


def r1_zero_reward_fn(response: str, ground_truth: Truth, fast: bool = True) -> dict[str, float]:
    """The reward of a response in the format `…</think> <answer>…</answer>`: reward, format_reward, answer_reward.

    | format | format_reward | answer_reward | reward |
    |---|---|---|---|
    | correct, with the correct answer (in a box or not) | 1 | 1 | 1 |
    | correct, with a wrong answer | 1 | 0 | 0 |
    | wrong, with any answer | 0 | 0 | 0 |

    The rule is the reward `r1_zero` of the recipes (posttrain/rewards/maths.py); tags and values are those of
    "Understanding R1-Zero-Like Training" (arXiv 2503.20783). `ground_truth` is the answer, a complete
    solution with a `\\boxed{}`, a number, or a list of them, any of which is accepted.

    A worker process grades: no response can run code in this process, and each ground truth takes at most 2 seconds, or
    10 with `fast=False`. A response without a verdict by then, or one that crashes the worker, counts as wrong, with a
    RuntimeWarning; the recipes exclude such completions instead. The first call takes seconds to start the worker,
    later calls take milliseconds; the worker ends a minute after the last call.

    Raises ValueError for a ground truth that no answer can be compared with.
    """
    return _graded("r1_zero", response, ground_truth, fast)


def question_only_reward_fn(response: str, ground_truth: Truth, fast: bool = True) -> dict[str, float]:
    """Like `r1_zero_reward_fn`, but the format is correct if the response contains a `\\boxed{…}`."""
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


def compute_group_normalized_rewards(
    reward_fn: Callable[[str, str], Mapping[str, float]],
    rollout_responses: Sequence[str],
    repeated_ground_truths: Sequence[str],
    group_size: int,
    advantage_eps: float,
    normalize_by_std: bool,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Reward n responses and normalise within each prompt's group. Returns advantages (n,), raw rewards (n,), metadata.

        A_i = (r_i − mean r) / (std r + ε)        arXiv 2402.03300, section 4.1.2
        A_i =  r_i − mean r                       without normalize_by_std: Dr. GRPO, arXiv 2503.20783

    Responses of one prompt are consecutive: i and j are in the same group if i // group_size = j // group_size, and
    each prompt's ground truth is repeated group_size times. mean and std are over the group (std divides by group_size
    − 1); ε = advantage_eps. A group of equal rewards, or of one response, has advantages 0. Both tensors are float32.

    `reward_fn(response, truth)` returns `reward`, `format_reward` and `answer_reward`. Metadata: the mean of each, std,
    min and max of `reward`, and `frac_reward_zero_std`, the share of groups without a learning signal.

    Raises ValueError if the lists differ in length or do not divide into groups, and for a reward that is missing or
    not finite, with the index of its response.
    """
    count = len(rollout_responses)
    if count != len(repeated_ground_truths):
        raise ValueError(f"{count} responses, but {len(repeated_ground_truths)} ground truths: give one for each")
    if group_size < 1 or count == 0 or count % group_size:
        raise ValueError(f"{count} responses do not divide into groups of group_size {group_size}")
    values: dict[str, list[float]] = {name: [] for name in REWARDS}
    for index, (response, truth) in enumerate(zip(rollout_responses, repeated_ground_truths, strict=True)):
        scores = reward_fn(response, truth)
        for name in REWARDS:
            if not math.isfinite(scores.get(name, math.nan)):
                raise ValueError(f"the reward function returned no finite {name} for response {index}: {dict(scores)}")
            values[name].append(float(scores[name]))
    rewards = torch.tensor(values["reward"])
    groups = torch.arange(count) // group_size
    scale = "group" if normalize_by_std else "none"
    advantages = group_advantages(rewards, groups, scale_rewards=scale, eps=advantage_eps)
    by_group = rewards.view(-1, group_size)
    metadata = {name: sum(column) / count for name, column in values.items()} | {
        "reward_std": rewards.std().item() if count > 1 else 0.0,
        "reward_min": rewards.min().item(),
        "reward_max": rewards.max().item(),
        "frac_reward_zero_std": (by_group.amin(1) == by_group.amax(1)).float().mean().item(),
    }
    return advantages, rewards, metadata


def compute_naive_policy_gradient_loss(raw_rewards_or_advantages: Tensor, policy_log_probs: Tensor) -> Tensor:
    """REINFORCE's loss of each token: −A log π. (B, 1) and (B, L) give (B, L).

    Its gradient is −A ∇ log π: the policy gradient (Williams 1992, section 5; arXiv 2402.03300, eq. 21). Every token of
    a response has the same A: the response's reward or advantage, through which no gradient flows.

    Raises ValueError for other shapes.
    """
    return policy_gradient(policy_log_probs, _each_token(raw_rewards_or_advantages, policy_log_probs))


def compute_grpo_clip_loss(
    advantages: Tensor, policy_log_probs: Tensor, old_log_probs: Tensor, cliprange: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """GRPO's loss of each token: −min(ρ A, clip(ρ, 1 − ε, 1 + ε) A) with ρ = π / π_old. (B, L), and metadata.

    PPO's clipped surrogate (arXiv 1707.06347, eq. 7) with a response's advantage at each of its tokens (arXiv
    2402.03300, eq. 3, without the KL term). advantages (B, 1); policy_log_probs and old_log_probs (B, L), the latter
    under the policy that sampled, without gradient; ε = cliprange.

    Metadata: `clipped` (B, L), bool, true where the clipped term is the smaller one, so that the token has no gradient;
    and `ratio` (B, L), ρ. Raises ValueError for other shapes.
    """
    advantage_BL = _each_token(advantages, policy_log_probs)
    loss_BL, clipped_BL = grpo_clip(policy_log_probs, old_log_probs.detach(), advantage_BL, epsilon=cliprange)
    return loss_BL, {"clipped": clipped_BL, "ratio": torch.exp(policy_log_probs - old_log_probs).detach()}


def compute_policy_gradient_loss(
    policy_log_probs: Tensor,
    loss_type: LossType,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each token (B, L), selected by name, and metadata.

        no_baseline                −r log π             needs raw_rewards (B, 1)
        reinforce_with_baseline    −A log π             needs advantages (B, 1)
        grpo_clip                  −min(ρ A, clip A)    needs advantages, old_log_probs (B, L), cliprange

    See `compute_naive_policy_gradient_loss` and `compute_grpo_clip_loss`. Metadata is as in the latter, or empty.
    Raises ValueError for an unknown name, and if an argument that the loss needs is None.
    """
    needed: dict[str, dict[str, Any]] = {
        "no_baseline": {"raw_rewards": raw_rewards},
        "reinforce_with_baseline": {"advantages": advantages},
        "grpo_clip": {"advantages": advantages, "old_log_probs": old_log_probs, "cliprange": cliprange},
    }
    if loss_type not in needed:
        raise ValueError(f"unknown loss_type {loss_type!r}: it is one of {', '.join(needed)}")
    given = needed[loss_type]
    if lacking := [name for name, value in given.items() if value is None]:
        raise ValueError(f"loss_type {loss_type} needs {lacking[0]}")
    if loss_type == "grpo_clip":
        return compute_grpo_clip_loss(policy_log_probs=policy_log_probs, **given)
    [weight] = given.values()
    return compute_naive_policy_gradient_loss(weight, policy_log_probs), {}


def grpo_microbatch_train_step(
    policy_log_probs: Tensor,
    response_mask: Tensor,
    gradient_accumulation_steps: int,
    loss_type: LossType,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy-gradient loss of one microbatch, and its gradients.

        loss = 1 / (B · k) Σ_b 1/|y_b| Σ_t m_bt loss_bt        arXiv 2402.03300, eq. 3

    loss_bt comes from `compute_policy_gradient_loss`, which receives the remaining arguments; m = response_mask (B, L),
    |y_b| is its sum over a row, k = gradient_accumulation_steps. A row without response tokens contributes 0.

    Calls backward: the gradients of k microbatches add up to those of one batch of k · B responses. Returns the loss, a
    detached scalar already divided by k, and the metadata of the loss; with grpo_clip also `clip_fraction`, the share
    of response tokens that were clipped. Values at padding, including NaN and −∞, have no effect.

    Raises ValueError as `compute_policy_gradient_loss` does, and for a mask with a different shape.
    """
    _check_microbatch(policy_log_probs, response_mask, gradient_accumulation_steps)
    kept = response_mask.bool()
    # Masked before the loss, not only after: exp and min pass a NaN to the gradient even if its value is masked later.
    policy_log_probs = policy_log_probs.masked_fill(~kept, 0.0)
    if old_log_probs is not None and old_log_probs.shape == kept.shape:
        old_log_probs = old_log_probs.masked_fill(~kept, 0.0)
    loss_BL, metadata = compute_policy_gradient_loss(
        policy_log_probs, loss_type, raw_rewards, advantages, old_log_probs, cliprange
    )
    filled = kept.any(-1)
    loss_B = masked_mean(loss_BL, kept | ~filled[:, None], dim=-1)  # a row without a response: finite, set to 0 below
    loss = torch.where(filled, loss_B, 0.0).mean() / gradient_accumulation_steps
    loss.backward()
    if "clipped" in metadata:
        clipped = metadata["clipped"] & kept
        metadata |= {"clipped": clipped, "clip_fraction": clipped.sum() / kept.sum().clamp(min=1)}
    return loss.detach(), metadata


def _each_token(value: Tensor, policy_log_probs: Tensor) -> Tensor:
    """Expand a value per response (B, 1) to each of its tokens (B, L), without gradient."""
    if policy_log_probs.ndim != 2 or value.shape != (len(policy_log_probs), 1):
        raise ValueError(
            "expected (B, 1) rewards or advantages and (B, L) log-probabilities, got "
            f"{list(value.shape)} and {list(policy_log_probs.shape)}"
        )
    return value.detach().expand_as(policy_log_probs)
