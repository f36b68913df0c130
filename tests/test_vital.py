"""Each vital sign fails when, and only when, what it watches is broken."""

import copy
from functools import partial

import pytest
import torch
from test_equivalence import forest, make

from posttrain.batch import Example, Sample, pack
from posttrain.errors import VitalSignError
from posttrain.models import attention
from posttrain.optim.adamw import AdamW
from posttrain.recipes.vital import MovedWeights, check_margins, check_packing, check_reward_packing
from posttrain.scoring import RewardScorer, Scorer


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
    examples = [Example((Sample(list(range(3 + row, 15 + row)), True),), row) for row in range(3)]
    scorer = Scorer(packed_model())
    assert check_packing(scorer, examples, packed_100) < 1e-4
    monkeypatch.setattr(attention.PackedMask, "__init__", one_tree(attention.PackedMask.__init__))
    with pytest.raises(VitalSignError, match="packed = unpacked fails"):
        check_packing(scorer, examples, packed_100)


def one_tree(init):
    def broken(self, whole, read=None):
        init(self, whole, read)
        self.end_T = torch.full_like(self.end_T, whole.num_tokens)
        self.position_T = torch.arange(whole.num_tokens)

    return broken


def test_reward_packing(monkeypatch):
    from transformers import AutoModelForSequenceClassification

    model = make("qwen3", AutoModelForSequenceClassification, num_labels=1)
    model.set_attn_implementation("packed")
    examples = pairs()
    rewarded = partial(pack, tokens_per_pack=100, keep_last=True)
    assert check_reward_packing(RewardScorer(model), examples, rewarded) < 1e-3
    monkeypatch.setattr(attention.PackedMask, "__init__", one_tree(attention.PackedMask.__init__))
    with pytest.raises(VitalSignError, match="a reward of the first batch"):
        check_reward_packing(RewardScorer(model), examples, rewarded)


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
    found = ours_S - theirs_S, one.length_S()
    if change == 0.0:
        assert check_margins(*found, torch.float32) == 0
    else:
        with pytest.raises(VitalSignError, match="margins are not 0 at the start"):
            check_margins(*found, torch.float32)


def test_a_run_whose_reference_is_another_model_stops(tmp_path, shared, monkeypatch):
    """Through the recipe: the sign is read where the first update's margins are computed."""
    import json

    from posttrain import recipes
    from posttrain.config import load
    from posttrain.recipes import preference

    make_reference = preference.make_reference

    def shifted(*args):
        reference = make_reference(*args)
        return lambda one, examples: reference(one, examples) + 1.0

    monkeypatch.setattr(preference, "make_reference", shifted)
    settings = {
        "name": "run",
        "output_dir": str(tmp_path),
        "model": str(shared / "models/stories260K"),
        "method": "dpo",
        "data": {"source": str(shared / "data/hh-harmless"), "format": "hh", "template": "none", "max_rows": 8},
    }
    (tmp_path / "c.json").write_text(json.dumps(settings))
    with pytest.raises(VitalSignError, match="margins are not 0"):
        recipes.train(load(tmp_path / "c.json").config)


def step(model, optimizer, rate=1e-3):
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.ones_like(p)
    optimizer.step(rate)


def test_moved_weights():
    model = packed_model()
    model.model.layers[0].requires_grad_(False)
    optimizer = AdamW(model)
    signs = MovedWeights(model, optimizer)
    with pytest.raises(VitalSignError, match="no trained tensor moved"):
        signs.check(1e-3, 1.0)
    step(model, optimizer)
    signs.check(1e-3, 1.0)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] += 1e-3
    with pytest.raises(VitalSignError, match=r"frozen tensor moved.*layers\.0\.mlp\.up_proj"):
        signs.check(1e-3, 1.0)


def test_masters_count_as_moved_where_bfloat16_stands_still():
    """At 1e-7 no bfloat16 weight of 1 moves, but its float32 master does, and that is a healthy run."""
    model = packed_model()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
    optimizer = AdamW(model, torch.bfloat16)
    signs = MovedWeights(model, optimizer)
    for master in optimizer.masters.values():
        master.grad = torch.ones_like(master)
    optimizer.step(1e-7)
    assert all(torch.equal(p, torch.ones_like(p)) for p in model.parameters())
    signs.check(1e-7, 1.0)
