"""Every family gives a pack the log-probabilities and gradients of plain one-by-one evaluation by transformers.

Weights are scaled up after random initialisation, so that attention is far from uniform and capping matters: with
the usual small initialisation a wrong mask hides below the tolerance.
"""

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import AutoModelForSequenceClassification
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from benchmarks.families import VOCAB, forest, make
from posttrain import scoring
from posttrain.base.errors import ModelError
from posttrain.batch import pack, sequences
from posttrain.models import matmul
from posttrain.models.attention import PackedMask, packed_attention
from posttrain.models.families import FAMILIES, check_positions
from posttrain.models.lean import TORCH, lean
from posttrain.models.matmul import PACKS, is_for_onednn, linear, packed_weights, weight_of
from posttrain.scoring import ChunkedScores, RewardScorer, Scorer
from posttrain.training.job import enable_gradient_checkpointing


@contextmanager
def kept_for_backward() -> Iterator[dict[int, int]]:
    """The bytes of each storage that autograd keeps of what runs inside, by address."""
    sizes: dict[int, int] = {}

    def keep(tensor):
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield sizes


def one_by_one(model, examples, temperature=1.0):
    """Log-probabilities by transformers alone, a sequence at a time, in the order of the pack's N axis."""
    out = []
    for example in examples:
        for tree in example.trees:
            for ids, trained in sequences(tree):
                tokens = torch.from_numpy(ids)[None]
                logits = model(input_ids=tokens, use_cache=False).logits[0, :-1] / temperature
                logprob = logits.log_softmax(-1).gather(1, tokens[0, 1:, None]).squeeze(1)
                out.append(logprob[torch.from_numpy(trained[1:].copy())])
    return torch.cat(out)


def gradients(model):
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_close_gradients(got, want):
    assert got.keys() == want.keys()
    scale = max(g.abs().max() for g in want.values())
    for name in want:
        error = (got[name] - want[name]).abs().max() / scale
        assert error <= 1e-4, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_one_by_one(family):
    model = make(family)
    examples = forest()
    torch.manual_seed(1)
    [whole] = pack(examples, 1000)
    weight_N = torch.rand(len(whole.target_N))

    want_N = one_by_one(model, examples, temperature=0.7)
    (want_N * weight_N).sum().backward()
    want_grad = gradients(model)
    assert want_N.std() > 0.5, "the model is too flat for this test to mean anything"

    model.set_attn_implementation("packed" if FAMILIES[family].packed else "eager")
    lean(model)
    got_N = Scorer(model)(whole, temperature=0.7).logprob_N
    print(f"{family}: largest log-probability error {(got_N - want_N).abs().max():.2e}")
    torch.testing.assert_close(got_N, want_N, rtol=0, atol=1e-5)
    (got_N * weight_N).sum().backward()
    assert_close_gradients(gradients(model), want_grad)


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_padding_of_a_pack_and_of_what_is_read_changes_nothing(family):
    """Packs are padded to a few widths, and the last layer continues with a multiple of READ_STEP tokens."""
    examples = [example for seed in range(3) for example in forest(seed)]
    model = make(family)
    model.set_attn_implementation("packed")
    lean(model)
    found = []
    for pad_to in (None, 512):
        [whole] = pack(examples, 1000, pad_to=pad_to)
        logprob_N = Scorer(model)(whole).logprob_N
        logprob_N.sum().backward()
        found.append((logprob_N.detach(), gradients(model), len(whole.source_N.unique()), len(whole.tokens_T)))
    (bare, bare_grads, read, width), (padded, padded_grads, _, padded_width) = found
    assert read % scoring.READ_STEP and read + scoring.READ_STEP < width < padded_width == 512
    torch.testing.assert_close(padded, bare, rtol=0, atol=1e-5)
    assert_close_gradients(padded_grads, bare_grads)


@pytest.mark.parametrize("step", [1, 16])
def test_chunks_are_whole_steps_and_a_rest(monkeypatch, step):
    monkeypatch.setitem(scoring.CHUNK_ELEMENTS, "cpu", 100 * VOCAB)
    weight = torch.empty(VOCAB, 8)
    for size in (0, 1, 15, 16, 99, 100, 101, 112, 113, 1000):
        chunks = scoring._chunks(size, weight, step)
        rows = torch.cat([torch.empty(0, dtype=torch.int64), *(torch.arange(size)[part] for part in chunks)])
        assert torch.equal(rows, torch.arange(size))
        sizes = [part.stop - part.start for part in chunks]
        assert all(0 < rows <= 112 and not rows % step for rows in sizes[:-1])
        assert not sizes or sizes[-1] % step == 0 or sizes[-1] < step


