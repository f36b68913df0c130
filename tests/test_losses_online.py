"""Losses of the GRPO family and PPO: exact enumeration over a tiny policy, numbers by hand, and TRL's own trainer.

The policy writes two tokens of a vocabulary of three, the second one's distribution depending on the first: nine
completions, whose probabilities, and so every expectation, are known exactly.
"""

import math
from itertools import product

import pytest
import torch
from trl_grpo import trl_grpo

from posttrain.losses.advantage import (
    ReturnScale,
    decoupled,
    gae,
    group_advantages,
    leave_one_out,
    normalized,
    rewards_to_go,
    value_loss,
    whitened,
)
from posttrain.losses.policy import (
    POLICY_LOSSES,
    Counts,
    adapted_kl_coef,
    cispo,
    grpo_clip,
    kl_penalty,
    logratio,
    off_policy_kept,
    policy_loss,
    sampling_weights,
    token_weights,
)

V = 3
COMPLETIONS = list(product(range(V), repeat=2))
TOKEN_OF = torch.tensor(COMPLETIONS)  # (9, 2)


def policy(seed: int) -> torch.Tensor:
    """Logits of the first token, then of the second after each first: (1 + V, V)."""
    return torch.randn(1 + V, V, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def logprobs(logits: torch.Tensor) -> torch.Tensor:
    """Log-probability of each token of each completion, (9, 2)."""
    log_p = logits.log_softmax(-1)
    first, second = TOKEN_OF.T
    return torch.stack([log_p[0, first], log_p[1 + first, second]], dim=1)


REWARD_S = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def true_gradient(logits: torch.Tensor, reward_S: torch.Tensor = REWARD_S) -> torch.Tensor:
    """−∇ Σ_y π(y) r(y)."""
    (gradient,) = torch.autograd.grad(-(logprobs(logits).sum(1).exp() * reward_S).sum(), logits)
    return gradient


def of_samples(loss_of, logits: torch.Tensor, count: int = 1) -> torch.Tensor:
    """The mean over all samples of `count` completions of the gradient of `loss_of(log-probabilities, which)`."""
    total = torch.zeros_like(logits)
    weight = logprobs(logits).detach().sum(1).exp()
    for sample in product(range(9), repeat=count):
        which = torch.tensor(sample)
        (gradient,) = torch.autograd.grad(loss_of(logprobs(logits)[which], which), logits)
        total += weight[which].prod() * gradient
    return total


@pytest.fixture
def logits():
    return policy(0).requires_grad_()


def flat(logprob: torch.Tensor) -> tuple:
    """Log-probabilities (S, 2) as a pack has them, with each token's completion and the lengths."""
    size = len(logprob)
    return logprob.flatten(), torch.arange(size).repeat_interleave(2), torch.full((size,), 2)


@pytest.mark.parametrize("name", [name for name, loss in POLICY_LOSSES.items() if loss.surrogate is not None])
def test_on_policy_every_loss_with_ratios_is_the_policy_gradient(name, logits):
    """With A = r and the policy that sampled, all have the true gradient, but for each one's constant factor."""
    loss = POLICY_LOSSES[name]
    counts = Counts(sequences=1, tokens=2, rollout_tokens=2, max_length=2)

    def loss_of(logprob, which):
        logprob_N, sequence_N, length_S = flat(logprob)
        advantage_N = REWARD_S[which][sequence_N]
        value_N, clipped_N = policy_loss(
            loss, logprob_N, logprob_N.detach(), advantage_N, sequence_N, length_S, epsilon=0.2
        )
        assert not clipped_N.any()
        return (token_weights(loss.average, length_S, sequence_N, counts) * value_N).sum()

    factor = 1.0 if loss.level == "product" or name == "luspo" else 0.5  # means over two tokens, but for these
    torch.testing.assert_close(of_samples(loss_of, logits), factor * true_gradient(logits), rtol=1e-6, atol=1e-8)


def test_groups_leave_one_out_is_unbiased_and_the_groups_mean_nearly(logits):
    """RLOO's baseline keeps the gradient as it is; one's own reward in the baseline shrinks it by 1 − 1/G, G = 2."""

    def loss_of(advantages):
        def of(logprob, which):
            advantage_S = advantages(REWARD_S[which], torch.zeros(2, dtype=torch.long))
            return -(advantage_S * logprob.sum(1)).mean()

        return of

    true = true_gradient(logits)
    torch.testing.assert_close(of_samples(loss_of(leave_one_out), logits, 2), true, rtol=1e-9, atol=1e-12)

    def centred(reward, group):
        return group_advantages(reward, group, scale_rewards="none", eps=0)

    torch.testing.assert_close(of_samples(loss_of(centred), logits, 2), 0.5 * true, rtol=1e-9, atol=1e-12)


def test_off_policy_ratios_give_the_gradient_of_the_new_policy(logits):
    """Sampled by an old policy, the product of ratios without clipping has the new policy's exact gradient."""
    old = (logits.detach() + 0.3 * policy(1)).requires_grad_()
    old_logprob = logprobs(old).detach()
    total = torch.zeros_like(logits)
    for s in range(9):
        logprob_N, sequence_N, length_S = flat(logprobs(logits)[s : s + 1])
        value_N, _ = policy_loss(
            POLICY_LOSSES["rloo"], logprob_N, old_logprob[s], REWARD_S[s].expand(2), sequence_N, length_S, epsilon=1e6
        )
        total += old_logprob[s].sum().exp() * torch.autograd.grad(value_N.mean(), logits)[0]
    torch.testing.assert_close(total, true_gradient(logits), rtol=1e-9, atol=1e-12)


def test_kl_estimates_by_enumeration():
    """One token: means of the values and of the gradients, as the module's docstring states them."""
    logits, ref = policy(0)[0].requires_grad_(), policy(3)[0].log_softmax(-1)

    def mean(of) -> torch.Tensor:
        return (logits.log_softmax(-1).detach().exp() * of).sum()

    log_p = logits.log_softmax(-1)
    kl, reverse = (log_p.exp() * (log_p - ref)).sum(), (ref.exp() * (ref - log_p)).sum()
    assert torch.isclose(mean(kl_penalty(log_p, ref, estimator="k1")), kl)
    assert torch.isclose(mean(kl_penalty(log_p, ref, estimator="k3")), kl)
    assert (kl_penalty(log_p, ref, estimator="k3") >= 0).all()
    want = {"k1": torch.zeros(3, dtype=torch.float64)}
    want["k2"], want["k3"] = (torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (kl, reverse))
    for name, gradient in want.items():
        got = torch.autograd.grad(mean(kl_penalty(log_p, ref, estimator=name)), logits, retain_graph=True)[0]
        torch.testing.assert_close(got, gradient, rtol=1e-9, atol=1e-12)
    with pytest.raises(ValueError, match="k4"):
        kl_penalty(log_p, ref, estimator="k4")


def test_kl_in_the_reward_is_the_gradient_of_the_whole_kl(logits):
    """E[(r − β k1 of the completion) ∇ log π] is the gradient of E[r] − β KL."""
    ref, beta = logprobs(policy(3)).sum(1), 0.3
    penalty = kl_penalty(logprobs(logits).sum(1), ref, estimator="k1").detach()
    shaped = REWARD_S - beta * penalty

    def loss_of(logprob, which):
        return -(shaped[which] * logprob.sum(1)).sum()

    log_p = logprobs(logits).sum(1)
    objective = (log_p.exp() * (REWARD_S - beta * (log_p - ref))).sum()
    (want,) = torch.autograd.grad(-objective, logits)
    torch.testing.assert_close(of_samples(loss_of, logits), want, rtol=1e-9, atol=1e-12)


def test_advantages_by_the_steps_own_spread():
    """Group means 1 and 3, the spread of 0, 2, 1, 5: mean 2, variance 14/3."""
    got = group_advantages(torch.tensor([0.0, 2, 1, 5]), torch.tensor([0, 0, 1, 1]), scale_rewards="batch", eps=0.0)
    assert got.tolist() == pytest.approx([x / (14 / 3) ** 0.5 for x in (-1, 1, -2, 2)])
    alike = group_advantages(torch.ones(4), torch.tensor([0, 0, 1, 1]), scale_rewards="batch", eps=0.0)
    assert alike.tolist() == [0, 0, 0, 0]
    assert leave_one_out(torch.tensor([1.0, 2, 6, 5]), torch.tensor([0, 0, 0, 1])).tolist() == [-3, -1.5, 4.5, 0]
    assert normalized(torch.tensor([0.0, 2, 1, 5]), eps=0.0).tolist() == pytest.approx(
        [x / (14 / 3) ** 0.5 for x in (-2, 0, -1, 3)]
    )


def test_gdpo_keeps_rewards_apart_that_add_up_to_the_same():
    """One of two rewards each, or both: the sums are 1, 1, 2, 0, the advantages four different ones."""
    rewards, groups = torch.tensor([[1.0, 0], [0, 1], [1, 1], [0, 0]]), torch.zeros(4)
    equal = decoupled(rewards, torch.tensor([1.0, 1.0]), groups, eps=0.0)
    assert equal.tolist() == pytest.approx([0, 0, 1.5**0.5, -(1.5**0.5)])
    weighed = decoupled(rewards, torch.tensor([1.0, 0.5]), groups, eps=0.0).tolist()
    assert weighed[1] == pytest.approx(-weighed[0]) and weighed[2] == pytest.approx(3 * weighed[0]) != 0
    lone = decoupled(torch.tensor([[1.0, 5], [2, math.nan]]), torch.ones(2), torch.zeros(2), eps=0.0)
    assert lone.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5]), "a reward that only one completion has says nothing"


