"""Properties of packs over random forests, against the plain definition of what a sequence is."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.batch import Example, Node, pack, physical_length, sequences
from posttrain.config import SFTMethod
from posttrain.optim.update import numbers, shares_of
from posttrain.recipes import sft
from posttrain.scoring import Scores


def nodes(depth: int):
    def build(parts):
        tokens, trained, children = parts
        return Node([t for t, _ in tokens], [m for _, m in tokens] if trained is None else trained, tuple(children))

    token = st.tuples(st.integers(0, 50), st.booleans())
    children = st.lists(nodes(depth - 1), max_size=3) if depth else st.just([])
    return st.tuples(st.lists(token, min_size=2, max_size=6), st.none() | st.booleans(), children).map(build)


@st.composite
def forests(draw):
    """Examples of one tree or two, of which some have the root of another."""
    rows = draw(st.lists(st.lists(nodes(2), min_size=1, max_size=2), min_size=1, max_size=5))
    for row, other in draw(st.lists(st.tuples(*[st.integers(0, len(rows) - 1)] * 2), max_size=3)):
        root = rows[other][0]
        rows[row][0] = replace(root, children=rows[row][0].children)
    return [Example(tuple(trees), row) for row, trees in enumerate(rows)]


FORESTS = forests()


def flat(examples):
    return [(e.row, *path) for e in examples for tree in e.trees for path in sequences(tree)]


@given(FORESTS, st.booleans(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_a_pack_is_its_sequences(examples, keep_last, pad):
    """Following `end`, `position`, `source`, `target` gives back every sequence, its trained tokens, its owner."""
    width = max(sum(physical_length(t, keep_last) for t in e.trees) for e in examples) + 3
    packs = pack(examples, width, keep_last, 7 if pad else None)
    by_group = {g: [] for g in range(len(examples))}
    for p in packs:
        assert p.num_tokens <= width
        assert len(p.tokens_T) - p.num_tokens == (-p.num_tokens % 7 if pad else 0)
        scored = p.length_S.tolist()
        offset = 0
        for s, path in enumerate(seen.nonzero().squeeze(1) for seen in p.seen_ST()):
            assert p.position_T[path].tolist() == list(range(len(path)))
            chosen = slice(offset, offset + scored[s])
            assert (p.sequence_N[chosen] == s).all()
            sources = p.position_T[p.source_N[chosen]].tolist()
            assert set(p.source_N[chosen].tolist()) <= set(path.tolist())
            found = dict(zip([x + 1 for x in sources], p.target_N[chosen].tolist(), strict=True))
            by_group[int(p.group_S[s])].append((p.tokens_T[path].tolist(), found))
            offset += scored[s]
    got = [(g, ids, found) for g, members in by_group.items() for ids, found in members]
    want = []
    for row, ids, trained in flat(examples):
        ids, fed = ids.tolist(), len(ids) if keep_last else len(ids) - 1
        want.append((row, ids[:fed], {i: ids[i] for i in range(1, len(ids)) if trained[i]}))
    assert got == want


@given(FORESTS)
@settings(max_examples=80, deadline=None)
def test_visibility_is_ancestry(examples):
    """`k <= q < end_T[k]` holds exactly when k is q or before it on the path from q's root."""
    for p in pack(examples, 10_000):
        index = torch.arange(p.num_tokens)
        visible = (index[None] <= index[:, None]) & (index[:, None] < p.end_T[None])
        for q in range(p.num_tokens):
            seen = torch.nonzero(visible[q]).squeeze(1)
            assert p.position_T[seen].tolist() == list(range(int(p.position_T[q]) + 1))
        want = torch.zeros_like(visible)
        for path in (seen.nonzero().squeeze(1) for seen in p.seen_ST()):
            for i, q in enumerate(path):
                want[q, path[: i + 1]] = True
        used = want.any(1)  # a token below which every leaf kept nothing is on a path too, since leaves end at it
        assert (visible[used] == want[used]).all() and used.all()


def test_sums_and_lengths_by_sequence():
    pair = Node([5, 6, 7], False, (Node([1, 2, 3], True), Node([4, 2], True)))
    [p] = pack([Example((pair,), 0)], 16)
    print(p)
    assert p.tokens_T.tolist() == [5, 6, 7, 1, 2, 4]
    assert p.end_T.tolist() == [6, 6, 6, 5, 5, 6]
    assert p.source_N.tolist() == [2, 3, 4, 2, 5]
    assert p.length_S.tolist() == [3, 2]
    assert p.sum_by_sequence(torch.tensor([1.0, 2.0, 3.0, 10.0, 20.0])).tolist() == [6.0, 30.0]


