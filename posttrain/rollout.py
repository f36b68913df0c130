"""Rollouts: completions of prompts with log-probabilities, rewards and verdicts, ready for training.

    rollout = sample(step, prompts)      S completions of G prompts, grouped by prompt

Per-token numbers of a rollout (log-probabilities, advantages, values) are flat tensors (R) over its trained tokens,
completion after completion. A completion may also have tokens that were not sampled, such as a tool's output: they are
fed to the model, but are not among the R. A `RolloutPack` is a pack of some of the completions, with the positions of
its N scored tokens among the R: `old_R[part.token_N]` are the pack's values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, groupby
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from posttrain.base.errors import DataError, VitalSignError
from posttrain.batch import Example, Node, Pack, sent
from posttrain.config import RolloutConfig
from posttrain.data.turns import common_prefix
from posttrain.engines import Completion, Engine, Sampling, seed_of, text_of
from posttrain.engines.protocol import FinishReason
from posttrain.environments.episodes import Episodes, Trajectory, metrics_of, rewarded_as, start_of
from posttrain.grading.extract import THINK
from posttrain.parallel.ranks import ALONE, Ranks
from posttrain.rewards.compose import Rewards
from posttrain.rewards.parts import CompletionReward, Rewarded, RewardInput

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


@dataclass(frozen=True, slots=True)
class SampledCompletion:
    """A sampled completion of a prompt: its tokens, which of them are trained, and the reward.

    A total reward of None drops the completion from the update. Raises ValueError unless each trained token has a
    log-probability.
    """

    group: int  # the index of the completion's prompt in the rollout
    tokens: Sequence[int]  # without the prompt, with the stop token
    logprobs: Sequence[float]  # under the engine, nats: one for each trained token
    text: str
    finish_reason: FinishReason
    version: int  # version of the sampling weights
    reward: CompletionReward
    trained: Sequence[bool] | None = None  # for each token: False if it was not sampled; None: all are trained
    episode: Trajectory | None = None  # of several turns

    def __post_init__(self) -> None:
        trained = len(self.tokens) if self.trained is None else sum(self.trained)
        if len(self.logprobs) != trained:
            raise ValueError(f"{len(self.logprobs)} log-probabilities for {trained} trained tokens: give one for each")


@dataclass(frozen=True)
class Rollout:
    """The rewarded completions of a step's prompts."""

    prompts: Sequence[Example]  # G
    completions: Sequence[SampledCompletion]  # S, grouped by prompt
    resampled: int = 0  # groups that were sampled again because all their rewards were equal

    @cached_property
    def group_S(self) -> Tensor:
        """The index of each completion's prompt in `prompts`."""
        return torch.tensor([completion.group for completion in self.completions], dtype=torch.int64)

    @cached_property
    def rewarded(self) -> Rewarded:
        return Rewarded(completion.reward for completion in self.completions)

    @cached_property
    def reward_S(self) -> Tensor:
        """The total reward of each completion, float32; NaN if it has no reward."""
        return torch.tensor([np.nan if total is None else total for total in self.rewarded.totals])

    @cached_property
    def has_reward_S(self) -> Tensor:
        return torch.tensor([total is not None for total in self.rewarded.totals], dtype=torch.bool)

    @cached_property
    def has_verdict_S(self) -> Tensor:
        """Whether a completion's environment, if it has one, did not fail."""
        episodes = [completion.episode for completion in self.completions]
        return torch.tensor([episode is None or episode.has_verdict for episode in episodes], dtype=torch.bool)

    @cached_property
    def truncated_S(self) -> Tensor:
        """Whether a completion reached the length limit."""
        return torch.tensor([completion.finish_reason == "length" for completion in self.completions], dtype=torch.bool)

    @cached_property
    def length_S(self) -> Tensor:
        """The number of trained tokens of each completion."""
        return torch.tensor([len(completion.logprobs) for completion in self.completions], dtype=torch.int64)

    @cached_property
    def sampler_R(self) -> Tensor:
        """The engine's log-probability of each trained token."""
        logprobs = [value for completion in self.completions for value in completion.logprobs]
        return torch.tensor(logprobs, dtype=torch.float32)

    @cached_property
    def sequence_R(self) -> Tensor:
        """The index of the completion that each trained token belongs to."""
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
        """Whether several completions of the step have a reward, and all these rewards are equal."""
        values = self.reward_S[self.has_reward_S]
        return len(values) > 1 and bool((values == values[0]).all())

    def examples(
        self, chosen: Sequence[int] | Tensor, tokens_per_pack: int, feeds_last: bool = False
    ) -> tuple[list[Example], list[list[int]]]:
        """The chosen completions as trees, and for each tree the indices of the completions that are its leaves.

        The completions of a prompt are leaves of one tree, or of several if one tree would be larger than a pack.
        `feeds_last`: packs include each completion's last token.
        """
        fed_S = [len(completion.tokens) - int(not feeds_last) for completion in self.completions]
        examples: list[Example] = []
        owners: list[list[int]] = []
        members: dict[int, list[int]] = {}
        for index in map(int, chosen):
            members.setdefault(int(self.group_S[index]), []).append(index)
        for group, indices in members.items():
            prompt = self.prompts[group].trees[0]
            for some in _fitting(indices, fed_S, len(prompt.tokens), tokens_per_pack):
                completions = [self.completions[index] for index in some]
                leaves = (Node(c.tokens, trained=True if c.trained is None else c.trained) for c in completions)
                examples.append(replace(self.prompts[group], trees=(replace(prompt, children=tuple(leaves)),)))
                owners.append(some)
        return examples, owners

    def parts(
        self, chosen: Sequence[int] | Tensor, pack_of: PackOf, tokens_per_pack: int, feeds_last: bool = False
    ) -> list[RolloutPack]:
        """The chosen completions in packs."""
        examples, owners = self.examples(chosen, tokens_per_pack, feeds_last)
        start_S, made = self.length_S.cumsum(0) - self.length_S, []
        for packed in pack_of(examples):
            indices = [index for example in dict.fromkeys(packed.groups) for index in owners[example]]
            positions = [torch.arange(int(self.length_S[i])) + start_S[i] for i in indices]
            made.append(RolloutPack(packed, torch.tensor(indices), torch.cat(positions)))
        return made

    def metrics(self) -> dict[str, float]:
        """The metrics of a rollout, with TRL's names; empty without completions."""
        if not self.completions:
            return {}
        length, stopped = self.length_S.float(), self.length_S[~self.truncated_S].float()
        metrics = {
            "completions/mean_length": length.mean().item(),
            "completions/min_length": length.min().item(),
            "completions/max_length": length.max().item(),
            "completions/clipped_ratio": self.truncated_S.float().mean().item(),
            "resampled_groups": float(self.resampled),
        }
        if self.completions[0].reward.parts:
            metrics["rewards/left_out_ratio"] = 1.0 - self.has_reward_S.float().mean().item()
            lacking = sum(reward.lacks_verdict for reward in self.rewarded)
            metrics["rewards/no_verdict_ratio"] = lacking / len(self.rewarded)
            if len(self.completions) > len(self.prompts):
                metrics["frac_reward_zero_std"] = 1.0 - self.spread_G().float().mean().item()
        if len(stopped):
            metrics["completions/mean_terminated_length"] = stopped.mean().item()
        episodes = [completion.episode for completion in self.completions if completion.episode is not None]
        return metrics | (metrics_of(episodes) if episodes else {}) | self.rewarded.metrics()


