"""FlexAttention over packs as far as a CPU shows it: widths, masks, blocks, and when it is not used."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_equivalence import forest
from torch.nn.attention.flex_attention import flex_attention

from posttrain.batch import Example, Sample, pack
from posttrain.models import flex
from posttrain.models.attention import How, PackedMask

CARDS = {"RTX 4090": 101_376, "A100": 166_912, "H100": 232_448}  # bytes of shared memory a block may have


@pytest.fixture(autouse=True)
def forget():
    cached = (flex.lacking, flex.announce)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


def test_few_widths():
    widths = [flex.width(tokens) for tokens in range(1, 65_537)]
    assert all(tokens <= wide <= tokens + max(128, tokens // 4) for tokens, wide in enumerate(widths, 1))
    assert all(wide % flex.BLOCK == 0 for wide in set(widths)) and len(set(widths)) <= 36
    assert all(flex.width(wide) == wide for wide in set(widths))


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("pad_to", [160, 1])
def test_attention_filled_up_inside_is_dense_attention(monkeypatch, window, pad_to):
    """What fills the tokens up is seen by none of them; each width of pack gets its own tokens back."""
    monkeypatch.setattr(flex, "_compiled", lambda: flex_attention)
    [whole] = pack(forest(), 160, pad_to=pad_to)
    mask, tokens = PackedMask(whole), len(whole.end_T)
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, tokens, 16), torch.randn(1, 2, tokens, 16), torch.randn(1, 2, tokens, 16)
    got = flex.attend(q, k, v, mask.blocks(window), 0.25, None, True)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask.dense(window), scale=0.25, enable_gqa=True)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    capped = flex.attend(q, k, v, mask.blocks(window), 0.25, 2.0, True)
    logits = 2 * torch.tanh(q @ k.repeat_interleave(2, 1).transpose(2, 3) * 0.25 / 2)
    want = logits.masked_fill(~mask.dense(window), -torch.inf).softmax(-1) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(capped, want, rtol=1e-4, atol=1e-5)


def test_packs_of_many_widths_compile_few_kernels(monkeypatch):
    seen = set()

    def compiled(query, *_, block_mask, **__):
        seen.add((query.shape[2], block_mask.seq_lengths))
        return query

    monkeypatch.setattr(flex, "_compiled", lambda: compiled)
    for tokens in range(40, 40 + 65 * 7, 7):
        [one] = pack([Example((Sample(list(range(tokens)), True),), 0)], 10_000)
        mask = PackedMask(one)
        query = torch.zeros(1, 1, len(mask.end_T), 16)
        out = flex.attend(query, query, query, mask.blocks(None), 1.0, None, False)
        assert out.shape == query.shape
    assert len(seen) <= 4


def query(dtype=torch.bfloat16, head=64, is_cuda=True) -> Any:
    return SimpleNamespace(is_cuda=is_cuda, dtype=dtype, shape=(1, 2, 8, head))


def test_where_it_suits(monkeypatch):
    monkeypatch.setattr(flex, "lacking", lambda: None)
    assert flex.suits(query(), 0.0) and flex.suits(query(torch.float16, 256), 0.0)
    others = [query(is_cuda=False), query(torch.float32), query(head=8)]
    assert not any(flex.suits(other, 0.0) for other in others) and not flex.suits(query(), 0.1)
    monkeypatch.setattr(flex, "lacking", lambda: "Triton is not installed")
    assert not flex.suits(query(), 0.0)


@pytest.mark.parametrize(
    ("triton", "compiler", "why"),
    [
        (None, "/usr/bin/cc", "Triton is not installed"),
        (object(), None, "no C compiler"),
        (object(), "/usr/bin/cc", None),
    ],
)
def test_what_it_lacks_is_said_once(monkeypatch, caplog, triton, compiler, why):
    monkeypatch.setattr(flex.importlib.util, "find_spec", lambda name: triton)
    monkeypatch.setattr(flex.shutil, "which", lambda name: compiler)
    monkeypatch.delenv("CC", raising=False)
    with caplog.at_level(logging.WARNING):
        flex.announce()
        flex.announce()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (why is not None) and all(why in text for text in said)


def test_without_it_a_pack_goes_node_by_node(monkeypatch):
    monkeypatch.setattr(flex, "attend", None)
    [whole] = pack(forest(), 160)
    q = torch.randn(1, 2, len(whole.end_T), 16)
    out = PackedMask(whole).attend(torch.nn.Module(), q, q, q, How(0.25, 0.0, None, None))
    assert out.shape == q.shape


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("head", [16, 64, 80, 96, 128, 192, 256])
def test_blocks_fit_the_card(card, head):
    chosen, shared, wide = flex.blocks_for(head, CARDS[card]), CARDS[card], 1 << (head - 1).bit_length()
    if not chosen:
        assert head in (16, 64, 128) and card != "RTX 4090"  # as PyTorch has chosen and tuned them
        return
    forward = chosen["fwd_BLOCK_M"] + 2 * chosen["fwd_BLOCK_N"] * chosen["fwd_num_stages"]
    backward = 2 * chosen["bwd_BLOCK_N1"] + 2 * chosen["bwd_BLOCK_M1"] * chosen["bwd_num_stages"]
    assert max(forward, backward) * 2 * wide < shared
    assert chosen["bwd_BLOCK_N1"] % chosen["bwd_BLOCK_M1"] == chosen["bwd_BLOCK_M2"] % chosen["bwd_BLOCK_N2"] == 0
    assert all(flex.BLOCK % size == 0 and size >= 16 for name, size in chosen.items() if "BLOCK" in name)
