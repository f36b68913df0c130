"""One suite for every engine: the record, streams, log-probabilities, new weights, stops, adapters, bad input.

The models are those of benchmarks/families.py: small, with weights scaled up so that attention is sharp and a wrong
mask, position or cache shows in every number.
"""

import math
import random
import time
from collections import Counter
from contextlib import ExitStack, nullcontext
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoTokenizer
from vllm_stand_in import HAS_VLLM, VLLM_REFUSES, standing_in

from benchmarks.families import CONFIGS, VOCAB
from benchmarks.families import make as make_small
from posttrain.base.errors import ConfigError, DataError, ModelError, VitalSignError
from posttrain.base.pieces import LOST, Pieces, pieces
from posttrain.batch import Example, Node, pack
from posttrain.config import ModelConfig
from posttrain.config.schema.rollout import VllmConfig
from posttrain.engines import Completion, EmbeddedEngine, Sampling, TransformersEngine, make_engine, text_of
from posttrain.engines.attention import Decoding, Shape
from posttrain.engines.cache import Cache, Room
from posttrain.engines.live import Live
from posttrain.models.attention import How
from posttrain.models.families import FAMILIES, base_of
from posttrain.models.lean import lean
from posttrain.models.load import load_model
from posttrain.scoring import Scorer

PACKED = [name for name, family in FAMILIES.items() if family.packed and not family.recurrent]  # for every engine
PROMPTS = [[5, 9, 11, 30, 7], [8, 8, 21], [40, 3, 17, 26, 5, 6, 19, 33, 50, 12, 4], [60], [9, 14, 22, 5, 31, 44]]
SAMPLED = Sampling(temperature=0.8, max_completion_length=14, num_generations=3, stop_token_ids=(7, 19), seed=3)


# Heads of 32 dimensions, the least that vLLM has attention for on a CPU; one config for all engines.
HEADS = dict(hidden_size=64, num_attention_heads=2)
GQA = HEADS | dict(num_key_value_heads=1, head_dim=32)
SHAPES = {
    **dict.fromkeys(("llama", "mistral", "olmo2", "olmo3", "smollm3", "granite", "glm", "glm4", "cohere2"), GQA),
    "mixtral": GQA,
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), GQA | dict(moe_intermediate_size=32)),  # vLLM pads others on a CPU
    "olmoe": GQA | dict(intermediate_size=64),
    "qwen3": GQA | dict(use_sliding_window=False, layer_types=None, attention_bias=False),  # as published; vLLM's only
    **dict.fromkeys(("gemma2", "gemma3_text"), GQA | dict(query_pre_attn_scalar=32)),
    **dict.fromkeys(("qwen2", "phi3"), HEADS | dict(num_key_value_heads=1)),
    "cohere": GQA | dict(use_qk_norm=False),  # whose rounding grows to 1e-4 in transformers' own float32
    "gpt2": dict(n_embd=64, n_head=2),
    "gpt_neox": HEADS,
    "opt": HEADS | dict(word_embed_proj_dim=64),
}


def make(family: str, **settings):
    return make_small(family, **SHAPES.get(family, {}) | settings)


def policy_of(family: str = "qwen3", **settings):
    """A policy as recipes have it: packed where its family is, with lean layers."""
    model = make(family, **settings)
    if FAMILIES[family].packed:
        model.set_attn_implementation("packed")
    lean(model)
    return model


def with_lora(model):
    """`model` with adapters that change it a good deal."""
    torch.manual_seed(5)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.5))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    return adapted.eval()


@pytest.fixture(scope="session")
def vllm_server():
    """The address of a server that many engines use in turn."""
    from posttrain.engines.vllm import wire
    from posttrain.engines.vllm.client import OwnServer

    with OwnServer(timeout=300.0) as process, pytest.MonkeyPatch.context() as patch:
        patch.setenv(wire.KEY, process.key)
        yield process.url