WITHOUT_CLASSIFIER = {"granite", "cohere", "cohere2", "olmoe"}  # transformers has none


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in {"gpt_neo", *WITHOUT_CLASSIFIER}])
def test_rewards_equal_one_by_one(family):
    """The scalar head on a pack gives the scores of transformers' own sequence classifier, a sequence at a time."""
    model = make(family, AutoModelForSequenceClassification, num_labels=1)
    examples = forest()
    rows = [torch.from_numpy(ids)[None] for e in examples for tree in e.trees for ids, _ in sequences(tree)]
    want_S = torch.cat([model(input_ids=ids).logits[:, 0] for ids in rows])
    model.set_attn_implementation("packed" if FAMILIES[family].packed else "eager")
    lean(model)
    [whole] = pack(examples, 1000, keep_last=True)
    assert want_S.std() > 0.1
    torch.testing.assert_close(RewardScorer(model)(whole), want_S, rtol=1e-4, atol=1e-5)


def test_a_wrong_mask_is_seen():
    """The equivalence above has teeth: letting completions see their siblings moves log-probabilities far beyond it."""
    model = make("qwen3")
    examples = forest()
    [whole] = pack(examples, 1000)
    model.set_attn_implementation("packed")
    right_N = Scorer(model)(whole).logprob_N
    leaky = whole.end_T.clone()
    for start, stop in zip(whole.tree_start, whole.tree_start[1:], strict=False):
        leaky[start:stop] = stop
    wrong = replace(whole, end_T=leaky, nodes=tuple((start, int(leaky[start])) for start, _ in whole.nodes))
    assert (Scorer(model)(wrong).logprob_N - right_N).abs().max() > 0.1


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "bloom"])
def test_packs_may_be_split_or_padded(family):
    """Small packs and padded ones give the log-probabilities and the summed gradients of one whole pack."""
    model = make(family)
    model.set_attn_implementation("packed" if FAMILIES[family].packed else "eager")
    examples = forest()
    [whole] = pack(examples, 1000)
    want_N = Scorer(model)(whole).logprob_N
    want_S = whole.sum_by_sequence(want_N)
    want_S.sin().sum().backward()
    want_grad = gradients(model)
    packs = pack(examples, 30, pad_to=30)
    assert len(packs) > 1 and all(len(p.tokens_T) == 30 for p in packs)
    for one in packs:
        got_S = one.sum_by_sequence(Scorer(model)(one).logprob_N)
        of_group = torch.isin(whole.group_S, one.group_S)
        torch.testing.assert_close(got_S, want_S[of_group], rtol=0, atol=5e-5)
        got_S.sin().sum().backward()
    assert_close_gradients(gradients(model), want_grad)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("chunk", [7 * VOCAB, 1 << 22])
