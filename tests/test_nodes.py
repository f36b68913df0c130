"""Attention over gathered paths, as FlashAttention 4 computes it, is attention in the tree. In its place PyTorch's
attention is called with a mask, with the same arguments."""

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.gpu.right import SHAPES, tree
from posttrain.batch import Example, pack
from posttrain.models import attention, nodes
from posttrain.models.attention import How, PackedMask
from posttrain.models.graphs import padded
from posttrain.models.nodes import Gathered, Paths, Segment, pays

CPU = torch.device("cpu")


class Unwritten(torch.autograd.Function):
    """The kernel writes no gradients of keys that belong to no node: they are what was in memory."""

    @staticmethod
    def forward(ctx, x, key_M):
        ctx.save_for_backward(key_M)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        [key_M] = ctx.saved_tensors
        return torch.where(torch.arange(len(grad))[:, None, None] < key_M[-1], grad, torch.nan), None


def dense_varlen(
    q,
    k,
    v,
    *,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale,
    causal,
    window_size,
    deterministic,
):
    """flash_attn_varlen_func: causal from the bottom right. No number is read from the tensors. Sequences that are
    longer than was said have no result."""
    assert causal and deterministic and cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert len(cu_seqlens_q) == len(cu_seqlens_k) and q.is_contiguous() and k.is_contiguous()
    k, v = (Unwritten.apply(x, cu_seqlens_k) for x in (k, v))
    row, column = torch.arange(len(q), dtype=torch.int32), torch.arange(len(k), dtype=torch.int32)
    of_row, of_column = (
        torch.searchsorted(*pair, right=True) for pair in ((cu_seqlens_q, row), (cu_seqlens_k, column))
    )
    before = (cu_seqlens_q[of_row] - row)[:, None] - (torch.cat([cu_seqlens_k, cu_seqlens_k[-1:]])[of_column] - column)
    left, right = window_size
    assert left is None or right == 0
    mask = (of_row[:, None] == of_column) & (before <= 0) & (-before <= (len(k) if left is None else left))
    are_short = (cu_seqlens_q.diff() <= max_seqlen_q).all() & (cu_seqlens_k.diff() <= max_seqlen_k).all()
    one = [x.transpose(0, 1)[None] for x in (q, k, v)]
    bias = torch.where(mask, torch.where(are_short, 0.0, torch.nan), -torch.inf).to(q.dtype)
    out = nn.functional.scaled_dot_product_attention(*one, bias, scale=softmax_scale, enable_gqa=True)
    return out[0].transpose(0, 1), None


def varlen(q, k, v, **more):
    """The same, and the numbers in the tensors are checked."""
    query_M, key_M = more["cu_seqlens_q"], more["cu_seqlens_k"]
    queries, keys = query_M.diff(), key_M.diff()
    assert query_M[0] == key_M[0] == 0 and query_M[-1] == len(q) and key_M[-1] <= len(k)
    assert (queries >= 0).all() and (queries <= keys).all()
    assert queries.max() <= more["max_seqlen_q"] and keys.max() <= more["max_seqlen_k"]
    return dense_varlen(q, k, v, **more)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setattr(nodes, "flash_attention", lambda: varlen)


