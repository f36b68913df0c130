"""Evaluation by generation during training, for any method: rewards of validation prompts, and suites.

Completions are sampled with the same random numbers at every evaluation, so two evaluations of the same rows differ
only because the weights differ. Training's random generators are unaffected.
"""

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from copy import deepcopy
from statistics import fmean

import numpy as np
from torch import nn

from posttrain.base.console import progress
from posttrain.base.errors import RewardError
from posttrain.batch import Example
from posttrain.config import RolloutConfig, RunConfig
from posttrain.config.schema.evaluation import EvaluationDataset
from posttrain.config.schema.rewards import Reward
from posttrain.data import Dataset, Prepared
from posttrain.data.codec import Codec
from posttrain.data.prepare import settings_of
from posttrain.data.templates import choose_template
from posttrain.engines import make_engine, stop_token_ids
from posttrain.environments.episodes import Episodes, Limits, codecs_of
from posttrain.environments.process import Environments
from posttrain.evaluation.statistics import passes
from posttrain.grading.extract import THINK_END
from posttrain.grading.pool import workers_of
from posttrain.models.families import base_of
from posttrain.parallel.ranks import Ranks
from posttrain.rewards.compose import Rewards
from posttrain.rewards.parts import CompletionReward, TrainerState
from posttrain.rewards.rules import TAGGED
from posttrain.rollout import Rollout, joined
from posttrain.runs.checkpoint import saved_step
from posttrain.runs.rollouts import GIB, RolloutStore, StoredEvaluation
from posttrain.sampler import Sampler
from posttrain.training.job import Job
from posttrain.training.saving import Saver
from posttrain.training.state import total_steps

# Creates a context for sampling (`evaluating`: in an evaluation); a signal inside it abandons the work at once.
SamplingContext = Callable[..., AbstractContextManager[None]]


class _Samplers:
    """Samples and rewards completions; created on first use and closed by `resources`."""

    def __init__(self, resources: ExitStack, job: Job, policy: nn.Module, data: Prepared):
        self._resources, self._job, rollout = resources, job, job.config.rollout
        self._policy, self._stops = policy, stop_token_ids(policy, job.tokenizer)
        online = job.config.method.samples_completions
        prompts = (data.train, *data.validation.values()) if online else data.prompts.values()
        longest = max((dataset.longest for dataset in prompts), default=1)
        engine = make_engine(
            rollout.engine, policy, job.tokenizer, vllm=rollout.vllm, longest_prompt=longest, ranks=job.ranks
        )
        self.engine = resources.enter_context(closing(engine))
        self._environments: Environments | None = None
        self._codecs: dict[str | None, Codec] = {}
        if job.config.acts:
            self._environments = resources.enter_context(environments_of(job.config, job.ranks))
            self._codecs = codecs_of(self._environments, job.tokenizer, job.config.data.date)
        self.rewards = self._rewards(job.config.rewards)
        self._rows = len(data.train)

    def sampler(
        self, rewards: Rewards, settings: RolloutConfig, dataset: EvaluationDataset | None = None, keeps: bool = True
    ) -> Sampler:
        """A sampler with the run's stop tokens, plus those of the `dataset`'s template if it has a different one."""
        tokenizer, stops, config = self._job.tokenizer, {*self._stops}, self._job.config
        if dataset is not None and dataset.template not in (None, config.data.template):
            own = deepcopy(tokenizer)
            turns = choose_template(settings_of(dataset, config.data), own).turns
            stops |= {*stop_token_ids(self._policy, own, turns and self._job.stops_at_turns)}
        return Sampler(
            self.engine,
            rewards,
            tokenizer,
            settings,
            stop_token_ids=tuple(sorted(stops)),
            seed=config.seed,
            keeps=keeps,
            ranks=self._job.ranks,
            continues=config.behavior_version >= 2,
            episodes=self._episodes(settings),
            state_at=self._state_at,
        )

    def _state_at(self, step: int) -> TrainerState:
        config = self._job.config
        steps_per_epoch = math.ceil(self._rows / config.training.batch_size)
        return TrainerState(step, total_steps(config, self._rows), step / steps_per_epoch)

    def _episodes(self, settings: RolloutConfig) -> Episodes | None:
        if self._environments is None:
            return None
        room = self._job.config.data.max_length - settings.max_completion_length
        version = self._job.config.behavior_version
        limits = Limits.of(settings, room, base_of(self._policy).config, behavior_version=version)
        return self._resources.enter_context(closing(Episodes(self.engine, self._environments, self._codecs, limits)))

    def of_sets(self) -> dict[str, Sampler]:
        """A sampler for each validation set that has rewards, either the run's or its own."""
        config, made = self._job.config, {}
        if not config.evaluates:
            return made
        settings = config.evaluation.sampling(config.rollout)
        if config.data.validation is not None and self.rewards is not None:
            made["validation"] = self.sampler(self.rewards, settings)
        for dataset in config.evaluation.datasets:
            rewards = self.rewards if dataset.rewards is None else self._rewards(dataset.rewards)
            if rewards is not None:
                made[dataset.name] = self.sampler(rewards, settings, dataset)
        return made

    def _rewards(self, settings: Sequence[Reward]) -> Rewards | None:
        config = self._job.config
        kinds = [] if self._environments is None else self._environments.kinds.values()
        if not settings and not kinds:
            return None
        rewards = Rewards.of_run(
            config,
            settings,
            workers=workers_of(self._job.ranks.locals),
            environments=list(dict.fromkeys(kind.title for kind in kinds)),
        )
        return self._resources.enter_context(rewards)


