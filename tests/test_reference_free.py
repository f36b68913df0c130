"""ORPO, CPO and SimPO: by hand, against TRL 1.16's own loss code, and through the recipe."""

import json
import math
from functools import partial
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_recipes import dpo, metrics, run

from posttrain.batch import Example, Node, pack
from posttrain.config import load
from posttrain.config.schema.offline import ContrastiveLoss
from posttrain.losses.preference import Pairs
from posttrain.losses.reference_free import contrastive, contrastive_metrics, odds_ratio, odds_ratio_metrics
from posttrain.planning.largest import FirstEpoch
from posttrain.recipes.reference_free import in_prompt, pack_with_chosen_prompts

SETTINGS = {"beta": 0.5, "label_smoothing": 0.1, "simpo_gamma": 0.3, "alpha": 0.0}


def pairs_of(chosen, rejected, chosen_length, rejected_length, dtype=torch.float64) -> Pairs:
    logps = [torch.as_tensor(values, dtype=dtype) for values in (chosen, rejected)]
    lengths = [torch.as_tensor(values) for values in (chosen_length, rejected_length)]
    return Pairs(*logps, *(torch.zeros_like(values) for values in logps), *lengths)


# log π(chosen) = −4 over 2 tokens and −1 over 4; rejected −9 over 3 and −2 over 2.
HAND = pairs_of([-4.0, -1.0], [-9.0, -2.0], [2, 4], [3, 2])


def sig(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def log_odds(mean: float) -> float:
    return math.log(math.exp(mean) / (1 - math.exp(mean)))


BY_HAND = {
    # sums: c − r = 5 and 1; means per token: −2 + 3 = 1 and −¼ + 1 = ¾
    "sigmoid": [-0.9 * math.log(sig(0.5 * d)) - 0.1 * math.log(sig(-0.5 * d)) for d in (5, 1)],
    "hinge": [0.0, 0.5],
    "ipo": [(1 - 1) ** 2, (0.75 - 1) ** 2],
    "simpo": [-0.9 * math.log(sig(0.5 * d - 0.3)) - 0.1 * math.log(sig(0.3 - 0.5 * d)) for d in (1, 0.75)],
}


@pytest.mark.parametrize("name", get_args(ContrastiveLoss))
def test_contrastive_by_hand(name):
    loss_P = contrastive(HAND, loss_type=name, **SETTINGS)
    torch.testing.assert_close(loss_P, torch.tensor(BY_HAND[name], dtype=torch.float64))


def test_alpha_shapes_the_reward_by_hand():
    """(1 − p^−α)/α of the means −2, −3 and −¼, −1; α → 0 is the log-probability itself."""
    rewards = [(1 - math.exp(0.5 * x)) / 0.5 for x in (2, 3, 0.25, 1)]
    differences = [rewards[0] - rewards[1], rewards[2] - rewards[3]]
    changed = SETTINGS | {"alpha": 0.5, "label_smoothing": 0.0}
    loss_P = contrastive(HAND, loss_type="simpo", **changed)
    expected = torch.tensor([-math.log(sig(0.5 * d - 0.3)) for d in differences], dtype=torch.float64)
    torch.testing.assert_close(loss_P, expected)
    near = contrastive(HAND, loss_type="simpo", **(SETTINGS | {"alpha": 1e-7}))
    torch.testing.assert_close(near, contrastive(HAND, loss_type="simpo", **SETTINGS), rtol=1e-5, atol=1e-6)


def test_odds_ratio_by_hand():
    ratios = [log_odds(-2) - log_odds(-3), log_odds(-0.25) - log_odds(-1)]
    expected = torch.tensor([-0.1 * math.log(sig(x)) for x in ratios], dtype=torch.float64)
    torch.testing.assert_close(odds_ratio(HAND, beta=0.1), expected)
    found = {name: value.item() for name, value in odds_ratio_metrics(HAND, 0.1).items()}
    assert found["log_odds_chosen"] == pytest.approx(sum(ratios))
    assert found["log_odds_ratio"] == pytest.approx(sum(math.log(sig(x)) for x in ratios))
    assert found["rewards/chosen"] == pytest.approx(0.1 * (-2 - 0.25))
    assert found["logps/rejected"] == pytest.approx(-3 - 1)
    assert found["rewards/accuracies"] == 2


@pytest.mark.parametrize("name", ["orpo", *get_args(ContrastiveLoss)])
def test_float32_extremes_stay_finite(name):
    """A certain completion (log-probability 0), an impossible one, and all between: finite values and gradients."""
    levels = torch.tensor([0.0, -1e-30, -1e-7, -0.69, -1.0, -88.0, -1e4])
    chosen, rejected = torch.cartesian_prod(levels, levels).T
    leaves = chosen.clone().requires_grad_(), rejected.clone().requires_grad_()
    pairs = Pairs(*leaves, *[torch.zeros_like(chosen)] * 2, *[torch.full_like(chosen, 10)] * 2)
    for alpha in (0.0,) if name in ("orpo", "ipo") else (0.0, 0.5, -0.5):
        settings = SETTINGS | {"alpha": alpha}
        loss_P = odds_ratio(pairs, beta=0.1) if name == "orpo" else contrastive(pairs, loss_type=name, **settings)
        gradients = torch.autograd.grad(loss_P.sum(), leaves)
        assert loss_P.dtype == torch.float32
        assert all(value.isfinite().all() for value in (loss_P, *gradients)), (name, alpha)


def test_unknown_name_is_an_error():
    with pytest.raises(KeyError, match="sigmod"):
        contrastive(HAND, loss_type="sigmod", **SETTINGS)


# --- TRL's own code -------------------------------------------------------------------------------------------------

TRL_ONLY = SimpleNamespace(accelerator=SimpleNamespace(device=torch.device("cpu")))


def random_pairs(seed: int) -> Pairs:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 30, (2, 8), generator=generator)
    logps = -3 * torch.rand(2, 8, generator=generator) * lengths
    return pairs_of(*logps.requires_grad_(), *lengths, dtype=torch.float32)


