"""The steps of recipes that sample: sample, score and update, then log, store, and load new weights into the engine.

with online(job, data, reference_of) as run:
    for number, prompts in run.steps():
        with run.sampling():
            step = step_of(run.models, run.sample(number, prompts, ...))     with its log-probabilities and advantages
            run.check_packing(number, step)
        run.update(number, step, updates(run.models, number, step))
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from posttrain.batch import Example, Pack, sum_segments
from posttrain.config.schema.online import RewardedMethod
from posttrain.data import Dataset, Prepared
from posttrain.optim.update import Batch, Objective
from posttrain.recipes.offline import Models, scorer_of
from posttrain.rewards.parts import CompletionReward
from posttrain.rollout import Rollout, RolloutPack, SampledCompletion
from posttrain.runs.rollouts import RolloutStore, StoredPrompt, StoredRollout
from posttrain.sampler import Sampler
from posttrain.scoring import Scorer
from posttrain.training.checks import Alarms, check_packing, check_sampler, importance_metrics, sampler_mismatch
from posttrain.training.evaluation import as_text, measure_completions, parts_of, rollout_store, sampler_of
from posttrain.training.job import Job
from posttrain.training.loop import Loop
from posttrain.training.reference import TokenReference, token_reference

# The columns stored for a completion that is scored, but outside the loss.
SCORED = ("sampler_logprobs", "old_logprobs", "ref_logprobs", "penalties", "old_values", "returns")

ROUNDING = 1e-4  # nats
Updates = Iterator[tuple[Sequence[Any], Objective[Any]]]  # the packs and the loss of each update of a step


def in_packs(job: Job, rollout: Rollout, chosen: Sequence[int] | Tensor) -> list[RolloutPack]:
    """The chosen completions of a rollout, in packs of training.tokens_per_pack."""
    return rollout.parts(chosen, job.pack, job.config.training.tokens_per_pack, job.feeds_last)


class Step:
    """A rollout with the numbers that its updates need, one per trained token (R), on the device."""

    def __init__(self, job: Job, rollout: Rollout, mask_truncated: bool):
        self.rollout = rollout
        needs_rewards, has_reward_S = job.config.method.needs_rewards, rollout.has_reward_S
        counted = (has_reward_S if needs_rewards else rollout.has_verdict_S) & (rollout.length_S > 0)
        in_loss = counted & ~rollout.truncated_S if mask_truncated else counted
        # Indices (int64) of the completions that count, and of the completions in the loss.
        self.counted_S, self.in_loss_S = counted.nonzero().squeeze(1), in_loss.nonzero().squeeze(1)
        self.parts = in_packs(job, rollout, self.in_loss_S)
        self.sampler_R = rollout.sampler_R.to(job.device)
        self._has_episodes = any(completion.episode is not None for completion in rollout.completions)
        self.old_R: Tensor | None = None  # None: only one update, so the old policy is the sampling policy
        # Log-probabilities of the sampling policy, computed by the trainer.
        self.trainer_R = torch.zeros(rollout.num_tokens, device=job.device)
        self.new_R = torch.zeros(rollout.num_tokens, device=job.device)  # log-probabilities at the last update
        self.clipped_R = torch.zeros(rollout.num_tokens, dtype=torch.bool, device=job.device)  # at the last update
        self.entropy_R = torch.zeros(rollout.num_tokens, device=job.device)  # at the last update
        self.reference_R: Tensor | None = None  # log-probabilities under the reference or teacher, if any
        self.advantage_R = torch.zeros(rollout.num_tokens, device=job.device)
        self.penalty_R: Tensor | None = None  # the weighted KL to the reference that is subtracted from the reward
        self.top_R: Tensor | None = None  # whether a token is among those whose entropy is high enough for the loss
        self.scored_S = self.in_loss_S  # the completions whose tokens are scored before the updates
        self.mismatch: dict[str, float] | None = None  # between engine and trainer, once measured
        self._ranks = job.ranks
        self._mine_R, self._ours_R = torch.zeros_like(self.clipped_R), torch.zeros_like(self.clipped_R)

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the loss."""
        return int(self.rollout.length_S[self.in_loss_S].sum())

    @property
    def in_loss_R(self) -> Tensor:
        """Whether each token is in the loss, on the device."""
        return torch.isin(self.rollout.sequence_R, self.in_loss_S).to(self.sampler_R.device)

    def packing(self) -> dict[str, float]:
        """For episodes: the tokens of the completions in the loss, each with its prompt, per token fed."""
        fed = sum(part.num_tokens for part in self.parts)
        if not (self._has_episodes and fed):
            return {}
        return {"packing_ratio": self.rollout.separate_tokens(self.in_loss_S) / fed}

    def score_truncated(self, job: Job) -> list[RolloutPack]:
        """Score completions that are truncated and outside the loss too; return the packs of all that are scored."""
        if len(self.in_loss_S) == len(self.counted_S):
            return self.parts
        self.scored_S = self.counted_S
        return in_packs(job, self.rollout, self.counted_S)

    def sampler(self, at_N: Tensor, old_N: Tensor) -> Tensor:
        """The engine's log-probabilities of these tokens.

        Which episodes share an engine's step depends on how fast their tools answer, and with it the rounding. For
        episodes, numbers that differ from the trainer's by rounding alone are the trainer's, so that a resumed run has
        the weights of an uninterrupted one.
        """
        sampler_N = self.sampler_R[at_N]
        if not self._has_episodes:
            return sampler_N
        return torch.where((old_N - sampler_N).abs() < ROUNDING, old_N, sampler_N)

    def assign(self, parts: Sequence[RolloutPack]) -> None:
        """Start an update of these packs; afterwards each rank has the numbers of its own packs."""
        if self._ranks.size > 1:
            for part in parts:
                self._mine_R[part.token_N], self._ours_R[part.token_N] = False, True
            for part in self._ranks.mine(parts):
                self._mine_R[part.token_N] = True

    def exchange(self, *names: str) -> None:
        """Complete these attributes (R) with the numbers that other ranks computed in the last updates."""
        if self._ranks.size == 1:
            return
        own = {name: value_R for name in names if (value_R := getattr(self, name)) is not None}
        sums = [value_R.float() * self._mine_R for value_R in own.values()]
        self._ranks.sum_(sums)
        for (name, value_R), sum_R in zip(own.items(), sums, strict=True):
            setattr(self, name, sum_R.to(value_R.dtype).where(self._ours_R, value_R))

    def sums(self, value_R: Tensor) -> Tensor:
        """Sum a value per token over each completion: (R) to (S)."""
        return sum_segments(value_R, self.rollout.length_S.to(value_R.device))

    def per_token(self) -> dict[str, Tensor | None]:
        """The stored numbers of each token (R), by column name."""
        return {
            "sampler_logprobs": self.sampler_R,
            "old_logprobs": self.trainer_R,
            "new_logprobs": self.new_R,
            "ref_logprobs": self.reference_R,
            "advantages": self.advantage_R,
            "clipped": self.clipped_R,
            "entropies": self.entropy_R,
            "penalties": self.penalty_R,
        }

    def stored(self) -> tuple[list[StoredPrompt], list[StoredRollout]]:
        """The step's prompts and completions, for the rollout store."""
        rollout, tokens = self.rollout, self.rollout.length_S.tolist()
        kept, scored = set(self.in_loss_S.tolist()), set(self.scored_S.tolist())
        flat = self.per_token()
        split = {name: None if values is None else values.cpu().split(tokens) for name, values in flat.items()}
        completions = []
        for index, completion in enumerate(rollout.completions):
            names = split if index in kept else SCORED if index in scored else ("sampler_logprobs",)
            columns = {name: split[name] for name in names if name in split}
            arrays = {name: None if values is None else values[index].numpy() for name, values in columns.items()}
            advantages = arrays.get("advantages")
            completions.append(
                StoredRollout(
                    prompt_index=completion.group,
                    rollout_index=index - int((rollout.group_S < completion.group).sum()),
                    completion=completion.text,
                    reward=completion.reward.total,
                    advantage=None if advantages is None else float(advantages.mean()),
                    finish_reason=completion.finish_reason,
                    version=completion.version,
                    parts=parts_of(completion.reward),
                    arrays=arrays | {"tokens": np.asarray(completion.tokens)},
                    trained=None if completion.trained is None else np.asarray(completion.trained, bool),
                    turns=completion.episode and completion.episode.stored(),
                )
            )
        tools = {each.group: each.episode.tools for each in rollout.completions if each.episode is not None}
        prompts = []
        for number, prompt in enumerate(rollout.prompts):
            facts = {**(prompt.facts or {}), **({"tools": tools[number]} if tools.get(number) else {})}
            tokens = np.asarray(prompt.trees[0].tokens).tolist()
            prompts.append(StoredPrompt(prompt.row, as_text(prompt), tokens, facts))
        return prompts, completions


