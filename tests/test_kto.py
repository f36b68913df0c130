"""KTO, BCO and APO-zero on labelled completions: by hand, beside TRL's numbers, and through the recipe."""

import json
import math
import shutil
from typing import get_args

import numpy as np
import pytest
import torch
from test_recipes import metrics, run, weights
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain import runner
from posttrain.batch import Example, Node, pack
from posttrain.config import KTOMethod, load
from posttrain.config.schema import offline
from posttrain.data import prepare_run
from posttrain.losses.unpaired import RunningMean, kl_estimate, unpaired_loss, unpaired_metrics
from posttrain.models.load import load_tokenizer
from posttrain.recipes.kto import advise_on_weights, keep_other, with_other_completions
from posttrain.training.order import epoch_order

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


@pytest.mark.parametrize("name", get_args(offline.UnpairedLoss))
def test_by_hand(name):
    expected = torch.tensor(BY_HAND[name], dtype=torch.float64)
    torch.testing.assert_close(loss_of(LOGRATIO, name), expected)
    weighted = loss_of(LOGRATIO, name, desirable_weight=2.0, undesirable_weight=0.5)
    torch.testing.assert_close(weighted, expected * torch.tensor([2.0, 2.0, 0.5, 0.5]))


@pytest.mark.parametrize("name", get_args(offline.UnpairedLoss))
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


@pytest.mark.parametrize("name", get_args(offline.UnpairedLoss))
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


def test_an_unknown_loss_is_refused():
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
    before = [example(9, [4], [41, 42]), *batch[:-1]]
    [alone] = pack([keep_other(pair) for pair in with_other_completions(batch, 9, before)], 100)
    targets = [alone.target_N[alone.sequence_N == s].tolist() for s in range(3)]
    assert targets == [[41, 42], [11, 12], [21]]


@pytest.fixture(scope="module")
def another_model(shared, tmp_path_factory):
    """The stories' model with other weights: a reference that makes the KL known before any step."""
    folder = tmp_path_factory.mktemp("another")
    model = AutoModelForCausalLM.from_pretrained(shared / "models/stories260K")
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data += 0.3 * parameter.std() * torch.randn_like(parameter)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(shared / "models/stories260K").save_pretrained(folder)
    return folder


def logprob(model, prompt: list[int], completion: list[int]) -> float:
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0].log_softmax(-1)
    return sum(float(logits[len(prompt) - 1 + n, token]) for n, token in enumerate(completion))


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_mismatched_completion_is_that_of_the_example_before(tmp_path, shared, another_model, shuffle):
    """Seven rows in batches of six, two epochs, and a validation set of seven of which some are evaluated: the KL of
    every step by transformers, one sequence at a time. The last batch has one row, whose own completion it is not.
    Precomputed, and resumed, too."""
    method = {"ref_model": str(another_model), "beta": 0.1}
    settings = kto(
        shared, tmp_path, rows=14, method=method, data={"validation": {"rows": 7}, "shuffle": shuffle},
        training={"learning_rate": 1e-9, "max_steps": 4},
        evaluation={"eval_steps": 2, "at_start": True},
    )  # fmt: skip
    settings["checkpoint"] = {"save_steps": 1, "save_total_limit": None}
    folder = run(tmp_path, **settings)
    config = load(folder / "config.yaml").config
    data = prepare_run(config, load_tokenizer(config.models[0]))
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(path) for path in (shared / "models/stories260K", another_model)
    )

    def kl(examples, before) -> float:
        ratios = []
        for one, other in zip(examples, before, strict=True):
            prompt, completion = ([int(t) for t in node.tokens] for node in (one.trees[0], other.trees[0].children[0]))
            ratios.append(logprob(policy, prompt, completion) - logprob(reference, prompt, completion))
        return max(0.0, sum(ratios) / len(ratios))

    expected = []
    for epoch in (0, 1):
        order = [data.train[int(row)] for row in epoch_order(config, data.train, epoch)]
        expected += [kl(order[:6], [order[6], *order[:5]]), kl(order[6:], [order[5]])]
    assert metrics(folder, "kl") == pytest.approx(expected, abs=2e-3) and max(expected) > 0.05
    losses = metrics(folder, "loss")
    assert all(abs(losses[step] - 0.5) > 1e-3 for step in (1, 3)), "with its own completion it is 0.5 exactly"

    held = [data.validation["validation"][row] for row in range(7)]
    batches = [kl(held[:6], [held[6], *held[:5]]), kl(held[6:], [held[5]])]
    evaluated = (6 * batches[0] + batches[1]) / 7
    assert metrics(folder, "eval_kl") == pytest.approx([evaluated] * 3, abs=2e-3)

    again = run(tmp_path, "name=precomputed", "method.precompute_ref_log_probs=true", **settings)
    for name in ("loss", "kl", "eval_loss", "eval_kl"):
        assert metrics(again, name) == pytest.approx(metrics(folder, name), abs=1e-5), name
    for step in (2, 3, 4):
        shutil.rmtree(folder / f"checkpoint-{step}")
    assert runner.train(load(folder / "config.yaml").config, resume=True) == 0
    assert metrics(folder, "kl") == pytest.approx(metrics(again, "kl"), abs=1e-5)


