"""Rollouts: completions of prompts with log-probabilities, rewards and verdicts, ready for training.

    rollout = sample(step, prompts)      P prompts, S completions, G per prompt, grouped by prompt

Per-token numbers of a rollout (log-probabilities, advantages, values) are flat tensors (R) over all R scored tokens,
completion after completion in the rollout's order. A `RolloutPack` is a pack of some of the completions, with the
positions of its N scored tokens among the R: `old_R[part.token_N]` has the pack's values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from posttrain.base.errors import DataError, VitalSignError
from posttrain.batch import Example, Node, Pack, sent
from posttrain.config import RolloutConfig
from posttrain.engines import Completion, Engine, Sampling, seed_of, text_of
from posttrain.grading.extract import THINK
from posttrain.parallel.ranks import ALONE, Ranks
from posttrain.rewards.compose import Rewarded, RewardInput, Rewards, picked

T = TypeVar("T")
PackOf = Callable[[Sequence[Example]], list[Pack]]


@dataclass(frozen=True, slots=True)
class RolloutPack:
    """A pack of completions: their indices (S), and each scored token's position in the rollout's order (N)."""

    pack: Pack
    completion_S: Tensor
    token_N: Tensor

    @property
    def num_tokens(self) -> int:
        return self.pack.num_tokens

    def to(self, device: torch.device | str) -> RolloutPack:
        return RolloutPack(self.pack.to(device), sent(self.completion_S, device), sent(self.token_N, device))


@dataclass(frozen=True)
class Rollout:
    """The completions of a step's prompts, and their rewards.

    `rewarded` has a total for every completion; None means no verdict and no reward, and drops the completion from the
    update.
    """

    prompts: Sequence[Example]
    completions: tuple[Completion, ...]  # S
    texts: tuple[str, ...]  # S
    rewarded: Rewarded
    group_S: Tensor  # the index of each completion's prompt in `prompts`
    resampled: int = 0  # groups that were sampled again because all their rewards were equal

    @cached_property
    def reward_S(self) -> Tensor:
        """The total rewards, float32; NaN without a reward."""
        return torch.tensor([np.nan if total is None else total for total in self.rewarded.totals])

    @cached_property
    def has_reward_S(self) -> Tensor:
        return torch.tensor([total is not None for total in self.rewarded.totals], dtype=torch.bool)

    @cached_property
    def truncated_S(self) -> Tensor:
        """Whether a completion reached the length limit."""
        return torch.tensor([completion.finish_reason == "length" for completion in self.completions], dtype=torch.bool)

    @cached_property
    def length_S(self) -> Tensor:
        return torch.tensor([len(completion.tokens) for completion in self.completions], dtype=torch.int64)

    @cached_property
    def start_S(self) -> Tensor:
        """The index of each completion's first token in the rollout's order."""
        return self.length_S.cumsum(0) - self.length_S

    @cached_property
    def sampler_R(self) -> Tensor:
        """The engine's log-probability of each sampled token."""
        logprobs = [value for completion in self.completions for value in completion.logprobs]
        return torch.tensor(logprobs, dtype=torch.float32)

    @cached_property
    def sequence_R(self) -> Tensor:
        """The completion that each token belongs to."""
        return torch.arange(len(self.completions)).repeat_interleave(self.length_S)

    @property
    def num_tokens(self) -> int:
        return int(self.length_S.sum())

    def spread_G(self) -> Tensor:
        """Whether the rewards of each prompt's completions differ."""
        spread = torch.zeros(len(self.prompts), dtype=torch.bool)
        for group in range(len(self.prompts)):
            values = self.reward_S[(self.group_S == group) & self.has_reward_S]
            spread[group] = len(values) > 1 and bool((values != values[0]).any())
        return spread

    @property
    def all_equal(self) -> bool:
        """Whether several completions of the step have a reward, and all have the same."""
        values = self.reward_S[self.has_reward_S]
        return len(values) > 1 and bool((values == values[0]).all())

    def examples(
        self, chosen: Sequence[int] | Tensor, tokens_per_pack: int, feeds_last: bool = False
    ) -> tuple[list[Example], list[list[int]]]:
        """The chosen completions as trees, and the indices of each tree's leaves.

        The completions of a prompt are leaves of one tree, or of several if one tree would be larger than a pack.
        `feeds_last`: packs have each completion's last token.
        """
        fed_S = (self.length_S - int(not feeds_last)).tolist()
        examples: list[Example] = []
        owners: list[list[int]] = []
        members: dict[int, list[int]] = {}
        for index in map(int, chosen):
            members.setdefault(int(self.group_S[index]), []).append(index)
        for group, indices in members.items():
            prompt = self.prompts[group].trees[0]
            for some in _fitting(indices, fed_S, len(prompt.tokens), tokens_per_pack):
                leaves = tuple(Node(self.completions[index].tokens, trained=True) for index in some)
                examples.append(replace(self.prompts[group], trees=(replace(prompt, children=leaves),)))
                owners.append(some)
        return examples, owners

    def parts(
        self, chosen: Sequence[int] | Tensor, pack_of: PackOf, tokens_per_pack: int, feeds_last: bool = False
    ) -> list[RolloutPack]:
        """The chosen completions in packs."""
        examples, owners = self.examples(chosen, tokens_per_pack, feeds_last)
        start_S, made = self.start_S, []
        for packed in pack_of(examples):
            indices = [index for example in dict.fromkeys(packed.groups) for index in owners[example]]
            places = [torch.arange(int(self.length_S[i])) + start_S[i] for i in indices]
            made.append(RolloutPack(packed, torch.tensor(indices), torch.cat(places)))
        return made

    def metrics(self) -> dict[str, float]:
        """Metrics of a rollout, by TRL's names; empty without completions."""
        if not self.completions:
            return {}
        length, stopped = self.length_S.float(), self.length_S[~self.truncated_S].float()
        found = {
            "completions/mean_length": length.mean().item(),
            "completions/min_length": length.min().item(),
            "completions/max_length": length.max().item(),
            "completions/clipped_ratio": self.truncated_S.float().mean().item(),
            "resampled_groups": float(self.resampled),
        }
        if self.rewarded.parts:
            found["rewards/left_out_ratio"] = 1.0 - self.has_reward_S.float().mean().item()
            lacking = [self.rewarded.lacks_verdict(row) for row in range(len(self.completions))]
            found["rewards/no_verdict_ratio"] = sum(lacking) / len(lacking)
        if self.rewarded.parts and len(self.completions) > len(self.prompts):
            found["frac_reward_zero_std"] = 1.0 - self.spread_G().float().mean().item()
        if len(stopped):
            found["completions/mean_terminated_length"] = stopped.mean().item()
        return found | self.rewarded.metrics()


