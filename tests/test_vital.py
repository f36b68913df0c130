"""Each vital check fails when, and only when, what it checks is broken."""

import copy
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from test_online import train
from test_recipes import dpo, run
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.families import forest, make
from posttrain.base.errors import VitalSignError
from posttrain.batch import Example, Node, pack
from posttrain.models import attention
from posttrain.optim.adamw import AdamW
from posttrain.runs.checks import MOVED, PACKED, RATIO, SAMPLER, SAVED, START, STEPS, checks_of
from posttrain.runs.summary import read_run
from posttrain.scoring import RewardScorer, Scorer
from posttrain.training.checks import MovedWeights, check_margins, check_packing, check_ratio, check_sampler


def packed_model(family="qwen3"):
    model = make(family)
    model.set_attn_implementation("packed")
    return model


def packed_100(examples):
    return pack(examples, 100)


def pairs():
    return [example for example in forest() if example.row in (1, 2)]


def test_packing_holds_and_a_leaking_mask_is_found(monkeypatch):
    examples = pairs()
    scorer = Scorer(packed_model())
    assert check_packing(scorer, examples, packed_100) < 1e-4
    monkeypatch.setattr(attention.PackedMask, "__init__", one_tree(attention.PackedMask.__init__))
    with pytest.raises(VitalSignError, match=r"packed = unpacked fails.*qwen3"):
        check_packing(scorer, examples, packed_100)


def test_documents_that_see_one_another_are_found(monkeypatch):
    """A pack of plain sequences whose trees are taken for one: the first looks right, the last does not."""
    examples = [Example((Node(list(range(3 + row, 15 + row)), True),), row) for row in range(3)]
    scorer = Scorer(packed_model())
    assert check_packing(scorer, examples, packed_100) < 1e-4
    monkeypatch.setattr(attention.PackedMask, "__init__", one_tree(attention.PackedMask.__init__))
    with pytest.raises(VitalSignError, match="packed = unpacked fails"):
        check_packing(scorer, examples, packed_100)


def one_tree(init):
    def broken(self, whole, *read):
        init(self, whole, *read)
        self.end_T = torch.full_like(self.end_T, whole.num_tokens)
        self.position_T = torch.arange(whole.num_tokens)
        self._pack = replace(whole, nodes=((0, whole.num_tokens),))

    return broken


def test_reward_packing(monkeypatch):
    from transformers import AutoModelForSequenceClassification

    model = make("qwen3", AutoModelForSequenceClassification, num_labels=1)
    model.set_attn_implementation("packed")
    examples = pairs()
    rewarded = partial(pack, tokens_per_pack=100, keep_last=True)
    assert check_packing(RewardScorer(model), examples, rewarded) < 1e-3
    monkeypatch.setattr(attention.PackedMask, "__init__", one_tree(attention.PackedMask.__init__))
    with pytest.raises(VitalSignError, match="a reward of the first batch"):
        check_packing(RewardScorer(model), examples, rewarded)


def test_the_check_leaves_modes_and_attention_as_they_were():
    model = packed_model()
    model.train()
    model.model.layers[0].eval()
    modes = [m.training for m in model.modules()]
    check_packing(Scorer(model), pairs(), packed_100)
    assert [m.training for m in model.modules()] == modes
    assert model.config._attn_implementation == "packed"


@pytest.mark.parametrize("change", [0.0, 1e-3, float("nan")])
def test_margins(change):
    policy = Scorer(packed_model())
    reference = copy.deepcopy(policy)
    with torch.no_grad():
        reference.model.lm_head.weight[::2] += change
    [one] = pack(pairs(), 100)
    ours_S, theirs_S = (one.sum_by_sequence(scorer(one).logprob_N) for scorer in (policy, reference))
    found = ours_S - theirs_S, one.length_S
    if change == 0.0:
        assert check_margins(*found, torch.float32) == 0
    else:
        with pytest.raises(VitalSignError, match="margins are not 0 at the start"):
            check_margins(*found, torch.float32)


def heavy_tailed(seed: int, *size: int) -> torch.Tensor:
    """Noise as bfloat16's was measured: standard deviation 0.055 and, of some 4,000, the largest near 0.6."""
    return torch.from_numpy(np.random.default_rng(seed).standard_t(3, size) * 0.055 / 3**0.5)


@pytest.mark.parametrize("tokens", [1, 3, 10, 100, 1_000, 16_000])
def test_rounding_of_bfloat16_stops_no_run(tokens):
    largest = [float(heavy_tailed(seed, 3916).abs().max()) for seed in range(100)]
    assert 0.4 < np.median(largest) < 0.8
    for seed in range(100):
        check_ratio(heavy_tailed(seed, tokens), torch.bfloat16)
        check_sampler(heavy_tailed(seed, tokens), torch.bfloat16, "embedded")
        sums_S = heavy_tailed(seed, 32, min(tokens, 1000)).sum(1)
        check_margins(sums_S, torch.full((32,), min(tokens, 1000)), torch.bfloat16)


