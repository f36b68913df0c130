"""The methods, one recipe each: a file that reads top to bottom and owns its training loop."""

from collections.abc import Callable

from posttrain.data import Prepared
from posttrain.recipes import distill, grpo, kto, ppo, preference, reference_free, reward, sft
from posttrain.training.job import Job
from posttrain.training.loop import Loop

__all__ = ["RECIPES", "REGRADED"]

RECIPES: dict[str, Callable[[Job, Prepared], Loop]] = {
    "sft": sft.train,
    "reward": reward.train,
    "dpo": preference.train,
    "orpo": reference_free.train,
    "cpo": reference_free.train,
    "simpo": reference_free.train,
    "kto": kto.train,
    "ppo": ppo.train,
    "grpo": grpo.train,
    "rloo": grpo.train,
    "reinforce_plus_plus": grpo.train,
    "distill": distill.train,
}

# For methods that store their completions: the advantages of a stored step under other rewards.
REGRADED: dict[str, Callable[..., list[float | None]]] = {
    "ppo": ppo.regraded,
    "grpo": grpo.regraded,
    "rloo": grpo.regraded,
    "reinforce_plus_plus": grpo.regraded,
}