def _fitting(indices: Sequence[int], fed_S: Sequence[int], prompt: int, most: int) -> Iterable[list[int]]:
    """The completions, of so many tokens that are fed, in parts that each fit into a pack together with the prompt."""
    some: list[int] = []
    taken = prompt
    for index in indices:
        fed = fed_S[index]
        if some and taken + fed > most:
            yield some
            some, taken = [], prompt
        some.append(index)
        taken += fed
    yield some


def sampling_of(rollout: RolloutConfig, num_generations: int, stops: tuple[int, ...], seed: int) -> Sampling:
    """The rollout settings as an engine's `Sampling`."""
    return Sampling(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        max_completion_length=rollout.max_completion_length,
        num_generations=num_generations,
        stop_token_ids=stops,
        stop=rollout.stop,
        seed=seed,
    )


class Sampler:
    """Samples and rewards completions. `seed` is the run's.

    A completion's random stream is a function of the run's seed, the step, the prompt's index in the step and its row,
    so that a resumed run samples the same completions as an uninterrupted one. `evaluation` has the samplers of the
    validation sets. Without `keeps`, the engine releases its memory after each rollout. `continues`: texts continue
    their prompts, leading spaces included; False: as in runs of earlier versions.
    """

    def __init__(
        self,
        engine: Engine,
        rewards: Rewards,
        tokenizer: PreTrainedTokenizerBase,
        settings: RolloutConfig,
        *,
        stop_token_ids: tuple[int, ...],
        seed: int,
        keeps: bool = True,
        ranks: Ranks = ALONE,
        continues: bool = True,
    ):
        self.keeps, self.ranks, self.continues = keeps, ranks, continues
        self.engine, self.rewards, self.tokenizer, self.seed = engine, rewards, tokenizer, seed
        self.sampling = sampling_of(settings, 1, stop_token_ids, seed)
        self.evaluation: Mapping[str, Sampler] = {}

    @property
    def filtered(self) -> bool:
        """Whether the engine samples from a filtered distribution, so that its log-probabilities differ."""
        return self.sampling.top_p < 1 or self.sampling.top_k > 0 or self.sampling.min_p > 0

    def __call__(
        self, stream: int | str, prompts: Sequence[Example], num_generations: int, rounds: int = 0, version: int = 0
    ) -> Rollout:
        """`num_generations` completions of each prompt, from weights that must be of this `version`.

        `stream` names the random stream: the step, or the validation set. Groups in which all rewards are equal are
        sampled again, at most `rounds` times. Raises VitalSignError if the engine has other weights, and RewardError.
        """
        rollout = self._sample(f"{stream}", prompts, num_generations, version)
        for round in range(1, rounds + 1):
            again = (~rollout.spread_G()).nonzero().squeeze(1).tolist()
            if not again:
                break
            fresh = self._sample(f"{stream} {round}", [prompts[place] for place in again], num_generations, version)
            rollout = _with_groups(rollout, again, fresh)
        if not self.keeps:
            self.engine.release()
        return rollout

    def _sample(self, stream: str, prompts: Sequence[Example], n: int, version: int) -> Rollout:
        seeds = [seed_of(self.seed, stream, place, prompt.row) for place, prompt in enumerate(prompts)]
        # Each rank completes some of the prompts, with the seeds that they have in the step.
        asked = list(zip(prompts, seeds, strict=True))
        made = self.ranks.together(lambda: self._generate(self.ranks.mine(asked), n, version))
        places = [(p % len(made), p // len(made) * n + member) for p in range(len(prompts)) for member in range(n)]
        completions, texts, rewarded = zip(*made, strict=True)
        group_S = torch.arange(len(prompts)).repeat_interleave(n)
        return Rollout(prompts, _at(completions, places), _at(texts, places), picked(rewarded, places), group_S)

    def _generate(
        self, asked: Sequence[tuple[Example, int]], n: int, version: int
    ) -> tuple[tuple[Completion, ...], tuple[str, ...], Rewarded]:
        """The completions of prompts with these seeds, their texts and rewards.

        The engine is called without prompts, too: its servers are shared by the ranks.
        """
        prompts = [prompt for prompt, _ in asked]
        groups = self.engine.generate(
            [np.asarray(prompt.trees[0].tokens).tolist() for prompt in prompts],
            replace(self.sampling, num_generations=n),
            seeds=[seed for _, seed in asked],
        )
        if not prompts:
            return (), (), Rewarded((), ())
        completions = tuple(completion for group in groups for completion in group)
        stale = {completion.version for completion in completions} - {version}
        if stale:
            raise VitalSignError(
                f"the engine samples from weights of version {min(stale)}, but the policy is at version {version}: the "
                "engine did not get the new weights after the last step"
            )
        stops = self.sampling.stop_token_ids
        before = [np.asarray(prompt.trees[0].tokens) for prompt in prompts]
        texts = tuple(
            text_of(completion, stops, self.tokenizer, before[number // n].tolist() if self.continues else None)
            for number, completion in enumerate(completions)
        )
        ends = [end_of(tokens, self.tokenizer) for tokens in before]
        rewarded = self.rewards(
            [
                to_reward(completion, text, ends[number // n], _facts(prompts[number // n]))
                for number, (text, completion) in enumerate(zip(texts, completions, strict=True))
            ]
        )
        return completions, texts, rewarded


def _at(parts: Sequence[tuple[T, ...]], places: Sequence[tuple[int, int]]) -> tuple[T, ...]:
    """A selection from several tuples: (number of the tuple, index in it) for each."""
    return tuple(parts[which][at] for which, at in places)


def end_of(tokens: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> str:
    """The last characters of a prompt, enough to see an open `<think>`."""
    return str(tokenizer.decode(tokens[-16:].tolist()))  # `<think>` and a line break are fewer tokens


def to_reward(completion: Completion, text: str, prompt: str, facts: Mapping[str, Any]) -> RewardInput:
    """A completion as input of the rewards; `prompt` is the end of its prompt, `facts` are those of the row."""
    return RewardInput(
        text,
        completion.tokens,
        prompt=facts["prompt"],
        answer=facts["answer"],
        columns=facts["columns"],
        truncated=completion.finish_reason == "length",
        thinking=ends_in_thinking(prompt),
    )


def ends_in_thinking(prompt: str) -> bool:
    """Whether the prompt ends with an open `<think>`."""
    return prompt.rstrip().endswith(THINK)


def _facts(prompt: Example) -> Mapping[str, Any]:
    """The facts of a row for rewards: prompt, answer, columns."""
    if prompt.facts is None:
        raise DataError(f"row {prompt.row} is not a prompt: rollouts need data prepared as prompts")
    return prompt.facts


def joined(rollouts: Sequence[Rollout]) -> Rollout:
    """Several rollouts with the same rewards, concatenated."""
    begins = np.cumsum([0, *(len(rollout.prompts) for rollout in rollouts)])
    places = [(which, at) for which, rollout in enumerate(rollouts) for at in range(len(rollout.completions))]
    return Rollout(
        [prompt for rollout in rollouts for prompt in rollout.prompts],
        _at([rollout.completions for rollout in rollouts], places),
        _at([rollout.texts for rollout in rollouts], places),
        picked([rollout.rewarded for rollout in rollouts], places),
        torch.cat([rollout.group_S + begin for rollout, begin in zip(rollouts, begins.tolist(), strict=False)]),
        sum(rollout.resampled for rollout in rollouts),
    )


def _with_groups(rollout: Rollout, places: Sequence[int], fresh: Rollout) -> Rollout:
    """The rollout with the groups of these prompts replaced."""
    n = len(rollout.completions) // len(rollout.prompts)
    new = {place: number for number, place in enumerate(places)}
    index = [
        (1, new[group] * n + member) if group in new else (0, group * n + member)
        for group in range(len(rollout.prompts))
        for member in range(n)
    ]
    return Rollout(
        rollout.prompts,
        _at((rollout.completions, fresh.completions), index),
        _at((rollout.texts, fresh.texts), index),
        picked((rollout.rewarded, fresh.rewarded), index),
        rollout.group_S,
        rollout.resampled + len(places),
    )