def environments_of(config: RunConfig, ranks: Ranks) -> Environments:
    """The environments of a run. Raises RewardError if nothing rewards its episodes, and for several ranks on vLLM."""
    if ranks.size > 1 and config.rollout.engine == "vllm":
        raise RewardError("environments on several ranks need rollout.engine: embedded: ranks share vLLM's servers")
    made = Environments(config.environments, config.tools, config.rollout.environment_workers)
    if config.method.needs_rewards and not config.rewards and not any(kind.rewards for kind in made.kinds.values()):
        made.close()
        raise RewardError("nothing rewards the episodes: give the environment a method `get_reward`, or set `rewards`")
    return made


@contextmanager
def sampler_of(job: Job, policy: nn.Module, data: Prepared) -> Iterator[Sampler]:
    """The run's sampler, with its engine and rewards; checks the rules and loads reward models."""
    with ExitStack() as resources:
        parts = _Samplers(resources, job, policy, data)
        sampler = parts.sampler(parts.rewards or Rewards(()), job.config.rollout, keeps=job.keeps_engine)
        sampler.evaluation = parts.of_sets()
        yield sampler


@contextmanager
def rollout_store(job: Job, saver: Saver) -> Iterator[RolloutStore | None]:
    """The run's `rollouts.sqlite`, without steps after the checkpoint. None if rollout.save is off or if this is not
    the first rank."""
    settings = job.config.rollout
    if not settings.save or not job.ranks.is_first:
        yield None
        return
    after = -1 if job.checkpoint is None else saved_step(job.checkpoint)
    most = int(settings.max_database_gb * GIB)
    with closing(RolloutStore(job.run.folder, most, after, job.checkpoint)) as saver.rollouts:
        yield saver.rollouts


def evaluated_rows(config: RunConfig, step: int, name: str, size: int) -> np.ndarray:
    """The rows of a validation set of `size` rows to evaluate at `step`: all, the first, or a sample with replacement.

    The sample is a function of seed, step and name, so that a resumed run evaluates the same rows.
    """
    common = config.evaluation
    own = next((entry for entry in common.datasets if entry.name == name), common)
    batches = own.num_batches or common.num_batches
    rows = size if batches is None else batches * config.training.batch_size
    if batches is None or not (common.with_replacement if own.with_replacement is None else own.with_replacement):
        return np.arange(min(size, rows))
    return np.random.default_rng([config.seed, step, zlib.crc32(name.encode())]).integers(size, size=rows)


