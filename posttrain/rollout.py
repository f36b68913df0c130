"""Rollouts: completions of prompts with log-probabilities, rewards and verdicts, ready for training.

    rollout = Rollout(prompts, completions)      S completions of G prompts, grouped by prompt

Per-token numbers of a rollout (log-probabilities, advantages, values) are flat tensors (R) over its trained tokens,
completion after completion. A completion may also have tokens that were not sampled, such as a tool's output: they are
fed to the model, but are not among the R. A `RolloutPack` is a pack of some of the completions, with the positions of
its N scored tokens among the R: `old_R[part.token_N]` are the pack's values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import fsum
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posttrain.base.words import by_key
from posttrain.batch import Example, Node, Pack, sent
from posttrain.engines.protocol import FinishReason
from posttrain.environments.trajectory import Trajectory, metrics_of
from posttrain.losses.advantage import Turns
from posttrain.rewards.parts import CompletionReward, Rewarded

PackOf = Callable[[Sequence[Example]], list[Pack]]
Ids = Sequence[int] | np.ndarray


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
    """A sampled completion of a prompt: its tokens, which of them are trained, and the reward; a total of None drops it
    from the update. Raises ValueError unless each trained token has a log-probability."""

    group: int  # the index of the completion's prompt in the rollout
    tokens: Sequence[int]  # without the prompt, with the stop token
    logprobs: Sequence[float]  # under the engine, nats: one for each trained token
    text: str
    finish_reason: FinishReason
    version: int  # version of the sampling weights
    reward: CompletionReward
    trained: Sequence[bool] | None = None  # for each token: False if it was not sampled; None: all are trained
    episode: Trajectory | None = None  # of several turns

    @property
    def tree(self) -> int | None:
        """Of an episode in a group that branches: the number of its tree."""
        return None if self.episode is None else self.episode.tree

    def __post_init__(self) -> None:
        trained = len(self.tokens) if self.trained is None else sum(self.trained)
        if len(self.logprobs) != trained:
            raise ValueError(f"{len(self.logprobs)} log-probabilities for {trained} trained tokens: give one for each")


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """A path through a completion's tokens: all of them, or of an episode that forks, those of one of its branches."""

    completion: int
    tree: int  # equal for branches that may share tokens
    tokens: np.ndarray
    trained: np.ndarray  # bool
    rank: np.ndarray  # of each trained token among those of the completion
    own: np.ndarray  # whether a trained token is in none of the completion's earlier branches


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

    def turns(self, chosen: Tensor) -> Turns:
        """The turns of the chosen completions (indices, ascending), which have a reward and trained tokens."""
        some = [self.completions[index] for index in chosen.tolist()]
        return turns_of([each.episode for each in some], self.reward_S[chosen], self.length_S[chosen])

    def rewards_of(self, group: int) -> Tensor:
        """The rewards of a prompt's completions, of those that have one."""
        return self.reward_S[(self.group_S == group) & self.has_reward_S]

    def spread_G(self) -> Tensor:
        """Whether the rewards of each prompt's completions differ."""
        groups = map(self.rewards_of, range(len(self.prompts)))
        spread = [len(values) > 1 and bool((values != values[0]).any()) for values in groups]
        return torch.tensor(spread, dtype=torch.bool)

    @property
    def all_equal(self) -> bool:
        """Whether several completions of the step have a reward, and all these rewards are equal."""
        values = self.reward_S[self.has_reward_S]
        return len(values) > 1 and bool((values == values[0]).all())

    def examples(
        self, chosen: Sequence[int] | Tensor, tokens_per_pack: int, feeds_last: bool = False
    ) -> tuple[list[Example], list[list[Branch]]]:
        """The chosen completions as trees, and for each tree the branches of completions that are its leaves.

        The completions of a prompt are leaves of one tree, or of several if one tree would be larger than a pack.
        `feeds_last`: packs include each completion's last token.
        """
        fed_S = [len(completion.tokens) - int(not feeds_last) for completion in self.completions]
        examples: list[Example] = []
        owners: list[list[Branch]] = []
        for group, indices in by_key((int(self.group_S[index]), index) for index in map(int, chosen)).items():
            prompt = self.prompts[group].trees[0]
            branches = {index: self._branches(index) for index in indices}
            for some in _fitting(branches, fed_S, len(prompt.tokens), tokens_per_pack):
                nodes, leaves = _nodes([branch for index in some for branch in branches[index]])
                examples.append(replace(self.prompts[group], trees=(replace(prompt, children=nodes),)))
                owners.append(leaves)
        return examples, owners

    def _branches(self, index: int) -> list[Branch]:
        """The branches of a completion: one, unless it is an episode that forks."""
        completion, taken, branches = self.completions[index], 0, list[Branch]()
        tokens, episode = np.asarray(completion.tokens, np.int64), completion.episode
        trained = np.ones(len(tokens), bool) if completion.trained is None else np.asarray(completion.trained, bool)
        rank = np.cumsum(trained) - 1
        for path in [np.arange(len(tokens))] if episode is None else map(np.asarray, episode.paths()):
            ranks = rank[path][trained[path]]
            tree = index if completion.tree is None else -1 - completion.tree
            branches.append(Branch(index, tree, tokens[path], trained[path], ranks, ranks >= taken))
            taken = max(taken, 1 + int(ranks.max(initial=-1)))
        return [branch for branch in branches if branch.own.any()] or branches[:1]

    def separate_tokens(self, chosen: Tensor) -> int:
        """The number of tokens that the chosen completions feed if each branch is a row of its own."""
        prompts = [len(prompt.trees[0].tokens) for prompt in self.prompts]
        branches = [branch for index in chosen.tolist() for branch in self._branches(index)]
        return sum(prompts[self.completions[each.completion].group] + len(each.tokens) - 1 for each in branches)

    def parts(
        self, chosen: Sequence[int] | Tensor, pack_of: PackOf, tokens_per_pack: int, feeds_last: bool = False
    ) -> list[RolloutPack]:
        """The chosen completions in packs."""
        examples, owners = self.examples(chosen, tokens_per_pack, feeds_last)
        start_S, made = self.length_S.cumsum(0) - self.length_S, []
        for packed in pack_of(examples):
            leaves = [leaf for example in dict.fromkeys(packed.groups) for leaf in owners[example]]
            made.append(_of_completions(packed, leaves, start_S))
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