@torch.no_grad()
def scored(
    job: Job, rollout: Rollout, parts: Sequence[RolloutPack], of: Callable[[Pack], Tensor], columns: int = 1
) -> Tensor:
    """The value of `of` for each scored token of the packs, in the rollout's order: (R, columns).

    `of` returns (N) or (N, columns). The value of tokens in none of the packs is 0.
    """
    value_R = torch.zeros(rollout.num_tokens, columns, device=job.device)
    for part in job.ranks.mine(parts):
        moved = part.to(job.device)
        value_R[moved.token_N] = of(moved.pack).view(-1, columns)
    for part in job.ranks.spare(parts):  # a reference may be sharded too
        of(part.to(job.device).pack)
    job.ranks.sum_([value_R])
    return value_R


@dataclass(frozen=True, slots=True)
class Minibatch:
    """The completions of one update."""

    parts: Sequence[RolloutPack]
    chosen: Tensor  # indices in the rollout
    counted: int  # number of completions in its groups, including those outside the loss
    number: int  # number of minibatches in the epoch
    is_first: bool  # whether this is the run's first minibatch


def minibatches(job: Job, step: Step, number: int, epochs: int, count: int) -> Iterator[Minibatch]:
    """Yield the minibatches of step `number`: `count` in each epoch, packed only once if `count` is 1."""
    for epoch in range(epochs):
        divisions = divided(step, count, (job.config.seed, number, epoch))
        for index, (chosen, counted) in enumerate(divisions):
            parts = step.parts if count == 1 else in_packs(job, step.rollout, chosen)
            step.assign(parts)
            yield Minibatch(parts, chosen, counted, len(divisions), is_first=number == 1 and epoch == index == 0)


