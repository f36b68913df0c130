"""Policy-gradient losses by hand and by exact enumeration; TRL's numbers are in test_functional_train.py."""

import math

import pytest
import torch

from posttrain.losses.advantage import group_advantages
from posttrain.losses.policy import grpo_clip, policy_gradient


def advantages(rewards, groups, scale="group", eps=0.0) -> list[float]:
    return group_advantages(
        torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), scale_rewards=scale, eps=eps
    ).tolist()


def test_group_advantages_by_hand():
    """Rewards 1, 0, 0, 1: mean 1/2, unbiased variance 4·(1/4)/3 = 1/3. Rewards 2, 5: mean 3.5, variance 4.5."""
    rewards, groups = [1, 0, 0, 1, 2, 5], [7, 7, 7, 7, -1, -1]
    assert advantages(rewards, groups, "none") == [0.5, -0.5, -0.5, 0.5, -1.5, 1.5]
    s, t = math.sqrt(1 / 3), math.sqrt(4.5)
    want = [0.5 / s, -0.5 / s, -0.5 / s, 0.5 / s, -1.5 / t, 1.5 / t]
    assert advantages(rewards, groups) == pytest.approx(want)
    want = [0.5 / (s + 0.1), -0.5 / (s + 0.1), -0.5 / (s + 0.1), 0.5 / (s + 0.1), -1.5 / (t + 0.1), 1.5 / (t + 0.1)]
    assert advantages(rewards, groups, eps=0.1) == pytest.approx(want)


def test_groups_are_named_not_placed():
    """Members of a group may lie anywhere: shuffling rows shuffles the advantages."""
    rewards, groups = [1.0, 0.0, 3.0, 5.0, 4.0], [0, 0, 1, 1, 1]
    order = [3, 0, 4, 1, 2]
    mixed = advantages([rewards[i] for i in order], [groups[i] for i in order])
    assert mixed == pytest.approx([advantages(rewards, groups)[i] for i in order])


@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_a_group_that_tells_nothing_has_no_advantage(eps):
    rewards = torch.tensor([0.1, 0.1, 0.1, 0.7])  # three alike, whose float32 sum is rounded, and one alone
    values = group_advantages(rewards, torch.tensor([0, 0, 0, 1]), scale_rewards="group", eps=eps)
    assert values.tolist() == [0, 0, 0, 0] and values.dtype == torch.float32


def test_shapes_are_checked():
    with pytest.raises(ValueError, match=r"reward_S \[3\], group_S \[2\]"):
        group_advantages(torch.zeros(3), torch.zeros(2), scale_rewards="none", eps=0)
    with pytest.raises(ValueError, match=r"logprob \[3\], advantage \[1\]"):
        policy_gradient(torch.zeros(3), torch.zeros(1))
    with pytest.raises(ValueError, match="one shape"):
        grpo_clip(torch.zeros(2, 3), torch.zeros(3), torch.zeros(2, 3), epsilon=0.2)


def test_clip_by_hand():
    """ε = 0.2, π_old = 0.5. Clipped exactly where π has moved beyond ε in the direction of A, and only there."""
    #        ρ       A     loss                      clipped
    table = [
        (1.0, 2.0, -2.0, False),
        (1.1, 2.0, -2.2, False),
        (1.5, 2.0, -2.4, True),  # up, and A says up: held at 1.2
        (0.5, 2.0, -1.0, False),  # down although A says up: not held
        (1.5, -2.0, 3.0, False),  # up although A says down
        (0.5, -2.0, 1.6, True),  # down, and A says down: held at 0.8
        (1.5, 0.0, 0.0, False),
    ]
    ratio, advantage, want, held = zip(*table, strict=True)
    logprob = (0.5 * torch.tensor(ratio, dtype=torch.float64)).log().requires_grad_()
    loss, clipped = grpo_clip(
        logprob,
        torch.full_like(logprob, math.log(0.5)).detach(),
        torch.tensor(advantage, dtype=torch.float64),
        epsilon=0.2,
    )
    assert loss.tolist() == pytest.approx(want) and clipped.tolist() == list(held)
    loss.sum().backward()
    # d(−ρA)/d log π = −ρA where it is not clipped, else 0
    assert logprob.grad.tolist() == pytest.approx([0 if c else -r * a for r, a, _, c in table])


def test_gradient_is_the_policy_gradient_by_enumeration():
    """Over all tokens of a small policy, Σ π(a) ∇[−r log π(a)] = −∇ Σ π(a) r(a): REINFORCE's mean is the true gradient.

    On policy (ρ = 1) the clipped surrogate has the same gradient, and a baseline changes nothing.
    """
    torch.manual_seed(0)
    logits, reward = torch.randn(5, dtype=torch.float64, requires_grad=True), torch.randn(5, dtype=torch.float64)
    p = torch.softmax(logits, 0)
    (true,) = torch.autograd.grad(-(p * reward).sum(), logits)
    for baseline in (0.0, reward.mean()):
        logprob = torch.log_softmax(logits, 0)
        (naive,) = torch.autograd.grad((p.detach() * policy_gradient(logprob, reward - baseline)).sum(), logits)
        logprob = torch.log_softmax(logits, 0)
        loss, clipped = grpo_clip(logprob, logprob.detach(), reward - baseline, epsilon=0.2)
        (surrogate,) = torch.autograd.grad((p.detach() * loss).sum(), logits)
        assert torch.allclose(naive, true) and torch.allclose(surrogate, true) and not clipped.any()


def test_a_ratio_beyond_floats_stays_finite():
    logprob = torch.tensor([0.0, 0.0], requires_grad=True)
    loss, _ = grpo_clip(logprob, torch.tensor([-200.0, -200.0]), torch.tensor([1.0, -1.0]), epsilon=0.2)
    loss.sum().backward()
    assert loss.isfinite().all() and logprob.grad.isfinite().all()
