"""KTO, BCO and APO-zero on labelled completions: by hand, beside TRL's numbers, and through the recipe."""

import json
import math
from typing import get_args

import numpy as np
import pytest
import torch
from test_recipes import metrics, run, weights

from posttrain.batch import Example, Node, pack
from posttrain.config import KTOMethod
from posttrain.config.schema import offline
from posttrain.losses import UNPAIRED_LOSSES, RunningMean, kl_estimate, unpaired_loss, unpaired_metrics
from posttrain.recipes.kto import advise_on_weights, keep_other, with_other_completions

SETTINGS = {"beta": 0.5, "shift": 0.25, "desirable_weight": 1.0, "undesirable_weight": 1.0}
LOGRATIO, DESIRABLE = [2.0, -1.0, 0.5, -3.0], [True, True, False, False]


def sig(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def loss_of(logratio, loss_type: str, desirable=DESIRABLE, **changed) -> torch.Tensor:
    logratio_S = logratio if isinstance(logratio, torch.Tensor) else torch.tensor(logratio, dtype=torch.float64)
    return unpaired_loss(logratio_S, torch.tensor(desirable), loss_type=loss_type, **(SETTINGS | changed))


# --- by hand --------------------------------------------------------------------------------------------------------

# β c = 1, −½ (desirable), ¼, −1.5 (undesirable); compared with ¼ but for APO
BY_HAND = {
    "kto": [1 - sig(0.75), 1 - sig(-0.75), 1 - sig(0.0), 1 - sig(1.75)],
    "bco": [-math.log(sig(0.75)), -math.log(sig(-0.75)), -math.log(sig(0.0)), -math.log(sig(1.75))],
    "apo_zero_unpaired": [1 - sig(1.0), 1 - sig(-0.5), sig(0.25), sig(-1.5)],
}


@pytest.mark.parametrize("name", UNPAIRED_LOSSES)
def test_by_hand(name):
    expected = torch.tensor(BY_HAND[name], dtype=torch.float64)
    torch.testing.assert_close(loss_of(LOGRATIO, name), expected)
    weighted = loss_of(LOGRATIO, name, desirable_weight=2.0, undesirable_weight=0.5)
    torch.testing.assert_close(weighted, expected * torch.tensor([2.0, 2.0, 0.5, 0.5]))


@pytest.mark.parametrize("name", UNPAIRED_LOSSES)
def test_gradients(name):
    """Autograd = finite differences; desirable completions are pushed up, undesirable ones down, the shift is not."""
    logratio_S = torch.tensor(LOGRATIO, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda c: loss_of(c, name), logratio_S)
    [gradient] = torch.autograd.grad(loss_of(logratio_S, name).sum(), logratio_S)
    assert (gradient.sign() == torch.tensor([-1, -1, 1, 1])).all()


def test_kto_is_the_papers_value_function():
    """Equations 7 and 8 of arXiv 2402.01306: λ_y − v(x, y) with v = λ_D σ(β(r − z)) or λ_U σ(β(z − r))."""
    beta, z, rewards = 0.5, 0.5, LOGRATIO
    value = [sig(beta * (r - z)) if good else sig(beta * (z - r)) for r, good in zip(rewards, DESIRABLE, strict=True)]
    torch.testing.assert_close(
        loss_of(rewards, "kto", shift=beta * z), torch.tensor([1 - v for v in value], dtype=torch.float64)
    )


@pytest.mark.parametrize("name", UNPAIRED_LOSSES)
def test_float32_extremes_stay_finite(name):
    logratio_S = torch.tensor([0.0, 1e4, -1e4, 88.0], requires_grad=True)
    for desirable in ([True] * 4, [False] * 4):
        loss_S = loss_of(logratio_S, name, desirable)
        [gradient] = torch.autograd.grad(loss_S.sum(), logratio_S)
        assert loss_S.dtype == torch.float32 and loss_S.isfinite().all() and gradient.isfinite().all()


def test_a_batchs_kl_is_a_mean_that_is_never_negative():
    assert kl_estimate(torch.tensor([1.0, -2.0, 4.0])).item() == 1.0
    assert kl_estimate(torch.tensor([1.0, -2.0, -4.0])).item() == 0.0
    logratio_S = torch.tensor([1.0, 2.0], requires_grad=True)
    assert not kl_estimate(logratio_S).requires_grad


def test_metrics_are_means_of_each_class():
    logratio_S, desirable_S = torch.tensor(LOGRATIO), torch.tensor(DESIRABLE)
    found = unpaired_metrics(logratio_S - 10, logratio_S, desirable_S, 0.5, 2, 2)
    assert {name: value.item() for name, value in found.items()} == pytest.approx(
        {
            "rewards/chosen": 0.25, "rewards/rejected": -0.625, "rewards/margins": 0.875,
            "logps/chosen": -9.5, "logps/rejected": -11.25,
        }
    )  # fmt: skip
    only = unpaired_metrics(logratio_S[:2], logratio_S[:2], desirable_S[:2], 0.5, 2, 0)
    assert set(only) == {"rewards/chosen", "logps/chosen"}


# Three batches, one after the other, through `BCOTrainer.bco_loss` of TRL 1.12 with its `RunningMoments`
# (trl/experimental/bco/bco_trainer.py; 1.16 has no BCO), beta 0.3: log-ratios, labels -> the running mean, the losses.
TRL_BCO = [
    ([2.0, -1.0, 0.5, -3.0], [True, True, False, False], -0.1125, [0.3990557, 0.7912853, 0.8329859, 0.3749927]),
    ([1.5, 4.0, -2.5], [True, False, True], 0.0642857, [0.5187728, 1.4142492, 1.1809793]),
    (
        [-1.25, 0.75, -6.0, 3.0, 1.0], [False, False, False, True, True], -0.025,
        [0.5333821, 0.8259394, 0.1565621, 0.3339916, 0.5437926],
    ),
]  # fmt: skip


def test_bco_is_trls():
    mean = RunningMean()
    for logratio, desirable, delta, losses in TRL_BCO:
        logratio_S = torch.tensor(logratio)
        mean = mean.after(0.3 * logratio_S)
        assert mean.mean == pytest.approx(delta, rel=1e-6)
        ours = loss_of(logratio_S, "bco", desirable, beta=0.3, shift=mean.mean)
        torch.testing.assert_close(ours, torch.tensor(losses), rtol=1e-5, atol=1e-6)
    assert mean.count == sum(len(logratio) for logratio, *_ in TRL_BCO)


def test_configuration_knows_these_losses():
    assert get_args(offline.UnpairedLoss) == UNPAIRED_LOSSES
    with pytest.raises(KeyError, match="ktoo"):
        loss_of(LOGRATIO, "ktoo")


# --- completions of other prompts -----------------------------------------------------------------------------------


def example(row: int, prompt: list[int], completion: list[int]) -> Example:
    return Example((Node(prompt, False, (Node(completion, True),)),), row, label=True)


def test_completions_rotate_by_one_and_keep_within_the_limit():
    """(x1, y1), (x2, y2), (x3, y3) -> (x1, y3), (x2, y1), (x3, y2): TRL 1.16's `KL_completion_ids`."""
    batch = [example(0, [1], [11, 12]), example(1, [2, 2], [21]), example(2, [3, 3, 3], [31, 32, 33])]
    pairs = with_other_completions(batch, max_length=4)
    [one] = pack(pairs, 100)
    targets = [one.target_N[one.sequence_N == s].tolist() for s in range(6)]
    assert targets == [[11, 12], [31, 32, 33], [21], [11, 12], [31, 32, 33], [21]]
    [alone] = pack([keep_other(pair) for pair in pairs], 100)
    assert alone.tokens_T.tolist() == [1, 31, 32, 2, 2, 11, 3, 3, 3]
    cut = with_other_completions(batch, max_length=3)
    assert [list(pair.trees[0].children[1].tokens) for pair in cut] == [[31, 32], [11], []]


# --- the recipe -----------------------------------------------------------------------------------------------------


def kto(shared, tmp_path, rows=24, **sections) -> dict:
    """Settings of a run on labelled pieces of stories, of different lengths."""
    text = (shared / "data/tinystories/sample.txt").read_text()
    pieces = [text[160 * n : 160 * n + 100 + 2 * n] for n in range(rows)]
    data = [{"prompt": t[:50], "completion": t[50:], "label": n % 3 > 0} for n, t in enumerate(pieces)]
    source = tmp_path / "kto.jsonl"
    source.write_text("\n".join(map(json.dumps, data)))
    settings = {
        "model": {"path": str(shared / "models/stories260K"), **sections.pop("model", {})},
        "method": {"type": "kto", "beta": 0.5, **sections.pop("method", {})},
        "data": {"source": str(source), "template": "none", "max_length": 128, **sections.pop("data", {})},
        "training": {
            "batch_size": 6, "max_steps": 3, "tokens_per_pack": 4096, "learning_rate": 1e-3, "warmup_steps": 0,
            **sections.pop("training", {}),
        },
        "tracking": {"logging_steps": 1},
    }  # fmt: skip
    return settings | sections


@pytest.mark.parametrize("loss_type", ["kto", "bco"])
def test_packs_do_not_change_the_update(tmp_path, shared, loss_type):
    results = []
    for name, tokens in (("whole", 4096), ("split", 256)):
        settings = kto(shared, tmp_path, method={"loss_type": loss_type}, training={"tokens_per_pack": tokens})
        folder = run(tmp_path, f"name={name}", **settings)
        names = ("loss", "grad_norm", "rewards/chosen", "rewards/margins", "entropy")
        names += {"kto": ("kl",), "bco": ("delta",)}.get(loss_type, ())
        results.append(({name: metrics(folder, name) for name in names}, weights(folder / "final")))
    (whole, a), (split, b) = results
    print(whole)
    start = {"bco": math.log(2)}.get(loss_type, 0.5)
    assert whole["loss"][0] == pytest.approx(start, abs=1e-5) and abs(whole["rewards/margins"][-1]) > 0.01
    for name in whole:
        assert whole[name] == pytest.approx(split[name], rel=1e-3, abs=1e-5), name
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=1e-4)  # of 4e-3: AdamW divides by tiny moments