def divided(step: Step, count: int, key: Sequence[int]) -> list[tuple[Tensor, int]]:
    """Divide the completions in the loss into `count` parts of complete groups, in a random order seeded by `key`.

    Each part comes with the number of its groups' completions, including those outside the loss. A part without
    completions in the loss is dropped.
    """
    group_S, prompts = step.rollout.group_S, len(step.rollout.prompts)
    order = np.arange(prompts) if count == 1 else np.random.default_rng(list(key)).permutation(prompts)
    made = []
    for groups in map(torch.from_numpy, np.array_split(order, count)):
        chosen, counted = (
            index_S[torch.isin(group_S[index_S], groups)] for index_S in (step.in_loss_S, step.counted_S)
        )
        if len(chosen):
            made.append((chosen, len(counted)))
    return made


def split_prompts(
    seed: int, step: int, prompts: Sequence[Example], fraction: float
) -> tuple[list[Example], list[Example]]:
    """The prompts that the policy completes, each chosen with probability `fraction`, and the step's other prompts."""
    chosen = np.random.default_rng([seed, step, zlib.crc32(b"on-policy")]).random(len(prompts)) < fraction
    return list(compress(prompts, chosen)), list(compress(prompts, ~chosen))


def given_completions(prompts: Sequence[Example]) -> Rollout:
    """The data's completions of prompts, as a rollout without rewards."""
    leaves = [np.asarray(leaf.tokens).tolist() for prompt in prompts for leaf in prompt.trees[0].children]
    completions = [
        SampledCompletion(group, tokens, [0.0] * len(tokens), "", "stop", 0, CompletionReward())
        for group, tokens in enumerate(leaves)
    ]
    return Rollout(prompts, completions)


def measure_mismatch(job: Job, sample: Sampler, step: Step) -> None:
    """Record the mismatch between engine and trainer of a step whose tokens the trainer has scored.

    Runs before the step's first update, so that nothing is learned from an engine with wrong weights. Raises
    VitalSignError if the mismatch exceeds rounding.
    """
    rollout, method, inside_R = step.rollout, job.config.method, step.in_loss_R.cpu()
    if step.mismatch is not None or not inside_R.any():
        return
    step.exchange("trainer_R")
    trainer_N, sampler_N = step.trainer_R.cpu()[inside_R], rollout.sampler_R[inside_R]
    step.mismatch = sampler_mismatch(trainer_N, sampler_N)
    if isinstance(method, RewardedMethod):
        step.mismatch |= importance_metrics(method, trainer_N, sampler_N, rollout.length_S[step.in_loss_S])
    if not sample.filtered:  # a filter raises the probabilities of the sampled tokens above the policy's
        check_sampler(trainer_N - sampler_N, job.dtype, job.config.rollout.engine, job.record)


