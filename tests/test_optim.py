"""The optimizer against torch's, its float32 masters, and the schedules against transformers'."""

import copy
import importlib.util
import json
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn
from transformers.optimization import get_scheduler

from posttrain.base.errors import ConfigError, DamagedError
from posttrain.config import load
from posttrain.optim import adamw
from posttrain.optim.adamw import AdamW
from posttrain.optim.variants import AdamW8bit, AdamWCPUOffload, Muon, eight_bit_names, layer_matrices
from posttrain.training.loop import learning_rate_at, warmup_count


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


def offloaded(model, dtype=torch.float32, **settings):
    """The CPU is the model's device here: the same steps as with a GPU, but for the stream and page-locked memory."""
    return AdamWCPUOffload(model, dtype, device=torch.device("cpu"), **settings)


OPTIMIZERS = {"adamw": AdamW, "adamw_8bit": AdamW8bit, "adamw_cpu_offload": offloaded, "muon": Muon}
if importlib.util.find_spec("triton"):
    OPTIMIZERS |= {"in halves": partial(AdamW, in_halves=True), "muon, in halves": partial(Muon, in_halves=True)}


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch):
    """For masters in halves."""
    monkeypatch.setattr(adamw, "LARGE", 1)


def large_model():
    """With matrices that have 8-bit moments, an embedding that must not, and vectors."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 130), nn.LayerNorm(130), nn.Linear(130, 64, bias=False))


def backward_large(model, seed):
    torch.manual_seed(seed)
    model(torch.randint(100, (32,))).float().square().mean().backward()


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_restores_to_the_bit(kind, dtype):
    """Two packs a step, so that gradients are summed too."""
    model = large_model()
    optimizer = OPTIMIZERS[kind](model, dtype, ema_decay=0.9)
    for step in range(3):
        backward_large(model, step)
        backward_large(model, step + 10)
        optimizer.step(1e-3)
    other = large_model()
    other.load_state_dict({k: v.float() for k, v in model.state_dict().items()})
    resumed = OPTIMIZERS[kind](other, dtype, ema_decay=0.9)
    resumed.load_state({k: v.clone() for k, v in optimizer.state().items()})
    for step in range(3, 6):
        for m, o in ((model, optimizer), (other, resumed)):
            backward_large(m, step)
            backward_large(m, step + 10)
            o.step(1e-3)
    for name, master in optimizer.values.items():
        assert torch.equal(master, resumed.values[name])
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    ours, theirs = optimizer.state(), resumed.state()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_going_back_to_before_the_first_update_leaves_no_moments(kind):
    """A run that fails in a step of several updates goes back so; those that come then must begin as the first."""
    model = large_model()
    optimizer = OPTIMIZERS[kind](model)
    before = {f"{name}|master": master.clone() for name, master in optimizer.masters.items()}
    names = optimizer.state().keys()
    backward_large(model, 0)
    optimizer.step(1e-3)
    optimizer.load_state(before)
    assert optimizer.updates == 0 and optimizer.state().keys() == names
    assert all(torch.equal(p, before[f"{name}|master"]) for name, p in model.named_parameters())


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(kind, bad):
    model = large_model()
    optimizer = OPTIMIZERS[kind](model, ema_decay=0.9)
    backward_large(model, 0)
    optimizer.step(1e-3)
    before = {k: v.clone() for k, v in (model.state_dict() | optimizer.state()).items()}
    model[1].weight.register_hook(lambda grad: grad.index_fill(0, torch.tensor([0]), bad))
    backward_large(model, 1)
    assert not math.isfinite(optimizer.step(1e-3))
    after = model.state_dict() | optimizer.state()
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_gradients_that_are_forgotten_leave_no_trace(kind):
    """A step that is not taken: the next is as if it had never started."""
    results = []
    for started in (True, False):
        model = large_model()
        optimizer = OPTIMIZERS[kind](model, torch.bfloat16)
        if started:
            backward_large(model, 7)
            optimizer.forget()
        backward_large(model, 0)
        optimizer.step(1e-2)
        results.append(optimizer.state())
    assert all(torch.equal(results[0][k], results[1][k]) for k in results[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("packs", "beside"), [(1, False), (3, False), (3, True)])
def test_offloaded_equals_adamw_to_the_bit(dtype, packs, beside):
    """With sums made beside backward too, as on a GPU."""
    models = large_model(), large_model()
    optimizers = [
        make(m, dtype, weight_decay=0.1, max_grad_norm=0.05) for make, m in zip((AdamW, offloaded), models, strict=True)
    ]
    if beside:
        optimizers[1]._adder = ThreadPoolExecutor(1)
    for step in range(4):
        for model in models:
            for part in range(packs):
                backward_large(model, 10 * step + part)
        norms = [optimizer.step(1e-2 / (step + 1)) for optimizer in optimizers]
        assert norms[0] == norms[1] > 0.05
    plain, remote = (o.state() for o in optimizers)
    for name, master in optimizers[0].masters.items():
        assert torch.equal(master, optimizers[1].masters[name])
    assert all(torch.equal(plain[k], remote[k]) for k in plain)
    for a, b in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(a, b) and a.dtype == dtype
    other = large_model()
    AdamW(other, dtype).load_state(remote)  # a run that began with a GPU may go on without
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), models[1].parameters(), strict=True))


def test_8bit_equals_bitsandbytes_own_optimizer():
    """Where both keep 8-bit moments: the same weights, to the bit. Elsewhere (embeddings, vectors) we are AdamW."""
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: the `quant` extra")
    ours, theirs = large_model(), large_model()
    optimizer = AdamW8bit(ours, weight_decay=0.1, max_grad_norm=0)
    assert eight_bit_names(ours) == {"1.weight", "3.weight"}
    [embedding, *rest] = theirs.parameters()
    reference = bitsandbytes.optim.AdamW8bit([p for p in rest if p.ndim > 1], weight_decay=0.1, eps=1e-8)
    plain = torch.optim.AdamW([embedding], weight_decay=0.1, fused=True)
    vectors = torch.optim.AdamW([p for p in rest if p.ndim < 2], weight_decay=0.0, fused=True)
    for step in range(5):
        backward_large(ours, step)
        backward_large(theirs, step)
        for other in (reference, plain, vectors):
            for group in other.param_groups:
                group["lr"] = 1e-3
            other.step()
            other.zero_grad()
        optimizer.step(1e-3)
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b), name
    sizes = {k: v.nbytes for k, v in optimizer.state().items()}
    weights = ours[1].weight.numel()
    assert sizes["1.weight|exp_avg"] == weights and sizes["0.weight|exp_avg"] == 4 * ours[0].weight.numel()
    assert sizes["1.weight|exp_avg_scale"] == 4 * math.ceil(weights / 256)


def test_muon_is_torchs_for_matrices_of_layers_and_adamw_for_the_rest():
    ours, theirs = large_model(), large_model()
    assert layer_matrices(ours) == {"1.weight", "3.weight"}
    optimizer = Muon(ours, weight_decay=0.1, max_grad_norm=0)
    named = dict(theirs.named_parameters())
    matrices = [named.pop("1.weight"), named.pop("3.weight")]
    muon = torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    decays = [{"params": [p], "weight_decay": 0.1 if p.ndim > 1 else 0.0} for p in named.values()]
    adamw = torch.optim.AdamW(decays, lr=1e-2)
    for step in range(4):
        for model in (ours, theirs):
            backward_large(model, step)
        optimizer.step(1e-2)
        for reference in (muon, adamw):
            reference.step()
            reference.zero_grad()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)  # torch iterates in bfloat16
    assert optimizer.updates == 4


def test_muon_moves_a_transposed_layer_alike_and_as_far_as_adamw():
    """GPT-2's layers have the transposed weight. An update of Muon has the size of AdamW's: 0.2 to 0.4 of the rate."""
    torch.manual_seed(0)
    gradient = torch.randn(48, 192)
    moved = []
    for shape in (gradient, gradient.T):
        model = nn.Sequential(nn.Linear(shape.shape[1], shape.shape[0], bias=False))
        start = model[0].weight.detach().clone()
        model[0].weight.grad = shape.clone()
        Muon(model, max_grad_norm=0).step(1e-2)
        moved.append(model[0].weight.detach() - start)
    torch.testing.assert_close(moved[0], moved[1].T, rtol=0.05, atol=1e-4)  # torch's iterations are in bfloat16
    assert 0.1 < moved[0].square().mean().sqrt() / 1e-2 < 0.4


def test_8bit_stays_near_adamw():
    """Fifty steps on one batch: a loss as low, though every moment is rounded to a byte."""
    losses = []
    for make in (AdamW, AdamW8bit):
        model = large_model()
        optimizer = make(model)
        for _ in range(50):
            backward_large(model, 0)
            optimizer.step(1e-3)
        torch.manual_seed(0)
        losses.append(float(model(torch.randint(100, (32,))).square().mean().detach()))
    print(f"AdamW {losses[0]:.5f}, with 8-bit moments {losses[1]:.5f}")
    assert losses[1] == pytest.approx(losses[0], rel=0.1)


def test_8bit_without_bitsandbytes_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"adamw_8bit needs bitsandbytes.*\[quant\]"):
        AdamW8bit(large_model())


def test_frozen_parameters_are_left_out():
    model = small_model()
    model[0].requires_grad_(False)
    optimizer = AdamW(model, torch.bfloat16)
    assert model[0].weight.dtype == torch.float32 and "0.weight" not in optimizer.masters


SCHEDULES = {
    "constant": {}, "constant_with_warmup": {}, "linear": {}, "cosine": {}, "inverse_sqrt": {"timescale": 9},
    "cosine_with_restarts": {"num_cycles": 3}, "cosine_with_min_lr": {"min_lr": 1e-4},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.2, "warmup_lr_rate": 0.5},
    "polynomial": {"lr_end": 2e-4, "power": 2.0}, "warmup_stable_decay": {"num_decay_steps": 12, "min_lr_ratio": 0.1},
}  # fmt: skip


def at(kind: str, step: int, warmup: float, method: str = "sft", total: int = 40, **arguments: float) -> float:
    training = {"lr_scheduler_type": kind, "warmup_steps": warmup, "lr_scheduler_kwargs": arguments}
    if kind == "constant":
        training["warmup_steps"] = 0.03  # anything else is refused
    rewards = [{"type": "math"}] if method == "grpo" else []
    values = {"model": "gpt2", "method": method, "data": {"source": "x"}, "training": training, "rewards": rewards}
    return learning_rate_at(load(None, [f"{name}={json.dumps(value)}" for name, value in values.items()]).config,
                            1e-3, step, total)  # fmt: skip


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 0.03, 0.25, 7])
def test_schedules_equal_transformers(kind, warmup):
    total, rate = 40, 1e-3
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate)
    theirs = get_scheduler(kind, optimizer, warmup_count(warmup, total), total, SCHEDULES[kind])
    for step in range(0, total, 1 if kind == "cosine" else 3):
        while theirs.last_epoch < step:
            optimizer.step()
            theirs.step()
        assert at(kind, step, warmup, **SCHEDULES[kind]) == pytest.approx(theirs.get_last_lr()[0])


def test_a_schedule_with_wrong_arguments_is_refused():
    for kind, arguments, message in (
        ("cosine_with_min_lr", {}, "One of min_lr or min_lr_rate"),
        ("cosine_with_restarts", {"cycles": 3}, "unexpected keyword argument 'cycles'"),
        ("polynomial", {"lr_end": 1.0}, "lr_end"),
        ("linear", {"num_cycles": 3}, "are not read by lr_scheduler_type: linear"),
    ):
        with pytest.raises(ConfigError, match=message):
            at(kind, 0, 0.03, **arguments)


def test_warm_up_of_online_methods_begins_above_zero():
    rates = [at("linear", step, 4, "grpo", total=10) / 1e-3 for step in range(6)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1 - 1 / 6])
    for kind, warmup in (("constant", 4), ("cosine", 0)):
        assert at(kind, 0, warmup, "grpo") == at(kind, 0, warmup) == 1e-3


def test_a_share_of_warm_up_leaves_a_step_to_train():
    """transformers rounds up, so that a run of one step would have the rate 0 and nothing else."""
    assert [warmup_count(0.03, total) for total in (1, 2, 34, 100)] == [0, 1, 2, 3]
    assert warmup_count(5, 3) == 5


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit"])
def test_loraplus_is_pefts(kind):
    """B matrices and vectors (here DoRA's magnitudes) at a multiple of the rate, the rest at the rate itself."""
    from peft import LoraConfig, get_peft_model
    from peft.optimizers import create_loraplus_optimizer

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        body = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
        models.append(get_peft_model(body, LoraConfig(r=32, target_modules=["0", "2"], use_dora=True)))
    optimizer = OPTIMIZERS[kind](models[0], loraplus_lr_ratio=16.0, weight_decay=0.0, max_grad_norm=0)
    other = torch.optim.AdamW
    if kind == "adamw_8bit":
        other = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: the `quant` extra").optim.AdamW8bit
    reference = create_loraplus_optimizer(models[1], other, lr=1e-3, loraplus_lr_ratio=16.0, eps=1e-8)
    for step in range(4):
        for model in models:
            torch.manual_seed(step)
            model(torch.randn(5, 64)).square().sum().backward()
        optimizer.step(1e-3)
        reference.step()
        reference.zero_grad()
    trained = dict(models[1].named_parameters())
    assert len({group["lr"] for group in optimizer._adamw.param_groups}) == 2
    for name in optimizer.masters:
        torch.testing.assert_close(optimizer.masters[name], trained[name].data, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_averages_are_torchs_of_the_masters(kind, dtype):
    """From the start on; swapped, the model has them, and swapped back its own weights again, to the bit."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    model = large_model()
    optimizer = OPTIMIZERS[kind](model, dtype, ema_decay=0.9)
    masters = nn.ParameterDict({name.replace(".", "-"): nn.Parameter(m) for name, m in optimizer.values.items()})
    averaged = AveragedModel(masters, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    averaged.update_parameters(masters)  # its first call copies
    for step in range(4):
        backward_large(model, step)
        optimizer.step(1e-2)
        averaged.update_parameters(
            nn.ParameterDict({name.replace(".", "-"): nn.Parameter(m) for name, m in optimizer.values.items()})
        )
    want = {name: averaged.module[name.replace(".", "-")].data for name in optimizer.masters}
    for name, average in optimizer.averages.items():
        torch.testing.assert_close(average, want[name], rtol=1e-6, atol=1e-7, msg=name)
    own = {name: p.detach().clone() for name, p in model.named_parameters()}
    masters = {name: m.detach().clone() for name, m in optimizer.values.items()}
    optimizer.swap_averages()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, optimizer.values[name].to(dtype)), name
        torch.testing.assert_close(optimizer.values[name], want[name], rtol=1e-6, atol=1e-7, msg=name)
    optimizer.swap_averages()
    assert all(torch.equal(p, own[name]) for name, p in model.named_parameters())
    assert all(torch.equal(m, masters[name]) for name, m in optimizer.values.items())


def test_halves_are_exact():
    """Ties, both signs, powers of two, numbers below the smallest normal one, and infinity."""
    patterns = [0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F818001, 0x7F7F7FFF, 0x7F800000, 0x00008000, 0x00000001, 0]
    signed = [pattern - (1 << 31) for pattern in patterns]
    x = torch.cat([torch.tensor(patterns + signed, dtype=torch.int32).view(torch.float32), torch.randn(10_000)])
    weight, rest = adamw.halves(x)
    assert weight.dtype == torch.bfloat16 and rest.dtype == torch.int16
    bits = (weight.view(torch.int16).int() << 16) + rest
    assert torch.equal(bits, x.view(torch.int32))
    assert torch.equal(weight[18:], x[18:].bfloat16())  # no ties
    finite = x.isfinite()
    assert ((weight.double() - x.double()).abs() <= (x.bfloat16().double() - x.double()).abs())[finite].all()


@pytest.mark.skipif("in halves" not in OPTIMIZERS, reason="the kernel needs Triton: pip install -e .[gpu-dev]")
@pytest.mark.parametrize("make", [AdamW, Muon])
def test_masters_in_halves_move_as_whole_ones(make):
    """The same masters up to float32 rounding; weights are the rounded masters; either goes on from the other."""
    models = large_model(), large_model()
    whole, halved = (
        make(m, torch.bfloat16, weight_decay=0.1, max_grad_norm=0.05, loraplus_lr_ratio=3.0, in_halves=halves)
        for m, halves in zip(models, (False, True), strict=True)
    )
    assert halved.rests.keys() == {"0.weight"} | ({"1.weight", "3.weight"} if make is AdamW else set())
    for step in range(6):
        for model, optimizer in zip(models, (whole, halved), strict=True):
            backward_large(model, step)
            if step == 2:
                model[3].weight.grad = optimizer.masters["3.weight"].grad = None  # it has no gradient in this step
            assert optimizer.step(1e-2 / (step + 1)) > 0.05
    for name, master in whole.values.items():
        torch.testing.assert_close(halved.values[name], master, rtol=1e-4, atol=2e-6, msg=name)
        wide = halved.parameters[name].float()
        assert ((wide - master).abs() <= master.abs() / 256 + 2e-6).all(), "the weights are not the rounded masters"
        if name in halved.rests:
            assert halved.masters[name].isnan().all() and halved.masters[name].untyped_storage().nbytes() == 4
    ours, theirs = halved.state(), whole.state()
    assert {n: v.shape for n, v in ours.items()} == {n: v.shape for n, v in theirs.items()}
    for state, halves in ((ours, False), (theirs, True)):
        other = make(model := large_model(), torch.bfloat16, in_halves=halves)
        other.load_state(state)
        assert all(torch.equal(value, state[name]) for name, value in other.state().items())
        backward_large(model, 0)
        other.step(1e-3)


@pytest.mark.skipif("in halves" not in OPTIMIZERS, reason="the kernel needs Triton: pip install -e .[gpu-dev]")
def test_averages_where_every_master_is_in_halves():
    torch.manual_seed(0)
    model = nn.Linear(16, 16, bias=False)
    optimizer = AdamW(model, torch.bfloat16, ema_decay=0.5, in_halves=True)
    start = optimizer.values["weight"].clone()
    model(torch.randn(3, 16).bfloat16()).float().square().sum().backward()
    optimizer.step(1e-2)
    moved = optimizer.values["weight"]
    assert optimizer.rests.keys() == {"weight"} and not torch.equal(moved, start)
    torch.testing.assert_close(optimizer.averages["weight"], (start + moved) / 2)


def test_a_state_without_its_averages_is_damaged():
    optimizer = AdamW(large_model(), ema_decay=0.9)
    state = {name: tensor for name, tensor in optimizer.state().items() if name != "1.weight|ema"}
    with pytest.raises(DamagedError, match=r"1.weight\|ema has the shape none"):
        optimizer.load_state(state)


def half_model(ema_decay=None):
    model = large_model()
    return model, AdamW(model, torch.float16, ema_decay=ema_decay, max_grad_norm=0.5)


def scaled_step(model, optimizer, seed, factor=1.0):
    torch.manual_seed(seed)
    loss = factor * model(torch.randint(100, (32,))).float().square().mean()
    optimizer.scaler.scale(loss).backward()
    return optimizer.step(1e-3)


def test_float16_steps_are_those_of_the_scaled_losses():
    """The same steps as in float32, up to float16's rounding, although gradients of this size would be 0 in float16."""
    (half, optimizer), whole = half_model(), large_model()
    exact = AdamW(whole, max_grad_norm=0.5)
    assert optimizer.scaler.get_scale() == 65536 and not exact.scaler.is_enabled()
    for step in range(4):
        norms = scaled_step(half, optimizer, step, 1e-7), scaled_step(whole, exact, step, 1e-7)
        assert norms[0] == pytest.approx(norms[1], rel=1e-2) and norms[0] > 0
    for name, master in optimizer.masters.items():
        assert master.dtype == torch.float32 and half.get_parameter(name).dtype == torch.float16
        moved = master.detach() - dict(large_model().named_parameters())[name]
        want = exact.masters[name].detach() - dict(large_model().named_parameters())[name]
        assert float((moved - want).norm() / want.norm()) < 0.1, name


def test_an_overflow_of_float16_changes_only_the_scale_and_is_resumed(monkeypatch):
    """The scale is halved, and doubled after as many updates without overflow; a resumed optimizer goes on so."""
    grown = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", partial(grown, growth_interval=3))
    model, optimizer = half_model(ema_decay=0.9)
    scaled_step(model, optimizer, 0)
    before = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    assert not math.isfinite(scaled_step(model, optimizer, 1, 1e6))
    after = optimizer.state()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"loss scale|scale", "loss scale|_growth_tracker"} and optimizer.scaler.get_scale() == 32768
    scaled_step(model, optimizer, 2)
    other, resumed = half_model(ema_decay=0.9)
    resumed.load_state({name: tensor.clone() for name, tensor in optimizer.state().items()})
    scales = []
    for step in range(3, 8):
        norms = [scaled_step(m, o, step) for m, o in ((model, optimizer), (other, resumed))]
        assert norms[0] == norms[1] and optimizer.scaler.get_scale() == resumed.scaler.get_scale()
        scales.append(optimizer.scaler.get_scale())
    assert scales == [32768, 65536, 65536, 65536, 131072]
    assert all(torch.equal(master, resumed.masters[name]) for name, master in optimizer.masters.items())
    state = {name: tensor for name, tensor in optimizer.state().items() if name != "loss scale|scale"}
    with pytest.raises(DamagedError, match=r"loss scale\|scale is missing"):
        resumed.load_state(state)
