"""`posttrain regrade`: grade the stored completions of a run with other rewards, and compare the advantages."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from posttrain import engines
from posttrain.base.errors import PosttrainError, RunError
from posttrain.config.schema.rewards import Reward
from posttrain.environments.trajectory import Trajectory, rewarded_as
from posttrain.models.load import load_tokenizer
from posttrain.recipes import recipe_of
from posttrain.rewards.compose import Rewards
from posttrain.rewards.parts import RewardInput
from posttrain.runs.inputs import run_settings
from posttrain.runs.stored_rollouts import StoredRun, of_trained
from posttrain.sampler import end_of, to_reward
from posttrain.training.evaluation import parts_of

SIGN, TO_ZERO, FROM_ZERO, STAYS_ZERO, SAME = "sign", "to 0", "from 0", "stays 0", "same sign"


@dataclass(frozen=True, slots=True)
class ChangedAdvantage:
    """A completion whose advantage changes sign, becomes 0, or is no longer 0 under other rewards."""

    step: int
    prompt: int
    rollout: int
    change: str
    rewards: tuple[float, float]  # the run's, and the new one
    advantages: tuple[float, float]
    text: str


@dataclass(frozen=True, slots=True)
class Regraded:
    """The advantages that other rewards change, and the counts of each kind of change."""

    changed: list[ChangedAdvantage]
    counts: Counter[str]
    approximate: bool  # the run's own rewards were whitened, so new advantages are not exactly those of training
    has_tokenizer: bool  # without a tokenizer, rewards do not know which prompts open <think>


def regrade(folder: Path, settings: Sequence[Reward], step: int | None = None) -> Regraded:
    """Compute other rewards for the stored completions of one step, or of all steps.

    The run's advantages are the stored ones; the new ones are computed as in training, over the completions that have
    both rewards. Raises RunError for a run that does not learn from rewards.
    """
    config = run_settings(folder, imports=True)
    method = config.method
    if not method.needs_rewards:
        raise RunError(f"{folder} is a run of {method.type}, which does not learn from rewards")
    tokenizer, changed, counts, approximate = tokenizer_of(folder), [], Counter[str](), False
    with (
        StoredRun(folder) as stored,
        Rewards.of_run(config, settings, environments=stored.environments() if config.acts else ()) as rewards,
    ):
        if step is not None:
            stored.require(step)
        for number in stored.steps() if step is None else [step]:
            prompts, rows = stored.prompts(number), stored.rollouts(number)
            graded = rewards([_completion(prompts[row["prompt_index"]], row, tokenizer) for row in rows])
            usable = [
                ({**of_trained(row), "parts": parts_of(new)}, new.total)
                for row, new in zip(rows, graded, strict=True)
                if row["reward"] is not None and new.total is not None
            ]
            whitened = getattr(method, "whiten_rewards", False)  # exact only with the penalties, which old runs lack
            approximate |= whitened and any(row.get("penalties") is None for row, _ in usable)
            advantages = recipe_of(method).regraded(method, [row for row, _ in usable], [new for _, new in usable])
            for (row, reward), after in zip(usable, advantages, strict=True):
                before = row["advantage"]
                if before is None or after is None:  # outside the loss
                    continue
                change = _change(before, after)
                counts[change] += 1
                if change not in (SAME, STAYS_ZERO):
                    where = number, row["prompt_index"], row["rollout_index"], change
                    both = (row["reward"], reward), (before, after)
                    changed.append(ChangedAdvantage(*where, *both, row["completion"]))
    changed.sort(key=lambda advantage: advantage.change != SIGN)  # sign changes first, otherwise in the stored order
    return Regraded(changed, counts, approximate, tokenizer is not None)


def _change(before: float, after: float) -> str:
    if before * after < 0:
        return SIGN
    if before == 0:
        return STAYS_ZERO if after == 0 else FROM_ZERO
    return TO_ZERO if after == 0 else SAME


def _completion(
    prompt: Mapping[str, Any], row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase | None
) -> RewardInput:
    """A stored completion as a reward's input. Without a tokenizer, no prompt is assumed to open `<think>`."""
    if row.get("turns"):
        return rewarded_as(Trajectory.restored(row["turns"], row["tokens"].tolist()), prompt["facts"])
    sampled = engines.Completion(row["tokens"].tolist(), [], row["finish_reason"], row["version"])
    end = "" if tokenizer is None else end_of(prompt["tokens"], tokenizer)
    return to_reward(sampled, row["completion"], end, prompt["facts"])


def tokenizer_of(folder: Path) -> PreTrainedTokenizerBase | None:
    """A run's tokenizer, loaded by transformers; None if it cannot be loaded."""
    model = run_settings(folder).models[0]
    for path in (str(folder / "final"), model.path):
        try:
            return load_tokenizer(model.model_copy(update={"path": path}))
        except PosttrainError:
            continue
    return None