ENGINES = ["embedded", "transformers", "stand-in", *(["vllm", "vllm-server"] if HAS_VLLM else [])]  # make test-vllm


@pytest.fixture(params=ENGINES)
def engine_of(request):
    """Makes an engine over a policy. `stand-in` is the vLLM engine and its server over HTTP, without vLLM in it."""
    kind, name = request.param, request.param.partition("-")[0]
    with ExitStack() as resources:

        def made(policy, **settings):
            if kind == "stand-in":
                settings["vllm"] = VllmConfig(mode="server", base_url=resources.enter_context(standing_in()))
            elif kind == "vllm-server":
                settings["vllm"] = VllmConfig(mode="server", base_url=request.getfixturevalue("vllm_server"))
            if refusal := VLLM_REFUSES.get((kind, base_of(policy).config.model_type)):
                with pytest.raises((ModelError, VitalSignError), match=refusal):
                    make_engine("vllm", policy, **settings)
                pytest.skip("vLLM does not run this family here, and says so")
            engine = make_engine("vllm" if kind == "stand-in" or name == "vllm" else kind, policy, **settings)
            resources.callback(engine.close)
            return engine

        yield made


def tokens_of(groups):
    return [[completion.tokens for completion in group] for group in groups]


def trainer_logprobs(policy, prompt, group, temperature):
    """Those of the group's tokens by posttrain.scoring, from one pack."""
    tree = Node(prompt, children=tuple(Node(completion.tokens, True) for completion in group))
    [whole] = pack([Example((tree,), 0)], 1000)
    with torch.no_grad():
        return Scorer(policy)(whole, temperature=temperature).logprob_N


def assert_trainers(policy, prompts, groups, temperature):
    worst = 0.0
    for prompt, group in zip(prompts, groups, strict=True):
        got = torch.tensor([value for completion in group for value in completion.logprobs])
        worst = max(worst, (got - trainer_logprobs(policy, prompt, group, temperature)).abs().max().item())
    print(f"largest difference of a log-probability: {worst:.2e}")
    assert worst <= 1e-5


def test_the_record(engine_of):
    engine = engine_of(policy_of(), version=4)
    groups = engine.generate(PROMPTS, SAMPLED)
    assert [len(group) for group in groups] == [3] * len(PROMPTS)
    reasons = Counter()
    for completion in (completion for group in groups for completion in group):
        assert 1 <= len(completion.tokens) == len(completion.logprobs) <= 14
        assert all(value <= 0 for value in completion.logprobs) and completion.version == 4
        stops = [token in SAMPLED.stop_token_ids for token in completion.tokens]
        assert not any(stops[:-1]) and stops[-1] == (completion.finish_reason == "stop")
        assert stops[-1] or len(completion.tokens) == 14
        reasons[completion.finish_reason] += 1
    assert set(reasons) == {"stop", "length"}, "the prompts should show both ends"
    assert len({tuple(completion.tokens) for completion in groups[0]}) > 1, "completions of a group differ"
    assert engine.generate([], SAMPLED) == []


def test_prompts_are_given_as_they_finish(engine_of):
    """Each once, with the completions that the call returns, and the engine's time is shared among them."""
    engine, found = engine_of(policy_of()), []
    began = time.perf_counter()
    groups = engine.generate(PROMPTS, SAMPLED, finished=lambda index, group: found.append((index, list(group))))
    spent = time.perf_counter() - began
    assert sorted(index for index, _ in found) == list(range(len(PROMPTS)))
    assert all(groups[index] == group for index, group in found)
    seconds = [completion.seconds for group in groups for completion in group]
    assert min(seconds) > 0 and 0.5 * spent < sum(seconds) <= spent


def test_the_same_seed_gives_the_same_text(engine_of):
    engine = engine_of(policy_of())
    first = engine.generate(PROMPTS, SAMPLED)
    assert engine.generate(PROMPTS, SAMPLED) == first
    assert tokens_of(engine.generate(PROMPTS, replace(SAMPLED, seed=4))) != tokens_of(first)