def test_gdpo_is_trls():
    """TRL's formula, with its own function for deviations, where rewards of None are NaN."""
    nanstd = pytest.importorskip("trl.trainer.utils", reason="the oracle: pip install 'posttrain[bench]'").nanstd
    torch.manual_seed(0)
    rewards, weights = torch.randn(24, 3) * torch.tensor([1.0, 20.0, 0.1]), torch.tensor([1.0, 0.3, -2.0])
    rewards[torch.rand(24, 3) < 0.2] = math.nan
    rewards[:5, 1], rewards[6:12, 2] = math.nan, 0.7  # one of a group has it; all of a group have the same
    grouped = rewards.view(4, 6, 3)
    each = (grouped - grouped.nanmean(1, keepdim=True)) / (nanstd(grouped, dim=1, keepdim=True) + 1e-4)
    total = (each.view(24, 3) * weights).nansum(1)
    want = (total - total.mean()) / (total.std() + 1e-4)
    got = decoupled(rewards, weights, torch.arange(4).repeat_interleave(6), eps=1e-4)
    print("advantages", got.tolist())
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_gae_by_hand():
    """Two sequences, γ = 0.5, λ = 0.5. The first: δ = (1 + 0.5·4 − 2, 3 − 4) = (1, −1), A = (1 − 0.25, −1)."""
    reward, value = torch.tensor([1.0, 3, 2]), torch.tensor([2.0, 4, 1])
    advantage, returns = gae(reward, value, torch.tensor([0, 0, 1]), gamma=0.5, lam=0.5)
    assert advantage.tolist() == [0.75, -1, 1] and returns.tolist() == [2.75, 3, 2]
    assert rewards_to_go(torch.tensor([1.0, 2, 4, 3]), torch.tensor([5, 5, 5, 6]), gamma=0.5).tolist() == [3, 4, 4, 3]
    with pytest.raises(ValueError, match=r"reward_N \[3\], value_N \[2\]"):
        gae(reward, value[:2], torch.tensor([0, 0, 1]), gamma=1, lam=1)


