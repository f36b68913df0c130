"""posttrain.functional: rewards, policy gradients and training steps, by hand, brute force, and TRL 1.16's own code."""

import copy
import math

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from trl_grpo import trl_grpo

from posttrain import functional as pf


@pytest.fixture(scope="module")
def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=300, n_positions=512, n_embd=32, n_layer=2, n_head=2, initializer_range=0.3)
    return GPT2LMHeadModel(config).eval()


# --- SFT --------------------------------------------------------------------------------------------------------------


def test_sft_step_by_hand():
    """−(−1 − 2)/10 and −(−4)/10, mean over 2 rows, over 5 steps: (0.3 + 0.4) / 2 / 5 = 0.07; each gradient −1/100."""
    log_probs = torch.tensor([[-1.0, -2.0, -9.0], [-9.0, -4.0, -9.0]], requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [0, 1, 0]])
    loss, metadata = pf.sft_microbatch_train_step(log_probs, mask, 5, normalize_constant=10)
    assert loss == pytest.approx(0.07) and loss.shape == () and not loss.requires_grad
    assert log_probs.grad.flatten().tolist() == pytest.approx([-0.01, -0.01, 0, 0, -0.01, 0])
    assert metadata["nll"] == pytest.approx(7 / 3)


def test_microbatches_add_up_to_the_batch(gpt2):
    """Four microbatches of two = one batch of eight, in loss and in every gradient, for SFT and for GRPO."""
    input_ids, labels = torch.randint(0, 300, (2, 8, 9))
    mask = torch.rand(8, 9) > 0.3
    advantages, old = torch.randn(8, 1), torch.randn(8, 9) - 5

    def run(size: int) -> tuple[list[float], list[list[torch.Tensor]]]:
        losses, gradients = [], []
        for step in ("sft", "grpo"):
            model, total = copy.deepcopy(gpt2), 0.0
            for rows in torch.arange(8).split(size):
                log_probs = pf.get_response_log_probs(model, input_ids[rows], labels[rows], False)["log_probs"]
                if step == "sft":
                    loss, _ = pf.sft_microbatch_train_step(log_probs, mask[rows], 8 // size, 3.0)
                else:
                    settings = {"advantages": advantages[rows], "old_log_probs": old[rows], "cliprange": 0.2}
                    loss, _ = pf.grpo_microbatch_train_step(log_probs, mask[rows], 8 // size, "grpo_clip", **settings)
                total += loss.item()
            losses.append(total)
            gradients.append([p.grad for p in model.parameters()])
        return losses, gradients

    (losses, gradients), (whole_losses, whole_gradients) = run(2), run(8)
    assert losses == pytest.approx(whole_losses, rel=1e-4)
    for ours, whole in zip(gradients, whole_gradients, strict=True):
        for a, b in zip(ours, whole, strict=True):
            assert torch.allclose(a, b, rtol=1e-3, atol=1e-4 * b.abs().max().item())


def test_steps_refuse_what_does_not_fit():
    log_probs = torch.zeros(2, 3, requires_grad=True)
    for step in (pf.sft_microbatch_train_step, lambda *a: pf.grpo_microbatch_train_step(*a, "no_baseline")):
        with pytest.raises(ValueError, match=r"\(B, L\)"):
            step(log_probs, torch.ones(2, 2), 1)
        with pytest.raises(ValueError, match="gradient_accumulation_steps is 0"):
            step(log_probs, torch.ones(2, 3), 0)


# --- rewards and policy gradients -----------------------------------------------------------------------------------


def count_letters(response: str, truth: str) -> dict[str, float]:
    return {"reward": len(response), "format_reward": 1.0, "answer_reward": float(response == truth)}


def normalised(responses, group_size, eps=0.0, by_std=True, reward_fn=count_letters):
    return pf.compute_group_normalized_rewards(reward_fn, responses, ["aa"] * len(responses), group_size, eps, by_std)


def test_group_normalised_rewards_by_hand():
    """Rewards 1, 2 | 3, 3: means 1.5 and 3, unbiased deviation √½ of the first group, 0 of the second."""
    advantages, rewards, metadata = normalised(["a", "aa", "aaa", "bbb"], 2, eps=0.5)
    scale = math.sqrt(0.5) + 0.5
    assert rewards.tolist() == [1, 2, 3, 3] and rewards.dtype == advantages.dtype == torch.float32
    assert advantages.tolist() == pytest.approx([-0.5 / scale, 0.5 / scale, 0, 0])
    assert normalised(["a", "aa", "aaa", "bbb"], 2, by_std=False)[0].tolist() == [-0.5, 0.5, 0, 0]
    want = {"reward": 2.25, "format_reward": 1, "answer_reward": 0.25, "reward_min": 1, "reward_max": 3}
    want |= {"reward_std": torch.tensor([1.0, 2, 3, 3]).std().item(), "frac_reward_zero_std": 0.5}
    assert metadata == pytest.approx(want)


@pytest.mark.parametrize("by_std", [True, False])
def test_groups_at_the_edges(by_std):
    """A group of one, a group of equals, all in one group; ε = 0 divides by nothing."""
    assert normalised(["a", "aa", "aaa"], 1, by_std=by_std)[0].tolist() == [0, 0, 0]
    assert normalised(["a"], 1, by_std=by_std)[2]["reward_std"] == 0
    assert normalised(["aa"] * 4, 2, by_std=by_std)[0].tolist() == [0] * 4
    assert normalised(["a", "aa", "aaa"], 3, by_std=by_std)[0].tolist() == [-1, 0, 1]


def test_rewards_that_are_refused():
    for responses, size, match in (
        (["a"] * 5, 2, "5 responses do not divide"),
        ([], 2, "0 responses"),
        (["a"], 0, "group_size 0"),
    ):
        with pytest.raises(ValueError, match=match):
            normalised(responses, size)
    with pytest.raises(ValueError, match="2 responses, but 1 ground truths"):
        pf.compute_group_normalized_rewards(count_letters, ["a", "b"], ["a"], 2, 0, True)
    for bad in ({"reward": 1.0}, {"reward": math.nan, "format_reward": 1.0, "answer_reward": 1.0}):
        with pytest.raises(ValueError, match=r"no finite .* for response 0"):
            normalised(["a", "b"], 2, reward_fn=lambda *_, bad=bad: bad)


def test_policy_gradient_losses_by_hand():
    log_probs = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]], requires_grad=True)
    values = torch.tensor([[2.0], [-1.0]])
    loss = pf.compute_naive_policy_gradient_loss(values, log_probs)
    assert loss.tolist() == [[2, 4], [-3, -4]]
    old = log_probs.detach() - torch.tensor([1.5, 0.5]).log()  # ratios 1.5 and 0.5
    clipped, metadata = pf.compute_grpo_clip_loss(values, log_probs, old, 0.2)
    assert clipped.flatten().tolist() == pytest.approx([-2.4, -1, 1.5, 0.8])
    assert metadata["clipped"].tolist() == [[True, False], [False, True]]
    assert metadata["ratio"].flatten().tolist() == pytest.approx([1.5, 0.5] * 2)
    arguments = {"raw_rewards": values, "advantages": -values, "old_log_probs": old, "cliprange": 0.2}
    for name, want in (("no_baseline", loss), ("reinforce_with_baseline", -loss), ("grpo_clip", None)):
        got, metadata = pf.compute_policy_gradient_loss(log_probs, name, **arguments)
        want = pf.compute_grpo_clip_loss(-values, log_probs, old, 0.2)[0] if want is None else want
        assert torch.equal(got, want) and bool(metadata) == (name == "grpo_clip")