def _fitting(
    branches: Mapping[int, Sequence[Branch]], fed_S: Sequence[int], prompt: int, most: int
) -> Iterable[list[int]]:
    """Divide completions that feed `fed_S` tokens into parts that fit, with the prompt, in packs of `most`."""
    some: list[int] = []
    taken = prompt
    for index, (first, *_) in branches.items():
        others = [branch for other in some for branch in branches[other]]
        fed = fed_S[index] - max((_shared(first, other) for other in others), default=0)
        if some and taken + fed > most:
            yield some
            some, taken, fed = [], prompt, fed_S[index]
        some.append(index)
        taken += fed
    yield some


def _nodes(some: Sequence[Branch], start: int = 0) -> tuple[tuple[Node, ...], list[Branch]]:
    """The nodes of branches without their first `start` tokens, where they share what they have in common; and the
    branches that are their leaves, in order."""
    nodes, leaves, left = list[Node](), list[Branch](), [*some]
    while left:
        first, *left = left
        near = [other for other in left if _shared(first, other) > start]
        left = [other for other in left if other not in near]
        stop = min((_shared(first, other) for other in near), default=None)
        children, below = ((), [first]) if stop is None else _nodes([first, *near], stop)
        nodes.append(Node(first.tokens[start:stop], first.trained[start:stop], children))
        leaves += below
    return tuple(nodes), leaves


def _shared(left: Branch, right: Branch) -> int:
    """The number of tokens that two branches of a tree have in common, while each has a further one."""
    if left.tree != right.tree:
        return 0
    most = min(len(left.tokens), len(right.tokens))
    differ = (left.tokens[:most] != right.tokens[:most]) | (left.trained[:most] != right.trained[:most])
    return int(np.argmax(differ)) if differ.any() else most - 1


