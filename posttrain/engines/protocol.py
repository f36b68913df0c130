"""What all engines share: the interface (token ids in, completions out), and the rules for where completions end.

    engine.generate(prompts, sampling) -> completions of each prompt
    engine.load(policy, version)       from now on completions come from these weights and carry this version

Training uses exactly the sampled tokens: a completion contains them, and the log-probability of each token under the
distribution that it was sampled from. Prompts are tokenised elsewhere.
"""

from __future__ import annotations

import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Literal

from torch import nn
from transformers import PreTrainedTokenizerBase

from posttrain.base.errors import ConfigError, DataError, VitalSignError
from posttrain.base.pieces import Pieces
from posttrain.data.prompts import end_of_turn
from posttrain.models.families import base_of, eos_token_ids, positions_of, vocabulary_of

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How completions are sampled. The filters apply in transformers' order: temperature, top_k, top_p, min_p.
    `temperature` 0 is greedy decoding, with log-probabilities at temperature 1."""

    temperature: float = 1.0
    top_p: float = 1.0  # smallest set of most likely tokens with this total probability; 1: all
    top_k: int = 0  # number of most likely tokens; 0: all
    min_p: float = 0.0  # minimum probability, relative to that of the most likely token; 0: all
    max_completion_length: int = 512  # tokens, including the stop token
    num_generations: int = 1  # completions of each prompt
    stop_token_ids: tuple[int, ...] = ()  # a completion ends after one of these tokens
    stop: tuple[str, ...] = ()  # or after the token that completes one of these strings
    seed: int = 0

    def __post_init__(self) -> None:
        for is_valid, name, wanted in (
            (self.temperature >= 0, "temperature", "0 (greedy) or more"),
            (0 < self.top_p <= 1, "top_p", "above 0 and at most 1"),
            (self.top_k >= 0, "top_k", "0 (off) or more"),
            (0 <= self.min_p <= 1, "min_p", "from 0 (off) to 1"),
            (self.max_completion_length >= 1, "max_completion_length", "1 or more"),
            (self.num_generations >= 1, "num_generations", "1 or more"),
            (all(self.stop), "stop", "non-empty strings"),
        ):
            if not is_valid:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be {wanted}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion. `logprobs` are of the processed distribution: after temperature and filters, renormalised."""

    tokens: list[int]  # at least one token; without the prompt, with the stop token
    logprobs: list[float]  # nats, one per token
    finish_reason: FinishReason  # a stop token or string, or the length limit
    version: int  # version of the weights that it was sampled from
    seconds: float = field(default=0.0, compare=False)  # the completion's share of the engine's time


Completed = list[list[Completion]]  # the completions of each prompt
Finished = Callable[[int, list[Completion]], None]  # takes the index of a prompt, and its completions


class Engine(ABC):
    """Generates completions. A completion's random stream depends only on its prompt's seed and its number: in float32
    the same seed gives the same tokens, whatever the other requests are."""

    policy: nn.Module
    version: int

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        seeds: Sequence[int] | None = None,
        limits: Sequence[Sequence[int]] | None = None,
        finished: Finished | None = None,
    ) -> Completed:
        """Return `sampling.num_generations` completions of every prompt, in order.

        `seeds`: one per prompt; by default derived from `sampling.seed` and the prompt's index. `limits`: a limit for
        every completion of every prompt, at most `max_completion_length`. Completions of a long prompt are limited by
        the model's remaining positions. `finished` is called once for each prompt, when all its completions are
        finished; prompts finish in any order.

        Raises DataError for a prompt that is empty, has ids outside the vocabulary, or leaves no room for a completion.
        """
        return self._completed(checked_requests(prompts, sampling, seeds, limits, *self._sizes), sampling, finished)

    @property
    def _sizes(self) -> tuple[int, int | None]:
        """The number of token ids, and of positions (None: no limit), of the model."""
        base = base_of(self.policy)
        return vocabulary_of(base), positions_of(base.config)

    @abstractmethod
    def _completed(self, requests: list[Request], sampling: Sampling, finished: Finished | None) -> Completed:
        """`generate` for checked prompts."""

    def load(self, policy: nn.Module, version: int) -> None:
        """Use the weights of `policy` from now on, with the adapters that are active when `generate` is called."""
        self.policy, self.version = policy, version

    def release(self) -> None:  # noqa: B027 (some engines keep nothing)
        """Release the memory that is kept between calls; the next call allocates it again."""

    def close(self) -> None:  # noqa: B027 (some engines have nothing open)
        """Release memory and processes, but not the policy. The engine cannot be used afterwards."""


def in_batches(
    batches: Iterable[Sequence[Request]], sample: Callable[[Sequence[Request]], Completed], finished: Finished | None
) -> Completed:
    """The completions of all batches of prompts. A batch's time is divided among its completions in proportion to
    their tokens, and its prompts are reported to `finished`. Raises `not_finite`."""
    groups: Completed = []
    for batch in batches:
        began, completions = time.perf_counter(), sample(batch)
        seconds, every = time.perf_counter() - began, [one for group in completions for one in group]
        if not all(isfinite(value) for one in every for value in one.logprobs):
            raise not_finite()
        per_token = seconds / max(1, sum(len(one.tokens) for one in every))
        groups += [[replace(one, seconds=len(one.tokens) * per_token) for one in group] for group in completions]
        if finished is not None:
            for request in batch:
                finished(request.index, groups[request.index])
    return groups


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, with its seed and limits."""

    index: int
    tokens: Sequence[int]
    seed: int
    limits: tuple[int, ...]  # one for each completion

    @property
    def longest(self) -> int:
        """The number of tokens of the longest sequence fed to the model. The last sampled token is not fed."""
        return len(self.tokens) + max(self.limits) - 1


def seed_of(*parts: int | str) -> int:
    """Return a 64-bit seed from numbers and names (by their CRC-32), such as a run's seed, the step and the row."""
    seed = 0
    for part in parts:
        number = zlib.crc32(part.encode()) if isinstance(part, str) else part & (1 << 64) - 1
        seed = mix64(seed ^ mix64(number))
    return seed