def _fitting(indices: Sequence[int], fed_S: Sequence[int], prompt: int, most: int) -> Iterable[list[int]]:
    """Divide completions that feed `fed_S` tokens into parts that fit, with the prompt, in packs of `most` tokens."""
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
    """Samples and rewards completions. `seed` is the seed of the run.

    A completion's random stream is a function of the run's seed, the step, the prompt's index in the step and its row,
    so a resumed run samples the same completions as an uninterrupted one. `evaluation` contains the samplers of the
    validation sets. Without `keeps`, the engine releases its memory after each rollout. `continues`: a completion's
    text continues the text of its prompt, including leading spaces; False: as in runs of earlier versions. With
    `episodes`, completions have several turns.
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
        episodes: Episodes | None = None,
    ):
        self.episodes = episodes
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
        """Sample `num_generations` completions of each prompt, with weights that must have this `version`.

        `stream` names the random stream: the step, or the validation set. Groups in which all rewards are equal are
        sampled again, at most `rounds` times. Raises VitalSignError if the weights have another version; RewardError.
        """
        rollout = self._sample(f"{stream}", prompts, num_generations, version)
        for round in range(1, rounds + 1):
            again = (~rollout.spread_G()).nonzero().squeeze(1).tolist()
            if not again:
                break
            fresh = self._sample(f"{stream} {round}", [prompts[group] for group in again], num_generations, version)
            rollout = _with_groups(rollout, again, fresh)
        if not self.keeps:
            self.engine.release()
        return rollout

    def _sample(self, stream: str, prompts: Sequence[Example], n: int, version: int) -> Rollout:
        requests = [(i, prompt, seed_of(self.seed, stream, i, prompt.row)) for i, prompt in enumerate(prompts)]
        # Each rank completes some of the prompts; the seeds do not depend on which rank it is.
        made = self.ranks.together(lambda: self._generate(self.ranks.mine(requests), n, version))
        completions = sorted(chain(*made), key=attrgetter("group"))
        return Rollout(prompts, completions) if self.episodes is None else of_episodes(prompts, completions)

    def _generate(self, requests: Sequence[tuple[int, Example, int]], n: int, version: int) -> list[SampledCompletion]:
        """The rewarded completions of prompts, which are given with their index in the step and their seed.

        The engine is called even if there are no prompts, because the ranks share its servers.
        """
        if self.episodes is not None:
            return self._act(self.episodes, requests, n, version)
        prompts = [np.asarray(prompt.trees[0].tokens) for _, prompt, _ in requests]
        groups = self.engine.generate(
            [tokens.tolist() for tokens in prompts],
            replace(self.sampling, num_generations=n),
            seeds=[seed for _, _, seed in requests],
        )
        if not prompts:
            return []
        _refuse_stale({completion.version for group in groups for completion in group}, version)
        stops, made, inputs = self.sampling.stop_token_ids, [], []
        for (index, prompt, _), tokens, group in zip(requests, prompts, groups, strict=True):
            before = tokens.tolist() if self.continues else None
            end, facts = end_of(tokens, self.tokenizer), _facts(prompt)
            for completion in group:
                text = text_of(completion, stops, self.tokenizer, before)
                made.append((index, completion, text))
                inputs.append(to_reward(completion, text, end, facts))
        return [
            SampledCompletion(index, sampled.tokens, sampled.logprobs, text, sampled.finish_reason, version, reward)
            for (index, sampled, text), reward in zip(made, self.rewards(inputs), strict=True)
        ]

    def _act(
        self, episodes: Episodes, requests: Sequence[tuple[int, Example, int]], n: int, version: int
    ) -> list[SampledCompletion]:
        """The rewarded episodes of prompts, each as one completion of several turns; their prompts may be longer."""
        facts, seeds = [_facts(prompt) for _, prompt, _ in requests], [seed for _, _, seed in requests]
        groups = episodes.run([*map(start_of, facts)], n, replace(self.sampling, num_generations=1), seeds)
        made = [(index, made) for (index, _, _), group in zip(requests, groups, strict=True) for made in group]
        _refuse_stale({each.version for _, each in made if each.turns}, version)
        inputs = [rewarded_as(each, facts[number // n]) for number, (_, each) in enumerate(made)]
        return [
            SampledCompletion(
                index, each.tokens, each.logprobs, str(self.tokenizer.decode(each.tokens)), each.finish_reason,
                each.version, reward, each.trained, replace(each, state=None),
            )
            for (index, each), reward in zip(made, self.rewards(inputs), strict=True)
        ]  # fmt: skip


def _refuse_stale(versions: set[int], version: int) -> None:
    if stale := versions - {version}:
        raise VitalSignError(
            f"the engine samples from weights of version {min(stale)}, but the policy is at version {version}: the "
            "engine did not receive the new weights after the last step"
        )


def of_episodes(prompts: Sequence[Example], completions: Sequence[SampledCompletion]) -> Rollout:
    """A rollout whose prompts are what the episodes of each group have in common. What the prompt of one has beyond it
    is context at the start of its completion."""
    shared, made = list(prompts), []
    for group, members in groupby(completions, key=attrgetter("group")):
        begun = [(each, each.episode) for each in members if each.episode is not None]
        texts = [episode.prompt for _, episode in begun if episode.turns]
        common = min((common_prefix(texts[0], text) for text in texts), default=0)
        if common:
            node = replace(prompts[group].trees[0], tokens=texts[0][:common])
            shared[group] = replace(prompts[group], trees=(node,))
        for each, episode in begun:
            extra = episode.prompt[common:] if episode.turns else []
            trained = [*([False] * len(extra)), *episode.trained]
            own = replace(episode, parts=[part.moved(len(extra)) for part in episode.parts])
            made.append(replace(each, tokens=[*extra, *each.tokens], trained=trained, episode=own))
    return Rollout(shared, made)


def end_of(tokens: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> str:
    """The last characters of a prompt, enough to see an open `<think>`."""
    return str(tokenizer.decode(tokens[-16:].tolist()))  # `<think>` and a line break take fewer tokens


def to_reward(completion: Completion, text: str, prompt: str, facts: Mapping[str, Any]) -> RewardInput:
    """A completion as the input of rewards. `prompt`: the end of its prompt; `facts`: the facts of its row."""
    return RewardInput(
        text,
        completion.tokens,
        prompt=facts["prompt"],
        answer=facts["answer"],
        columns=facts["columns"],
        truncated=completion.finish_reason == "length",
        thinking=prompt.rstrip().endswith(THINK),
    )


def _facts(prompt: Example) -> Mapping[str, Any]:
    """A row's facts for rewards: prompt, answer, columns."""
    if prompt.facts is None:
        raise DataError(f"row {prompt.row} is not a prompt: rollouts need data prepared as prompts")
    return prompt.facts


def joined(rollouts: Sequence[Rollout]) -> Rollout:
    """Concatenate several rollouts that were scored by the same rewards."""
    prompts: list[Example] = []
    completions: list[SampledCompletion] = []
    for rollout in rollouts:
        completions += [replace(each, group=each.group + len(prompts)) for each in rollout.completions]
        prompts += rollout.prompts
    return Rollout(prompts, completions, sum(rollout.resampled for rollout in rollouts))


def _with_groups(rollout: Rollout, groups: Sequence[int], fresh: Rollout) -> Rollout:
    """The rollout with the completions of these prompts replaced."""
    kept = [completion for completion in rollout.completions if completion.group not in groups]
    new = [replace(completion, group=groups[completion.group]) for completion in fresh.completions]
    completions = sorted([*kept, *new], key=attrgetter("group"))
    prompts = list(rollout.prompts)  # those of episodes have what the environment said
    for group, prompt in zip(groups, fresh.prompts, strict=True):
        prompts[group] = prompt
    return Rollout(prompts, completions, rollout.resampled + len(groups))