def assert_same(ours_P, theirs_P, pairs):
    torch.testing.assert_close(ours_P, theirs_P)
    leaves = pairs.chosen_P, pairs.rejected_P
    for ours, theirs in zip(
        torch.autograd.grad(ours_P.sum(), leaves, retain_graph=True),
        torch.autograd.grad(theirs_P.sum(), leaves, retain_graph=True),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 0.2, -0.3])
@pytest.mark.parametrize("name", get_args(ContrastiveLoss))
def test_contrastive_equals_trl(name, alpha):
    trainer = pytest.importorskip("trl.experimental.cpo.cpo_trainer", reason="the oracle: posttrain[bench]")
    pairs = random_pairs(1)
    if alpha and name in ("sigmoid", "hinge"):  # TRL goes through p itself, which underflows for sums
        pairs = pairs.with_policy(pairs.chosen_P / 10, pairs.rejected_P / 10)
    used = pairs.per_token() if name in ("ipo", "simpo") else pairs
    smoothing = 0.1 if name in ("sigmoid", "simpo") else 0.0
    settings = {"beta": 0.7, "label_smoothing": smoothing, "simpo_gamma": 0.4, "alpha": alpha}
    its = SimpleNamespace(**settings, loss_type=name, **vars(TRL_ONLY))
    theirs_P, chosen_rewards, rejected_rewards = trainer.CPOTrainer.cpo_loss(its, used.chosen_P, used.rejected_P)
    assert_same(contrastive(pairs, loss_type=name, **settings), theirs_P, pairs)
    found = contrastive_metrics(pairs, loss_type=name, beta=0.7, alpha=alpha)
    torch.testing.assert_close(found["rewards/chosen"], chosen_rewards.sum())
    torch.testing.assert_close(found["rewards/rejected"], rejected_rewards.sum())
    torch.testing.assert_close(found["logps/chosen"], used.chosen_P.sum())


def test_odds_ratio_equals_trl():
    trainer = pytest.importorskip("trl.experimental.orpo.orpo_trainer", reason="the oracle: posttrain[bench]")
    pairs = random_pairs(2)
    used = pairs.per_token()
    its = SimpleNamespace(beta=0.1, **vars(TRL_ONLY))
    found = trainer.ORPOTrainer.odds_ratio_loss(its, used.chosen_P, used.rejected_P)
    assert_same(odds_ratio(pairs, beta=0.1), -found[0], pairs)  # TRL subtracts it
    ours = odds_ratio_metrics(pairs, 0.1)
    torch.testing.assert_close(ours["log_odds_ratio"] / 8, found[3].detach())
    torch.testing.assert_close(ours["log_odds_chosen"] / 8, found[4].detach())
    torch.testing.assert_close(ours["rewards/chosen"], found[1].sum())


# --- the recipe -----------------------------------------------------------------------------------------------------


pack_of = partial(pack, tokens_per_pack=100)


