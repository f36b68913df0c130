"""What the recipes that draw completions share: the sampler of a run, scores, minibatches, evaluation, vital signs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from posttrain.batch import Example, Pack
from posttrain.data import Dataset
from posttrain.engines import make_engine, stop_token_ids
from posttrain.progress import progress
from posttrain.recipes.job import Job
from posttrain.recipes.loop import Loop
from posttrain.recipes.vital import check_sampler
from posttrain.rewards.compose import Rewards
from posttrain.rollout import Part, Rollout, Sampler
from posttrain.store.rollouts import GIB, RolloutStore, StoredEvaluation, StoredPrompt, StoredRollout


@contextmanager
def sampler_of(job: Job, policy: nn.Module) -> Iterator[Sampler]:
    """The engine and the rewards that the settings ask for; rules are proven, and models loaded, here."""
    config = job.config
    engine = make_engine(config.rollout.engine, policy, job.tokenizer)
    with Rewards(
        config.rewards,
        tags=config.data.tags,
        devices=config.devices,
        max_completion_length=config.rollout.max_completion_length,
    ) as rewards:
        stops = stop_token_ids(policy, job.tokenizer)
        yield Sampler(engine, rewards, job.tokenizer, config.rollout, stop_token_ids=stops, seed=config.seed)


def in_packs(job: Job, rollout: Rollout, chosen: Sequence[int] | Tensor) -> list[Part]:
    """The chosen completions of a rollout in packs of the settings' size."""
    return rollout.parts(chosen, job.pack, job.config.training.tokens_per_pack)


class Step:
    """A rollout with all that its updates need, in the rollout's order on the device (R)."""

    def __init__(self, job: Job, rollout: Rollout, mask_truncated: bool):
        self.rollout = rollout
        self.counted_S, self.in_loss_S = trained_on(rollout, mask_truncated)
        self.parts = in_packs(job, rollout, self.in_loss_S)
        self.sampler_R = rollout.sampler_R.to(job.device)
        self.old_R: Tensor | None = None  # none where the one update is of the policy that drew
        self.trainer_R = torch.zeros(rollout.num_tokens, device=job.device)  # of that policy, as the trainer scores it
        self.new_R = torch.zeros(rollout.num_tokens, device=job.device)  # of the policy at the step's last update
        self.clipped_R = torch.zeros(rollout.num_tokens, dtype=torch.bool, device=job.device)  # there
        self.reference_R: Tensor | None = None
        self.advantage_R = torch.zeros(rollout.num_tokens, device=job.device)

    def sums(self, value_R: Tensor) -> Tensor:
        """A value for each token, summed over each completion: (R) to (S)."""
        zeros_S = value_R.new_zeros(len(self.rollout.completions))
        return zeros_S.index_add(0, self.rollout.sequence_R.to(value_R.device), value_R)

    def stored(self) -> tuple[list[StoredPrompt], list[StoredRollout]]:
        """The step as the store keeps it."""
        rollout, tokens = self.rollout, self.rollout.length_S.tolist()
        kept = set(self.in_loss_S.tolist())
        flat = {
            "sampler_logprobs": self.sampler_R,
            "old_logprobs": self.trainer_R,
            "new_logprobs": self.new_R,
            "ref_logprobs": self.reference_R,
            "advantages": self.advantage_R,
            "clipped": self.clipped_R,
        }
        split = {name: None if flat[name] is None else flat[name].cpu().split(tokens) for name in flat}
        made = []
        for index, (group, completion) in enumerate(zip(rollout.group_S.tolist(), rollout.completions, strict=True)):
            inside = {name: values for name, values in split.items() if index in kept or name == "sampler_logprobs"}
            arrays = {name: None if values is None else values[index].numpy() for name, values in inside.items()}
            advantages = arrays.get("advantages")
            made.append(
                StoredRollout(
                    prompt_index=group,
                    rollout_index=index - int((rollout.group_S < group).sum()),
                    completion=rollout.texts[index],
                    reward=rollout.rewarded.totals[index],
                    advantage=None if advantages is None else float(advantages.mean()),
                    finish_reason=completion.finish_reason,
                    version=completion.version,
                    parts=parts_of(rollout, index),
                    arrays=arrays | {"tokens": np.asarray(completion.tokens)},
                )
            )
        prompts = [
            StoredPrompt(p.row, as_text(p), np.asarray(p.trees[0].tokens).tolist(), p.facts or {})
            for p in rollout.prompts
        ]
        return prompts, made


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


