"""Losses against numbers worked by hand, exact enumeration on tiny policies, and their own invariances."""

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from posttrain.losses import global_mean, keywords_of, loss_coefficients, nll
from posttrain.losses.preference import (
    F_DIVERGENCES,
    PREFERENCE_LOSSES,
    Pairs,
    couples_batch,
    divergence_score,
    preference_loss,
    preference_metrics,
)
from posttrain.losses.reference_free import bradley_terry, reward_metrics, reward_range

SETTINGS = {
    "loss_weights": None,
    "beta": 0.1,
    "label_smoothing": 0.1,
    "f_divergence_type": "reverse_kl",
    "f_alpha_divergence_coef": 0.5,
    "discopop_tau": 0.05,
}
ALONE = [name for name, loss in PREFERENCE_LOSSES.items() if not loss.couples_batch]
COUPLED = [name for name, loss in PREFERENCE_LOSSES.items() if loss.couples_batch]


def loss_of(pairs: Pairs, *names: str, **changed) -> Tensor:
    return preference_loss(pairs, loss_type=names, **{**SETTINGS, **changed})


def pairs_of(chosen, rejected, ref_chosen=None, ref_rejected=None, lengths=None) -> Pairs:
    """Pairs in float64 from lists; the reference is 0 and every length 1 unless given."""
    zeros, ones = [0.0] * len(chosen), [1] * len(chosen)
    vectors = (chosen, rejected, ref_chosen or zeros, ref_rejected or zeros)
    lengths = lengths or (ones, ones)
    return Pairs(*(torch.tensor(v, dtype=torch.float64) for v in vectors), *(torch.tensor(v) for v in lengths))


def random_pairs(count: int, seed: int = 0, dtype=torch.float64) -> Pairs:
    generator = torch.Generator().manual_seed(seed)
    logps = [-20 * torch.rand(count, generator=generator, dtype=dtype) - 1 for _ in range(4)]
    lengths = [torch.randint(1, 30, (count,), generator=generator) for _ in range(2)]
    return Pairs(*logps, *lengths)


def subset(pairs: Pairs, index: Tensor) -> Pairs:
    return Pairs(*(getattr(pairs, name)[index] for name in Pairs.__slots__))


# --- numbers by hand ------------------------------------------------------------------------------------------------

# Two pairs with log-ratios c = (2, −1), r = (−3, 1), so c − r = (5, −2); β = 0.5, ε = 0.1, lengths (2, 4) and (3, 5).
C, R = (2.0, -1.0), (-3.0, 1.0)
HAND = pairs_of([-4.0, -6.0], [-9.0, -4.0], [-6.0, -5.0], [-6.0, -5.0], ([2, 4], [3, 5]))


