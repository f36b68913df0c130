"""Every method by its name."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from posttrain.config.schema.offline import (
    CPOMethod,
    DPOMethod,
    KTOMethod,
    ORPOMethod,
    RewardMethod,
    SFTMethod,
    SimPOMethod,
)
from posttrain.config.schema.online import DistillMethod, GRPOMethod, PPOMethod, ReinforcePlusPlusMethod, RLOOMethod


def spell_out(method: Any) -> Any:
    """`ipo` is `dpo` with `loss_type: [ipo]`, and a bare name is a method with its defaults; the rest as it is."""
    if isinstance(method, str):
        method = {"type": method}
    if isinstance(method, dict) and method.get("type") == "ipo":
        method = {**method, "type": "dpo", "loss_type": method.get("loss_type", ["ipo"])}
    if isinstance(method, dict) and method.get("type") == "ppo":
        method = {PPO_NAMES.get(key, key): value for key, value in method.items()}
    return method


# What PPO calls otherwise, so that the names that aliases come to (posttrain/config/reading/layers.py) are its own too.
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