def test_a_prompt_is_a_target_once():
    """ORPO's likelihood: the prompt but its first token belongs to chosen, and rejected has its completion alone."""

    def leaf(*ids):
        return Node(ids, True)

    shared = Example((Node((1, 2, 3), children=(leaf(4, 5), leaf(6, 7, 8))),), 0)
    apart = Example((Node((1, 2), children=(leaf(3),)), Node((4, 5), children=(leaf(6),))), 1)
    [one] = pack_with_chosen_prompts(pack_of, [shared, apart])
    targets = [one.target_N[one.sequence_N == s].tolist() for s in range(4)]
    assert targets == [[2, 3, 4, 5], [6, 7, 8], [2, 3], [6]]
    prompt = in_prompt(one, [shared, apart])
    assert one.target_N[prompt].tolist() == [2, 3, 2]
    assert one.length_S.tolist() == [4, 3, 2, 1]
    [plain] = pack_of([shared, apart])
    assert not in_prompt(plain, [shared, apart]).any()


METHODS = [
    {"type": "orpo"},
    {"type": "orpo", "completion_only_loss": True},
    {"type": "cpo", "label_smoothing": 0.1},
    {"type": "simpo", "cpo_alpha": 0.5},
]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_packs_do_not_change_the_update(tmp_path, shared, method):
    results = []
    for name, tokens in (("whole", 8192), ("split", 800)):
        settings = dpo(shared, shared / "models/stories260K", method=method)
        settings["training"] |= {"tokens_per_pack": tokens, "batch_size": 6, "max_steps": 2}
        folder = run(tmp_path, f"name={name}", **settings)
        results.append(
            (metrics(folder, "loss"), metrics(folder, "grad_norm"), load_file(next(folder.glob("final/*s"))))
        )
    (loss_a, norm_a, a), (loss_b, norm_b, b) = results
    assert loss_a == pytest.approx(loss_b, rel=1e-4)
    assert norm_a == pytest.approx(norm_b, rel=1e-3)
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=1e-4)  # of 2e-3: AdamW divides by tiny moments


def test_the_likelihood_of_prompts_is_a_setting(tmp_path, shared):
    """The odds ratio is the same, the likelihood term another: it has the prompts too, or not."""
    found = {}
    for only in (False, True):
        method = {"type": "orpo", "completion_only_loss": only}
        settings = dpo(shared, shared / "models/stories260K", method=method, training={"max_steps": 1})
        folder = run(tmp_path, f"name=only-{only}", **settings)
        found[only] = {name: metrics(folder, name)[0] for name in ("nll_loss", "log_odds_ratio", "loss", "entropy")}
        assert found[only]["loss"] == pytest.approx(found[only]["nll_loss"] - 0.1 * found[only]["log_odds_ratio"])
    print(found)
    for name in ("log_odds_ratio", "entropy"):
        assert found[False][name] == pytest.approx(found[True][name], rel=1e-5)
    assert abs(found[False]["nll_loss"] - found[True]["nll_loss"]) > 0.01


@pytest.mark.parametrize("method", ["orpo", {"type": "orpo", "completion_only_loss": True}, "cpo"])
def test_a_plan_counts_the_targets_that_the_recipe_does(tmp_path, method):
    """ORPO's prompts are targets, of the chosen completion."""
    settings = {"model": "m", "method": method, "data": {"source": "x"}}
    (tmp_path / "a.json").write_text(json.dumps(settings))
    examples = [Example((Node((1, 2, 3), children=(Node((4, 5), True), Node((6,), True))),), 0)] * 3
    [planned] = FirstEpoch(load(tmp_path / "a.json").config, SimpleNamespace(train=examples)).packs(np.arange(3), 100)
    assert len(planned.target_N) == 3 * (5 if method == "orpo" else 3)


@pytest.mark.parametrize("method", ["dpo", "orpo", "cpo"])
def test_means_over_tokens_do_not_depend_on_the_batch(tmp_path, shared, method):
    found = []
    for size in (2, 5):
        sections = dpo(shared, shared / "models/stories260K", data={"validation": {"rows": 5}})
        sections |= {"method": {"type": method}, "name": f"by-{size}"}
        sections["training"] |= {"batch_size": size, "max_steps": 1, "learning_rate": 0}
        folder = run(tmp_path, **sections)
        found.append([metrics(folder, f"eval_{name}") for name in ("mean_token_accuracy", "entropy", "nll_loss")])
    assert found[0][0] and found[0][1] and bool(found[0][2]) == (method != "dpo")
    for one, two in zip(*found, strict=True):
        assert one == pytest.approx(two, rel=1e-5)