def test_whatever_else_is_in_the_batch(engine_of):
    engine = engine_of(policy_of("gemma3_text"))
    seeds = [11, 22, 33, 44, 55]
    together = tokens_of(engine.generate(PROMPTS, SAMPLED, seeds=seeds))
    alone = [
        tokens_of(engine.generate([prompt], SAMPLED, seeds=[seed]))[0]
        for prompt, seed in zip(PROMPTS, seeds, strict=True)
    ]
    assert alone == together
    turned = tokens_of(engine.generate(PROMPTS[::-1], SAMPLED, seeds=seeds[::-1]))
    assert turned[::-1] == together
    fewer = tokens_of(engine.generate(PROMPTS, replace(SAMPLED, num_generations=2), seeds=seeds))
    assert fewer == [group[:2] for group in together]


@pytest.mark.parametrize("family", PACKED)
def test_engines_agree_while_rows_leave_and_enter(family):
    """A handful of rows at a time, lengths of their own: what the scheduler does changes no token, and logprobs are
    the trainer's."""
    policy = policy_of(family)
    prompts, limits = PROMPTS * 3, [[1 + (5 * i + 7 * j) % 14 for j in range(3)] for i in range(15)]
    sampling = replace(SAMPLED, stop_token_ids=())
    few = EmbeddedEngine(policy, max_rows=7).generate(prompts, sampling, limits=limits)
    assert [[len(completion.tokens) for completion in group] for group in few] == limits
    assert tokens_of(EmbeddedEngine(policy).generate(prompts, sampling, limits=limits)) == tokens_of(few)
    assert_trainers(policy, prompts, few, sampling.temperature)
    if family in ("qwen3", "gemma2", "opt"):
        plain = TransformersEngine(policy, max_rows=9).generate(prompts, sampling, limits=limits)
        assert tokens_of(plain) == tokens_of(few)