@pytest.mark.parametrize("fault", [None, "swapped prompt", "shifted mask", "stale weights", "nan"])
def test_what_is_wrong_in_bfloat16_is_found(shared, fault):
    """Not by one token, but by many at once."""
    model = AutoModelForCausalLM.from_pretrained(shared / "models/stories260K", dtype=torch.bfloat16)
    model.set_attn_implementation("packed")
    tokenizer = AutoTokenizer.from_pretrained(shared / "models/stories260K")
    prompts = [tokenizer.encode(text) for text in ("Lily had a red ball and she", "The old dog was very tired and")]
    reply = tokenizer.encode(" wanted to play with her friend in the park. They ran and", add_special_tokens=False)

    def scored(prompts, shift=0):
        trees = [(Node(prompt, children=(Node(reply, True),)),) for prompt in prompts]
        [one] = pack([Example(tree, row) for row, tree in enumerate(trees)], 1000)
        with torch.no_grad():
            return Scorer(model)(one).logprob_N.float().roll(shift)

    before = scored(prompts)
    if fault == "stale weights":
        torch.manual_seed(0)
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.2 * weight.std() * torch.randn_like(weight)
    difference = scored(prompts[::-1] if fault == "swapped prompt" else prompts, int(fault == "shifted mask")) - before
    if fault == "nan":
        difference[3] = float("nan")
    for check in (check_ratio, partial(check_sampler, engine="embedded")):
        if fault is None:
            check(difference + heavy_tailed(0, len(difference)), dtype=torch.bfloat16)
        else:
            with pytest.raises(VitalSignError):
                check(difference, dtype=torch.bfloat16)


def test_a_run_whose_reference_is_another_model_stops(tmp_path, shared, monkeypatch):
    """Through the recipe: the sign is read where the first update's margins are computed."""
    import json

    from posttrain import runner
    from posttrain.config import load
    from posttrain.recipes import offline

    make_reference = offline.make_reference

    def shifted(*args):
        reference = make_reference(*args)
        return lambda one, examples: reference(one, examples) + 1.0

    monkeypatch.setattr(offline, "make_reference", shifted)
    settings = {
        "name": "run",
        "output_dir": str(tmp_path),
        "model": str(shared / "models/stories260K"),
        "method": "dpo",
        "data": {"source": str(shared / "data/hh-harmless"), "format": "hh", "template": "none", "max_rows": 8},
    }
    (tmp_path / "c.json").write_text(json.dumps(settings))
    with pytest.raises(VitalSignError, match="margins are not 0"):
        runner.train(load(tmp_path / "c.json").config)


def step(model, optimizer, rate=1e-3):
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.ones_like(p)
    optimizer.step(rate)


def test_moved_weights():
    model = packed_model()
    model.model.layers[0].requires_grad_(False)
    optimizer = AdamW(model)
    checks = MovedWeights(model, optimizer)
    with pytest.raises(VitalSignError, match="no trained tensor moved"):
        checks.check(1e-3, 1.0)
    step(model, optimizer)
    checks.check(1e-3, 1.0)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] += 1e-3
    with pytest.raises(VitalSignError, match=r"frozen tensor moved.*layers\.0\.mlp\.up_proj"):
        checks.check(1e-3, 1.0)


def test_masters_count_as_moved_where_bfloat16_stands_still():
    """At 1e-7 no bfloat16 weight of 1 moves, but its float32 master does, and that is a healthy run."""
    model = packed_model()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
    optimizer = AdamW(model, torch.bfloat16)
    checks = MovedWeights(model, optimizer)
    for master in optimizer.masters.values():
        master.grad = torch.ones_like(master)
    optimizer.step(1e-7)
    assert all(torch.equal(p, torch.ones_like(p)) for p in model.parameters())
    checks.check(1e-7, 1.0)


def test_a_run_records_what_its_checks_found(shared, sums_home, tmp_path):
    """Each check that ran, with its largest value and limit; one that does not apply is not there."""

    def recorded(folder):
        return {name: found for name, found in read_run(folder).recorded_checks.items() if not found["failed"]}

    (tmp_path / "dpo").mkdir()
    pairs = recorded(run(tmp_path / "dpo", **dpo(shared, shared / "models/stories260K")))
    assert pairs.keys() == {PACKED, START, MOVED, STEPS, SAVED}
    assert 0 < pairs[PACKED]["value"] < 1e-4 < pairs[PACKED]["limit"] and pairs[START]["value"] <= pairs[START]["limit"]
    assert (pairs[STEPS]["value"], pairs[STEPS]["limit"]) == (0, 4) and pairs[MOVED]["seen"].endswith("frozen ones")

    sampled = recorded(train(sums_home, tmp_path / "grpo", {"beta": 0.05}))
    assert sampled.keys() == {PACKED, START, RATIO, MOVED, SAMPLER, STEPS, SAVED}
    assert sampled[SAMPLER]["times"] == 2 and sampled[RATIO]["value"] <= sampled[RATIO]["limit"]
    without = recorded(train(sums_home, tmp_path / "no reference", {"beta": 0.0}))
    assert without.keys() == sampled.keys() - {START}
    shown = {one.what: one.outcome for one in checks_of(without, "grpo", 2)}
    assert shown["The policy equals its reference before the first update"] == "does not apply"
    assert set(shown.values()) == {"passed", "does not apply"}
    assert {one.outcome for one in checks_of({}, "grpo", 0)} == {"waiting"}
    assert {one.outcome for one in checks_of(None, "grpo", 2)} == {"not recorded"}


def test_a_check_that_fails_is_recorded_as_failed(sums_home, tmp_path, monkeypatch):
    """By the check, not by words of the run's reason."""
    monkeypatch.setattr(MovedWeights, "__init__", unmoved(MovedWeights.__init__))
    with pytest.raises(VitalSignError, match="no trained tensor moved"):
        train(sums_home, tmp_path, {"beta": 0.0})
    info = read_run(tmp_path / "run")
    outcomes = {one.what: one.outcome for one in checks_of(info.recorded_checks, "grpo", 0)}
    assert info.state == "failed"
    assert [what for what, outcome in outcomes.items() if outcome == "failed"] == [
        "The first update changes trained tensors, and no frozen one"
    ]


def unmoved(init):
    """A check that looks at a copy, which no update changes."""

    def changed(self, policy, optimizer):
        init(self, policy, optimizer)
        self.trained = {name: tensor.clone() for name, tensor in self.trained.items()}

    return changed
