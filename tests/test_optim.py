"""The optimizer against torch's, its float32 masters, and the schedules against transformers'."""

import copy
import math

import pytest
import torch
from torch import nn
from transformers import get_scheduler

from posttrain.optim.adamw import AdamW
from posttrain.optim.schedules import schedule, warmup_count


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3))


def backward(model, seed):
    torch.manual_seed(seed)
    model(torch.randn(5, 6).to(next(model.parameters()).dtype)).float().square().sum().backward()


def test_float32_equals_torch_adamw_with_clipping():
    ours, theirs = small_model(), small_model()
    optimizer = AdamW(ours, weight_decay=0.1, max_grad_norm=0.5)
    decayed = [p for p in theirs.parameters() if p.ndim > 1]
    plain = [p for p in theirs.parameters() if p.ndim < 2]
    reference = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}])
    for step in range(5):
        backward(ours, step)
        backward(theirs, step)
        want = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        for group in reference.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        reference.step()
        reference.zero_grad()
        assert optimizer.step(1e-2 / (step + 1)) == pytest.approx(want.item(), rel=1e-6)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
        assert a.grad is None


def test_bfloat16_moves_at_small_learning_rates():
    """At 1e-6 a bfloat16 weight of 0.1 cannot take one update; its float32 master takes all of them."""
    model = small_model()
    start = copy.deepcopy(model.state_dict())
    optimizer = AdamW(model, torch.bfloat16)
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    for _ in range(10):
        backward(model, 0)
        optimizer.step(1e-6)
    moved = (optimizer.masters["0.weight"] - start["0.weight"]).abs()
    print(f"after 10 steps at 1e-6 the masters moved by {moved.mean():.1e}")
    assert 5e-6 < moved.max() < 2e-5
    torch.testing.assert_close(model[0].weight, optimizer.masters["0.weight"].bfloat16(), rtol=0, atol=0)


def test_bfloat16_gradients_are_summed_in_float32():
    model = small_model()
    optimizer = AdamW(model, torch.bfloat16)
    grads = []
    for seed in range(3):
        probe = small_model().bfloat16()
        backward(probe, seed)
        grads.append(probe[0].weight.grad.float())
        backward(model, seed)
    assert model[0].weight.grad is None
    torch.testing.assert_close(optimizer.masters["0.weight"].grad, sum(grads), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_restores_to_the_bit(dtype):
    model = small_model()
    optimizer = AdamW(model, dtype)
    for step in range(3):
        backward(model, step)
        optimizer.step(1e-3)
    other = small_model()
    other.load_state_dict({k: v.float() for k, v in model.state_dict().items()})
    resumed = AdamW(other, dtype)
    resumed.load_state({k: v.clone() for k, v in optimizer.state().items()})
    for step in range(3, 6):
        for m, o in ((model, optimizer), (other, resumed)):
            backward(m, step)
            o.step(1e-3)
    for name, master in optimizer.masters.items():
        assert torch.equal(master, resumed.masters[name])
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad):
    model = small_model()
    optimizer = AdamW(model)
    backward(model, 0)
    optimizer.step(1e-3)
    before = {k: v.clone() for k, v in (model.state_dict() | optimizer.state()).items()}
    backward(model, 1)
    model[0].weight.grad[0, 0] = bad
    assert not math.isfinite(optimizer.step(1e-3))
    after = model.state_dict() | optimizer.state()
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert all(p.grad is None for p in model.parameters())


def test_frozen_parameters_are_left_out():
    model = small_model()
    model[0].requires_grad_(False)
    optimizer = AdamW(model, torch.bfloat16)
    assert model[0].weight.dtype == torch.float32 and "0.weight" not in optimizer.masters


@pytest.mark.parametrize("kind", ["constant", "constant_with_warmup", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 0.03, 0.25, 7])
def test_schedules_equal_transformers(kind, warmup):
    total, rate = 40, 1e-3
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate)
    theirs = get_scheduler(kind, optimizer, warmup_count(warmup, total), total)
    for step in range(total):
        assert rate * schedule(kind, step, total, warmup_count(warmup, total)) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
