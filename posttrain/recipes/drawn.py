"""Evaluation by generation: a completion of every validation prompt, rewarded; of methods that draw none too.

Completions are drawn with the same random numbers at every evaluation, so that two evaluations differ by their weights
alone. Nothing here touches the generators that training draws from.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from statistics import fmean
from typing import TYPE_CHECKING

from torch import nn
from transformers import PreTrainedTokenizerBase

from posttrain.batch import Example
from posttrain.config import RunConfig
from posttrain.data import Dataset, validation_prompts
from posttrain.engines import make_engine, stop_token_ids
from posttrain.grading.extract import THINK_END
from posttrain.models.families import base_of, positions_of
from posttrain.progress import progress
from posttrain.recipes.job import Job
from posttrain.rewards.compose import Rewards
from posttrain.rewards.known import TAGGED
from posttrain.rollout import Rollout, Sampler, joined
from posttrain.store.checkpoint import saved_step
from posttrain.store.rollouts import GIB, RolloutStore, StoredEvaluation

if TYPE_CHECKING:
    from posttrain.recipes.loop import Loop

log = logging.getLogger("posttrain")


@contextmanager
def sampler_of(job: Job, policy: nn.Module) -> Iterator[Sampler]:
    """The engine and the rewards that the settings ask for; rules are proven, and models loaded, here."""
    config = job.config
    rollout = config.rollout
    with (
        closing(make_engine(rollout.engine, policy, job.tokenizer, vllm=rollout.vllm)) as engine,
        Rewards(
            config.rewards,
            tags=config.data.tags,
            devices=config.devices,
            max_completion_length=rollout.max_completion_length,
        ) as rewards,
    ):
        stops = stop_token_ids(policy, job.tokenizer)
        if not stops and not rollout.stop:
            log.warning(
                "neither the model nor its tokenizer names a stop token, so that every completion runs to "
                "rollout.max_completion_length = %d: set the tokenizer's eos_token, or rollout.stop",
                rollout.max_completion_length,
            )
        yield Sampler(engine, rewards, job.tokenizer, rollout, stop_token_ids=stops, seed=config.seed)


@contextmanager
def rollout_store(job: Job, loop: Loop) -> Iterator[RolloutStore | None]:
    """`rollouts.sqlite` of the run, from the step that it stands at; None where the settings keep none."""
    settings = job.config.rollout
    if not settings.save:
        yield None
        return
    after = -1 if job.checkpoint is None else saved_step(job.checkpoint)
    store = RolloutStore(job.run.folder, int(settings.max_database_gb * GIB), after, job.checkpoint)
    loop.saver.rollouts = store
    try:
        yield store
    finally:
        store.close()


def measure_drawn(
    loop: Loop, sample: Sampler, store: RolloutStore | None, name: str, prompts: Dataset
) -> dict[str, float]:
    """Draw and reward a completion of each prompt of a validation set; what they are worth, by name."""
    size, chunk = loop.evaluated_rows(prompts), 8 * loop.batch_size
    rollouts: list[Rollout] = []
    for start in progress(range(0, size, chunk), f"evaluating {name}"):
        some = [prompts[index] for index in range(start, min(start + chunk, size))]
        with loop.drawing(evaluating=True):
            rollouts.append(sample(f"evaluation {name} {start}", some, 1, version=loop.state.step))
    rollout = joined(rollouts)
    if store is not None:
        store.add_evaluation(loop.state.step, name, evaluated(rollout))
    found = {key: value for key, value in rollout.metrics().items() if key not in OF_GROUPS}
    return found | sample.rewards.accuracies(rollout.rewarded) | reasoning(loop.job.config, sample.tokenizer, rollout)


# Of a rollout's metrics, those that say nothing of one completion a prompt.
OF_GROUPS = ("frac_reward_zero_std", "resampled_groups")


def reasoning(config: RunConfig, tokenizer: PreTrainedTokenizerBase, rollout: Rollout) -> dict[str, float]:
    """The share of completions with any text before the end of their reasoning, and the mean length of it in tokens.

    Empty where neither the template nor a reward has a mark for that end.
    """
    kinds = {reward.type for reward in config.rewards}
    tagged = config.data.template == "tags" or bool(kinds & TAGGED)
    end = THINK_END if "r1_zero" in kinds else config.data.tags.reasoning_end if tagged else None
    if end is None:
        return {}
    texts = [text.partition(end)[0].strip() for text in rollout.texts if end in text]
    lengths = [len(tokenizer(text, add_special_tokens=False).input_ids) for text in texts if text]
    share = len(lengths) / len(rollout.texts)
    return {"reasoning_share": share} | ({"reasoning_length": fmean(lengths)} if lengths else {})


def parts_of(rollout: Rollout, index: int) -> dict[str, dict[str, object]]:
    """Each reward of a completion: its value and weight, and of rules the verdict and what it rests on."""
    found: dict[str, dict[str, object]] = {}
    for part in rollout.rewarded.parts:
        one: dict[str, object] = {"value": part.values[index], "weight": part.weight}
        if part.grades is not None:
            grade = part.grades[index]
            one |= {"verdict": grade.verdict, "extracted": grade.extracted, "reason": grade.reason}
        found[part.name] = one
    return found


def as_text(prompt: Example) -> str:
    """What was asked, for people to read: the text, or the content of the last message."""
    asked = (prompt.facts or {}).get("prompt", "")
    return asked if isinstance(asked, str) else str(asked[-1].get("content", ""))


def evaluated(rollout: Rollout) -> list[StoredEvaluation]:
    return [
        StoredEvaluation(
            prompt.row,
            as_text(prompt),
            rollout.texts[index],
            rollout.rewarded.totals[index],
            completion.finish_reason,
            parts_of(rollout, index),
            completion.tokens,
        )
        for index, (prompt, completion) in enumerate(zip(rollout.prompts, rollout.completions, strict=True))
    ]


class Drawn:
    """Evaluation by generation of a method that draws nothing itself: where `rewards` are set, every evaluation also
    draws and rewards a completion of each validation prompt. Engine and graders start with the first one."""

    def __init__(self, loop: Loop):
        self._loop, self._resources = loop, ExitStack()
        self._parts: tuple[Sampler, RolloutStore | None, dict[str, Dataset]] | None = None

    def __call__(self, name: str) -> Mapping[str, float]:
        """What the completions of this validation set are worth."""
        loop = self._loop
        if self._parts is None:
            sample = self._resources.enter_context(sampler_of(loop.job, loop.policy))
            store = self._resources.enter_context(rollout_store(loop.job, loop))
            positions = positions_of(base_of(loop.policy).config)
            prompts = validation_prompts(loop.job.config, loop.job.tokenizer, loop.data, positions=positions)
            self._parts = sample, store, prompts
        sample, store, prompts = self._parts
        sample.engine.load(loop.policy, loop.state.step)
        return measure_drawn(loop, sample, store, name, prompts[name])

    def close(self) -> None:
        self._resources.close()
        self._parts = None
