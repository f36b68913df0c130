"""Each vital sign fails when, and only when, what it watches is broken."""

import copy

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


def pairs():
    return [example for example in forest() if example.row in (1, 2)]


def test_packing_holds_and_a_leaking_mask_is_found(monkeypatch):
    examples = pairs()
    scorer = Scorer(packed_model())
    assert check_packing(scorer, pack(examples, 100), examples) < 1e-4
    monkeypatch.setattr(attention.PackedMask, "trees", lambda self, window: [None] * len(self.sizes))
    with pytest.raises(VitalSignError, match=r"packed = unpacked fails.*qwen3"):
        check_packing(scorer, pack(examples, 100), examples)


def test_documents_that_see_one_another_are_found(monkeypatch):
    """A pack of plain sequences whose trees are taken for one: the first looks right, the last does not."""
    examples = [Example((Sample(list(range(3 + row, 15 + row)), True),), row) for row in range(3)]
    scorer = Scorer(packed_model())
    assert check_packing(scorer, pack(examples, 100), examples) < 1e-4
    monkeypatch.setattr(attention.PackedMask, "__init__", one_tree(attention.PackedMask.__init__))
    with pytest.raises(VitalSignError, match="packed = unpacked fails"):
        check_packing(scorer, pack(examples, 100), examples)


def one_tree(init):
    def broken(self, whole):
        init(self, whole)
        self.tree_start, self.sizes = (0, whole.num_tokens), [whole.num_tokens]
        self.end_T = torch.full_like(self.end_T, whole.num_tokens)

    return broken


def test_reward_packing(monkeypatch):
    from transformers import AutoModelForSequenceClassification

    model = make("qwen3", AutoModelForSequenceClassification, num_labels=1)
    model.set_attn_implementation("packed")
    examples = pairs()
    packs = pack(examples, 100, keep_last=True)
    assert check_reward_packing(RewardScorer(model), packs, examples) < 1e-3
    monkeypatch.setattr(attention.PackedMask, "trees", lambda self, window: [None] * len(self.sizes))
    with pytest.raises(VitalSignError, match="a reward of the first batch"):
        check_reward_packing(RewardScorer(model), packs, examples)


def test_the_check_leaves_modes_and_attention_as_they_were():
    model = packed_model()
    model.train()
    model.model.layers[0].eval()
    modes = [m.training for m in model.modules()]
    check_packing(Scorer(model), pack(pairs(), 100), pairs())
    assert [m.training for m in model.modules()] == modes
    assert model.config._attn_implementation == "packed"


@pytest.mark.parametrize("change", [0.0, 1e-3, float("nan")])
def test_margins(change):
    policy = Scorer(packed_model())
    other = copy.deepcopy(policy)
    with torch.no_grad():
        other.model.lm_head.weight[::2] += change
    examples = pairs()

    def reference(p, _):
        return p.sum_by_sequence(other(p).logprob_N)

    if change == 0.0:
        assert check_margins(policy, reference, pack(examples, 100), examples) == 0
    else:
        with pytest.raises(VitalSignError, match="margins are not 0 at the start"):
            check_margins(policy, reference, pack(examples, 100), examples)


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
