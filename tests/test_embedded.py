"""The embedded engine's memory and its static shapes: one budget, what is kept between calls, recordings, bfloat16."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch._dynamo
import torch._inductor
from test_engines import PROMPTS, SAMPLED, assert_trainers, policy_of, tokens_of, trainer_logprobs, with_lora
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoTokenizer, Qwen3Config

from posttrain.base.errors import VitalSignError
from posttrain.config.schema.model import ModelConfig
from posttrain.engines import EmbeddedEngine, Sampling
from posttrain.engines.attention import Shape
from posttrain.engines.cache import Cache, Room, cache_tokens, token_bytes
from posttrain.engines.decode import Recordings, StaticStepper
from posttrain.engines.sampling import sample_tokens
from posttrain.models.load import load_model
from posttrain.models.matmul import float32_product

CPU = torch.device("cpu")


def test_prompts_and_completions_have_one_budget():
    """1,024 prompts of 1,000 tokens would fill 112 GiB; and wherever one completion fits, the room is in the budget."""
    qwen = Qwen3Config(num_hidden_layers=28, num_key_value_heads=8, head_dim=128)
    a_token = token_bytes(qwen, torch.bfloat16, torch.device("cuda", 0))
    assert a_token == 28 * 2 * 8 * 128 * 2
    assert token_bytes(qwen, torch.bfloat16, CPU) == 2 * a_token  # float32 there
    tokens = cache_tokens(qwen, torch.bfloat16, torch.device("cuda", 0), 20 << 30)
    room = Room.of(1024, 1, 1000, 512, max_rows=512, tokens=tokens)
    print(f"{room}: {room.tokens * a_token / 2**30:.1f} GiB")
    assert 19 << 30 < room.tokens * a_token <= 20 << 30
    rng = random.Random(0)
    for _ in range(2000):
        prompts, n, longest, own = (rng.randrange(1, most) for most in (200, 70, 3000, 3000))
        max_rows, tokens = rng.randrange(1, 600), rng.randrange(longest + own, 1 << rng.randrange(13, 22))
        room = Room.of(prompts, n, longest, own, max_rows=max_rows, tokens=tokens)
        assert room.tokens <= tokens and 1 <= room.members <= room.rows <= min(prompts * n, max_rows)
        assert 1 <= room.groups <= prompts * -(-n // room.members)
        assert (
            room.rows == min(prompts * n, max_rows) or room.tokens + 4 * max(longest, own) * room.members > tokens / 2
        )


@pytest.mark.slow
@pytest.mark.parametrize("static", [False, True])
def test_the_budget_changes_no_token(monkeypatch, static):
    """From room for all to room for one completion at a time, groups divided; and the budget is kept."""
    monkeypatch.setattr("posttrain.engines.cache.COLUMNS", 8)
    policy, prompts = policy_of("qwen3"), PROMPTS * 3
    rooms = []
    monkeypatch.setattr(Cache, "__init__", noting(Cache.__init__, rooms))
    a_token = token_bytes(policy.config, torch.float32, CPU)
    sampling = replace(SAMPLED, num_generations=5)
    want = EmbeddedEngine(policy).generate(prompts, sampling)
    for tokens in (4000, 250, 16 + 32):
        got = EmbeddedEngine(policy, static=static, cache_bytes=tokens * a_token).generate(prompts, sampling)
        assert tokens_of(got) == tokens_of(want)
        assert_trainers(policy, prompts, got, sampling.temperature)
        taken = sum(side.nbytes for sides in rooms[-1].buffers.layers.values() for side in sides)
        print(f"{tokens} tokens: {rooms[-1].room}, {taken:,} bytes")
        assert taken <= tokens * a_token
    assert rooms[-1].room.members == rooms[-1].room.rows <= 2


def noting(method, made: list):
    """The method, whose first argument is kept in `made`."""

    def noted(self, *args, **kwargs):
        made.append(self)
        return method(self, *args, **kwargs)

    return noted


@pytest.mark.parametrize("budget", [None, 900])
def test_a_resumed_run_has_the_same_shapes(monkeypatch, budget):
    """Shapes are those of the call, whatever earlier calls have sampled."""
    monkeypatch.setattr("posttrain.engines.cache.COLUMNS", 16)
    policy, shapes = policy_of("qwen3"), []
    step = StaticStepper.step
    monkeypatch.setattr(
        StaticStepper, "step", lambda self, state, cache, shape: (shapes.append(shape), step(self, state, cache, shape))
    )
    budget = budget and budget * token_bytes(policy.config, torch.float32, CPU)

    def last_call(*earlier: tuple[list, Sampling]) -> tuple[list, list]:
        engine = EmbeddedEngine(policy, static=True, cache_bytes=budget)
        for prompts, sampling in earlier:
            engine.generate(prompts, sampling)
        shapes.clear()
        groups = engine.generate(PROMPTS, SAMPLED)
        return list(shapes), groups

    longer = [[5] * 40, *PROMPTS * 2]
    alone = last_call()
    assert (
        last_call((longer, SAMPLED), (PROMPTS, replace(SAMPLED, num_generations=1, max_completion_length=40))) == alone
    )
    assert last_call((PROMPTS[:2], replace(SAMPLED, max_completion_length=5))) == alone


def test_what_is_kept_lies_in_one_memory():
    """Training and evaluation in turn keep a state each, over the same keys and values; `release` gives all back."""
    policy = policy_of("qwen3")
    engine = EmbeddedEngine(policy, static=True)
    one = replace(SAMPLED, num_generations=1, temperature=0.0)
    want = [EmbeddedEngine(policy).generate(PROMPTS, sampling) for sampling in (SAMPLED, one)]
    engine.generate([[5] * 40, *PROMPTS * 2], SAMPLED)
    for _ in range(2):
        got = [engine.generate(PROMPTS, sampling) for sampling in (SAMPLED, one)]
        assert [tokens_of(groups) for groups in got] == [tokens_of(groups) for groups in want]
    first, second = engine._kept.memories.values()
    assert (first.room.members, second.room.members) == (3, 1)
    assert first.cache.buffers is second.cache.buffers
    stepper = first.stepper
    engine.release()
    assert not engine._kept.memories and not engine._kept._buffers.layers
    engine.generate(PROMPTS, SAMPLED)
    assert next(iter(engine._kept.memories.values())).stepper is stepper, "what was compiled serves again"


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_static_shapes_draw_the_same(family):
    """What a GPU records, run plainly: rounded shapes, rows without a use, checks every few steps, memory kept."""
    policy, sampling = policy_of(family), replace(SAMPLED, stop_token_ids=(7,))
    want = EmbeddedEngine(policy).generate(PROMPTS * 2, sampling)
    engine = EmbeddedEngine(policy, max_rows=9, static=True)
    got = engine.generate(PROMPTS * 2, sampling)
    assert tokens_of(got) == tokens_of(want)
    assert_trainers(policy, PROMPTS * 2, got, sampling.temperature)
    held = dict(engine._kept.memories)
    again = engine.generate(PROMPTS[:3], replace(sampling, seed=9, max_completion_length=5))
    assert engine._kept.memories == held, "a smaller call is served by the memory that is there"
    assert tokens_of(again) == tokens_of(
        EmbeddedEngine(policy).generate(PROMPTS[:3], replace(sampling, seed=9, max_completion_length=5))
    )


def test_a_call_of_fewer_groups_in_memory_of_more():
    """What an earlier call left in the places of groups and rows that a later one has not is not looked at."""
    policy, sampling = policy_of("qwen3"), replace(SAMPLED, num_generations=3, stop_token_ids=())
    engine = EmbeddedEngine(policy, static=True)
    rng = random.Random(0)
    for count, shortest in ((8, 20), (5, 20), (7, 1), (3, 1)):
        prompts = [[rng.randrange(3, 40) for _ in range(rng.randrange(1, 6))] for _ in range(count)]
        limits = [[rng.randrange(shortest, 21) for _ in range(3)] for _ in range(count)]
        got = engine.generate(prompts, sampling, limits=limits)
        assert tokens_of(got) == tokens_of(EmbeddedEngine(policy).generate(prompts, sampling, limits=limits))


def test_numbers_that_were_not_finite_are_not_kept():
    """After an error the static memory is made anew: a NaN in a key would outlast every mask."""
    policy = policy_of("qwen3")
    engine = EmbeddedEngine(policy, static=True)
    want = engine.generate(PROMPTS, SAMPLED)
    layer = policy.model.layers[0].self_attn.v_proj.weight
    good = layer.detach().clone()
    with torch.no_grad():
        layer.fill_(torch.nan)
    with pytest.raises(VitalSignError):
        engine.generate(PROMPTS, SAMPLED)
    with torch.no_grad():
        layer.copy_(good)
    assert tokens_of(engine.generate(PROMPTS, SAMPLED)) == tokens_of(want)


def recorded(monkeypatch) -> list[Shape]:
    """The shapes that would be recorded on a GPU, as they are; a step is run in place of a replay."""
    made = []

    def step(self, state, cache, shape):
        if (self, shape) not in self.recordings.graphs:
            made.append(shape)
            self.recordings.graphs[self, shape] = object()
        super(StaticStepper, self).step(state, cache, shape)

    monkeypatch.setattr(StaticStepper, "step", step)
    return made


def test_a_recording_is_replayed_with_what_it_was_made_with_only(monkeypatch):
    """Weights at the same addresses and the same adapters; others are recorded anew."""
    made = recorded(monkeypatch)
    policy = with_lora(policy_of("qwen3"))
    engine = EmbeddedEngine(policy, static=True)

    def count() -> int:
        made.clear()
        engine.generate(PROMPTS, SAMPLED)
        return len(made)

    assert count() and not count()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.01)  # an update in place
    assert not count()
    with policy.disable_adapter():
        assert count() and not count()
    assert count() and not count()
    weight = policy.get_base_model().model.layers[0].mlp.up_proj.weight
    weight.data = weight.data.clone()
    assert count() and not count()
    policy.merge_adapter()
    assert count()
    engine.generate(PROMPTS, replace(SAMPLED, temperature=0.0))
    assert not count(), "another way of drawing has recordings of its own"


def test_one_compilation_serves_every_shape(monkeypatch):
    """The number of rows is a symbol in what torch.compile makes of sampling, without a break."""
    torch._dynamo.reset()
    counter, whole = CompileCounterWithBackend("eager"), partial(torch.compile, fullgraph=True)
    monkeypatch.setattr(torch, "compile", lambda function, **given: whole(function, backend=counter, **given))
    policy, sampling = policy_of("qwen3", num_hidden_layers=1, layer_types=None), replace(SAMPLED, top_k=5, top_p=0.9)
    stepper = StaticStepper(policy, sampling, CPU, Recordings(), compiled=True)
    for rows in (64, 8, 32):
        logits = torch.randn(rows, len(stepper.words_V))
        given = sampling, stepper.words_V, torch.randint(99, (rows, 2), dtype=torch.int32), torch.arange(rows)
        before = logits.clone()
        got, want = stepper.sample(logits, *given), sample_tokens(logits.clone(), *given)
        assert torch.equal(logits, before)
        torch.testing.assert_close(got, want)
    assert counter.frame_count == 1


@pytest.mark.slow
def test_compiled_sampling_is_sampling(monkeypatch):
    """Inductor's code for it gives the tokens and log-probabilities of single operations."""
    policy, sampling = policy_of("qwen3"), replace(SAMPLED, stop_token_ids=(7,))
    want = EmbeddedEngine(policy, static=True).generate(PROMPTS, sampling)
    init = StaticStepper.__init__
    monkeypatch.setattr(StaticStepper, "__init__", lambda self, *given: init(self, *given[:-1], True))
    got = EmbeddedEngine(policy, static=True).generate(PROMPTS, sampling)
    assert tokens_of(got) == tokens_of(want)


