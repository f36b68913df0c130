"""Conversations on an engine continue from what is computed: the same replies as from the whole conversation again."""

import threading
from concurrent.futures import Future

import pytest
import torch
from test_engines import PROMPTS, policy_of

from posttrain.base.errors import DataError
from posttrain.batch import Example, Node, pack
from posttrain.engines import EmbeddedEngine, Sampling, TransformersEngine, generation
from posttrain.engines.protocol import seed_of
from posttrain.engines.turns import Turn, converse
from posttrain.scoring import Scorer

SAMPLED = Sampling(temperature=0.8, max_completion_length=9, stop_token_ids=(7, 19), seed=3)
FAMILIES = ["qwen3", "llama", "gpt2", "mistral", "gemma2", "gemma3_text", "phi3", "qwen3_moe", "cohere2"]
TURNS, COPIES = 4, 3


def held(engine, delay=None, sampling=SAMPLED):
    """Conversations of TURNS replies: by prompt and number, the tokens with who wrote each, and log-probabilities."""
    keys = [(index, number) for index in range(len(PROMPTS)) for number in range(COPIES)]
    talks = {key: ([*PROMPTS[key[0]]], [], [], []) for key in keys}

    def future_of(key, context, turns):
        future = Future()
        turn = Turn(context, seed_of(5, *key, turns), sampling.max_completion_length)
        if delay is None:
            future.set_result(turn)
        else:
            threading.Timer(delay(*key), future.set_result, [turn]).start()
        return future

    def follow(index, reply):
        key = keys[index]
        tokens, sampled, logprobs, turns = talks[key]
        sampled += [False] * (len(tokens) - len(sampled)) + [True] * len(reply.tokens)
        tokens += reply.tokens
        logprobs += reply.logprobs
        turns.append(len(reply.tokens))
        if len(turns) == TURNS or key == (1, 1):
            return None
        context = [(key[0] * 7 + key[1] * 3 + k * len(turns)) % 50 + 1 for k in range(1, 2 + key[1] * 2)]
        tokens += context
        return future_of(key, context, len(turns))

    begun = [future_of(key, PROMPTS[key[0]], 0) for key in keys]
    converse(engine, begun, sampling, follow=follow, longest=100)
    return talks


class Again(TransformersEngine):
    """The embedded engine without its conversations: every turn is a new prompt."""

    def __init__(self, policy):
        self.engine, self.version = EmbeddedEngine(policy), 0

    def generate(self, *args, **more):
        return self.engine.generate(*args, **more)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_continues_as_from_the_whole(family):
    policy = policy_of(family)
    talks, again = held(EmbeddedEngine(policy)), held(Again(policy))
    assert len(talks) == len(PROMPTS) * COPIES
    assert {key: talk[0] for key, talk in talks.items()} == {key: talk[0] for key, talk in again.items()}
    worst = max(abs(a - b) for key in talks for a, b in zip(talks[key][2], again[key][2], strict=True))
    assert worst < 2e-5, worst


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_its_log_probabilities_are_those_of_the_scorer(family):
    policy = policy_of(family)
    for tokens, sampled, logprobs, _ in held(EmbeddedEngine(policy)).values():
        sampled += [False] * (len(tokens) - len(sampled))
        [packed] = pack([Example((Node(tokens, trained=sampled),), 0)], 4096)
        scores = Scorer(policy)(packed, SAMPLED.temperature).logprob_N
        assert torch.allclose(scores, torch.tensor(logprobs), atol=2e-5)


def test_slow_tools_change_nothing_and_hold_nobody_else_back():
    """The order in which tools answer decides which conversations share a step, and no token."""
    policy = policy_of("qwen3")
    plain = held(EmbeddedEngine(policy))
    slow = held(EmbeddedEngine(policy), delay=lambda index, number: 0.3 if index == 0 else 0.01 * number)
    few = held(EmbeddedEngine(policy, max_rows=3), delay=lambda index, number: 0.02 * number)
    small = held(EmbeddedEngine(policy, cache_bytes=1))
    for other in (slow, few, small):
        assert {key: talk[0] for key, talk in plain.items()} == {key: talk[0] for key, talk in other.items()}


def test_no_token_is_computed_twice(monkeypatch):
    monkeypatch.setattr(
        generation, "width_step", lambda *_: None
    )  # whether prefills are padded depends on the processor
    policy, fed = policy_of("qwen3"), []
    policy.model.embed_tokens.register_forward_hook(lambda module, given, out: fed.append(given[0].numel()))
    engine = EmbeddedEngine(policy)
    talks = held(engine, sampling=SAMPLED)
    once = sum(fed)
    fed.clear()
    held(Again(policy))
    prompts = sum(map(len, PROMPTS))
    unique = prompts + sum(len(talk[0]) - len(PROMPTS[index]) - 1 for (index, _), talk in talks.items())
    assert once <= 1.1 * unique
    assert sum(fed) > 2 * once, "the whole conversation again at each turn"


def test_the_transformers_engine_holds_the_same_conversations():
    policy = policy_of("qwen3")
    plain = held(EmbeddedEngine(policy))
    other = held(TransformersEngine(policy))
    assert {key: talk[0] for key, talk in plain.items()} == {key: talk[0] for key, talk in other.items()}


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        (Turn([3] * 60, 1, 4), "has 67 tokens before a reply of up to 4; there is room for 40"),
        (Turn([3], 1, 500), "a reply of up to 500; there is room for 40 and 32"),
        (Turn([10**6], 1, 4), "prompt 0 has the token id 1000000"),
    ],
)
def test_a_turn_without_room_is_an_error(turn, message):
    def future_of(turn):
        future = Future()
        future.set_result(turn)
        return future

    begun = [future_of(Turn([5, 9, 11], 1, 4))]
    with pytest.raises(DataError, match=message):
        converse(
            EmbeddedEngine(policy_of()), begun, Sampling(max_completion_length=4),
            follow=lambda index, reply: future_of(turn), longest=40,
        )  # fmt: skip