NEEDS = {
    "no_baseline": ["raw_rewards"],
    "reinforce_with_baseline": ["advantages"],
    "grpo_clip": ["advantages", "old_log_probs", "cliprange"],
}


@pytest.mark.parametrize(("loss_type", "missing"), [(loss, name) for loss, names in NEEDS.items() for name in names])
def test_a_missing_argument_is_named(loss_type, missing):
    log_probs = torch.zeros(2, 3, requires_grad=True)
    given = {"advantages": torch.ones(2, 1), "old_log_probs": torch.zeros(2, 3), "cliprange": 0.2}
    given = {
        name: value for name, value in (given | {"raw_rewards": torch.ones(2, 1)}).items() if name in NEEDS[loss_type]
    }
    pf.compute_policy_gradient_loss(log_probs, loss_type, **given)  # what it does not need may be omitted
    with pytest.raises(ValueError, match=f"{loss_type} needs {missing}"):
        pf.compute_policy_gradient_loss(log_probs, loss_type, **given | {missing: None})
    with pytest.raises(ValueError, match=f"{loss_type} needs {missing}"):
        pf.grpo_microbatch_train_step(log_probs, torch.ones(2, 3), 1, loss_type, **given | {missing: None})


def test_other_wrong_arguments():
    log_probs = torch.zeros(3, 3)
    with pytest.raises(
        ValueError, match="unknown loss_type 'ppo': it is one of no_baseline, reinforce_with_baseline, grpo"
    ):
        pf.compute_policy_gradient_loss(log_probs, "ppo")
    with pytest.raises(ValueError, match=r"\(B, 1\)"):  # (B,) would be spread over the columns
        pf.compute_naive_policy_gradient_loss(torch.ones(3), log_probs)
    with pytest.raises(ValueError, match="one shape"):
        pf.compute_grpo_clip_loss(torch.ones(3, 1), log_probs, torch.zeros(3, 2), 0.2)


