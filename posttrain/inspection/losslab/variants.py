"""The losses that fit a batch: the run's own first, then each with the run's settings, or with those of `--set`."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import ValidationError

from posttrain.base.errors import ConfigError
from posttrain.config import DistillMethod, DPOMethod, GRPOMethod, PPOMethod
from posttrain.config.reading.explain import did_you_mean, wrong_value
from posttrain.config.reading.fields import full
from posttrain.config.reading.files import parse_value
from posttrain.config.schema.base import SettingsConflict
from posttrain.config.schema.distill import DivergenceName
from posttrain.config.schema.methods import METHODS, PPO_NAMES, AnyMethod
from posttrain.config.schema.offline import ContrastiveLoss, PreferenceLoss, UnpairedLoss
from posttrain.config.schema.online import PolicyLossType
from posttrain.losses import PREFERENCE_LOSSES

# One update over the complete batch, and a reference that scores it then: what the lab computes.
ONE_UPDATE = {
    "num_iterations": 1,
    "num_minibatches": 1,
    "num_ppo_epochs": 1,
    "resampling_rounds": 0,
    "precompute_ref_log_probs": False,
}
# Settings that are no choice of the lab: they choose the loss, or other models, or act before or after the step.
FIXED = {
    *ONE_UPDATE,
    *("type", "loss_type", "loss_weights", "divergence"),
    *("ref_model", "teacher", "teacher_system_prompt", "on_policy_fraction"),
    *("num_generations", "completion_only_loss", "assistant_only_loss", "target_kl", "kl_horizon"),
}
ALIAS = "grpo_clip"  # another name of the loss grpo: no row of its own unless it is the run's
EXTRAS = {"scale_rewards", "center_rewards_coefficient"}  # rows of one loss that are not computed with `--set`
EXO_SMOOTHING = 0.001  # the paper's, for a run whose label_smoothing is 0


@dataclass(frozen=True, slots=True)
class Variant:
    """A loss with its settings: a row of the lab. `label` is `name` and the settings that it was asked to have."""

    name: str
    label: str
    method: AnyMethod


def variants(
    own: AnyMethod, losses: Sequence[str], settings: Mapping[str, Sequence[Any]]
) -> tuple[list[Variant], dict[str, str]]:
    """The rows of the lab for a run of `own`, its own loss first; and the losses that do not fit, with the reason.

    `losses` are names, empty for all. Every combination of `settings` makes a row of each loss that reads them. Raises
    ConfigError for an unknown loss or setting, or a value that is out of range.
    """
    entries = [(name, changes) for name, changes in catalogue(own) if not settings or not (changes.keys() & EXTRAS)]
    names = list(dict.fromkeys(name for name, _ in entries))
    for name in losses:
        if name not in names:
            raise ConfigError(f"--loss {name}: {did_you_mean(name, names)} for a run of {own.type}")
    _refuse_unknown(settings, {changes["type"] for name, changes in entries if not losses or name in losses})
    first = own.model_copy(update={key: value for key, value in ONE_UPDATE.items() if hasattr(own, key)})
    shown = {key: getattr(own, key) for key in settings if _reads(own, key)}
    rows = [Variant(own_name(own), _label(own_name(own), shown), first)]
    left_out: dict[str, str] = {}
    unread = set(settings)
    for name, changes in entries:
        if losses and name not in losses:
            continue
        for values in itertools.product(*settings.values()):
            chosen = dict(zip(settings, values, strict=True))
            made = _adapted(own, changes, chosen)
            if isinstance(made, str):
                left_out[_label(name, chosen)] = made
                continue
            method, read = made
            unread -= read.keys()
            if all(method != row.method for row in rows):
                extra = {key: value for key, value in changes.items() if key not in ("type", "loss_type", "divergence")}
                rows.append(Variant(name, _label(name, extra | read), method))
    for name in settings:
        if name in unread and not left_out:
            raise ConfigError(f"--set {name}: none of these losses reads it: {', '.join(losses or names)}")
    return rows, left_out


def parsed(texts: Sequence[str]) -> dict[str, list[Any]]:
    """The values of `--set name=value,value`, repeated. Raises ConfigError for text of another form."""
    found: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not (equals and name.strip() and all(map(str.strip, values.split(",")))):
            raise ConfigError(f"--set {text}: write a setting of the method and its values, such as epsilon=0.1,0.2")
        origin = f"--set {text}"
        each = [parse_value(value.strip(), origin).values["value"] for value in values.split(",")]
        found.setdefault(name.strip().removeprefix("method."), []).extend(each)
    return {name: list(dict.fromkeys(values)) for name, values in found.items()}


def own_name(method: AnyMethod) -> str:
    """The name of a method's loss: its loss_type or divergence, or else its type; several with a plus."""
    match method.type:
        case "grpo" | "kto":
            return method.loss_type
        case "dpo":
            return "+".join(method.loss_type)
        case "cpo":
            return "cpo" if method.loss_type == "sigmoid" else f"cpo_{method.loss_type}"
        case "distill":
            return method.divergence
    return method.type