def sig(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def log_sig(x: float) -> float:
    return -math.log(1 + math.exp(-x))


BY_HAND = {
    "sigmoid": [-0.9 * log_sig(2.5) - 0.1 * log_sig(-2.5), -0.9 * log_sig(-1) - 0.1 * log_sig(1)],
    "hinge": [0.0, 2.0],
    "ipo": [(2 / 2 + 3 / 3 - 1) ** 2, (-1 / 4 - 1 / 5 - 1) ** 2],
    "exo_pair": [
        sig(2.5) * (log_sig(2.5) - math.log(0.9)) + sig(-2.5) * (log_sig(-2.5) - math.log(0.1)),
        sig(-1) * (log_sig(-1) - math.log(0.9)) + sig(1) * (log_sig(1) - math.log(0.1)),
    ],
    "nca_pair": [
        -log_sig(1) - 0.5 * log_sig(-1) - 0.5 * log_sig(1.5),
        -log_sig(-0.5) - 0.5 * log_sig(0.5) - 0.5 * log_sig(-0.5),
    ],
    "robust": [(-0.9 * log_sig(2.5) + 0.1 * log_sig(-2.5)) / 0.8, (-0.9 * log_sig(-1) + 0.1 * log_sig(1)) / 0.8],
    "bco_pair": [-log_sig(1) - log_sig(1.5), -log_sig(-0.5) - log_sig(-0.5)],
    "sppo_hard": [(2 - 1) ** 2 + (-3 + 1) ** 2, (-1 - 1) ** 2 + (1 + 1) ** 2],
    # Margins log π(chosen) − log π(rejected) are 5 and −2, those of the reference 0 and 0: sorted δ = (−2, 5).
    "aot": [-0.9 * log_sig(-1) - 0.1 * log_sig(1), -0.9 * log_sig(2.5) - 0.1 * log_sig(-2.5)],
    # Sorted c = (−1, 2), sorted r = (−3, 1): δ = (2, 1).
    "aot_unpaired": [-0.9 * log_sig(1) - 0.1 * log_sig(-1), -0.9 * log_sig(0.5) - 0.1 * log_sig(-0.5)],
    "apo_zero": [1 - sig(1) + sig(-1.5), 1 - sig(-0.5) + sig(0.5)],
    "apo_down": [sig(1) + 1 - sig(2.5), sig(-0.5) + 1 - sig(-1)],
    "discopop": [
        -log_sig(2.5) * (1 - sig(50)) + math.exp(-2.5) * sig(50),
        -log_sig(-1) * (1 - sig(-20)) + math.exp(1) * sig(-20),
    ],
    # Chosen log-probabilities −4 and −6 over 2 + 4 tokens, two pairs: the mean of (4·2/6, 6·2/6) is 10/6.
    "sft": [4 * 2 / 6, 6 * 2 / 6],
    # KL_c = max(0, ½) = ½, KL_r = max(0, −1) = 0.
    "kto_pair": [
        0.5 * (1 - sig(0.5 * 2)) + 0.5 * (1 - sig(0.5 * (0.5 + 3))),
        0.5 * (1 - sig(0.5 * -1)) + 0.5 * (1 - sig(0.5 * (0.5 - 1))),
    ],
    "sigmoid_norm": [-log_sig(0.5 * (2 / 2 + 3 / 3)), -log_sig(0.5 * (-1 / 4 - 1 / 5))],
}


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_by_hand(name):
    torch.testing.assert_close(HAND.chosen_logratio_P, torch.tensor(C, dtype=torch.float64))
    torch.testing.assert_close(HAND.rejected_logratio_P, torch.tensor(R, dtype=torch.float64))
    expected = torch.tensor(BY_HAND[name], dtype=torch.float64)
    torch.testing.assert_close(loss_of(HAND, name, beta=0.5), expected, rtol=1e-12, atol=1e-12)


def test_weighted_list_is_the_weighted_sum():
    names, weights = ("sigmoid", "bco_pair", "sft"), [0.8, 0.2, 1.5]
    expected = sum(w * loss_of(HAND, name) for name, w in zip(names, weights, strict=True))
    torch.testing.assert_close(loss_of(HAND, *names, loss_weights=weights), expected)


def test_preference_metrics_by_hand():
    metrics = {name: value.item() for name, value in preference_metrics(HAND, beta=0.5).items()}
    assert metrics == {
        "rewards/chosen": 0.5 * (2 - 1),
        "rewards/rejected": 0.5 * (-3 + 1),
        "rewards/accuracies": 1.0,
        "rewards/margins": 0.5 * (5 - 2),
        "logps/chosen": -10.0,
        "logps/rejected": -13.0,
    }


def test_dpo_without_label_smoothing_by_hand():
    expected = torch.tensor([-log_sig(2.5), -log_sig(-1.0)], dtype=torch.float64)
    torch.testing.assert_close(loss_of(HAND, "sigmoid", beta=0.5, label_smoothing=0.0), expected)


def test_policy_equal_to_reference_has_no_margin():
    same = pairs_of([-4.0, -7.0], [-5.0, -6.0], [-4.0, -7.0], [-5.0, -6.0])
    metrics = preference_metrics(same, beta=0.1)
    assert all(metrics[f"rewards/{name}"] == 0 for name in ("chosen", "rejected", "margins", "accuracies"))
    torch.testing.assert_close(loss_of(same, "sigmoid"), torch.full((2,), math.log(2), dtype=torch.float64))
    torch.testing.assert_close(loss_of(same, "ipo"), torch.full((2,), 25.0, dtype=torch.float64))


# --- exact enumeration ----------------------------------------------------------------------------------------------

RESPONSES = 5
BETA = 0.3


def expected_loss_gradient(name: str, theta: Tensor, ref: Tensor, weight: Tensor, wins: Tensor) -> Tensor:
    """Gradient of E loss over all ordered pairs of responses: i, j ~ `weight`, i preferred with `wins[i, j]`."""
    i, j = (
        index.flatten() for index in torch.meshgrid(torch.arange(RESPONSES), torch.arange(RESPONSES), indexing="ij")
    )
    policy, ones = torch.log_softmax(theta, 0), torch.ones(RESPONSES**2)
    pairs = Pairs(policy[i], policy[j], ref[i], ref[j], ones, ones)
    loss_P = loss_of(pairs, name, beta=BETA, label_smoothing=0.0)
    # The entry (i, j) is the event that i and j were sampled and i preferred; (j, i) is the other label.
    expectation = (weight[i] * weight[j] * wins[i, j] * loss_P).sum()
    return torch.autograd.grad(expectation, theta)[0]


@pytest.fixture
def tiny():
    """Over five responses: reference log-probabilities, sampling weights, rewards, their Bradley-Terry preferences."""
    generator = torch.Generator().manual_seed(1)
    ref = torch.log_softmax(torch.randn(RESPONSES, generator=generator, dtype=torch.float64), 0)
    weight = torch.softmax(torch.randn(RESPONSES, generator=generator, dtype=torch.float64), 0)
    reward = torch.randn(RESPONSES, generator=generator, dtype=torch.float64)
    return ref, weight, reward, torch.sigmoid(reward[:, None] - reward[None, :])


def test_dpo_is_stationary_at_the_rlhf_optimum(tiny):
    """π* ∝ π_ref exp(reward / β) (arXiv 2305.18290, eq. 4) when preferences are Bradley-Terry's under that reward."""
    ref, weight, reward, wins = tiny
    optimum = (ref + reward / BETA).requires_grad_()
    assert expected_loss_gradient("sigmoid", optimum, ref, weight, wins).abs().max() < 1e-12
    elsewhere = (ref + 0.9 * reward / BETA).requires_grad_()
    assert expected_loss_gradient("sigmoid", elsewhere, ref, weight, wins).abs().max() > 1e-4


def test_ipo_is_stationary_at_its_optimum(tiny):
    """π* ∝ π_ref exp(p(y ≻ μ) / τ), p(y ≻ μ) the chance to beat a response sampled from μ (arXiv 2310.12036, eq. 7)."""
    ref, weight, _, wins = tiny
    optimum = (ref + wins @ weight / BETA).requires_grad_()
    assert expected_loss_gradient("ipo", optimum, ref, weight, wins).abs().max() < 1e-12
    elsewhere = (ref + 0.9 * wins @ weight / BETA).requires_grad_()
    assert expected_loss_gradient("ipo", elsewhere, ref, weight, wins).abs().max() > 1e-4


@pytest.mark.parametrize("flip", [0.0, 0.1, 0.4])
def test_robust_is_unbiased_under_flipped_labels(flip):
    pairs = random_pairs(50)
    flipped = Pairs(
        pairs.rejected_P,
        pairs.chosen_P,
        pairs.ref_rejected_P,
        pairs.ref_chosen_P,
        *[torch.ones(50, dtype=torch.int64)] * 2,
    )
    noisy = [loss_of(p, "robust", label_smoothing=flip) for p in (pairs, flipped)]
    expectation_P = (1 - flip) * noisy[0] + flip * noisy[1]
    torch.testing.assert_close(expectation_P, loss_of(pairs, "sigmoid", label_smoothing=0.0))


def test_exo_is_zero_where_the_policy_splits_as_asked():
    margin = math.log(0.9 / 0.1) / 0.1
    loss_P = loss_of(pairs_of([margin, margin + 1, margin - 1], [0.0] * 3), "exo_pair", label_smoothing=0.1)
    assert loss_P[0].abs() < 1e-12 and loss_P[1] > 1e-6 and loss_P[2] > 1e-6


F_PRIMITIVE = {
    "reverse_kl": lambda t: t * t.log(),
    "forward_kl": lambda t: -t.log(),
    "js_divergence": lambda t: t * (2 * t / (t + 1)).log() + (2 / (t + 1)).log(),
    "alpha_divergence": lambda t: (t**0.3 - 0.3 * t - 0.7) / (0.3 * (0.3 - 1)),
}


@pytest.mark.parametrize("name", F_DIVERGENCES)
def test_scores_are_the_derivative_of_the_divergence(name):
    """Differences of scores equal differences of f'(t), t the probability ratio, with f' taken by autograd."""
    t = torch.linspace(0.05, 8, 40, dtype=torch.float64, requires_grad=True)
    (derivative,) = torch.autograd.grad(F_PRIMITIVE[name](t).sum(), t)
    score = divergence_score(name, 0.3)(t.detach().log())
    torch.testing.assert_close(score - score[0], derivative - derivative[0])


def test_alpha_divergence_has_both_kl_as_limits():
    logratio = torch.linspace(-3, 3, 7, dtype=torch.float64)
    torch.testing.assert_close(divergence_score("alpha_divergence", 1.0)(logratio), logratio)
    near = divergence_score("alpha_divergence", 1 + 2e-6)(logratio)
    torch.testing.assert_close(near, logratio, rtol=1e-5, atol=1e-5)
    forward = divergence_score("forward_kl", 0.5)(logratio)
    torch.testing.assert_close(divergence_score("alpha_divergence", 0.0)(logratio), forward)


# --- the division of a step changes nothing -------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(data=st.data(), name=st.sampled_from(ALONE))
def test_dropping_pairs_equals_masking_them(data, name):
    """A value depends on its own pair only: the loss of a subset is the subset of the loss."""
    pairs = random_pairs(6, seed=data.draw(st.integers(0, 1000)))
    index = torch.tensor(data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True)))
    counts = {"num_pairs": 6, "num_chosen_tokens": int(pairs.chosen_length_P.sum())}
    torch.testing.assert_close(loss_of(subset(pairs, index), name, **counts), loss_of(pairs, name, **counts)[index])