def reference_of(job: Job, method: RewardedMethod, policy: nn.Module) -> TokenReference | None:
    """The reference of a method, at the temperature of the rollout; None without one."""
    return token_reference(job, method, Scorer(policy), job.config.rollout.temperature)


class Online:
    """A run that samples: its models, engine, rewards, stored rollouts and alarms."""

    def __init__(self, loop: Loop, models: Models[Any, Any, Any], sample: Sampler, store: RolloutStore | None):
        self.loop, self.models, self.sample = loop, models, sample
        self.sampling = loop.interruption.sampling  # a context for the part of a step before its first update
        self._policy, self._store = models.scorer.model, store
        self._alarms = Alarms(loop.state.memory, models.method)

    def steps(self) -> Iterator[tuple[int, list[Example]]]:
        """Yield each step's number and prompts. After the loop body, load the new weights into the engine; evaluate."""
        self._load()
        for number, prompts in self.loop.steps():
            yield number, prompts
            self._load()

    def _load(self) -> None:
        self.sample.engine.load(self._policy, self.loop.state.step)
        if self.loop.evaluation_due:
            evaluate(self.loop, self.sample, self._store)

    def check_packing(self, number: int, step: Step) -> None:
        """Check the packs of the run's first step; do nothing in later steps."""
        if number == 1 and step.parts:
            job, first_two = self.loop.job, step.rollout.examples(step.in_loss_S[:2], 1 << 30)[0]
            check_packing(Scorer(self._policy), first_two, job.pack_together, job.record)

    def update(
        self,
        number: int,
        step: Step,
        updates: Iterable[tuple[Sequence[Batch], Objective[Batch]]],
        finish: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """Make the updates of a step; then log its metrics and those of `finish`, check alarms, and store rollouts."""
        loop, store = self.loop, self._store
        check = partial(measure_mismatch, loop.job, self.sample, step)

        def measure(metrics: Mapping[str, float]) -> dict[str, float]:
            if loop.job.config.rollout.save:
                step.exchange("trainer_R", "new_R", "reference_R", "advantage_R", "clipped_R", "entropy_R")
            more = {**step.rollout.metrics(), **step.packing(), **(step.mismatch or {}), **finish()}
            more |= {} if loop.resting is None else loop.resting.learn(step.rollout)
            self._alarms.check(number, {**metrics, **more}, step.rollout.all_equal)
            if store is not None:
                store.add(number, number / loop.steps_per_epoch, *step.stored())
            return more

        loop.updates(((packs, replace(objective, check=check)) for packs, objective in updates), measure)


@contextmanager
def online(job: Job, data: Prepared, load_reference: Callable[[Job, Any, nn.Module], Any]) -> Iterator[Online]:
    """Create the models, loop, engine, rewards and rollout store for a job."""
    method = job.config.method
    policy = job.policy(method.head)
    scorer = scorer_of(job, method, policy)
    trained = scorer if method.trains_values else policy
    optimizer = job.optimizer(trained)
    reference = load_reference(job, method, policy)
    loop = Loop(job, trained, optimizer, data, reference)
    models = Models(job, method, scorer, reference, loop.state)
    with sampler_of(job, policy, data) as sample, rollout_store(job, loop.saver) as store:
        yield Online(loop, models, sample, store)


def evaluate(loop: Loop, sample: Sampler, store: RolloutStore | None) -> None:
    """Sample and reward completions of the validation prompts."""

    def measure(name: str, dataset: Dataset) -> Mapping[str, float]:
        sampler, sampling = sample.evaluation.get(name), loop.interruption.sampling
        if sampler is None:
            return {}
        return measure_completions(loop.job.config, sampler, store, name, dataset, loop.state.step, sampling)

    loop.evaluate_by(measure)
    sample.engine.release()  # evaluation may have used more memory than a step, for which the estimate is made