def test_chunked_scores_equal_full_logits(monkeypatch, softcap, chunk):
    """Log-probability, entropy and all gradients, against full logits through autograd."""
    monkeypatch.setitem(scoring.CHUNK_ELEMENTS, "cpu", chunk)
    torch.manual_seed(0)
    hidden = torch.randn(40, 16, requires_grad=True)
    weight = torch.randn(VOCAB, 16, requires_grad=True)
    bias = torch.randn(VOCAB, requires_grad=True)
    target = torch.randint(VOCAB, (40,))
    a, b = torch.randn(40), torch.randn(40)

    logits = hidden @ weight.T + bias
    logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / 0.6
    log_p = logits.log_softmax(-1)
    want = log_p.gather(1, target[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)
    want_grad = torch.autograd.grad((a * want[0] + b * want[1]).sum(), (hidden, weight, bias), retain_graph=True)
    *got, top1 = ChunkedScores.apply(hidden, weight, bias, target, 0.6, softcap)
    got_grad = torch.autograd.grad((a * got[0] + b * got[1]).sum(), (hidden, weight, bias), retain_graph=True)
    for g, w in zip((*got, *got_grad), (*want, *want_grad), strict=True):
        torch.testing.assert_close(g, w, rtol=2e-5, atol=2e-5)
    assert torch.equal(top1 == 1, logits.argmax(-1) == target)
    # The branch without an entropy gradient, and the one with nothing else.
    for value, want_value in ((got[0], want[0]), (got[1], want[1])):
        got_grad = torch.autograd.grad((a * value).sum(), (hidden, weight, bias), retain_graph=True)
        want_grad = torch.autograd.grad((a * want_value).sum(), (hidden, weight, bias), retain_graph=True)
        torch.testing.assert_close(got_grad, want_grad, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("top", [0, 5, 2 * VOCAB])
def test_requested_scores_equal_full_logits(monkeypatch, softcap, top):
    """The mean log-probability of the vocabulary, with all gradients beside the others', and the entropy of the largest
    logits, of all of them if the vocabulary has fewer."""
    monkeypatch.setitem(scoring.CHUNK_ELEMENTS, "cpu", 7 * VOCAB)
    torch.manual_seed(0)
    inputs = [torch.randn(size, requires_grad=True) for size in ((40, 16), (VOCAB, 16), (VOCAB,))]
    hidden, weight, bias = inputs
    target, a_3N = torch.randint(VOCAB, (40,)), torch.randn(3, 40)
    logits = hidden @ weight.T + bias
    logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / 0.6
    log_p = logits.log_softmax(-1)
    want = log_p.gather(1, target[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1), log_p.sum(-1) / VOCAB
    logprob, entropy, _, mean, top_entropy = ChunkedScores.apply(hidden, weight, bias, target, 0.6, softcap, False, top)
    for parts in ((0, 1, 2), (0, 2), (1, 2), (2,)):
        found = []
        for scores in ((logprob, entropy, mean), want):
            loss = torch.stack([(a_3N[part] * scores[part]).sum() for part in parts]).sum()
            found.append([scores[2], *torch.autograd.grad(loss, inputs, retain_graph=True)])
        torch.testing.assert_close(*found, rtol=2e-5, atol=2e-5)
    if top == 0:
        assert top_entropy is None
        return
    count = min(top, VOCAB)
    p = logits.sort(descending=True).values[:, :count].softmax(-1)
    torch.testing.assert_close(top_entropy, (-(p * p.log()).sum(-1) / math.log(count)).detach(), rtol=1e-5, atol=1e-5)
    assert not top_entropy.requires_grad


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("pad_to", [None, 200])
def test_nodes_equal_dense_mask(window, pad_to):
    """Attention node by node gives what one call under the dense mask gives, at every real token, and its gradients."""
    [whole] = pack(forest(), 1000, pad_to=pad_to)
    mask, total = PackedMask(whole), len(whole.tokens_T)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, total, 16, requires_grad=True) for heads in (4, 2, 2))
    got, _ = packed_attention(torch.nn.Identity(), q, k, v, None, sliding_window=window, packed=mask)
    dense = mask.dense(window)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, dense, enable_gqa=True).transpose(1, 2)
    real = slice(0, whole.num_tokens)
    torch.testing.assert_close(got[:, real], want[:, real], rtol=1e-5, atol=1e-5)
    weight = torch.randn_like(got)[:, real]
    got_grad = torch.autograd.grad((got[:, real] * weight).sum(), (q, k, v))
    want_grad = torch.autograd.grad((want[:, real] * weight).sum(), (q, k, v))
    torch.testing.assert_close(got_grad, want_grad, rtol=1e-4, atol=1e-5)


def test_bfloat16_attention_on_a_cpu_is_float32_attention_rounded():
    """Of the same rounded queries, keys and values, gradients too: only what enters and leaves has 8 bits."""
    [whole] = pack(forest(), 1000)
    mask, total = PackedMask(whole), len(whole.tokens_T)
    torch.manual_seed(0)
    narrow = [torch.randn(1, heads, total, 16).bfloat16().requires_grad_() for heads in (4, 2, 2)]
    wide = [x.detach().float().requires_grad_() for x in narrow]
    outs = [packed_attention(torch.nn.Identity(), *inputs, None, packed=mask)[0] for inputs in (narrow, wide)]
    assert torch.equal(outs[0], outs[1].bfloat16())
    weight = torch.randn_like(outs[0])
    got = torch.autograd.grad((outs[0] * weight).sum(), narrow)
    want = torch.autograd.grad((outs[1] * weight.float()).sum(), wide)
    assert all(torch.equal(g, w.bfloat16()) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "mistral", "phi3", "qwen2", "qwen3"])