def test_references_agree(tmp_path, shared):
    """A frozen copy, and numbers computed beforehand for two epochs' batches, as shuffled, and for the evaluations."""
    settings = kto(
        shared, tmp_path, rows=15, data={"validation": {"rows": 5}}, training={"max_steps": 4, "batch_size": 5}
    )
    plain = run(tmp_path, "name=plain", **settings)
    precomputed = run(tmp_path, "name=precomputed", "method.precompute_ref_log_probs=true", **settings)
    again = run(tmp_path, "name=again", "method.precompute_ref_log_probs=true", **settings)
    for name in ("loss", "kl", "eval_loss", "eval_kl", "eval_rewards/margins"):
        assert metrics(plain, name) == pytest.approx(metrics(precomputed, name), abs=1e-5), name
        assert metrics(precomputed, name) == metrics(again, name)
    assert "computing the reference" in (precomputed / "training.log").read_text()
    assert "computing the reference" not in (again / "training.log").read_text()


def test_adapter_off_is_the_reference(tmp_path, shared):
    folder = run(tmp_path, **kto(shared, tmp_path, model={"lora": {"r": 4, "alpha": 8}}))
    losses, kl = metrics(folder, "loss"), metrics(folder, "kl")
    print(losses, kl)
    assert losses[0] == pytest.approx(0.5, abs=1e-5) and kl[0] == pytest.approx(0, abs=1e-4)
    assert losses[-1] != losses[0] and (folder / "final/adapter_config.json").exists()