def test_a_prompt_that_several_examples_have_is_laid_once():
    """Rows 0, 2, 3 have one prompt; 3 trains it, so that its own targets are among the prompt's tokens."""
    a, b = [5, 6, 7, 8], [9, 6, 7, 8]
    rows = [(a, False, [1, 2]), (b, False, [3, 1]), (a, False, [4, 2, 2]), (a, True, [1, 1])]
    examples = [Example((Node(ids, trained, (Node(own, True),)),), n) for n, (ids, trained, own) in enumerate(rows)]
    [p] = pack(examples, 100)
    print(p)
    assert p.tokens_T.tolist() == [*a, 1, 4, 2, *b, 3, *a, 1]
    assert p.group_S.tolist() == [0, 2, 1, 3] and p.length_S.tolist() == [2, 3, 2, 5]
    assert p.tree_start == (0, 7, 12, 17)
    sizes = [q.num_tokens for q in pack(examples, 7)]
    assert sizes == [7, 5, 5], "the rows with one prompt are brought together"
    assert [q.num_tokens for q in pack(examples[::2], 6)] == [6, 5], "and parted where they do not fit"


def test_an_example_is_never_split():
    rows = [Example((Node(list(range(2, 2 + n)), True),), n) for n in (9, 5, 5, 3)]
    assert [p.num_tokens for p in pack(rows, 8)] == [8, 8, 2]
    with pytest.raises(ValueError, match=r"row 9 takes 8 tokens.*tokens_per_pack 7"):
        pack(rows, 7)
    with pytest.raises(ValueError, match="fewer than two tokens"):
        pack([Example((Node([3], True),), 0)], 8)


@pytest.mark.parametrize("width", [1000, 20, 9])
@pytest.mark.parametrize("weighted", [True, False])
def test_the_weighted_loss_is_that_of_a_dense_computation(width, weighted):
    """Over the whole step, however it is packed: the sum of weight times nll over the sum of weights. Without weights
    packs carry none, and the count stays that of the targets."""
    generator = np.random.default_rng(0)
    examples, dense, total = [], torch.zeros(()), 0.0
    table = torch.linspace(-3, -0.1, 50, requires_grad=True)  # log-probability of a token
    for row in range(6):
        ids, trained = generator.integers(0, 50, 8), generator.random(8) < 0.7
        trained[-1] = True
        weights = generator.choice(np.float32([0.25, 0.5, 1.0]), 8) if weighted and row != 2 else None
        examples.append(Example((Node(ids, trained, weights=weights),), row))
        for place in range(1, 8):
            if trained[place]:
                weight = 1.0 if weights is None else float(weights[place])
                dense, total = dense - weight * table[ids[place]], total + weight
    packs_of = partial(pack, tokens_per_pack=width)
    config = SimpleNamespace(data=SimpleNamespace(source_names=()))
    job = SimpleNamespace(pack=packs_of, device="cpu", config=config)

    def scorer(one, top):
        assert top is None  # only label smoothing and eaft need more
        logprob_N = table[one.target_N]
        return Scores(logprob_N, logprob_N, logprob_N.detach())

    packs, objective = sft.objectives(SimpleNamespace(job=job, scorer=scorer, method=SFTMethod()))(examples)
    assert len(packs) == {1000: 1, 20: 3, 9: 6}[width] and objective.count == pytest.approx(total, rel=1e-12)
    assert isinstance(objective.count, float) == weighted
    losses = numbers(shares_of(packs, objective))
    torch.testing.assert_close(losses["loss"], float(dense.detach() / total), rtol=1e-6, atol=0)
    torch.testing.assert_close(table.grad, torch.autograd.grad(dense / total, table)[0])
    if not weighted:
        assert all(one.weight_N is None for one in packs)
        return
    for one in packs:
        kept = torch.arange(len(one.target_N)) % 2 == 0
        if one.weight_N is not None:
            assert one.with_targets(kept).weight_N.tolist() == one.weight_N[kept].tolist()
            assert one.to("cpu").weight_N.dtype == torch.float32
