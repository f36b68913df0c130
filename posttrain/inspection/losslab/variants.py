"""The losses that fit a batch: the run's own first, then each with the run's settings, or with those of `--set`."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from posttrain.base.errors import ConfigError
from posttrain.config.reading.explain import did_you_mean, wrong_value
from posttrain.config.reading.fields import full
from posttrain.config.reading.files import parse_value
from posttrain.config.schema.base import SettingsConflict
from posttrain.config.schema.methods import METHODS, AnyMethod

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
EXTRAS = {"scale_rewards", "center_rewards_coefficient"}  # rows of one loss that are not computed with `--set`


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
    shown = {key: getattr(own, key) for key in settings if own.reads(key)}
    rows = [Variant(own.loss_name, _label(own.loss_name, shown), first)]
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


def catalogue(own: AnyMethod) -> list[tuple[str, dict[str, Any]]]:
    """The losses for the data of a run of `own`: a name, and what changes in the settings."""
    made = [
        (name, {"type": method.name(), **chosen})
        for method in sorted(METHODS.values(), key=lambda method: method.trains_values)
        if _learns_alike(method, own) and method.trains_values <= own.trains_values
        for name, chosen in method.losses(own)
    ]
    if own.loss_name not in dict(made):  # a sum of losses
        made.append((own.loss_name, own.model_dump(include={"type", "loss_type", "loss_weights"})))
    return made


def _learns_alike(method: type[AnyMethod], own: AnyMethod) -> bool:
    """Whether a method learns from the same data."""
    return all(getattr(method, name) == getattr(own, name) for name in ("kind", "head", "needs_rewards"))


def _adapted(
    own: AnyMethod, changes: Mapping[str, Any], chosen: Mapping[str, Any]
) -> tuple[AnyMethod, dict[str, Any]] | str:
    """The settings of another loss, and those of `chosen` that it reads; or the reason why there are none.

    They are the run's; what the run leaves at its method's default has the other method's default, and so has what the
    other loss does not read.
    """
    group = METHODS[changes["type"]]
    values = _carried(own, group) | dict(changes)
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
            unread = {key for key in asked if not method.reads(key)}
            if not unread:
                return method, asked
        for path in unread:
            asked.pop(path, None)
            values.pop(path, None)


def _carried(own: AnyMethod, group: type[AnyMethod]) -> dict[str, Any]:
    """The run's settings that the other method has too."""
    names = own.own_names if group is not type(own) else {}
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
