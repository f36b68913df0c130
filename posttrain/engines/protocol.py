"""The interface of all engines: token ids in, completions out. Tokenisation happens elsewhere.

    engine.generate(prompts, sampling) -> completions of each prompt
    engine.load(policy, version)       from now on completions come from these weights and carry this version

Training uses exactly the sampled tokens: a completion has them, each with its log-probability under the distribution
that it was sampled from.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from torch import nn

from posttrain.base.errors import ConfigError, DataError, VitalSignError

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How completions are sampled. The filters apply in transformers' order: temperature, top_k, top_p, min_p.

    `temperature` 0 is greedy decoding, with log-probabilities at temperature 1.
    """

    temperature: float = 1.0
    top_p: float = 1.0  # smallest set of most likely tokens with this total probability; 1: all
    top_k: int = 0  # number of most likely tokens; 0: all
    min_p: float = 0.0  # minimum probability as a share of the most likely token's; 0: all
    max_completion_length: int = 512  # tokens, the stop token included
    num_generations: int = 1  # completions of each prompt
    stop_token_ids: tuple[int, ...] = ()  # a completion ends with one of these, which is its last token
    stop: tuple[str, ...] = ()  # or with the token that completes one of these strings
    seed: int = 0

    def __post_init__(self) -> None:
        for holds, name, wanted in (
            (self.temperature >= 0, "temperature", "0 (greedy) or more"),
            (0 < self.top_p <= 1, "top_p", "above 0 and at most 1"),
            (self.top_k >= 0, "top_k", "0 (off) or more"),
            (0 <= self.min_p <= 1, "min_p", "from 0 (off) to 1"),
            (self.max_completion_length >= 1, "max_completion_length", "1 or more"),
            (self.num_generations >= 1, "num_generations", "1 or more"),
            (all(self.stop), "stop", "non-empty strings"),
        ):
            if not holds:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be {wanted}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion. `logprobs` are of the processed distribution: after temperature and filters, renormalised."""

    tokens: list[int]  # at least one; without the prompt, with the stop token
    logprobs: list[float]  # nats, one per token
    finish_reason: FinishReason  # a stop token or string, or the length limit
    version: int  # of the sampling weights
    seconds: float = field(default=0.0, compare=False)  # its share of the engine's time


Finished = Callable[[int, list[Completion]], None]  # takes the index of a prompt, and its completions


class Engine(Protocol):
    """Generates completions.

    A completion's random stream depends only on its prompt's seed and its number: in float32 the same seed gives the
    same tokens, independent of other requests.
    """

    version: int

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        seeds: Sequence[int] | None = None,
        limits: Sequence[Sequence[int]] | None = None,
        finished: Finished | None = None,
    ) -> list[list[Completion]]:
        """`sampling.num_generations` completions of every prompt, in order.

        `seeds`: one per prompt; by default from `sampling.seed` and the prompt's index. `limits`: an individual limit,
        at most `max_completion_length`, for every completion of every prompt. Completions of a long prompt are limited
        by the model's remaining positions. `finished` is called for each prompt once, when the engine has all its
        completions; prompts finish in any order.

        Raises DataError for a prompt that is empty, has ids outside the vocabulary, or leaves no room.
        """
        ...

    def load(self, policy: nn.Module, version: int) -> None:
        """Use the weights of `policy`, with the adapters that are active when `generate` is called."""
        ...

    def release(self) -> None:
        """Release the memory that is kept between calls; the next call allocates it again."""
        ...

    def close(self) -> None:
        """Release memory and processes, but not the policy. The engine cannot be used afterwards."""
        ...


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt with its arguments of `generate`."""

    index: int
    tokens: Sequence[int]
    seed: int
    limits: tuple[int, ...]  # one for each completion


def seed_of(*parts: int | str) -> int:
    """A 64-bit seed from numbers and names (by their CRC-32), such as a run's seed, the step and the row."""
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


def requests(
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    seeds: Sequence[int] | None,
    limits: Sequence[Sequence[int]] | None,
    *,
    vocabulary: int,
    positions: int | None,
) -> list[Request]:
    """The arguments of `generate`, checked. `positions` is the model's number of positions, None without a limit."""
    n, longest = sampling.num_generations, sampling.max_completion_length
    for name, given in (("seeds", seeds), ("limits", limits)):
        if given is not None and len(given) != len(prompts):
            raise ValueError(f"{len(given)} {name} for {len(prompts)} prompts: give one for each")
    made = []
    for index, tokens in enumerate(prompts):
        if not len(tokens):
            raise DataError(f"prompt {index} is empty: there is nothing to complete; give at least one token")
        outside = next((token for token in tokens if not 0 <= token < vocabulary), None)
        if outside is not None:
            raise DataError(
                f"prompt {index} has the token id {outside}, and the model's vocabulary has {vocabulary}: it was made "
                "with another tokenizer"
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
            raise ValueError(f"limits of prompt {index}: {own}; give {n} of 1 or more")
        seed = seed_of(sampling.seed, index) if seeds is None else seeds[index]
        made.append(Request(index, tokens, seed, tuple(min(limit, room) for limit in own)))
    return made


def timed(groups: Sequence[Sequence[Completion]], seconds: float) -> list[list[Completion]]:
    """Completions that were generated together in `seconds`, each with its share by tokens."""
    per_token = seconds / max(1, sum(len(one.tokens) for group in groups for one in group))
    return [[replace(one, seconds=len(one.tokens) * per_token) for one in group] for group in groups]


def not_finite() -> VitalSignError:
    """The error for a log-probability that is NaN or infinite."""
    return VitalSignError(
        "the engine: the model gives log-probabilities that are not finite, so nothing can be sampled: its "
        "weights have diverged or are damaged; go back to an earlier checkpoint, or lower the learning rate"
    )