@pytest.fixture
def poisoned():
    """What `torch.empty` and its variants give is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("size", [8, 32])
@pytest.mark.parametrize("rows_step", [1, 4])
def test_the_cache_widens_while_rows_leave_and_enter(monkeypatch, poisoned, size, rows_step):
    """Every few columns, with keys number by number and token by token, with idle rows and without; what nothing has
    written is not looked at."""
    caches = []

    class Kept(Cache):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            caches.append(self)

    monkeypatch.setattr("posttrain.engines.cache.WIDTH_STEP", 4)
    monkeypatch.setattr("posttrain.engines.cache.FEWEST_COLUMNS", 1)
    monkeypatch.setattr("posttrain.engines.generation.FEWEST_COLUMNS", 1)
    monkeypatch.setattr("posttrain.engines.embedded.packed_weights", lambda policy, head: nullcontext(rows_step))
    monkeypatch.setattr("posttrain.engines.generation.Cache", Kept)
    policy = policy_of("qwen3", head_dim=size)
    rng = random.Random(1)
    prompts, limits = PROMPTS * 3, [[rng.randrange(1, 40) for _ in range(3)] for _ in range(15)]
    sampling = replace(SAMPLED, stop_token_ids=(), max_completion_length=40)
    for max_rows in (7, 12, 100):
        got = EmbeddedEngine(policy, max_rows=max_rows).generate(prompts, sampling, limits=limits)
        assert [[len(completion.tokens) for completion in group] for group in got] == limits
        assert_trainers(policy, prompts, got, sampling.temperature)
    assert [cache.steep for cache in caches] == [set()] * 3


@pytest.mark.parametrize("size", [8, 32])
@pytest.mark.parametrize(("window", "beyond"), [(None, 0), (30, 3)])
@pytest.mark.parametrize(
    ("sharp", "push", "is_steep"),
    [
        (1.0, 0.0, False),
        (6.0, 0.0, False),
        (1.0, 40.0, False),
        (1.0, -35.0, False),
        (40.0, 0.0, True),
        (1.0, 150.0, True),
        (1.0, -150.0, True),
    ],
)
def test_attention_to_logits_of_any_size(monkeypatch, size, sharp, push, is_steep, window, beyond):
    """Beside a dense softmax in float64, token after token: logits `sharp` times as far apart, `push` nats off 0.

    Prompt columns that are hidden are full of other numbers, and `beyond` own ones are looked at too early.
    """
    monkeypatch.setattr("posttrain.engines.cache.WIDTH_STEP", 16)
    torch.manual_seed(0)
    lengths, n, heads, each, steps = [5, 3], 2, 2, 2, 56
    rows, module, how = len(lengths) * n, nn.Module(), How(size**-0.5, 0.0, window, None)
    module.layer_idx = 0  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
    cache = Cache(Room(rows, len(lengths), n, max(lengths), steps + beyond))

    def keys(count: int) -> torch.Tensor:
        key = torch.randn(1, heads, count, size) * sharp
        key[..., 0] = push * size**0.5  # and the same number of a query is 1
        return key

    prompt_key, prompt_value = keys(sum(lengths)), torch.randn(1, heads, sum(lengths), size)
    layer = cache.layer(module, prompt_key)
    layer.prompt_key.fill_(1e3)
    layer.prompt_value.fill_(1e3)
    of_prompt = [slice(0, 5), slice(5, 8)]
    for group, (part, length) in enumerate(zip(of_prompt, lengths, strict=True)):
        layer.prompt_key[group, :, :length] = prompt_key[0, :, part]
        layer.prompt_value[group, :, :length] = prompt_value[0, :, part]
    own_key, own_value = torch.empty(1, heads, 0, rows, size), torch.empty(1, heads, 0, rows, size)
    group_R, member_R = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1])
    worst = 0.0
    for step in range(steps):
        cache.widen(rows, step + 1 + beyond)
        decoding = Decoding(
            cache,
            group_R,
            member_R,
            torch.arange(rows).view(len(lengths), n),
            torch.full((rows,), step),
            torch.tensor(lengths),
            torch.full((len(lengths),), step + 1),
            Shape(rows, len(lengths), n, max(lengths), step + 1 + beyond, even_prompts=False, even_ages=not beyond),
        )
        query, key, value = torch.randn(1, heads * each, rows, size), keys(rows), torch.randn(1, heads, rows, size)
        query[..., 0] = 1.0
        own_key, own_value = torch.cat([own_key, key[:, :, None]], 2), torch.cat([own_value, value[:, :, None]], 2)
        got = decoding.attend(module, query, key, value, how)
        for row in range(rows if step % 3 == 0 else 0):
            part = of_prompt[group_R[row]]
            seen = torch.cat([prompt_key[0, :, part], own_key[0, :, :, row]], 1).double().repeat_interleave(each, 0)
            values = torch.cat([prompt_value[0, :, part], own_value[0, :, :, row]], 1).double()
            logits = (query[0, :, row, None].double() * seen).sum(-1) * how.scaling
            logits[:, : -window if window else 0] = -math.inf
            want = (logits.softmax(-1)[..., None] * values.repeat_interleave(each, 0)).sum(1)
            worst = max(worst, (got[0, :, row] - want).abs().max().item())
    print(f"largest difference: {worst:.1e}")
    assert worst < 1e-6 * max(1.0, sharp, abs(push)), worst
    assert bool(cache.steep) == is_steep, "m = 0 is for logits near 0, and only for these"


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_logprobs_are_the_trainers(engine_of, family):
    policy = policy_of(family)
    assert_trainers(policy, PROMPTS, engine_of(policy).generate(PROMPTS, SAMPLED), SAMPLED.temperature)


@pytest.mark.parametrize("family", PACKED)
def test_greedy_is_transformers_greedy(engine_of, family):
    reference = make(family)
    sampling = Sampling(temperature=0.0, max_completion_length=12, stop_token_ids=(2,))
    groups = engine_of(policy_of(family)).generate(PROMPTS, sampling)
    for prompt, [completion] in zip(PROMPTS, groups, strict=True):
        row = torch.tensor([prompt])
        out = reference.generate(row, attention_mask=torch.ones_like(row), do_sample=False, max_new_tokens=12)
        assert completion.tokens == out[0, len(prompt) :].tolist()
    assert_trainers(policy_of(family), PROMPTS, groups, 1.0)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in PACKED])
def test_families_that_are_not_packed_or_recurrent(family):
    policy, reference = policy_of(family), make(family)
    with pytest.raises(ModelError, match=r"rollout\.engine: transformers"):
        EmbeddedEngine(policy)
    with pytest.raises(ModelError, match=r"the embedded engine (needs packed attention|caches only keys and values)"):
        Live(policy, None, lambda events: None)
    groups = TransformersEngine(policy).generate(PROMPTS, replace(SAMPLED, temperature=0.0, num_generations=1))
    for prompt, [completion] in zip(PROMPTS, groups, strict=True):
        logits = reference(torch.tensor([prompt + completion.tokens])).logits[0, len(prompt) - 1 : -1]
        assert completion.tokens == logits.argmax(-1).tolist()


def test_new_weights_change_output_and_version(engine_of):
    policy = policy_of()
    engine = engine_of(policy)
    before = engine.generate(PROMPTS, SAMPLED)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    engine.load(policy, version=1)
    after = engine.generate(PROMPTS, SAMPLED)
    assert {completion.version for group in after for completion in group} == {1}
    assert tokens_of(after) != tokens_of(before)
    assert_trainers(policy, PROMPTS, after, SAMPLED.temperature)


def test_a_prompt_is_prefilled_once_and_finished_rows_cost_nothing(monkeypatch):
    """Tokens that go through the model: every prompt's once, every completion's but the last (padding aside)."""
    monkeypatch.setattr("posttrain.engines.generation.width_step", lambda device, budget: None)
    policy, fed = policy_of(), []
    policy.get_input_embeddings().register_forward_hook(lambda module, given, out: fed.append(given[0].numel()))
    groups = EmbeddedEngine(policy, max_rows=8).generate(PROMPTS, replace(SAMPLED, num_generations=4))
    sampled = [len(completion.tokens) for group in groups for completion in group]
    assert sum(fed) == sum(map(len, PROMPTS)) + sum(sampled) - len(sampled)


@pytest.mark.parametrize(
    "filters", [dict(top_k=5), dict(top_p=0.6), dict(min_p=0.2), dict(top_k=20, top_p=0.8, min_p=0.05, temperature=1.7)]
)
def test_filters_are_transformers_warpers(filters):
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    from posttrain.engines.sampling import process

    sampling = Sampling(**filters)
    torch.manual_seed(0)
    logits = want = 3 * torch.randn(50, VOCAB)
    warpers = [TemperatureLogitsWarper(sampling.temperature)] if sampling.temperature != 1 else []
    warpers += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    warpers += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    warpers += [MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
    for warper in warpers:
        want = warper(torch.zeros(50, 1), want)
    torch.testing.assert_close(process(logits.clone(), sampling), want)
    assert (want == -math.inf).any()


def test_logprobs_are_of_the_processed_distribution(engine_of):
    """With filters they are those of the tokens left, renormalised, and no other token is sampled."""
    policy = policy_of()
    sampling = replace(SAMPLED, top_k=6, top_p=0.9, min_p=0.02, stop_token_ids=())
    groups = engine_of(policy).generate(PROMPTS, sampling)
    reference = make("qwen3")
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            logits = reference(torch.tensor([prompt + completion.tokens])).logits[0, len(prompt) - 1 : -1]
            for row, token, logprob in zip(logits.detach(), completion.tokens, completion.logprobs, strict=True):
                assert logprob == pytest.approx(by_hand(row, sampling)[token], abs=1e-5)


def by_hand(logits, sampling) -> dict[int, float]:
    """Log-probabilities of the tokens that temperature, top_k, top_p and min_p leave, in plain Python."""
    p = (logits / sampling.temperature).softmax(-1).tolist()
    order = sorted(range(len(p)), key=lambda i: -p[i])[: sampling.top_k]
    total, kept, before = sum(p[i] for i in order), [], 0.0
    for i in order:
        if before / total < sampling.top_p:
            kept.append(i)
        before += p[i]
    kept = [i for i in kept if p[i] >= sampling.min_p * p[kept[0]]]
    total = sum(p[i] for i in kept)
    return {i: math.log(p[i] / total) for i in kept}


def test_tokens_come_as_often_as_they_are_likely(engine_of):
    """First tokens of 4,000 completions against their probabilities: chi-square over the likelier ones."""
    policy, prompt, n = policy_of("llama"), PROMPTS[0], 4000
    sampling = Sampling(temperature=2.0, max_completion_length=2, num_generations=n)
    [group] = engine_of(policy).generate([prompt], sampling)
    logits = make("llama")(torch.tensor([prompt])).logits[0, -1] / 2.0
    expected = n * logits.detach().softmax(-1)
    found = torch.bincount(torch.tensor([completion.tokens[0] for completion in group]), minlength=VOCAB)
    common = expected >= 5
    chi2 = ((found - expected) ** 2 / expected)[common].sum().item()
    freedom = int(common.sum())
    print(f"chi-square {chi2:.1f} with {freedom} degrees of freedom")
    assert freedom >= 5 and chi2 < freedom + 5 * math.sqrt(2 * freedom)
    # The second token is sampled anew: completions that begin alike continue differently.
    starts = Counter(completion.tokens[0] for completion in group)
    likeliest = starts.most_common(1)[0][0]
    assert len({completion.tokens[1] for completion in group if completion.tokens[0] == likeliest}) > 3


def test_stop_texts(engine_of, shared):
    tokenizer = AutoTokenizer.from_pretrained(shared / "tokenizers" / "minimind6400")
    policy = policy_of(vocab_size=len(tokenizer))
    free = replace(SAMPLED, stop_token_ids=(), max_completion_length=20, num_generations=2)
    engine = engine_of(policy, tokenizer=tokenizer)
    whole = engine.generate(PROMPTS, free)
    pairs = [tokenizer.decode(whole[0][0].tokens[start : start + 2]) for start in range(3, 15)]
    text = next(pair for pair in pairs if "\ufffd" not in pair)[:-1]  # it ends within the text of a token
    stopped = engine.generate(PROMPTS, replace(free, stop=(text, "no such text")))
    seen = 0
    for was, now in zip((c for g in whole for c in g), (c for g in stopped for c in g), strict=True):
        ends = [end for end in range(1, 21) if text in tokenizer.decode(was.tokens[:end])]
        size = ends[0] if ends else 20
        assert now.tokens == was.tokens[:size] and now.logprobs == pytest.approx(was.logprobs[:size], abs=1e-5)
        assert now.finish_reason == ("stop" if ends else "length")
        seen += bool(ends)
    assert seen
    with pytest.raises(ConfigError, match="need a tokenizer"):
        engine_of(policy).generate(PROMPTS, replace(free, stop=("x",)))


def test_stop_texts_that_begin_a_completion(engine_of, shared):
    """With a SentencePiece tokenizer, whose decoder strips the first space: a stop string is found at the first token,
    among bytes, and never in the prompt."""
    stories = shared / "models/stories260K"
    tokenizer = AutoTokenizer.from_pretrained(stories)
    policy = load_model(ModelConfig(path=str(stories)), "lm", torch.float32, torch.device("cpu"))
    greedy = Sampling(temperature=0, max_completion_length=4, stop=(" was", "\U0001f999"))
    engine = engine_of(policy, tokenizer=tokenizer)
    ids = tokenizer("Once upon a time, there was").input_ids
    [[done], [other]] = engine.generate([ids[:-1], ids], greedy)
    assert (done.tokens, done.finish_reason) == (ids[-1:], "stop") and text_of(done, (), tokenizer, ids[:-1]) == " was"
    assert (len(other.tokens), other.finish_reason) == (4, "length")
    assert text_of(other, (), tokenizer, ids) == " a little gir"


WRITTEN = "Hello, one two. Caf\u00e9 \u4f60\u597d \U0001f642\U0001f999 all  spaces\n\n \ufffd end"


@pytest.mark.parametrize(
    "name", ["models/stories260K", "tokenizers/gpt2", "tokenizers/qwen3", "tokenizers/minimind6400"]
)
def test_a_text_continues_its_prompt(shared, name):
    """Cut anywhere: prompt and completion together are the text. Of any tokens, also those that are no characters,
    pieces are the whole, and none takes more than one character's tokens."""
    tokenizer, draw = AutoTokenizer.from_pretrained(shared / name), random.Random(0)
    written, tokens = "", tokenizer(WRITTEN, add_special_tokens=False).input_ids
    begin = tokenizer("", add_special_tokens=True).input_ids
    for cut in range(len(tokens)):
        after = text_of(Completion(tokens[cut:], [], "length", 0), (), tokenizer, begin + tokens[:cut])
        assert (
            WRITTEN.endswith(after)
            and "".join(text for _, text in pieces(tokens[cut:], tokenizer, tokens[:cut])) == after
        )
        before = tokenizer.decode(begin + tokens[:cut], skip_special_tokens=True)
        assert before + after == WRITTEN or (before.endswith(LOST) and WRITTEN.startswith(before.rstrip(LOST)))
        written = max(written, after, key=len)
    assert written == WRITTEN
    for _ in range(60):
        some = [draw.randrange(draw.choice([300, len(tokenizer)])) for _ in range(30)]
        whole = Pieces(tokenizer, some[:8]).whole(some[8:])
        reader = Pieces(tokenizer, some[:8])
        parts = [(reader.add(token), reader.open) for token in some[8:]]
        assert "".join(text for text, _ in parts) + reader.rest() == whole and max(left for _, left in parts) < 8
        with_prompt = tokenizer.decode(some, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert LOST in with_prompt or with_prompt.endswith(whole)


def test_special_tokens_are_no_text_before_others(shared):
    """The space after them stays, whatever their number."""
    tokenizer = AutoTokenizer.from_pretrained(shared / "models/stories260K")
    was, end = tokenizer.convert_tokens_to_ids("\u2581was"), tokenizer.eos_token_id
    girl = tokenizer("a girl").input_ids
    for tokens in ([was, end, was], [end, end, was, was], [end] * 40 + [was, was]):
        done = Completion(tokens, [], "length", 0)
        assert text_of(done, (), tokenizer, girl) == text_of(done, (), tokenizer, girl + [end] * 20) == " was was"
        shown = [text for _, text in pieces(tokens, tokenizer, girl)]
        assert shown == ["</s>" if token == end else " was" for token in tokens]


def test_adapters_on_and_off(engine_of):
    base = tokens_of(engine_of(policy_of()).generate(PROMPTS, SAMPLED))
    policy = with_lora(policy_of())
    engine = engine_of(policy)
    policy.train()  # as a recipe may leave it: dropout is off while the engine samples, and on again afterwards
    adapted = engine.generate(PROMPTS, SAMPLED)
    assert all(module.training for module in policy.modules())
    policy.eval()
    assert tokens_of(adapted) != base
    assert_trainers(policy, PROMPTS, adapted, SAMPLED.temperature)
    with policy.disable_adapter():
        assert tokens_of(engine.generate(PROMPTS, SAMPLED)) == base
    assert base_of(policy).config._attn_implementation == "packed"


def test_limits_of_positions(engine_of):
    """A completion ends where the model's positions do; a prompt that leaves none is named."""
    engine = engine_of(policy_of("gpt2", n_positions=16))
    sampling = replace(SAMPLED, stop_token_ids=(), num_generations=1, max_completion_length=12)
    groups = engine.generate([[3] * 10, [4] * 3, [5] * 16], sampling)
    assert [len(group[0].tokens) for group in groups] == [7, 12, 1]
    with pytest.raises(DataError, match=r"prompt 1 has 17 tokens and the model 16 positions.*max_prompt_length"):
        engine.generate([[3], [3] * 17], sampling)


@pytest.mark.parametrize(
    ("prompt", "message"), [([], "prompt 1 is empty"), ([3, VOCAB], f"token id {VOCAB}.*different")]
)
def test_bad_prompts_are_named(engine_of, prompt, message):
    with pytest.raises(DataError, match=message):
        engine_of(policy_of()).generate([[3], prompt], SAMPLED)


def test_weights_that_are_not_finite(engine_of):
    policy = policy_of()
    policy.lm_head.weight.data[5] = math.nan
    with pytest.raises(VitalSignError, match="not finite"):
        engine_of(policy).generate(PROMPTS, SAMPLED)


@pytest.mark.parametrize(
    "wrong", [dict(temperature=-1.0), dict(top_p=0.0), dict(num_generations=0), dict(max_completion_length=0)]
)
def test_bad_sampling_is_named(wrong):
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} is"):
        Sampling(**wrong)