def test_lean_norms_and_mlps_are_those_of_transformers(family, dtype):
    """The same values and gradients, and less kept for backward."""
    ids = torch.randint(3, VOCAB, (2, 24), generator=torch.Generator().manual_seed(0))
    outs, grads, kept = [], [], []
    for change in (lambda model: None, lean):
        model = make(family).to(dtype)
        change(model)
        with kept_for_backward() as sizes:
            out = model(input_ids=ids, use_cache=False).logits.float()
        (out.log_softmax(-1)[..., 5]).sum().backward()
        outs.append(out.detach())
        grads.append(gradients(model))
        kept.append(sum(sizes.values()))
    print(f"{family}: {kept[1] / kept[0]:.2f} of the memory kept for backward")
    assert kept[1] < 0.95 * kept[0]
    close = dict(rtol=0, atol=1e-4) if dtype == torch.float32 else dict(rtol=0.05, atol=0.1 * outs[0].std().item())
    torch.testing.assert_close(outs[1], outs[0], **close)
    if dtype == torch.float32:
        assert_close_gradients(grads[1], grads[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotated_is_what_transformers_computes(dtype):
    """To the bit, so that in bfloat16 a packed call and a plain one round alike; the gradient turns back."""
    torch.manual_seed(0)
    query, key = (torch.randn(1, heads, 5, 8).to(dtype).requires_grad_() for heads in (4, 2))
    cos, sin = (turn.to(dtype).repeat(1, 1, 2) for turn in torch.randn(2, 1, 5, 4).unbind())
    for x, want in zip((query, key), apply_rotary_pos_emb(query, key, cos, sin), strict=True):
        got = TORCH.rotated(x.transpose(1, 2), cos.unsqueeze(-2), sin.unsqueeze(-2)).transpose(1, 2)
        assert torch.equal(got, want)
        given = torch.randn_like(want)
        [back], [want_back] = torch.autograd.grad(got, x, given), torch.autograd.grad(want, x, given)
        torch.testing.assert_close(back, want_back)


def test_lean_attention_drops_out_as_transformers_does():
    model = make("llama", attention_dropout=0.3)
    model.set_attn_implementation("packed")
    [whole] = pack(forest(), 400)
    seen = []
    for change in (lambda model: None, lean):
        change(model)
        model.train()
        torch.manual_seed(0)
        seen.append(Scorer(model)(whole).logprob_N.detach())
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(seen[0], Scorer(model.eval())(whole).logprob_N, atol=1e-2)


def test_lean_changes_no_module_it_does_not_know():
    for family in ("gemma2", "gemma3_text", "gpt2"):
        model = make(family)
        lean(model)
        assert {type(m).__name__ for m in model.modules() if "forward" in vars(m)} <= {"Linear"}, family
    other = make("llama", hidden_act="gelu")
    lean(other)
    changed = {type(m).__name__ for m in other.modules() if "forward" in vars(m)}
    assert changed == {"Linear", "LlamaAttention", "LlamaDecoderLayer", "LlamaRMSNorm"}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("trained", ["weights", "inputs", "both"])
@pytest.mark.parametrize("rows", [16, 17])  # for oneDNN, and for MKL
def test_linear_layers_are_those_of_torch(rows, trained, bias, monkeypatch):
    monkeypatch.setattr("posttrain.models.matmul.ONEDNN", PACKS)  # on Intel's processors too
    layer = torch.nn.Linear(256, 320, bias)
    assert is_for_onednn(layer.weight) == PACKS
    layer.requires_grad_(trained != "inputs")
    x = torch.randn(3, rows, 256, requires_grad=trained != "weights")
    given = torch.randn(3, rows, 320)
    outs, grads = [], []
    for forward in (layer, partial(linear, layer)):
        outs.append(forward(x))
        outs[-1].backward(given)
        grads.append([leaf.grad for leaf in (x, *layer.parameters()) if leaf.grad is not None])
        x.grad = None
        layer.zero_grad()
    torch.testing.assert_close(outs[1], outs[0])
    assert len(grads[0]) == len(grads[1]) == (trained != "weights") + (trained != "inputs") * (1 + bias)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-4)
    assert linear(layer, torch.empty(0, 256)).shape == (0, 320)
    torch.testing.assert_close(linear(layer.double(), x.double()), layer(x.double()))


@pytest.mark.parametrize("bias", [True, False])
def test_packed_weights_multiply_alike(bias):
    layer = torch.nn.Linear(256, 320, bias)
    with torch.no_grad(), packed_weights(layer, layer):
        assert not PACKS or weight_of(layer).is_mkldnn
        for shape in ((1, 256), (7, 256), (1, 8, 256), (2, 3, 256)):
            x = torch.randn(shape)
            torch.testing.assert_close(linear(layer, x), layer(x))
    assert weight_of(layer) is layer.weight


def test_weights_are_packed_only_as_one_dnn_may_multiply():
    """It may be limited to older instructions than the processor's, without bfloat16."""
    code = (
        "import torch\n"
        "from posttrain.models.matmul import PACKED_DTYPES, linear, packed_weights\n"
        "model = torch.nn.Sequential(torch.nn.Linear(256, 320), torch.nn.Linear(320, 300)).bfloat16()\n"
        "layer, x = model[0], torch.randn(16, 256).bfloat16()\n"
        "assert torch.bfloat16 not in PACKED_DTYPES\n"
        "with torch.no_grad(), packed_weights(model, model[1]):\n"
        "    torch.testing.assert_close(linear(layer, x).float(), layer(x).float(), rtol=0.02, atol=0.02)\n"
    )
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)