def pack_of(shape):
    """A pack of this shape, a quarter as long."""

    def short(nodes):
        return [nodes[0] // 4, *map(short, nodes[1:])]

    [whole] = pack([Example((tree(short(each)),), row) for row, each in enumerate(SHAPES[shape])], 1 << 14)
    return whole


@pytest.mark.parametrize("window", [None, 1, 10, 75])
@pytest.mark.parametrize("shape", SHAPES)
def test_paths_are_the_tree(shape, window):
    """Outputs and gradients, padded packs too."""
    for whole in (pack_of(shape), padded(pack_of(shape))):
        mask, tokens = PackedMask(whole), len(whole.tokens_T)
        torch.manual_seed(0)
        given = [torch.randn(1, heads, tokens, 8, requires_grad=True) for heads in (4, 2, 2)]
        got = Paths.of(mask.nodes, CPU).attend(*given, 0.3, window)
        want = nn.functional.scaled_dot_product_attention(*given, mask.dense(window), scale=0.3, enable_gqa=True)
        real = slice(0, whole.num_tokens)
        torch.testing.assert_close(got[:, :, real], want[:, :, real], rtol=0, atol=1e-5)
        weight = torch.randn_like(got)
        weight[:, :, whole.num_tokens :] = 0
        sides = [torch.autograd.grad((out * weight).sum(), given) for out in (got, want)]
        for ours, theirs in zip(*sides, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_gradients_of_copies_are_summed_in_float32():
    """In bfloat16 a sum of 300 ones would end at 256."""
    token = torch.tensor([1, 0, 1, 2] + [1] * 298)
    order, copies = token.argsort(stable=True), torch.bincount(token, minlength=4)
    x = torch.ones(4, 2, 3, dtype=torch.bfloat16, requires_grad=True)
    Gathered.apply(x, token, order, copies).sum().backward()
    assert x.grad.dtype == torch.bfloat16 and x.grad[:, 0, 0].tolist() == [1, 300, 1, 0]


def test_nothing_is_gathered_without_ancestors():
    assert not len(Paths.of(PackedMask(pack_of("rows")).nodes, CPU).token_G)
    assert len(Paths.of(PackedMask(pack_of("a pair")).nodes, CPU).token_G)


def test_packs_have_few_sizes():
    """So that few CUDA graphs serve all packs; what is added is of no node, and no token counts it."""
    generator, found = np.random.default_rng(0), set()
    for _ in range(300):
        prompt, *rest = (int(length) for length in generator.integers(2, 200, 1 + generator.integers(2, 9)))
        trees = [tree([prompt, *([length] for length in rest)]), tree([200])]
        [whole] = pack([Example((each,), row) for row, each in enumerate(trees)], 1 << 14)
        mask = PackedMask(padded(whole))
        paths, real = Paths.of(mask.nodes, CPU), len(mask.nodes)
        gathered = sum(node.seen + node.stop - node.start for node in mask.nodes)
        assert len(paths.query_M) == len(paths.key_M) == 16 + 1
        assert paths.query_M[real:].unique().tolist() == [len(mask.end_T)]
        assert paths.key_M[real:].unique().tolist() == [gathered] == [int(paths.copies_T.sum())]
        assert gathered <= len(paths.token_G) <= max(gathered + nodes.STEP, gathered * 5 / 4)
        assert sorted(paths.order_G.tolist()) == list(range(len(paths.token_G)))
        longest = int(paths.key_M.diff().max())
        assert longest <= paths.longest < 2 * longest
        found.add((len(mask.end_T), len(paths.token_G), paths.longest))
    assert len(found) < 40
    assert len(Paths.of(segments(*[(0, 2)] * 20), CPU).query_M) == 32 + 1


def segments(*lengths: tuple[int, int]) -> list[Segment]:
    """Nodes of (ancestors' tokens, own tokens)."""
    return [Segment(seen, seen + own, (slice(0, seen),) if seen else (), seen) for seen, own in lengths]


def test_the_faster_one_of_each_measured_shape():
    """docs/gpu.md has the milliseconds of both for packs of 8,192 tokens."""
    assert pays(segments((0, 8192)))
    assert pays(segments((0, 4096), (4096, 2048), (4096, 2048)))
    assert not pays(segments((0, 1024), *[(1024, 896)] * 8))
    assert not pays(segments(*[(0, 512)] * 16))
    assert not pays(segments(*[(0, 60)] * 100))


def test_where_it_is_used(monkeypatch):
    """On Hopper with the package, for long nodes, without a cap of the logits, for heads of its sizes."""
    whole = pack_of("a sequence")
    assert PackedMask(whole).paths is None
    monkeypatch.setattr(attention, "has_flash_attention", lambda: True)
    assert isinstance(PackedMask(whole).paths, Paths) and PackedMask(pack_of("rows")).paths is None
    monkeypatch.setattr(attention, "suits_flex", lambda query, dropout: True)
    called = []
    monkeypatch.setattr(Paths, "attend", lambda self, *given: called.append("paths"))
    monkeypatch.setattr(attention, "flex_attend", lambda *given: called.append("flex"))
    monkeypatch.setattr(PackedMask, "blocks", lambda self, window: None)

    class OnCard(torch.Tensor):
        is_cuda = True

    for size, softcap in ((128, None), (128, 50.0), (80, None)):
        query = torch.zeros(1, 4, 8, size).as_subclass(OnCard)
        PackedMask(whole).attend(nn.Identity(), query, query, query, How(1.0, 0.0, None, softcap))
    assert called == ["paths", "flex", "flex"]