def _of_completions(packed: Pack, leaves: Sequence[Branch], start_S: Tensor) -> RolloutPack:
    """A pack whose sequences are these branches as one whose sequences are their completions, each of whose tokens is
    scored once. `start_S`: the first of the trained tokens of each completion of the rollout."""
    owners = [leaf.completion for leaf in leaves]
    token_N = torch.cat([torch.from_numpy(leaf.rank) + start_S[leaf.completion] for leaf in leaves])
    last = {owner: index for index, owner in enumerate(owners)}  # the last branch of each completion
    completion_S = torch.tensor([*last])
    if len(last) == len(leaves):
        return RolloutPack(packed, completion_S, token_N)
    own_N = torch.from_numpy(np.concatenate([leaf.own for leaf in leaves]))
    packed, token_N = packed.with_targets(own_N), token_N[own_N]
    numbers = {owner: number for number, owner in enumerate(last)}
    number_N = torch.tensor([numbers[owner] for owner in owners])[packed.sequence_N]
    order_N = torch.argsort(number_N * (int(token_N.max()) + 1) + token_N)
    last_S = torch.tensor([*last.values()])
    packed = replace(
        packed,
        source_N=packed.source_N[order_N],
        target_N=packed.target_N[order_N],
        where_N=packed.where_N[order_N],
        sequence_N=number_N[order_N],
        length_S=torch.bincount(number_N, minlength=len(last)),
        last_S=packed.last_S[last_S],
        group_S=packed.group_S[last_S],
        groups=tuple(packed.groups[index] for index in last.values()),
    )
    return RolloutPack(packed, completion_S, token_N[order_N])


def turns_of(episodes: Sequence[Trajectory | None], reward_S: Tensor, length_S: Tensor) -> Turns:
    """The turns of completions with these rewards and numbers of trained tokens. Each turn has the reward that the
    environment gave it. What the completion's reward has beyond their sum belongs to the last turn."""
    rewards: list[float] = []
    lengths: list[int] = []
    owners: list[int] = []
    for index, (episode, total, length) in enumerate(zip(episodes, reward_S.tolist(), length_S.tolist(), strict=True)):
        spans = [length] if episode is None else episode.reply_lengths
        given = [] if episode is None else episode.turn_rewards
        earned = [*given, *[0.0] * (len(spans) - len(given))]
        earned[-1] += total - fsum(earned)
        held = 0.0  # of replies without tokens
        for reward, span in zip(earned, spans, strict=True):
            held += reward
            if span:
                rewards.append(held)
                lengths.append(span)
                owners.append(index)
                held = 0.0
        rewards[-1] += held
    reward_U, length_U = torch.tensor(rewards, dtype=reward_S.dtype), torch.tensor(lengths, dtype=torch.int64)
    trees = [None if episode is None else episode.tree for episode in episodes]
    tree_S = None if None in trees else torch.tensor(trees, dtype=torch.int64)
    return Turns(reward_S, reward_U, length_U, torch.tensor(owners, dtype=torch.int64), tree_S)


def stored_turns(rows: Sequence[Mapping[str, Any]], rewards: Sequence[float]) -> Turns:
    """The turns of stored completions, of which only trained tokens are given, under these rewards."""
    episodes = [Trajectory.restored(row["turns"], row["tokens"]) if row.get("turns") else None for row in rows]
    return turns_of(episodes, torch.tensor(rewards), torch.tensor([len(row["tokens"]) for row in rows]))


def with_prompts(rollout: Rollout, prompts: Sequence[Ids | None]) -> Rollout:
    """The rollout with another prompt for each completion (tokens; None: the same), so that each is its own group."""
    examples = []
    for completion, tokens in zip(rollout.completions, prompts, strict=True):
        example = rollout.prompts[completion.group]
        root = example.trees[0] if tokens is None else Node(tokens)
        examples.append(replace(example, trees=(root,)))
    return Rollout(examples, [replace(each, group=index) for index, each in enumerate(rollout.completions)])


def joined(rollouts: Sequence[Rollout]) -> Rollout:
    """Concatenate several rollouts that were scored by the same rewards."""
    prompts: list[Example] = []
    completions: list[SampledCompletion] = []
    for rollout in rollouts:
        completions += [replace(each, group=each.group + len(prompts)) for each in rollout.completions]
        prompts += rollout.prompts
    return Rollout(prompts, completions, sum(rollout.resampled for rollout in rollouts))


def with_groups(rollout: Rollout, groups: Sequence[int], fresh: Rollout) -> Rollout:
    """The rollout with the completions of these prompts replaced."""
    kept = [completion for completion in rollout.completions if completion.group not in groups]
    new = [replace(completion, group=groups[completion.group]) for completion in fresh.completions]
    completions = sorted([*kept, *new], key=attrgetter("group"))
    prompts = list(rollout.prompts)  # those of episodes have what the environment said
    for group, prompt in zip(groups, fresh.prompts, strict=True):
        prompts[group] = prompt
    return Rollout(prompts, completions, rollout.resampled + len(groups))