@contextmanager
def rollout_store(job: Job, loop: Loop) -> Iterator[RolloutStore | None]:
    """`rollouts.sqlite` of the run, from the step that it stands at; None where the settings keep none."""
    settings = job.config.rollout
    if not settings.save:
        yield None
        return
    after = -1 if job.checkpoint is None else loop.state.step
    store = RolloutStore(job.run.folder, int(settings.max_database_gb * GIB), after)
    loop.before_saving = store.flush
    try:
        yield store
    finally:
        store.close()


@torch.no_grad()
def scored(job: Job, rollout: Rollout, parts: Sequence[Part], of: Callable[[Pack], Tensor], columns: int = 1) -> Tensor:
    """What `of` gives to each scored token of the packs, in the rollout's order: (R, columns).

    `of` gives (N), or (N, columns). Tokens in none of the packs have 0.
    """
    found = torch.zeros(rollout.num_tokens, columns, device=job.device)
    for part in parts:
        moved = part.to(job.device)
        found[moved.token_N] = of(moved.pack).view(-1, columns)
    return found


def minibatches(rollout: Rollout, chosen_S: Tensor, count: int, key: Sequence[int]) -> Iterator[Tensor]:
    """The chosen completions in `count` parts of whole groups, in an order drawn from `key`; empty parts left out."""
    if count == 1:
        yield from [chosen_S] if len(chosen_S) else []
        return
    order = np.random.default_rng(list(key)).permutation(len(rollout.prompts))
    for groups in np.array_split(order, count):
        mine = chosen_S[torch.isin(rollout.group_S[chosen_S], torch.from_numpy(groups))]
        if len(mine):
            yield mine


def trained_on(rollout: Rollout, mask_truncated: bool) -> tuple[Tensor, Tensor]:
    """Which completions count (they have a reward), and which of these are in the loss: int64 both."""
    counted = rollout.has_reward_S
    in_loss = counted & ~rollout.truncated_S if mask_truncated else counted
    return counted.nonzero().squeeze(1), in_loss.nonzero().squeeze(1)


def sampler_signs(trainer_N: Tensor, sampler_N: Tensor) -> dict[str, float]:
    """How far the trainer's probabilities of the drawn tokens are from the engine's; names are TRL's where it has any.

    The effective sample size of weights w = trainer / engine, (Σw)² / (n Σw²), is 1 where both agree.
    """
    difference_N = (trainer_N - sampler_N).abs()
    weight_N = (trainer_N - sampler_N).double().exp()
    return {
        "sampling/sampling_logp_difference/mean": difference_N.mean().item(),
        "sampling/sampling_logp_difference/max": difference_N.max().item(),
        "sampling/effective_sample_size": (weight_N.sum() ** 2 / (len(weight_N) * (weight_N**2).sum())).item(),
    }


def signs_of(job: Job, sample: Sampler, trainer_R: Tensor, rollout: Rollout, chosen: Tensor) -> dict[str, float]:
    """The signs over the chosen completions. Raises VitalSignError where they are not what rounding explains."""
    inside_R = torch.isin(rollout.sequence_R, chosen)
    if not inside_R.any():
        return {}
    signs = sampler_signs(trainer_R.cpu()[inside_R], rollout.sampler_R[inside_R])
    if not sample.filtered:  # a filter makes the drawn tokens likelier than they are in the policy
        check_sampler(signs["sampling/sampling_logp_difference/max"], job.dtype, job.config.rollout.engine)
    return signs


def evaluate(loop: Loop, sample: Sampler, store: RolloutStore | None) -> None:
    """One completion of every validation prompt, rewarded: drawn with the same random numbers at every evaluation."""

    def measure(name: str, dataset: Dataset) -> Mapping[str, float]:
        total: dict[str, float] = {}
        count: dict[str, int] = {}
        drawn: list[StoredEvaluation] = []
        size, step = loop.evaluated_rows(dataset), 8 * loop.batch_size
        for start in progress(range(0, size, step), f"evaluating {name}"):
            prompts = [dataset[index] for index in range(start, min(start + step, size))]
            with loop.drawing(evaluating=True):
                rollout = sample(f"evaluation {name} {start}", prompts, 1, version=loop.state.step)
            drawn += evaluated(rollout)
            for key, value in rollout.metrics().items():
                if key not in UNEVEN and not key.endswith("std"):
                    total[key] = total.get(key, 0.0) + value * len(prompts)
                    count[key] = count.get(key, 0) + len(prompts)
        if store is not None:
            store.add_evaluation(loop.state.step, name, drawn)
        return {key: value / count[key] for key, value in total.items()}

    loop.evaluate_by(measure)


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


# Of a rollout's metrics, those that say nothing of one completion a prompt.
UNEVEN = ("frac_reward_zero_std", "resampled_groups", "completions/min_length", "completions/max_length")