def mix64(x: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): every bit of the result depends on every bit of x."""
    x = (x + 0x9E3779B97F4A7C15) & (1 << 64) - 1
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    x = (x ^ x >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
    return x ^ x >> 31


def checked_requests(
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    seeds: Sequence[int] | None,
    limits: Sequence[Sequence[int]] | None,
    vocabulary: int,
    positions: int | None,
) -> list[Request]:
    """Check the arguments of `generate` and return a request for each prompt. `positions`: the model's number of
    positions; None: no limit."""
    n, longest = sampling.num_generations, sampling.max_completion_length
    for name, values in (("seeds", seeds), ("limits", limits)):
        if values is not None and len(values) != len(prompts):
            raise ValueError(f"{len(values)} {name} for {len(prompts)} prompts: give one per prompt")
    requests = []
    for index, tokens in enumerate(prompts):
        if not len(tokens):
            raise DataError(f"prompt {index} is empty: there is nothing to complete; give at least one token")
        outside = next((token for token in tokens if not 0 <= token < vocabulary), None)
        if outside is not None:
            raise DataError(
                f"prompt {index} has the token id {outside}, but the model's vocabulary has {vocabulary} ids: the "
                "prompt was encoded with a different tokenizer"
            )
        # The last sampled token is not fed, so it needs no position.
        room = longest if positions is None else min(longest, positions - len(tokens) + 1)
        if room < 1:
            raise DataError(
                f"prompt {index} has {len(tokens)} tokens and the model {positions} positions, which leaves no room "
                "for a completion: shorten the prompt (data.max_prompt_length) or drop it"
            )
        own = [longest] * n if limits is None else list(limits[index])
        if len(own) != n or min(own) < 1:
            raise ValueError(f"limits of prompt {index}: {own}; give {n} limits of 1 or more")
        seed = seed_of(sampling.seed, index) if seeds is None else seeds[index]
        requests.append(Request(index, tokens, seed, tuple(min(limit, room) for limit in own)))
    return requests


def not_finite() -> VitalSignError:
    """Return the error for a log-probability that is NaN or infinite."""
    return VitalSignError(
        "the engine: the model gives log-probabilities that are not finite, so nothing can be sampled: its "
        "weights have diverged or are damaged; go back to an earlier checkpoint, or lower the learning rate"
    )


class StopTexts:
    """The stop strings of completions. A tokenizer is needed only if there are any."""

    def __init__(self, stop: Sequence[str], tokenizer: PreTrainedTokenizerBase | None):
        if stop and tokenizer is None:
            raise ConfigError(
                "stop strings need a tokenizer, but this engine was created without one: give stop_token_ids"
            )
        self.stop, self.tokenizer = tuple(stop), tokenizer

    def __bool__(self) -> bool:
        return bool(self.stop)

    def search(self, prompt: Sequence[int]) -> StopSearch | None:
        """Return the search for one completion of `prompt`, or None without stop strings."""
        return StopSearch(self.stop, Pieces(self.tokenizer, prompt)) if self.stop and self.tokenizer else None


class StopSearch:
    """Searches the text of one completion, without its prompt, for stop strings."""

    def __init__(self, stop: tuple[str, ...], pieces: Pieces):
        self._stop, self._pieces = stop, pieces
        self._kept = max(map(len, stop)) - 1  # maximum length of an incomplete stop string
        self._tail, self._seen = "", 0

    def first(self, tokens: Sequence[int]) -> int | None:
        """Return the number of tokens up to the first complete stop string, or None. Each call passes the tokens of the
        previous call, followed by new ones."""
        for end in range(self._seen + 1, len(tokens) + 1):
            if self.add(tokens[end - 1]):
                return end
        return None

    def add(self, token: int) -> bool:
        """Add the next token. Return whether it completes a stop string."""
        self._seen += 1
        text = self._tail + self._pieces.add(token) + self._pieces.own
        self._tail = text[max(0, len(text) - self._kept) :]
        text += self._pieces.rest()
        return any(stop in text for stop in self._stop)


def stop_token_ids(policy: nn.Module, tokenizer: PreTrainedTokenizerBase, turns: bool = False) -> tuple[int, ...]:
    """Return the stop tokens of the policy: the tokenizer's end of text, and those in the model's
    generation_config.json. With `turns`, the chat template writes the prompts, and its end of turn is a stop token too,
    because a base model's tokenizer may declare a different one."""
    end = end_of_turn(tokenizer) if turns else None
    ids = [tokenizer.eos_token_id, *eos_token_ids(base_of(policy)), None if end is None else end[0]]
    return tuple(dict.fromkeys(id for id in ids if id is not None))


def text_of(
    completion: Completion,
    stop_token_ids: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    prompt: Sequence[int] | None = None,
) -> str:
    """Return a completion as a string for rewards and readers: the text that its tokens add to the text of `prompt`,
    including a leading space, but without the stop token and special tokens. If `prompt` is None, only the completion's
    tokens are decoded."""
    tokens = completion.tokens[:-1] if completion.tokens[-1] in stop_token_ids else completion.tokens
    if prompt is None:
        return str(tokenizer.decode(tokens, skip_special_tokens=True))
    return Pieces(tokenizer, prompt).whole(tokens)