def test_a_sample_of_the_validation_set_has_the_examples_before_in_the_set(tmp_path, shared, another_model):
    """Sampled with replacement, also where the reference was computed beforehand."""
    method = {"ref_model": str(another_model), "beta": 0.1}
    evaluation = {"eval_steps": 1, "at_start": True, "num_batches": 1, "with_replacement": True}
    settings = kto(
        shared, tmp_path, rows=14, method=method, data={"validation": {"rows": 7}},
        training={"learning_rate": 1e-9, "max_steps": 2}, evaluation=evaluation,
    )  # fmt: skip
    plain = run(tmp_path, "name=plain", **settings)
    precomputed = run(tmp_path, "name=precomputed", "method.precompute_ref_log_probs=true", **settings)
    assert metrics(precomputed, "eval_kl") == pytest.approx(metrics(plain, "eval_kl"), abs=1e-5)
    assert len(set(metrics(plain, "eval_kl"))) == 3


def test_an_earlier_run_keeps_its_mismatched_completions(tmp_path, shared, another_model):
    """Behaviour version 1: those of the batch, so that a last batch of one row has a loss of 0.5."""
    training = {"max_steps": 2, "batch_size": 6, "learning_rate": 1e-9}
    settings = kto(shared, tmp_path, rows=7, training=training, method={"ref_model": str(another_model)})
    losses = metrics(run(tmp_path, "behavior_version=1", **settings), "loss")
    assert losses[1] == pytest.approx(0.5, abs=1e-6)
    losses = metrics(run(tmp_path, "name=new", **settings), "loss")
    assert abs(losses[1] - 0.5) > 1e-3


def test_a_validation_set_of_one_example_has_no_other_completion(tmp_path, shared):
    settings = kto(shared, tmp_path, rows=8, data={"validation": {"rows": 1}})
    log = (run(tmp_path, "training.max_steps=1", **settings) / "training.log").read_text()
    assert "validation has only one example, so the KL is estimated from its own completion" in log


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


def test_a_cut_completion_has_a_cut_mask():
    """Of a completion of several turns, only the assistant's are trained; the other example's prompt may be longer."""
    mask = np.array([True, False, True, True])
    examples = [Example((Node([1] * size, children=(Node([5, 6, 7, 8], mask),)),), size, label=True) for size in (2, 6)]
    pairs = with_other_completions(examples, max_length=8)
    cut = pairs[1].trees[0].children[1]
    assert (list(cut.tokens), list(cut.trained)) == ([5, 6], [True, False])
    assert pack(pairs, 64)[0].num_sequences == 4
