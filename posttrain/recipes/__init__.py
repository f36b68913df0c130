"""The methods, one recipe each: a file that reads top to bottom and owns its training loop.

The other half of a method, its settings and facts, is in posttrain/config/schema/.
"""

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from posttrain.data import Prepared
from posttrain.recipes import distill, grpo, kto, ppo, preference, reference_free, reward, sft
from posttrain.recipes.online import Updates
from posttrain.training.job import Job
from posttrain.training.loop import Loop, ObjectiveOf

__all__ = ["OFFLINE", "ONLINE", "RECIPES", "REWARDED"]


class Recipe(Protocol):
    """A method's file: `train` makes every step of a run."""

    def train(self, job: Job, data: Prepared) -> Loop: ...


class OfflineRecipe(Recipe, Protocol):
    """A method that learns from given completions."""

    def objectives(self, models: Any) -> ObjectiveOf:
        """The packs and the loss of a batch of examples."""
        ...


class OnlineRecipe(Recipe, Protocol):
    """A method that learns from completions that it samples."""

    step_of: Callable[..., Any]  # from `models`, a rollout and more to the step
    reference_of: Callable[..., Any]  # from a job, a method and a policy to the method's reference

    def updates(self, models: Any, number: int, step: Any) -> Updates: ...


class RewardedRecipe(OnlineRecipe, Protocol):
    """A method that learns from rewards of completions."""

    surrogate: Callable[..., tuple[Tensor, Tensor]]  # the loss of each token, and whether it is clipped
    regraded: Callable[..., list[float | None]]  # the advantages of a step's stored completions under other rewards


OFFLINE: dict[str, OfflineRecipe] = {
    "sft": sft,
    "reward": reward,
    "dpo": preference,
    "orpo": reference_free,
    "cpo": reference_free,
    "simpo": reference_free,
    "kto": kto,
}
REWARDED: dict[str, RewardedRecipe] = {"ppo": ppo, "grpo": grpo, "rloo": grpo, "reinforce_plus_plus": grpo}
ONLINE: dict[str, OnlineRecipe] = {**REWARDED, "distill": distill}
RECIPES: dict[str, Recipe] = {**OFFLINE, **ONLINE}
