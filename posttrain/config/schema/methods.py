"""Every method by its name."""

from typing import Annotated, Any, get_args

from pydantic import BeforeValidator, Field

from posttrain.config.schema import offline, online
from posttrain.config.schema.online import PPO_NAMES


def spell_out(method: Any) -> Any:
    """Expand short forms: `ipo` is `dpo` with `loss_type: [ipo]`; a bare name is a method with its defaults."""
    if isinstance(method, str):
        method = {"type": method}
    if isinstance(method, dict) and method.get("type") == "ipo":
        method = {**method, "type": "dpo", "loss_type": method.get("loss_type", ["ipo"])}
    if isinstance(method, dict) and method.get("type") == "ppo":
        method = {PPO_NAMES.get(key, key): value for key, value in method.items()}
    return method


AnyMethod = (
    offline.SFTMethod | offline.RewardMethod | offline.DPOMethod | offline.ORPOMethod | offline.CPOMethod
    | offline.SimPOMethod | offline.KTOMethod | online.PPOMethod | online.GRPOMethod | online.RLOOMethod
    | online.ReinforcePlusPlusMethod | online.DistillMethod
)  # fmt: skip
METHODS: dict[str, type[AnyMethod]] = {method.name(): method for method in get_args(AnyMethod)}
METHOD_NAMES = (*METHODS, "ipo")
Method = Annotated[Annotated[AnyMethod, Field(discriminator="type")], BeforeValidator(spell_out)]