def test_metrics_of_a_class_are_means_over_what_has_it(tmp_path, shared):
    """Weights stand still; the first batch is all desirable, the second has the two undesirable rows.

    A log line's mean is over the steps that had the class, an evaluation's over the class.
    """
    settings = kto(shared, tmp_path, rows=12, training={"learning_rate": 0.0, "max_steps": 2})
    source = tmp_path / "kto.jsonl"
    rows = [json.loads(line) | {"label": n < 10} for n, line in enumerate(source.read_text().splitlines())]
    source.write_text("\n".join(map(json.dumps, rows)))
    settings["data"] |= {"shuffle": False, "validation": {"source": str(source)}}
    folder = run(tmp_path, "tracking.logging_steps=2", **settings)
    [logged], evaluated = metrics(folder, "logps/rejected"), metrics(folder, "eval_logps/rejected")
    assert evaluated[0] == pytest.approx(logged, rel=1e-5)
    [logged], evaluated = metrics(folder, "logps/chosen"), metrics(folder, "eval_logps/chosen")
    assert evaluated[0] != pytest.approx(logged, rel=1e-5)  # six and four of ten


@pytest.mark.parametrize(
    ("desirable", "weights", "advice"),
    [(20, (1, 1), "from 0.50 to 0.67"), (20, (0.6, 1), None), (10, (1, 1), None), (5, (1, 1), "from 2.00 to 2.67")],
)
def test_weights_that_do_not_balance_are_told(caplog, desirable, weights, advice):
    labels = np.array([True] * desirable + [False] * 10)
    caplog.set_level("WARNING", "posttrain")
    advise_on_weights(KTOMethod(desirable_weight=weights[0], undesirable_weight=weights[1]), labels)
    assert (advice in caplog.text) if advice else not caplog.text