def test_values_move_no_further_than_the_clip_rewards():
    """Held at 0.2 of the old value; the worse of both counts, so that a jump towards the return earns nothing more."""
    value = torch.tensor([1.0, 1.0, 0.0], requires_grad=True)
    loss, clipped = value_loss(value, torch.zeros(3), torch.tensor([1.0, -1.0, 2.0]), cliprange_value=0.2)
    assert loss.tolist() == pytest.approx([0.5 * 0.64, 0.5 * 4, 0.5 * 4]) and clipped.tolist() == [True, False, False]
    loss.sum().backward()
    assert value.grad.tolist() == pytest.approx([0, 2, -2])


def test_the_scale_of_returns_is_that_of_the_steps_so_far():
    """The last step counts 1, the one before 0.9, the one before that 0.81, each with all its tokens."""
    steps = [torch.tensor([1.0, 3.0]), torch.tensor([5.0, 5.0, 8.0]), torch.tensor([-2.0])]
    scale = ReturnScale()
    for returns in steps:
        scale = scale.after(returns)
    weights = [w / 2.71 for w in (0.81, 0.9, 1.0)]
    mean, square = (sum(w * float((r**power).mean()) for w, r in zip(weights, steps, strict=True)) for power in (1, 2))
    assert scale.mean == pytest.approx(mean) and scale.std == pytest.approx((square - mean**2) ** 0.5)
    output = torch.tensor([0.0, 1.0, -1.0])
    assert scale.values(output).tolist() == pytest.approx([scale.mean, scale.mean + scale.std, scale.mean - scale.std])
    torch.testing.assert_close(scale.outputs(scale.values(output)), output)
    assert ReturnScale().after(torch.full((5,), 0.1)) == ReturnScale(pytest.approx(0.1), 1.0, 1)  # no spread: unit 1


