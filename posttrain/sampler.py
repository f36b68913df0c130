"""Samples and rewards the completions of prompts: of one turn, or episodes of several.

rollout = sample(step, prompts, n)      n completions of each prompt
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import chain, groupby
from operator import attrgetter
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from posttrain.base.errors import DataError, VitalSignError
from posttrain.batch import Example
from posttrain.config import RolloutConfig
from posttrain.data.turns import common_prefix
from posttrain.engines import Completion, Engine, Sampling, seed_of, text_of
from posttrain.environments.episode import Forest, start_of
from posttrain.environments.episodes import Episodes
from posttrain.environments.trajectory import rewarded_as
from posttrain.grading.extract import THINK
from posttrain.parallel.ranks import ALONE, Ranks
from posttrain.rewards.compose import Rewards
from posttrain.rewards.parts import RewardInput, TrainerState
from posttrain.rollout import Rollout, SampledCompletion, with_groups

Requests = Sequence[tuple[int, Example, int]]  # prompts with their index in the step and their seed


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


@dataclass(eq=False)
class Sampler:
    """Samples and rewards completions. `seed` is the seed of the run.

    A completion's random stream is a function of the run's seed, the step, the prompt's index in the step and its row,
    so a resumed run samples the same completions as an uninterrupted one. `evaluation` contains the samplers of the
    validation sets. Without `keeps`, the engine releases its memory after each rollout. `continues`: a completion's
    text continues the text of its prompt, including leading spaces; False: as in runs of earlier versions. With
    `episodes`, completions have several turns. `state_at`: what reward functions see of training after a step.
    """

    engine: Engine
    rewards: Rewards
    tokenizer: PreTrainedTokenizerBase
    settings: RolloutConfig
    _: KW_ONLY
    stop_token_ids: tuple[int, ...]
    seed: int
    keeps: bool = True
    ranks: Ranks = ALONE
    continues: bool = True
    episodes: Episodes | None = None
    state_at: Callable[[int], TrainerState] = TrainerState

    def __post_init__(self) -> None:
        self.sampling = sampling_of(self.settings, 1, self.stop_token_ids, self.seed)
        self.evaluation: Mapping[str, Sampler] = {}

    @property
    def filtered(self) -> bool:
        """Whether the engine samples from a filtered distribution, so that its log-probabilities differ."""
        return self.sampling.top_p < 1 or self.sampling.top_k > 0 or self.sampling.min_p > 0

    def __call__(
        self,
        stream: int | str,
        prompts: Sequence[Example],
        num_generations: int,
        rounds: int = 0,
        version: int = 0,
        forest: Forest | None = None,
    ) -> Rollout:
        """Sample `num_generations` completions of each prompt, with weights that must have this `version`.

        `stream` names the random stream: the step, or the validation set. Groups in which all rewards are equal are
        sampled again, at most `rounds` times. `forest`: how the episodes of a prompt branch.

        Raises VitalSignError if the weights have another version; RewardError.
        """
        how = num_generations, version, forest
        rollout = self._sample(f"{stream}", prompts, *how)
        for round in range(1, rounds + 1):
            again = (~rollout.spread_G()).nonzero().squeeze(1).tolist()
            if not again:
                break
            fresh = self._sample(f"{stream} {round}", [prompts[group] for group in again], *how)
            rollout = with_groups(rollout, again, fresh)
        if not self.keeps:
            self.engine.release()
        return rollout

    def _sample(self, stream: str, prompts: Sequence[Example], n: int, version: int, forest: Forest | None) -> Rollout:
        requests = [(i, prompt, seed_of(self.seed, stream, i, prompt.row)) for i, prompt in enumerate(prompts)]
        # Each rank completes some of the prompts; the seeds do not depend on which rank it is.
        made = self.ranks.together(lambda: self._generate(self.ranks.mine(requests), n, version, forest))
        completions = sorted(chain(*made), key=attrgetter("group"))
        return Rollout(prompts, completions) if self.episodes is None else of_episodes(prompts, completions)

    def _generate(self, requests: Requests, n: int, version: int, forest: Forest | None) -> list[SampledCompletion]:
        """The rewarded completions. The engine is called even without prompts, because the ranks share its servers."""
        if self.episodes is not None:
            return self._act(self.episodes, requests, n, version, forest)
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
            for (index, sampled, text), reward in zip(made, self.rewards(inputs, self.state_at(version)), strict=True)
        ]

    def _act(
        self, episodes: Episodes, requests: Requests, n: int, version: int, forest: Forest | None
    ) -> list[SampledCompletion]:
        """The rewarded episodes of prompts, each as one completion of several turns; their prompts may be longer."""
        facts, seeds = [_facts(prompt) for _, prompt, _ in requests], [seed for _, _, seed in requests]
        sampling = replace(self.sampling, num_generations=1)
        groups = episodes.run([*map(start_of, facts)], n, sampling, seeds, forest=forest)
        made = [(index, made) for (index, _, _), group in zip(requests, groups, strict=True) for made in group]
        _refuse_stale({each.version for _, each in made if each.turns}, version)
        inputs = [rewarded_as(each, facts[number // n]) for number, (_, each) in enumerate(made)]
        return [
            SampledCompletion(
                index, each.tokens, each.logprobs, str(self.tokenizer.decode(each.tokens)), each.finish_reason,
                each.version, reward, each.trained, replace(each, state=None),
            )
            for (index, each), reward in zip(made, self.rewards(inputs, self.state_at(version)), strict=True)
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
        acting = [(each, each.episode) for each in members if each.episode is not None]
        texts = [episode.prompt for _, episode in acting if episode.turns]
        kept = [len(each.prompt) + keep for _, each in acting for _, keep in each.forks]
        common = min((*(common_prefix(texts[0], text) for text in texts), *kept), default=0)
        if common:
            node = replace(prompts[group].trees[0], tokens=texts[0][:common])
            shared[group] = replace(prompts[group], trees=(node,))
        for each, episode in acting:
            extra = episode.prompt[common:] if episode.turns else []
            trained = [*([False] * len(extra)), *episode.trained]
            parts, trunk = [part.moved(len(extra)) for part in episode.parts], episode.shared
            own = replace(episode, parts=parts, shared=trunk + len(extra) if trunk else 0)
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