def catalogue(own: AnyMethod) -> Iterator[tuple[str, dict[str, Any]]]:
    """The losses for the data of a run of `own`: a name, and what changes in the settings."""
    match own.type:
        case "grpo" | "rloo" | "reinforce_plus_plus" | "ppo":
            for loss in get_args(PolicyLossType):
                if loss != ALIAS or own_name(own) == ALIAS:
                    yield loss, {"type": "grpo", "loss_type": loss}
            base = own_name(own) if isinstance(own, GRPOMethod) and own.loss_type != "no_baseline" else "grpo"
            for scale in ("group", "batch", "none"):
                if scale != getattr(own, "scale_rewards", "group"):
                    yield base, {"type": "grpo", "loss_type": base, "scale_rewards": scale}
            yield "rloo", {"type": "rloo"}
            yield "reinforce_plus_plus", {"type": "reinforce_plus_plus"}
            if own.type == "ppo":
                yield "ppo", {"type": "ppo"}
        case "dpo" | "orpo" | "cpo" | "simpo":
            smooth = getattr(own, "label_smoothing", 0)
            for loss in get_args(PreferenceLoss):
                needed = {"label_smoothing": EXO_SMOOTHING} if loss == "exo_pair" and not smooth else {}
                yield loss, {"type": "dpo", "loss_type": (loss,)} | needed
            yield "orpo", {"type": "orpo"}
            for loss in get_args(ContrastiveLoss):
                yield "cpo" if loss == "sigmoid" else f"cpo_{loss}", {"type": "cpo", "loss_type": loss}
            yield "simpo", {"type": "simpo"}
            if len(getattr(own, "loss_type", "")) > 1 and isinstance(own, DPOMethod):
                yield own_name(own), {"type": "dpo", "loss_type": own.loss_type, "loss_weights": own.loss_weights}
        case "kto":
            for loss in get_args(UnpairedLoss):
                yield loss, {"type": "kto", "loss_type": loss}
        case "distill":
            for loss in get_args(DivergenceName):
                yield loss, {"type": "distill", "divergence": loss}
        case "reward":
            yield "reward", {"type": "reward"}
            yield "reward", {"type": "reward", "center_rewards_coefficient": 0.01}
        case "sft":
            yield "sft", {"type": "sft"}


def _adapted(
    own: AnyMethod, changes: Mapping[str, Any], chosen: Mapping[str, Any]
) -> tuple[AnyMethod, dict[str, Any]] | str:
    """The settings of another loss, and those of `chosen` that it reads; or the reason why there are none.

    They are the run's; what the run leaves at its method's default has the other method's default, and so has what the
    other loss does not read.
    """
    group = METHODS[changes["type"]]
    values = _carried(own, group) | dict(changes)
    if changes.get("loss_type") == "no_baseline":
        values.pop("scale_rewards", None)
    asked = {key: value for key, value in chosen.items() if key in group.model_fields}
    forced = {key: value for key, value in ONE_UPDATE.items() if key in group.model_fields}
    while True:
        try:
            method = group.model_validate(values | asked | forced)
        except ValidationError as error:
            conflict = error.errors(include_url=False)[0].get("ctx", {}).get("error")
            if not isinstance(conflict, SettingsConflict):
                raise _wrong(error, group) from error
            unread = {path for path, _ in conflict.problems} - changes.keys() - {"num_generations"}
            if not unread & (asked.keys() | values.keys()):
                return "; ".join(f"{path} {message}" for path, message in conflict.problems)
        else:
            unread = {key for key in asked if not _reads(method, key)}
            if not unread:
                return method, asked
        for path in unread:
            asked.pop(path, None)
            values.pop(path, None)


def _carried(own: AnyMethod, group: type[AnyMethod]) -> dict[str, Any]:
    """The run's settings that the other method has too."""
    names = PPO_NAMES if isinstance(own, PPOMethod) and group is not PPOMethod else {}
    defaults = type(own).model_fields
    found = {}
    for name in group.model_fields:
        source = names.get(name, name)
        if source not in defaults or name in ("type", "loss_type"):
            continue
        value = getattr(own, source)
        if group is type(own) or value != defaults[source].default or name == "num_generations":
            found[name] = value
    return found


def _reads(method: AnyMethod, setting: str) -> bool:
    """Whether the loss of these settings depends on one of them."""
    if isinstance(method, DPOMethod):
        known = {name for loss in PREFERENCE_LOSSES.values() for name in loss.reads}
        if setting in known:
            return any(setting in PREFERENCE_LOSSES[loss].reads for loss in method.loss_type)
    if isinstance(method, DistillMethod) and setting == "jsd_beta":
        return method.divergence == "jsd"
    return hasattr(method, setting)


def _refuse_unknown(settings: Mapping[str, Sequence[Any]], types: set[str]) -> None:
    """Raise ConfigError for a setting that none of the methods has, or that is not the lab's to change."""
    known = sorted({name for type in types for name in METHODS[type].model_fields} - FIXED)
    for name in settings:
        if name in FIXED:
            raise ConfigError(
                f"--set {name}: it chooses the loss (--loss), another model, or acts outside of a step's first update"
            )
        if name not in known:
            raise ConfigError(
                f"--set {name}: {did_you_mean(name, known) if known else 'these losses have no settings'}"
            )


def _wrong(error: ValidationError, group: type[AnyMethod]) -> ConfigError:
    problem = error.errors(include_url=False)[0]
    name = str(problem["loc"][0])
    return ConfigError(f"--set {name} {wrong_value(problem['input'], full(group.model_fields[name]))}")


def _label(name: str, settings: Mapping[str, Any]) -> str:
    shown = (f"{key}={'null' if value is None else value}" for key, value in settings.items())
    return " ".join([name, *shown])