def test_streams_are_one_and_the_same_everywhere():
    """The numbers of the race by plain Python integers; and apart streams, places and tokens they are unrelated."""
    from posttrain.engines import seed_of
    from posttrain.engines.sampling import exponentials, keys, token_words

    def mix(x):
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            x = (x ^ x >> shift) * factor % 2**32
        return x ^ x >> 16

    key = keys([(3, 0), (3, 1), (2**40, 0)], torch.device("cpu"))
    place = torch.tensor([0, 5, 70000])
    got = exponentials(token_words(200, key.device), key, place)
    for row, token in ((0, 0), (1, 17), (2, 199), (2, 3)):
        first, second = (int(word) % 2**32 for word in key[row])
        start = mix((first + int(place[row]) * 0x9E3779B9) % 2**32)
        x = mix(token + 1) ^ start
        x = (x ^ x >> 16) * 0x7FEB352D % 2**32
        x ^= start * 0x846CA68B % 2**32 ^ second
        x = (x ^ x >> 15) * 0x846CA68B % 2**32
        x = (x ^ x >> 16) & 0x7FFFFFFF
        assert got[row, token].item() == pytest.approx(-math.log1p(-min((x + 0.5) / 2**31, 1 - 2**-24)), rel=1e-5)

    assert len({seed_of(*parts) for parts in [(), (0,), (1,), (0, 1), (1, 0), (0, 0, 1)]}) == 6
    many = keys([(seed, number) for seed in range(20) for number in range(10)], torch.device("cpu"))
    table = torch.stack([exponentials(token_words(100, many.device), many, torch.full((200,), p)) for p in range(20)])
    assert table.mean().item() == pytest.approx(1.0, abs=0.01) and table.std().item() == pytest.approx(1.0, abs=0.02)
    below = (table < math.log(2)).float() * 2 - 1  # a fair coin each
    for axis in range(3):
        beside = (below * below.roll(1, axis)).mean().item()
        assert abs(beside) < 4 / math.sqrt(below.numel()), f"neighbours along axis {axis} are related: {beside}"


def test_every_packed_family_is_here():
    assert set(PACKED) <= set(CONFIGS)
