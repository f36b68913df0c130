"""Every method by its name."""

import sys
from typing import Annotated, Any, get_args

from pydantic import BeforeValidator, ConfigDict, Field, SerializeAsAny, ValidatorFunctionWrapHandler, WrapValidator

from posttrain.base.errors import ConfigError
from posttrain.base.functions import find_function
from posttrain.config.schema import distill, offline, online
from posttrain.config.schema.base import MethodSettings
from posttrain.config.schema.online import PPO_NAMES
from posttrain.config.schema.types import FUNCTION, is_own


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
    | online.ReinforcePlusPlusMethod | distill.DistillMethod
)  # fmt: skip
METHODS: dict[str, type[AnyMethod]] = {method.name(): method for method in get_args(AnyMethod)}
METHOD_NAMES = (*METHODS, "ipo")


def class_of(name: str) -> type[AnyMethod]:
    """The settings class of a method of METHOD_NAMES."""
    return METHODS["dpo" if name == "ipo" else name]


class UnreadMethod(MethodSettings):
    """A method of the user's, whose class `type` names, before that is imported: its settings are not checked."""

    model_config = ConfigDict(extra="allow")
    learning_rates = (1e-6, 1e-5)

    type: Annotated[str, Field(pattern=FUNCTION)]


OWN: dict[str, type[MethodSettings]] = {}  # the imported methods of the user's, by their `type`


def import_method(name: str) -> None:
    """Import the class of a user's method, so that settings are read as this class from now on. Raises ConfigError
    unless it is a class of settings, in a module with the function `train` of a recipe."""
    found = find_function(name)
    if not (isinstance(found, type) and issubclass(found, MethodSettings)):
        raise ConfigError(f"method.type: {name} is not a class derived from MethodSettings, e.g. from PreferenceMethod")
    lacking = [
        fact for fact in ("type", "learning_rates") if not hasattr(found, fact) and fact not in found.model_fields
    ]
    if lacking or not callable(getattr(sys.modules[found.__module__], "train", None)):
        needed = ", ".join([*lacking, "and its module the function train(job, data)"])
        raise ConfigError(f"method.type: {name} needs {needed} (docs/extending.md#a-method-of-your-own)")
    OWN[name] = found


def _own_or_known(value: Any, known: ValidatorFunctionWrapHandler) -> MethodSettings:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if not is_own(kind):
        return known(value)
    group = OWN.get(str(kind), UnreadMethod)
    if isinstance(value, MethodSettings) and type(value) is group:
        return value
    return group.model_validate(value.model_dump() if isinstance(value, MethodSettings) else value)


Method = Annotated[
    SerializeAsAny[Annotated[AnyMethod, Field(discriminator="type")]],
    WrapValidator(_own_or_known),
    BeforeValidator(spell_out),
]