@pytest.mark.parametrize("bias", [False, True])
def test_products_in_float32_of_bfloat16(bias):
    torch.manual_seed(0)
    layer = torch.nn.Linear(256, 700, bias).bfloat16()
    x = (4 * torch.randn(30, 256)).bfloat16()
    got = float32_product(x, layer.weight, layer.bias)
    want = torch.nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
    print(f"largest difference: {(got - want).abs().max():.1e}, rounded: {(layer(x) - want).abs().max():.1e}")
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("static", [False, True])
def test_engine_and_trainer_agree_in_bfloat16(shared, static):
    """The same completions through both: RMS of the differences of log-probabilities at most 0.03 nats."""
    path = str(shared / "models" / "stories260K")
    policy = load_model(ModelConfig(path=path, dtype="bfloat16"), "lm", torch.bfloat16, CPU)
    tokenizer = AutoTokenizer.from_pretrained(path)
    starts = ("Once upon a time there was a little girl", "One day, Tim and Sue went to", "The dog was sad because")
    prompts = [tokenizer(start).input_ids for start in starts]
    groups = EmbeddedEngine(policy, static=static).generate(
        prompts, Sampling(num_generations=8, max_completion_length=60)
    )
    difference = torch.cat(
        [
            torch.tensor([value for completion in group for value in completion.logprobs])
            - trainer_logprobs(policy, prompt, group, 1.0)
            for prompt, group in zip(prompts, groups, strict=True)
        ]
    )
    rms = difference.square().mean().sqrt().item()
    print(f"{len(difference)} tokens: RMS {rms:.4f}, largest {difference.abs().max():.3f}")
    assert rms <= 0.03
