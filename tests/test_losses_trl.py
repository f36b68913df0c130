"""The losses against TRL 1.16's own code: its loss methods are run on the same random numbers, values and gradients."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from posttrain.losses import global_mean, keywords_of
from posttrain.losses.preference import F_DIVERGENCES, PREFERENCE_LOSSES, Pairs, preference_loss, preference_metrics
from posttrain.losses.reference_free import bradley_terry, reward_metrics, reward_range

trl = pytest.importorskip("trl", reason="the oracle: pip install 'posttrain[bench]'")

PAIRS, PROMPT, COMPLETION = 6, 3, 9
OURS_ONLY = {"kto_pair"}  # TRL has dropped it; tests/test_losses.py has it by hand
SETTINGS = {
    "beta": 0.1,
    "label_smoothing": 0.1,
    "f_divergence_type": "reverse_kl",
    "f_alpha_divergence_coef": 0.3,
    "discopop_tau": 0.05,
}


def same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


ACCELERATOR = SimpleNamespace(device=torch.device("cpu"), gather=same, gather_for_metrics=same)


def trl_preference_loss(token_logps, mask, ref_chosen, ref_rejected, loss_type, loss_weights, **settings):
    """TRL's `DPOTrainer._compute_loss` over a model that returns the given log-probabilities of tokens [2P, L]."""
    from trl.trainer.dpo_trainer import DPOTrainer

    class Metrics(dict):
        def __missing__(self, key):
            return self.setdefault(key, [])

    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=ACCELERATOR,
        args=SimpleNamespace(discopop_tau=settings.pop("discopop_tau")),
        loss_types=loss_type,
        loss_weights=loss_weights,
        ld_alpha=None,
        precompute_ref_logps=True,
        aux_loss_enabled=False,
        use_weighting=False,
        _metrics={"train": Metrics()},
        _total_train_tokens=0,
        _tp_size=1,
        **settings,
    )
    filler = torch.zeros_like(token_logps)
    outputs = SimpleNamespace(log_probs=token_logps, entropy=filler, mean_logits=filler, is_top1=filler.bool())
    inputs = {
        "input_ids": torch.zeros_like(mask),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
        "ref_chosen_logps": ref_chosen,
        "ref_rejected_logps": ref_rejected,
    }
    loss = DPOTrainer._compute_loss(trainer, lambda **kwargs: outputs, inputs, False)
    return loss, {name: values[0] for name, values in trainer._metrics["train"].items()}