def test_whitened_rewards_keep_their_mean():
    reward = torch.tensor([0.0, 0.0, 0.0, 2.0])  # mean 0.5, variance 1
    assert whitened(3 * reward).tolist() == pytest.approx([1, 1, 1, 3]) and whitened(reward[:1]).tolist() == [0]


def test_the_kl_coefficient_follows_its_target():
    def adapted(kl):
        return adapted_kl_coef(0.1, kl, target=6.0, horizon=1000, completions=100)

    assert adapted(6.0) == 0.1 and adapted(60.0) == pytest.approx(0.1 * 1.02)
    assert adapted(0.0) == pytest.approx(0.1 * 0.98) and adapted(6.6) == pytest.approx(0.1 * 1.01)


def test_cispo_by_hand():
    logprob = torch.log(torch.tensor([0.5, 0.1, 0.9])).requires_grad_()
    sampler = torch.log(torch.tensor([0.25, 0.2, 0.1]))
    loss, held = cispo(logprob, sampler, torch.tensor([1.0, -1, 1]), epsilon_high=3.0)
    loss.sum().backward()
    assert logprob.grad.tolist() == pytest.approx([-2, 0.5, -3]) and held.tolist() == [False, False, True]
    with pytest.raises(ValueError, match="importance_sampling_level must be token"):
        ones = torch.ones(1, dtype=torch.long)
        policy_loss(
            POLICY_LOSSES["cispo"], sampler[:1], sampler[:1], sampler[:1], ones - 1, ones, level="sequence", epsilon=0.2
        )


@pytest.mark.parametrize(
    ("mode", "bounds", "expected"),
    [
        ("token_truncate", {}, [2, 0.5, 3, 1]),
        ("token_truncate", {"clip_min": 0.8}, [2, 0.8, 3, 1]),
        ("token_truncate", {"clip_max": None, "clip_min": 0.8}, [2, 0.8, 9, 1]),
        ("token_mask", {}, [2, 0.5, 0, 1]),
        ("token_mask", {"clip_max": 5.0, "clip_min": 0.8}, [2, 0, 0, 1]),  # IcePop
        ("sequence_truncate", {}, [1, 1, 3, 3]),
        ("sequence_mask", {}, [1, 1, 0, 0]),
        ("geometric_mask", {"clip_max": 3.5}, [1, 1, 3, 3]),
        ("geometric_mask", {"clip_max": 2.0}, [1, 1, 0, 0]),
    ],
)
def test_sampling_weights_by_hand(mode, bounds, expected):
    logprob = torch.log(torch.tensor([0.5, 0.1, 0.9, 0.3])).requires_grad_()
    sampler = torch.log(torch.tensor([0.25, 0.2, 0.1, 0.3]))
    where = torch.tensor([0, 0, 1, 1]), torch.tensor([2, 2])
    weights, clipped = sampling_weights(logprob, sampler, *where, mode=mode, **bounds)
    assert weights.tolist() == pytest.approx(expected) and not weights.requires_grad
    free, _ = sampling_weights(logprob, sampler, *where, mode=mode, clip_max=1e9)
    assert clipped.tolist() == [weight != pytest.approx(other) for weight, other in zip(expected, free, strict=True)]


