"""What the recipes that learn from completions share: a step with its numbers, minibatches, evaluation, vital signs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from posttrain.batch import Pack
from posttrain.losses.reduce import sum_segments
from posttrain.rollout import Part, Rollout, Sampler
from posttrain.store.rollouts import RolloutStore, StoredPrompt, StoredRollout
from posttrain.training.checks import check_sampler
from posttrain.training.evaluation import as_text, measure_drawn, parts_of
from posttrain.training.job import Job
from posttrain.training.loop import Loop


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
        self.signs: dict[str, float] | None = None  # how far engine and trainer are apart, once that is known

    def sums(self, value_R: Tensor) -> Tensor:
        """A value for each token, summed over each completion: (R) to (S)."""
        return sum_segments(value_R, self.rollout.length_S.to(value_R.device))

    def per_token(self) -> dict[str, Tensor | None]:
        """What the store keeps of each token (R), by its names there."""
        return {
            "sampler_logprobs": self.sampler_R,
            "old_logprobs": self.trainer_R,
            "new_logprobs": self.new_R,
            "ref_logprobs": self.reference_R,
            "advantages": self.advantage_R,
            "clipped": self.clipped_R,
        }

    def stored(self) -> tuple[list[StoredPrompt], list[StoredRollout]]:
        """The step as the store keeps it."""
        rollout, tokens = self.rollout, self.rollout.length_S.tolist()
        kept = set(self.in_loss_S.tolist())
        flat = self.per_token()
        split = {name: None if values is None else values.cpu().split(tokens) for name, values in flat.items()}
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


def minibatches(step: Step, count: int, key: Sequence[int]) -> list[tuple[Tensor, int]]:
    """The completions in the loss in `count` parts of whole groups, in an order drawn from `key`.

    With each part, how many completions of its groups count, those left out of the loss among them. A part with nothing
    in the loss is left out.
    """
    group_S, prompts = step.rollout.group_S, len(step.rollout.prompts)
    order = np.arange(prompts) if count == 1 else np.random.default_rng(list(key)).permutation(prompts)
    made = []
    for groups in map(torch.from_numpy, np.array_split(order, count)):
        chosen, counted = (some[torch.isin(group_S[some], groups)] for some in (step.in_loss_S, step.counted_S))
        if len(chosen):
            made.append((chosen, len(counted)))
    return made


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
        "sampling/sampling_logp_difference/rms": difference_N.square().mean().sqrt().item(),
        "sampling/effective_sample_size": (weight_N.sum() ** 2 / (len(weight_N) * (weight_N**2).sum())).item(),
    }


def look_at_sampler(job: Job, sample: Sampler, step: Step) -> None:
    """Take down the signs of a step whose tokens the trainer has scored; before its first update, so that nothing is
    learned from an engine with other weights. Raises VitalSignError where they are not what rounding explains."""
    rollout = step.rollout
    inside_R = torch.isin(rollout.sequence_R, step.in_loss_S)
    if step.signs is not None or not inside_R.any():
        return
    trainer_N, sampler_N = step.trainer_R.cpu()[inside_R], rollout.sampler_R[inside_R]
    step.signs = sampler_signs(trainer_N, sampler_N)
    if not sample.filtered:  # a filter makes the drawn tokens likelier than they are in the policy
        check_sampler(trainer_N - sampler_N, job.dtype, job.config.rollout.engine)


def evaluate(loop: Loop, sample: Sampler, store: RolloutStore | None) -> None:
    """Completions of the validation prompts, sampled and rewarded as the settings ask."""
    samplers = sample.evaluation
    loop.evaluate_by(
        lambda name, dataset: measure_drawn(loop, samplers[name], store, name, dataset) if name in samplers else {}
    )
    sample.engine.release()  # an evaluation may have drawn more at a time than a step, which the estimate counts