def measure_completions(
    config: RunConfig,
    sample: Sampler,
    store: RolloutStore | None,
    name: str,
    prompts: Dataset,
    step: int,
    sampling: SamplingContext,
) -> dict[str, float]:
    """Sample and reward completions of a validation set's prompts. Returns the metrics by name."""
    n, batch = config.evaluation.num_generations, config.training.batch_size
    rows, chunk = evaluated_rows(config, step, name, len(prompts)), max(1, 8 * batch // n)
    rollouts: list[Rollout] = []
    for start in progress(range(0, len(rows), chunk), f"evaluating {name}"):
        batch_prompts = [prompts[int(index)] for index in rows[start : start + chunk]]
        with sampling(evaluating=True):
            rollouts.append(sample(f"evaluation {name} {start}", batch_prompts, n, version=step))
    rollout = joined(rollouts)
    if store is not None:
        store.add_evaluation(step, name, evaluated(rollout))
    metrics = {key: value for key, value in rollout.metrics().items() if key != "resampled_groups"}
    metrics |= sample.rewards.accuracies(rollout.rewarded) | reasoning(config, sample, name, rollout)
    answers = sample.rewards.right(rollout.rewarded).get("answer")
    if n > 1 and answers is not None:
        found = passes([answers[first : first + n] for first in range(0, len(answers), n)], n)
        metrics |= {f"pass@{k}": share for k, share in found.items()}
    return metrics


def reasoning(config: RunConfig, sample: Sampler, name: str, rollout: Rollout) -> dict[str, float]:
    """The share of completions with reasoning, and the mean length of the reasoning in characters and in tokens.

    Empty if neither the template nor a reward marks the end of the reasoning.
    """
    kinds = {reward.type for reward in sample.rewards.settings}
    own = next((dataset.template for dataset in config.evaluation.datasets if dataset.name == name), None)
    tagged = (own or config.data.template) == "tags" or bool(kinds & TAGGED)
    end = THINK_END if "r1_zero" in kinds else config.data.tags.reasoning_end if tagged else None
    if end is None:
        return {}
    texts = [each.text.partition(end)[0].strip() for each in rollout.completions if end in each.text]
    tokens = [len(sample.tokenizer(text, add_special_tokens=False).input_ids) for text in texts if text]
    metrics = {"reasoning_share": len(tokens) / len(rollout.completions)}
    if not tokens:
        return metrics
    if config.behavior_version < 2:
        return metrics | {"reasoning_length": fmean(tokens)}
    characters = [len(text) for text in texts if text]
    return metrics | {"reasoning_length": fmean(characters), "reasoning_tokens": fmean(tokens)}


def parts_of(reward: CompletionReward) -> dict[str, dict[str, object]]:
    """The parts of a reward by name: value and weight; for rules also verdict, extracted answer and reason; for
    functions also what they noted."""
    parts: dict[str, dict[str, object]] = {}
    for part in reward.parts:
        facts = parts[part.name] = {"value": part.value, "weight": part.weight}
        if part.extra:
            facts["extra"] = dict(part.extra)
        if part.grade is not None:
            facts |= {"verdict": part.grade.verdict, "extracted": part.grade.extracted, "reason": part.grade.reason}
        elif not part.counts:
            facts["verdict"] = "timeout"
    return parts


def as_text(prompt: Example) -> str:
    """The prompt for display: the string, or the content of the last message."""
    text = (prompt.facts or {}).get("prompt", "")
    return text if isinstance(text, str) else str(text[-1].get("content", ""))


def evaluated(rollout: Rollout) -> list[StoredEvaluation]:
    """The completions of an evaluation, for the rollout store."""
    return [
        StoredEvaluation(
            rollout.prompts[completion.group].row,
            as_text(rollout.prompts[completion.group]),
            completion.text,
            completion.reward.total,
            completion.finish_reason,
            parts_of(completion.reward),
            completion.tokens,
        )
        for completion in rollout.completions
    ]


class CompletionEvaluation:
    """Evaluation by generation for offline methods.

    If a validation set has rewards (the run's or its own), every evaluation also samples and rewards completions of its
    prompts. Engine and graders start at the first evaluation.
    """

    def __init__(self, job: Job, policy: nn.Module, data: Prepared, saver: Saver):
        self._job, self._policy, self._data, self._saver = job, policy, data, saver
        self._resources = ExitStack()
        self._made: tuple[dict[str, Sampler], RolloutStore | None] | None = None

    def __call__(self, name: str, step: int, sampling: SamplingContext) -> Mapping[str, float]:
        """The metrics of completions of this validation set's prompts; empty if the set has no rewards."""
        job = self._job
        if not job.config.samples:
            return {}
        if self._made is None:
            samplers = _Samplers(self._resources, job, self._policy, self._data).of_sets()
            store = self._resources.enter_context(rollout_store(job, self._saver))
            self._made = samplers, store
        samplers, store = self._made
        if name not in samplers:
            return {}
        samplers[name].engine.load(self._policy, step)
        metrics = measure_completions(job.config, samplers[name], store, name, self._data.prompts[name], step, sampling)
        samplers[name].engine.release()
        return metrics

    def close(self) -> None:
        self._resources.close()
        self._made = None