@pytest.mark.parametrize(
    ("mode", "left"),
    [("sequence_truncate", 0), ("sequence_mask", 0), ("token_truncate", 1.0466), ("geometric_mask", 0.5154)],
)
def test_sampling_weights_correct_for_another_sampler(mode, left, logits):
    """Completions of another policy, weighted: a completion's ratio gives the policy's gradient exactly. The others
    leave a bias, computed by enumeration, here as a share of the bias without weights: a token's own ratio corrects
    neither how often the tokens before it are sampled nor what comes after it."""
    with torch.no_grad():
        sampler = policy(0) + 0.2 * policy(3)
    total = {True: torch.zeros_like(logits), False: torch.zeros_like(logits)}
    for weighted, gradient in total.items():
        logprob_N, sequence_N, length_S = flat(logprobs(logits))
        sampler_N = flat(logprobs(sampler))[0]
        weight_N, clipped_N = sampling_weights(logprob_N, sampler_N, sequence_N, length_S, mode=mode, clip_max=1e6)
        assert not clipped_N.any()
        loss_N = -REWARD_S[sequence_N] * logprob_N * (weight_N if weighted else 1)
        loss = (sampler_N.exp().view(9, 2).prod(1)[sequence_N] * loss_N).sum()
        gradient += torch.autograd.grad(loss, logits)[0]
    bias = {weighted: (gradient - true_gradient(logits)).norm().item() for weighted, gradient in total.items()}
    assert bias[True] / bias[False] == pytest.approx(left, rel=1e-3, abs=1e-12)


def test_off_policy_completions_leave_only_if_bad_and_far():
    sampler = torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0, -1.0])
    logprob = sampler - torch.tensor([0.9, 0.3, 0.9, 0.3, 0.4, 0.4])
    advantage = torch.tensor([-1.0, -1.0, 1.0, 1.0, -1.0, -1.0])
    where = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([2, 2, 2])
    kept = off_policy_kept(logprob, sampler, advantage, *where, threshold=0.5)
    assert kept.tolist() == [False, False, True, True, True, True]


def test_the_corrected_kl_has_the_gradient_of_the_kl(logits):
    """ρ · k3, with the ratio's gradient, by enumeration: the gradient of each token's KL(π‖π_ref), unlike k3 alone."""
    ref = policy(5)
    log_p, log_q = logits.log_softmax(-1), ref.log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    reached = torch.cat([torch.ones(1, dtype=torch.float64), log_p[0].detach().exp()])
    (exact,) = torch.autograd.grad((reached * kl).sum(), logits)

    def loss_of(corrected):
        def of(logprob, which):
            k3 = kl_penalty(logprob, logprobs(ref)[which], estimator="k3")
            return (k3 * (logprob - logprob.detach()).exp() if corrected else k3).sum()

        return of

    torch.testing.assert_close(of_samples(loss_of(True), logits), exact)
    assert (of_samples(loss_of(False), logits) - exact).norm() > 0.01


MASK = (torch.arange(6) < torch.tensor([6, 3, 1, 4])[:, None]).long()