@pytest.mark.parametrize("name", COUPLED)
def test_coupled_losses_need_the_whole_batch(name):
    """The mark is needed: halves differ from the whole. And the order of the pairs must not matter to the sum."""
    pairs = random_pairs(8)
    whole = loss_of(pairs, name).sum()
    halves = sum(loss_of(subset(pairs, index), name).sum() for index in (torch.arange(4), torch.arange(4, 8)))
    assert (whole - halves).abs() > 1e-4
    torch.testing.assert_close(loss_of(subset(pairs, torch.randperm(8)), name).sum(), whole)
    assert couples_batch(["sigmoid", name]) and not couples_batch(["sigmoid", "sft"])


class Model(torch.nn.Module):
    """Sequence log-probabilities that depend on shared weights, so that coefficients must be right for all pairs."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 4, dtype=torch.float64))

    def forward(self, features_SD: Tensor) -> Tensor:
        return -torch.nn.functional.softplus(features_SD @ self.weight) * 10


def step_data(count: int):
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(2, count, 4, generator=generator, dtype=torch.float64)
    reference = torch.randn(4, generator=generator, dtype=torch.float64)
    refs = -torch.nn.functional.softplus(features @ reference) * 10
    lengths = torch.randint(1, 9, (2, count), generator=generator)
    return features, refs, lengths


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_gradient_by_coefficients_equals_the_whole_step(name):
    """Scored in packs of 3, 1 and 4 pairs with coefficients of the step = one backward through all 8 pairs."""
    (chosen_PD, rejected_PD), refs, lengths = step_data(8)
    whole = Model()
    pairs = Pairs(whole(chosen_PD), whole(rejected_PD), *refs, *lengths)
    global_mean(loss_of(pairs, name), 8).backward()

    packed = Model()
    with torch.no_grad():
        scored = pairs.with_policy(packed(chosen_PD), packed(rejected_PD))
    loss_P, (chosen_P, rejected_P) = loss_coefficients(
        lambda chosen, rejected: loss_of(scored.with_policy(chosen, rejected), name), scored.chosen_P, scored.rejected_P
    )
    assert not loss_P.requires_grad and not chosen_P.requires_grad
    torch.testing.assert_close(loss_P, loss_of(pairs, name).detach())
    for part in (slice(0, 3), slice(3, 4), slice(4, 8)):
        surrogate_P = chosen_P[part] * packed(chosen_PD[part]) + rejected_P[part] * packed(rejected_PD[part])
        global_mean(surrogate_P, 8).backward()
    assert whole.weight.grad.abs().max() > 1e-6
    torch.testing.assert_close(packed.weight.grad, whole.weight.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ALONE)
def test_accumulated_gradient_equals_the_whole_step(name):
    (chosen_PD, rejected_PD), refs, lengths = step_data(8)
    counts = {"num_pairs": 8, "num_chosen_tokens": int(lengths[0].sum())}
    gradients = []
    for parts in ([slice(0, 8)], [slice(0, 1), slice(1, 6), slice(6, 8)]):
        model = Model()
        for part in parts:
            logps = model(chosen_PD[part]), model(rejected_PD[part])
            pairs = Pairs(*logps, refs[0][part], refs[1][part], lengths[0][part], lengths[1][part])
            global_mean(loss_of(pairs, name, **counts), 8).backward()
        gradients.append(model.weight.grad)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-10, atol=1e-12)


def test_metrics_add_up_over_parts():
    pairs, rewards = random_pairs(7), torch.randn(2, 7)
    whole, ranked = preference_metrics(pairs, 0.1), reward_metrics(*rewards)
    parts = [torch.arange(0, 2), torch.arange(2, 7)]
    for name, value in whole.items():
        torch.testing.assert_close(sum(preference_metrics(subset(pairs, part), 0.1)[name] for part in parts), value)
    for name, value in ranked.items():
        torch.testing.assert_close(sum(reward_metrics(*rewards[:, part])[name] for part in parts), value)
    ranges = [reward_range(*rewards[:, part]) for part in parts]
    assert min(r["min_reward"] for r in ranges) == rewards.min()
    assert max(r["max_reward"] for r in ranges) == rewards.max()


def test_nll_is_cross_entropy():
    logits_NV, target_N = torch.randn(9, 5), torch.arange(9) % 5
    logprob_N = torch.log_softmax(logits_NV, -1)[torch.arange(9), target_N]
    expected = torch.nn.functional.cross_entropy(logits_NV, target_N)
    torch.testing.assert_close(global_mean(nll(logprob_N), 9), expected)


# --- extremes and mistakes ------------------------------------------------------------------------------------------

EXTREMES = [0.0, 1e-30, 1.0, -1.0, 88.0, -88.0, 1e4, -1e4]


BY_SCORE = [name for name, loss in PREFERENCE_LOSSES.items() if "score" in keywords_of(loss.function)]


@pytest.mark.parametrize(
    ("name", "divergence"),
    [(name, "reverse_kl") for name in PREFERENCE_LOSSES] + [(n, d) for n in BY_SCORE for d in F_DIVERGENCES[1:]],
)
def test_float32_extremes_stay_finite(name, divergence):
    """Log-ratios of ±1e4 in every combination: finite losses and gradients. Squares of a clamped e^80 leave float32."""
    chosen, rejected = torch.cartesian_prod(torch.tensor(EXTREMES), torch.tensor(EXTREMES)).T
    zeros, lengths = torch.zeros_like(chosen), torch.full_like(chosen, 10)
    leaves = chosen.clone().requires_grad_(), rejected.clone().requires_grad_()
    loss_P = loss_of(Pairs(*leaves, zeros, zeros, lengths, lengths), name, f_divergence_type=divergence)
    gradients = torch.autograd.grad(loss_P.sum(), leaves, materialize_grads=True)
    assert loss_P.dtype == torch.float32
    ordinary = torch.ones_like(chosen, dtype=torch.bool)
    if divergence in ("forward_kl", "alpha_divergence") and name in ("ipo", "discopop"):
        # (e^80)² and e^(e^80): infinite in float32 by their own formula, so only moderate log-ratios are asked for.
        ordinary = (chosen.abs() <= 1) & (rejected.abs() <= 1)
    for value in (loss_P, *gradients):
        assert value[ordinary].isfinite().all(), value


def test_shapes_are_checked():
    one, two, column = torch.zeros(1), torch.zeros(2), torch.zeros(2, 1)
    with pytest.raises(ValueError, match=r"chosen_P \[2\], rejected_P \[1\]"):
        Pairs(two, one, two, two, two, two)
    with pytest.raises(ValueError, match=r"rejected_P \[2, 1\]"):
        bradley_terry(column, column)
    with pytest.raises(ValueError, match=r"margin_P \[1\]"):
        bradley_terry(two, two, one)
    with pytest.raises(ValueError, match=r"\[2, 1\]"):
        nll(column)
    with pytest.raises(ValueError, match="above 0"):
        global_mean(two, 0)


def test_names_and_weights_are_checked():
    with pytest.raises(KeyError, match="sigmod"):
        loss_of(HAND, "sigmod")
    with pytest.raises(ValueError):
        loss_of(HAND, "sigmoid", "ipo", loss_weights=[1.0])


def test_configuration_knows_these_losses_and_what_they_read():
    from posttrain.config.schema import offline

    readers = {
        key: {n for n, loss in PREFERENCE_LOSSES.items() if key in keywords_of(loss.function)}
        for key in ("score", "label_smoothing")
    }
    assert set(get_args(offline.PreferenceLoss)) == set(PREFERENCE_LOSSES)
    assert get_args(offline.Divergence) == F_DIVERGENCES
    assert readers["label_smoothing"] == offline.LABEL_SMOOTHING_LOSSES
    assert readers["score"] | {"sft"} == offline.F_DIVERGENCE_LOSSES  # `sft` has no reference: it may stand beside any
