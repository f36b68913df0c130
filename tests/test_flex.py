"""FlexAttention over packs as far as a CPU shows it: compilations, masks, blocks, and when it is not used."""

import logging
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from torch._dynamo import config
from torch._dynamo.utils import counters
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.families import forest
from posttrain.batch import Example, Node, pack
from posttrain.config import ModelConfig
from posttrain.models import attention
from posttrain.models.attention import How, PackedMask, _eager, _sdpa
from posttrain.models.devices import lacks_bfloat16
from posttrain.models.load import takes_triton

CARDS = {"RTX 4090": 101_376, "A100": 166_912, "H100": 232_448}  # bytes of shared memory a block may have


@pytest.fixture(autouse=True)
def forget():
    cached = (attention.lacking_for_triton, attention.announce_without_flex, lacks_bfloat16)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


@pytest.fixture
def compiled(monkeypatch):
    """FlexAttention and its masks as a GPU compiles them, with a backend that computes on a CPU."""
    torch.compiler.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)  # which refuses gradients on a CPU
    monkeypatch.setattr(attention, "_compiled", cache(attention._compiled.__wrapped__))
    of_gpu = cache(partial(attention._block_mask_maker.__wrapped__, "cuda"))
    monkeypatch.setattr(attention, "_block_mask_maker", lambda device_type: of_gpu())
    with config.patch(specialize_float=False, fail_on_recompile_limit_hit=False):  # put back afterwards
        yield
    torch.compiler.reset()


def test_padded_inside_it_is_dense_attention(compiled):
    """Values and gradients of a pack that is no whole number of blocks, with a window and capped logits."""
    [whole] = pack(forest(), 1000)
    mask, total = PackedMask(whole), len(whole.tokens_T)
    assert total % attention.BLOCK
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, total, 16, requires_grad=True) for heads in (4, 2, 2))
    got = attention.flex_attend(q, k, v, mask.blocks(5), 0.4, 2.0, True)
    seen = torch.zeros(total, total).masked_fill_(~mask.dense(5), -torch.inf)
    want = _eager(q, k, v, seen, How(0.4, 0.0, 5, 2.0))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    weight = torch.randn_like(got)
    got_grad, want_grad = (torch.autograd.grad((out * weight).sum(), (q, k, v)) for out in (got, want))
    torch.testing.assert_close(got_grad, want_grad, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_every_width_and_window_has_one_kernel(compiled):
    """65 widths, as callers of their own bring them: one compilation of masks and one of attention."""
    first = 0
    for number in range(65):
        width, window = 16 + 8 * number, None if number % 2 else 9
        [whole] = pack([Example((Node([1] * 15, children=(Node([1] * (width - 14), True),)),), 0)], width)
        mask = PackedMask(whole)
        q, k, v = (torch.randn(1, heads, width, 16) for heads in (4, 2, 2))
        got = attention.flex_attend(q, k, v, mask.blocks(window), 0.25, None, True)
        if number in (0, 33, 64):
            want = scaled_dot_product_attention(q, k, v, mask.dense(window), scale=0.25, enable_gqa=True)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        if number == 20:
            first = counters["stats"]["unique_graphs"]
    assert counters["stats"]["unique_graphs"] == first <= 2


def query(dtype=torch.bfloat16, head=64, is_cuda=True) -> Any:
    return SimpleNamespace(is_cuda=is_cuda, dtype=dtype, shape=(1, 2, 8, head))


def test_where_it_suits(monkeypatch):
    monkeypatch.setattr(attention, "lacking_for_triton", lambda: None)
    assert attention.suits_flex(query(), 0.0) and attention.suits_flex(query(torch.float16, 256), 0.0)
    others = [query(is_cuda=False), query(torch.float32), query(head=8)]
    assert not any(attention.suits_flex(other, 0.0) for other in others) and not attention.suits_flex(query(), 0.1)
    monkeypatch.setattr(attention, "lacking_for_triton", lambda: "Triton is not installed")
    assert not attention.suits_flex(query(), 0.0)


@pytest.mark.parametrize(("capability", "suits"), [((7, 0), False), ((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_cards_without_bfloat16_have_no_kernels(capability, suits, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(attention.shutil, "which", lambda name: "/usr/bin/cc")
    assert attention.suits_flex(query(torch.float16), 0.0) == suits
    assert takes_triton(ModelConfig(path="a"), torch.device("cuda")) == suits
    assert suits or attention.lacking_for_triton() == "this GPU's compute capability is below 8.0"


@pytest.mark.parametrize(
    ("triton", "compiler", "why"),
    [
        (None, "/usr/bin/cc", "Triton is not installed"),
        (object(), None, "no C compiler"),
        (object(), "/usr/bin/cc", None),
    ],
)
def test_missing_requirements_are_reported_once(monkeypatch, caplog, triton, compiler, why):
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name: triton)
    monkeypatch.setattr(attention.shutil, "which", lambda name: compiler)
    monkeypatch.delenv("CC", raising=False)
    with caplog.at_level(logging.WARNING):
        attention.announce_without_flex()
        attention.announce_without_flex()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (why is not None) and all(why in text for text in said)


def test_without_it_attention_runs_node_by_node(monkeypatch):
    monkeypatch.setattr(attention, "flex_attend", None)
    [whole] = pack(forest(), 160)
    q = torch.randn(1, 2, len(whole.end_T), 16)
    out = PackedMask(whole).attend(torch.nn.Module(), q, q, q, How(0.25, 0.0, None, None))
    assert out.shape == q.shape


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("head", [16, 64, 80, 96, 128, 192, 256])
def test_blocks_fit_the_card(card, head):
    chosen, shared, wide = attention.flex_blocks_for(head, CARDS[card]), CARDS[card], 1 << (head - 1).bit_length()
    if not chosen:
        assert head in (16, 64, 128) and card != "RTX 4090"  # as PyTorch has chosen and tuned them
        return
    forward = chosen["fwd_BLOCK_M"] + 2 * chosen["fwd_BLOCK_N"] * chosen["fwd_num_stages"]
    backward = 2 * chosen["bwd_BLOCK_N1"] + 2 * chosen["bwd_BLOCK_M1"] * chosen["bwd_num_stages"]
    assert max(forward, backward) * 2 * wide < shared
    assert chosen["bwd_BLOCK_N1"] % chosen["bwd_BLOCK_M1"] == chosen["bwd_BLOCK_M2"] % chosen["bwd_BLOCK_N2"] == 0
    assert all(attention.BLOCK % size == 0 and size >= 16 for name, size in chosen.items() if "BLOCK" in name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sdpa_on_cuda_has_no_groups(monkeypatch, dtype):
    """Masked or in float32, heads of keys are repeated: the kernel that keeps no matrix of scores takes no groups."""
    heads = []

    def kernel(q, k, v, mask, dropout, is_causal, scale, enable_gqa):
        heads.append((k.shape[1], enable_gqa))

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", kernel)
    q, k = (torch.zeros(1, count, 8, 16, dtype=dtype) for count in (4, 2))
    on_gpu = SimpleNamespace(is_cuda=True, dtype=dtype, shape=q.shape)
    how = How(0.25, 0.0, None, None)
    _sdpa(on_gpu, k, k, torch.zeros(8, 8), how)
    _sdpa(on_gpu, k, k, None, how)
    _sdpa(q, k, k, None, how)
    assert heads == [(4, False), (4, False) if dtype == torch.float32 else (2, True), (2, True)]
