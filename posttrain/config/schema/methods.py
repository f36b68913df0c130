"""Every method by its name."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from posttrain.config.schema.distill import DistillMethod
from posttrain.config.schema.offline import (
    CPOMethod,
    DPOMethod,
    KTOMethod,
    ORPOMethod,
    RewardMethod,
    SFTMethod,
    SimPOMethod,
)
from posttrain.config.schema.online import GRPOMethod, PPOMethod, ReinforcePlusPlusMethod, RLOOMethod


def spell_out(method: Any) -> Any:
    """Expand short forms: `ipo` is `dpo` with `loss_type: [ipo]`, a bare name a method with its defaults."""
    if isinstance(method, str):
        method = {"type": method}
    if isinstance(method, dict) and method.get("type") == "ipo":
        method = {**method, "type": "dpo", "loss_type": method.get("loss_type", ["ipo"])}
    if isinstance(method, dict) and method.get("type") == "ppo":
        method = {PPO_NAMES.get(key, key): value for key, value in method.items()}
    return method


# Settings with another name in PPO, so that aliases (posttrain/config/reading/layers.py) resolve to its names.
PPO_NAMES = {"beta": "kl_coef", "epsilon": "cliprange", "num_iterations": "num_ppo_epochs"}

AnyMethod = (
    SFTMethod
    | RewardMethod
    | DPOMethod
    | ORPOMethod
    | CPOMethod
    | SimPOMethod
    | KTOMethod
    | PPOMethod
    | GRPOMethod
    | RLOOMethod
    | ReinforcePlusPlusMethod
    | DistillMethod
)
METHODS: dict[str, type[AnyMethod]] = {
    "sft": SFTMethod,
    "reward": RewardMethod,
    "dpo": DPOMethod,
    "orpo": ORPOMethod,
    "cpo": CPOMethod,
    "simpo": SimPOMethod,
    "kto": KTOMethod,
    "ppo": PPOMethod,
    "grpo": GRPOMethod,
    "rloo": RLOOMethod,
    "reinforce_plus_plus": ReinforcePlusPlusMethod,
    "distill": DistillMethod,
}
METHOD_NAMES = (*METHODS, "ipo")
Method = Annotated[Annotated[AnyMethod, Field(discriminator="type")], BeforeValidator(spell_out)]
