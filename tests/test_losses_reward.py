"""The reward model's loss against numbers worked by hand."""

import math

import torch
from test_losses import log_sig

from posttrain.losses.reference_free import bradley_terry, reward_metrics


def test_bradley_terry_by_hand():
    chosen, rejected = torch.tensor([1.0, -0.5]), torch.tensor([0.0, 0.5])
    expected = [-log_sig(1.0), -log_sig(-1.0)]
    torch.testing.assert_close(bradley_terry(chosen, rejected), torch.tensor(expected))
    margin = torch.tensor([0.5, 0.0])
    expected = [-log_sig(0.5) + 0.1 * 1.0, -log_sig(-1.0) + 0.1 * 0.0]
    torch.testing.assert_close(bradley_terry(chosen, rejected, margin, 0.1), torch.tensor(expected))


def test_ties_by_hand():
    """Each is the better one by half: lowest, log 2, where the rewards are equal. The margin is not read there."""
    chosen, rejected, tie = (
        torch.tensor([1.0, 1.0, 2.0]),
        torch.tensor([0.0, 0.0, 2.0]),
        torch.tensor([True, False, True]),
    )
    expected = [-(log_sig(1.0) + log_sig(-1.0)) / 2, -log_sig(0.5), math.log(2)]
    margin = torch.tensor([0.5, 0.5, 0.5])
    torch.testing.assert_close(bradley_terry(chosen, rejected, margin, tie_P=tie), torch.tensor(expected))
    sums = {name: value.item() for name, value in reward_metrics(chosen, rejected, tie).items()}
    assert sums == {"mean_reward": 3.0, "accuracy": 1.0, "margin": 1.0}


def test_bradley_terry_extremes():
    chosen = torch.tensor([1e4, -1e4]).requires_grad_()
    loss_P = bradley_terry(chosen, -chosen.detach())
    torch.testing.assert_close(loss_P.detach(), torch.tensor([0.0, 2e4]))
    loss_P.sum().backward()
    torch.testing.assert_close(chosen.grad, torch.tensor([0.0, -1.0]))