VARIANTS = {
    **{name: (name, {}, {}) for name in ("grpo", "bnpo", "dr_grpo", "dapo", "sapo", "vespo")},
    "cispo": ("cispo", {"epsilon_high": 1.5}, {}),
    "gspo": ("gspo", {}, {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
    "luspo": ("luspo", {}, {"importance_sampling_level": "sequence"}),
    "two-sided": ("dapo", {"delta": 1.4}, {}),
    "sapo, temperatures": ("sapo", {"sapo_temperature_pos": 0.7, "sapo_temperature_neg": 2.0}, {}),
    "sapo, sequence": ("sapo", {"level": "sequence"}, {"importance_sampling_level": "sequence"}),
    "vespo, settings": ("vespo", {"vespo_k_pos": 1.5, "vespo_lambda_neg": 2.5}, {}),
    "off policy": ("grpo", {}, {"off_policy_mask_threshold": 0.1}),
    "corrected kl": ("grpo", {"use_bias_correction_kl": True}, {}),
    "corrected kl, sequence": (
        "gspo", {"use_bias_correction_kl": True}, {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_losses_are_trls(variant, beta):
    """`GRPOTrainer._compute_loss` on the same numbers: loss, gradient, share of clipped tokens."""
    name, settings, changes = VARIANTS[variant]
    torch.manual_seed(0)
    logprob = (-3 * torch.rand(4, 6)).requires_grad_()
    old, ref = logprob.detach() + 0.4 * torch.randn(4, 6), logprob.detach() + 0.4 * torch.randn(4, 6)
    advantages = torch.tensor([1.0, -0.5, 2.0, -1.5])
    settings = {"epsilon": 0.2, "epsilon_high": 0.28, **settings}
    inputs = {"advantages": advantages, "old_per_token_logps": old, "ref_per_token_logps": ref}
    inputs["num_items_in_batch"] = torch.tensor(31)  # of two updates, of which these 14 tokens are one
    theirs, metrics = trl_grpo(
        logprob, MASK, inputs, settings, **{"loss_type": name, **changes}, beta=beta,
        epsilon_high=settings["epsilon_high"], max_completion_length=10,
    )  # fmt: skip
    (their_gradient,) = torch.autograd.grad(theirs, logprob)

    scored, corrected, level = MASK.bool(), settings.pop("use_bias_correction_kl", False), settings.pop("level", None)
    where = torch.arange(4)[:, None].expand(4, 6)[scored], MASK.sum(1)
    advantage_N, loss = advantages[where[0]], POLICY_LOSSES[name]
    value_N, clipped_N = policy_loss(
        loss, logprob[scored], old[scored], advantage_N, *where, level=level, **settings
    )  # fmt: skip
    if threshold := changes.get("off_policy_mask_threshold"):
        kept_N = off_policy_kept(logprob[scored], old[scored], advantage_N, *where, threshold=threshold)
        assert 0 < kept_N.sum() < len(kept_N)
        value_N = value_N * kept_N
    kl_N = kl_penalty(logprob[scored], ref[scored], estimator="k3")
    if corrected:
        kl_N = kl_N * logratio(logprob[scored], old[scored], *where, level or loss.level).exp()
    counts = Counts(sequences=4, tokens=14, rollout_tokens=31 / 2, max_length=10)
    ours = (token_weights(loss.average, where[1], where[0], counts) * (value_N + beta * kl_N)).sum()
    (our_gradient,) = torch.autograd.grad(ours, logprob)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6, abs=1e-7)
    torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-5, atol=1e-7)
    if loss.surrogate is grpo_clip and loss.level == "token":
        assert clipped_N.float().mean().item() == pytest.approx(metrics["clip_ratio/region_mean"][0])


def test_clip_higher_by_hand():
    ratio = torch.tensor([1.25, 1.5, 0.5]).log()
    loss, clipped = grpo_clip(ratio, torch.zeros(3), torch.tensor([1.0, 1.0, -1.0]), epsilon=0.2, epsilon_high=0.3)
    assert loss.tolist() == pytest.approx([-1.25, -1.3, 0.8]) and clipped.tolist() == [False, True, True]