def random_batch(seed: int, spread: float):
    """Token log-probabilities [2P, L], completion mask [2P, L + 1], reference sums [P], lengths [2P]."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, COMPLETION + 1, (2 * PAIRS,), generator=generator)
    place = torch.arange(PROMPT + COMPLETION)
    mask = ((place >= PROMPT) & (place < PROMPT + lengths[:, None])).long()
    token_logps = -spread * torch.rand(2 * PAIRS, PROMPT + COMPLETION - 1, generator=generator) * mask[:, 1:]
    noise = spread * torch.randn(2 * PAIRS, generator=generator)
    ref_chosen, ref_rejected = (token_logps.sum(1) + noise).chunk(2)
    return token_logps.requires_grad_(), mask, ref_chosen, ref_rejected, lengths


def compare(loss_type, loss_weights=None, seed=0, spread=2.0, **changed):
    token_logps, mask, ref_chosen, ref_rejected, lengths = random_batch(seed, spread)
    # TRL reads no label smoothing in `sigmoid`, ours does.
    settings = {**SETTINGS, **({"label_smoothing": 0.0} if "sigmoid" in loss_type else {}), **changed}
    weights = loss_weights or [1.0] * len(loss_type)
    theirs, metrics = trl_preference_loss(token_logps, mask, ref_chosen, ref_rejected, loss_type, weights, **settings)
    (their_gradient,) = torch.autograd.grad(theirs, token_logps)

    chosen, rejected = token_logps.sum(1).chunk(2)
    pairs = Pairs(chosen, rejected, ref_chosen, ref_rejected, *lengths.chunk(2))
    loss_P = preference_loss(pairs, loss_type=loss_type, loss_weights=loss_weights, **settings)
    ours = global_mean(loss_P, PAIRS)
    (our_gradient,) = torch.autograd.grad(ours, token_logps)
    scored = mask[:, 1:].bool()  # TRL's `sft` reads only scored tokens; elsewhere a log-probability is no variable
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(our_gradient[scored], their_gradient[scored], rtol=1e-4, atol=1e-6)
    assert their_gradient[scored].abs().max() > 0
    for name, value in preference_metrics(pairs, settings["beta"]).items():
        assert value.item() / PAIRS == pytest.approx(metrics[name], rel=1e-5, abs=1e-6), name


NAMES = [name for name in PREFERENCE_LOSSES if name not in OURS_ONLY]


@pytest.mark.parametrize("spread", [0.1, 2.0, 10.0])
@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradient(name, spread):
    compare([name], spread=spread)


@pytest.mark.parametrize("smoothing", [0.001, 0.3])
@pytest.mark.parametrize("name", ["robust", "exo_pair", "aot", "aot_unpaired"])
def test_label_smoothing(name, smoothing):
    compare([name], label_smoothing=smoothing, seed=1)


@pytest.mark.parametrize(
    ("divergence", "name"),
    itertools.product(F_DIVERGENCES[1:], [n for n in NAMES if "score" in keywords_of(PREFERENCE_LOSSES[n].function)]),
)
def test_f_divergences(divergence, name):
    compare([name], f_divergence_type=divergence, seed=2, spread=0.5)


@pytest.mark.parametrize("coef", [0.0, 0.5, 1.0, 2.0])
def test_alpha_divergence(coef):
    compare(["sigmoid"], f_divergence_type="alpha_divergence", f_alpha_divergence_coef=coef, seed=3, spread=0.5)


def test_weighted_list():
    compare(["sigmoid", "bco_pair", "sft"], [0.8, 0.2, 1.0], seed=4)
    compare(["sigmoid", "aot", "ipo"], None, seed=5)


def test_tables_agree():
    """TRL names every loss it knows in its error; ours has the same, and what it has dropped."""
    with pytest.raises(ValueError, match="Unknown loss type") as error:
        trl_preference_loss(*random_batch(0, 1.0)[:4], ["nonsense"], [1.0], **SETTINGS)
    assert {name for name in PREFERENCE_LOSSES if f"'{name}'" in str(error.value)} == set(NAMES)
    assert str(error.value).count("'") == 2 * len(NAMES)


@pytest.mark.parametrize("margin", [None, torch.tensor([0.0, 1.0, -0.5, 3.0])])
@pytest.mark.parametrize("center", [None, 0.01])
def test_reward(margin, center):
    from trl.trainer.reward_trainer import RewardTrainer

    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(8, 1, generator=generator, requires_grad=True)
    metrics: dict = {name: [] for name in ("min_reward", "mean_reward", "max_reward", "accuracy", "margin")}
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=ACCELERATOR,
        args=SimpleNamespace(center_rewards_coefficient=center),
        _metrics={"train": metrics},
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {"attention_mask": torch.ones(8, 2)} | ({} if margin is None else {"margin": margin})
    theirs = RewardTrainer.compute_loss(trainer, lambda **kwargs: SimpleNamespace(logits=rewards), inputs)
    (their_gradient,) = torch.autograd.grad(theirs, rewards)

    chosen, rejected = rewards.squeeze(-1).chunk(2)
    ours = global_mean(bradley_terry(chosen, rejected, margin, center), 4)
    (our_gradient,) = torch.autograd.grad(ours, rewards)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(our_gradient, their_gradient)
    means = {name: value / 4 for name, value in reward_metrics(chosen, rejected).items()}
    for name, value in (means | reward_range(chosen, rejected)).items():
        assert value.item() == pytest.approx(metrics[name][0], rel=1e-6), name