def test_grpo_step_by_hand():
    """Rows of 2 and 1 response tokens: ((2 + 4)/2 + (−3)/1) / 2 = 0; with k = 4 the gradients are −A/(|y| · 2 · 4)."""
    log_probs = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]], requires_grad=True)
    mask = torch.tensor([[1, 1], [1, 0]])
    rewards = torch.tensor([[2.0], [-1.0]])
    loss, metadata = pf.grpo_microbatch_train_step(log_probs, mask, 4, "no_baseline", raw_rewards=rewards)
    assert loss.item() == 0 and loss.shape == () and not loss.requires_grad and metadata == {}
    assert log_probs.grad.flatten().tolist() == [-2 / 16, -2 / 16, 1 / 8, 0]


@pytest.mark.parametrize("filler", [0.0, -1e30, -math.inf, math.nan])
def test_padding_may_hold_anything(filler):
    """Loss, gradient and clip fraction are those of the response tokens; a row without any counts as 0."""
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]]).bool()
    values = torch.tensor([[-1.0, -2.0, -5.0], [-3.0, -5.0, -5.0], [-5.0, -5.0, -5.0]])
    log_probs = torch.where(mask, values, filler).requires_grad_()
    old = torch.where(mask, torch.tensor([[-1.5, -2.0, 0], [-3.0, 0, 0], [0, 0, 0]]), filler)
    advantages = torch.tensor([[1.0], [2.0], [3.0]])
    settings = {"advantages": advantages, "old_log_probs": old, "cliprange": 0.2}
    loss, metadata = pf.grpo_microbatch_train_step(log_probs, mask, 1, "grpo_clip", **settings)
    # ratios e^0.5 (held at 1.2), 1 and 1: −((1.2 + 1)/2 + 2 + 0) / 3
    assert loss == pytest.approx(-(1.1 + 2) / 3)
    assert log_probs.grad.flatten().tolist() == pytest.approx([0, -1 / 6, 0, -2 / 3, 0, 0, 0, 0, 0])
    assert metadata["clip_fraction"] == pytest.approx(1 / 3) and metadata["clipped"].sum() == 1
    loss, metadata = pf.sft_microbatch_train_step(log_probs.detach().requires_grad_(), mask, 1)
    assert loss == pytest.approx(2.0) and metadata["nll"] == pytest.approx(2.0)


def test_the_step_is_trls():
    """`GRPOTrainer._compute_loss` on the same numbers, its loss, its gradient and its clip ratio."""
    torch.manual_seed(0)
    log_probs = (-3 * torch.rand(4, 6)).requires_grad_()
    old = log_probs.detach() + 0.4 * torch.randn(4, 6)
    mask = (torch.arange(6) < torch.tensor([6, 3, 1, 4])[:, None]).long()
    advantages = torch.tensor([1.0, -0.5, 2.0, -1.5])
    inputs = {"advantages": advantages, "old_per_token_logps": old}
    theirs, metrics = trl_grpo(log_probs, mask, inputs, current_gradient_accumulation_steps=3)
    (their_gradient,) = torch.autograd.grad(theirs, log_probs)
    settings = {"advantages": advantages[:, None], "old_log_probs": old, "cliprange": 0.2}
    ours, metadata = pf.grpo_microbatch_train_step(log_probs, mask, 3, "grpo_clip", **settings)
    assert ours == pytest.approx(theirs.item(), rel=1e-6) and torch.allclose(log_probs.grad, their_gradient)
    assert metadata["clip_fraction"] == pytest.approx(metrics["clip_ratio/region_mean"][0])
    assert 0 < metadata["clip_fraction"] < 1