@pytest.mark.skipif(not PACKS or not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="needs oneDNN's bfloat16")
def test_packed_bfloat16_weights_multiply_alike(monkeypatch):
    """As where a processor multiplies in bfloat16; the head's stay in float32."""
    monkeypatch.setattr(matmul, "PACKED_DTYPES", {torch.float32, torch.bfloat16})
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 320), torch.nn.Linear(320, 300)).bfloat16()
    layer, head = model
    assert isinstance(layer, torch.nn.Linear) and isinstance(head, torch.nn.Linear)
    with torch.no_grad(), packed_weights(model, head):
        assert weight_of(layer).is_mkldnn and weight_of(layer).dtype == torch.bfloat16
        assert weight_of(head).is_mkldnn and weight_of(head).dtype == torch.float32
        for rows in (1, 7, 8):
            x = torch.randn(rows, 256).bfloat16()
            got = linear(layer, x)
            assert got.dtype == torch.bfloat16
            torch.testing.assert_close(got, layer(x), rtol=1e-2, atol=1e-2)


def test_the_last_mlp_takes_only_the_tokens_that_are_read():
    model = make("qwen3")
    model.set_attn_implementation("packed")
    lean(model)
    [whole] = pack(forest(), 1000)
    rows = []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda module, inputs: rows.append(inputs[0].shape[1]))
    Scorer(model)(whole)
    assert rows == [whole.num_tokens, whole.num_tokens, len(whole.source_N.unique())]
    assert rows[-1] < 0.8 * rows[0]


DROPOUTS = (
    "attention_dropout",
    "attn_pdrop",
    "dropout",
    "embd_pdrop",
    "hidden_dropout",
    "resid_dropout",
    "resid_pdrop",
)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_keeps_less_and_changes_nothing(family):
    """In evaluation mode too, and without turning on any dropout that the model has."""
    [whole] = pack(forest(), 1000)
    values, grads, kept = [], [], []
    for change in (lambda model: None, enable_gradient_checkpointing):
        model = make(family, **dict.fromkeys(DROPOUTS, 0.4))
        model.set_attn_implementation("packed" if FAMILIES[family].packed else "eager")
        change(model)
        with kept_for_backward() as sizes:
            logprob_N = Scorer(model)(whole).logprob_N
        logprob_N.sum().backward()
        values.append(logprob_N.detach())
        grads.append(gradients(model))
        kept.append(sum(sizes.values()))
    assert kept[1] < kept[0]
    torch.testing.assert_close(values[1], values[0], rtol=0, atol=1e-6)
    assert_close_gradients(grads[1], grads[0])


def test_recomputed_layers_read_random_generators_for_dropout_only(monkeypatch):
    """With dropout the recomputed masks are the same; in evaluation mode no generator is read."""
    [whole], grads, reads = pack(forest(), 1000), [], []
    read = torch.get_rng_state
    monkeypatch.setattr(torch, "get_rng_state", lambda: reads.append(1) or read())
    for change in (lambda model: None, enable_gradient_checkpointing):
        model = make("llama", attention_dropout=0.4).train()
        change(model)
        torch.manual_seed(0)
        Scorer(model)(whole).logprob_N.sum().backward()
        grads.append(gradients(model))
    assert_close_gradients(grads[1], grads[0])
    assert reads
    reads.clear()
    Scorer(model.eval())(whole).logprob_N.sum().backward()
    assert not reads


def test_positions_that_depend_on_the_batch_are_refused():
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    for config in (
        make("phi3", rope_parameters=longrope, max_position_embeddings=256, original_max_position_embeddings=64).config,
        make("llama", rope_parameters=dynamic, max_position_embeddings=64).config,
    ):
        check_positions(config, 64)
        with pytest.raises(
            ModelError,
            match=r"RoPE\) depend on the longest sequence .* beyond 64 tokens: set data.max_length to at most 64",
        ):
            check_positions(config, 65)
    check_positions(make("gemma3_text").config, 10**6)
