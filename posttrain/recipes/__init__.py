"""The recipes of the methods. A recipe is a file that reads from top to bottom and owns its training loop.

The other half of a method, its settings and properties, is in posttrain/config/schema/. Every recipe has `train`.
Recipes that learn from given completions have `objectives`. Recipes that sample have `step_of`, `updates` and
`reference_of`; with rewards, also `surrogate`, the loss of each token, and `regraded`, advantages under new rewards.
"""

import sys
from types import ModuleType

from posttrain.base.errors import ConfigError
from posttrain.config import DPOMethod, GRPOMethod, KTOMethod, RunConfig, SFTMethod
from posttrain.config.schema.base import MethodSettings
from posttrain.config.schema.methods import UnreadMethod
from posttrain.config.schema.rewards import PythonReward
from posttrain.config.schema.types import is_own
from posttrain.losses import own_token_loss
from posttrain.losses.policy import policy_loss_named
from posttrain.losses.preference import couples_batch
from posttrain.losses.unpaired import own_unpaired_loss
from posttrain.recipes import distill, grpo, kto, ppo, preference, reference_free, reward, sft
from posttrain.rewards.python import RewardFunction

OFFLINE: dict[str, ModuleType] = {
    "sft": sft,
    "reward": reward,
    "dpo": preference,
    "orpo": reference_free,
    "cpo": reference_free,
    "simpo": reference_free,
    "kto": kto,
}
REWARDED: dict[str, ModuleType] = {"ppo": ppo, "grpo": grpo, "rloo": grpo, "reinforce_plus_plus": grpo}
ONLINE = {**REWARDED, "distill": distill}
RECIPES = {**OFFLINE, **ONLINE}


def recipe_of(method: MethodSettings) -> ModuleType:
    """The recipe of a method; for one of the user's, the module of its class. Raises ConfigError for settings of which
    the class was not imported."""
    if isinstance(method, UnreadMethod):
        raise ConfigError(f"{method.type} was not imported: read the settings with load(…, imports=True)")
    return RECIPES.get(getattr(method, "type", "")) or sys.modules[type(method).__module__]


def check_functions(config: RunConfig) -> None:
    """Import the user's functions that the settings name, and try them. Raises ConfigError or RewardError for one that
    does not exist or does not fit."""
    for term in (*config.rewards, *(term for dataset in config.evaluation.datasets for term in dataset.rewards or ())):
        if isinstance(term, PythonReward):
            RewardFunction(term.function).close()
    method, own = config.method, is_own(getattr(config.method, "loss_type", None))
    if isinstance(method, DPOMethod):
        couples_batch(method.loss_type)
    elif own and isinstance(method, SFTMethod | KTOMethod):
        (own_token_loss if isinstance(method, SFTMethod) else own_unpaired_loss)(method.loss_type)
    elif own and isinstance(method, GRPOMethod):
        policy_loss_named(method.loss_type)
