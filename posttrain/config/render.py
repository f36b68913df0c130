"""Writes settings for people (starter files) and for editors (JSON Schema)."""

from textwrap import wrap
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from posttrain.base.files import table_beside
from posttrain.config.reading.fields import Setting, all_settings, choices, kinds_of, models_in, options
from posttrain.config.reading.files import write_yaml
from posttrain.config.reading.layers import ALIASES, ON_OFF
from posttrain.config.schema.methods import METHOD_NAMES, METHODS, PPO_NAMES, AnyMethod, class_of
from posttrain.config.schema.run import RunConfig
from posttrain.config.schema.types import FUNCTION

WIDTH = 110
# pydantic's names of bounds -> JSON Schema's. pydantic writes its own names for bounds that follow a validator.
_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
_TEXTS = table_beside(__file__, "render.yaml")
HEADINGS: dict[str, str] = _TEXTS["headings"]


def _example(method: type[AnyMethod]) -> dict[str, Any]:
    """Example values for the settings of a starter file that have no default."""
    model, source = method.example
    values: dict[str, Any] = {"model.path": model, "data.source": source}
    values |= {"rewards": [{"type": "math"}]} if method.samples_completions else {}
    return values | ({"method.teacher": "Qwen/Qwen3-4B"} if "teacher" in method.model_fields else {})


EXAMPLES = {name: _example(class_of(name)) for name in METHOD_NAMES}
# The usual settings.
STARTER = {f"{section}{name}" for section, names in _TEXTS["usual"].items() for name in names.split()}
FIRST = ("data.tags.reasoning_start", "rollout.vllm.mode", "method.importance_sampling.mode")  # of nested groups


def starter(method: str, everything: bool = False) -> str:
    """Return a commented settings file for a method (or `ipo`): the usual settings, or every one that the method reads.
    Groups that are off, such as model.lora, are commented out; uncommenting a group turns it on with its defaults."""
    values = {**EXAMPLES[method], "method.type": method}
    if not everything:
        best = "eval_reward" if class_of(method).samples_completions else "eval_loss"
        values |= {"data.validation": {"ratio": 0.05}, "checkpoint.best_metric": best}
    single = [s for s in all_settings() if not s.group or s.default is None]  # of a group that is on, its settings
    wanted = [s for s in single if reads(method, s) and (everything or s.path in STARTER)]
    if not everything and not class_of(method).samples_completions:
        wanted = [s for s in wanted if not s.path.startswith(("rewards", "rollout."))]
    article = "an" if method in ("sft", "orpo", "ipo") else "a"
    lines = [
        f"# Settings of {article} {method} run. Start it:  posttrain train FILE",
        "# See what it would do:  posttrain plan FILE      All settings explained:  docs/config.md",
    ]
    if everything:
        lines.append(
            "# A # right before a name turns its group off. To turn the group on, remove the # from its lines."
        )
    section = "run"
    off: Setting | None = None  # the group that contains the setting, if the group is off
    for setting in wanted:
        if setting.section != section:
            section = setting.section
            lines += ["", f"{section}:"]
        if setting.path in FIRST:
            lines.append(f"  {setting.path.split('.')[1]}:")
        off = setting if setting.group and everything else off
        inside = off is not None and f"{setting.path}.".startswith(f"{off.path}.")
        value = values.get(setting.path, setting.default)
        lines += _entry(setting, value, off=off if inside else None)
        indent = "  " * setting.path.count(".")
        if everything and (entries := entry_models(setting)):
            lines += [f"{indent}# {line}" for line in wrapped(_of_entries(entries), WIDTH - 2 - len(indent))]
        if setting.path == "model.lora" and value is None and not everything:
            lines.append("  # lora: {r: 16, alpha: 32, dropout: 0.05, target_modules: auto}")
    return "\n".join(lines) + "\n"


def reads(method: str, setting: Setting) -> bool:
    """Whether a method (or `ipo`) reads a setting."""
    if method == "ipo" and setting.path == "method.loss_type":
        return False  # `type: ipo` implies it
    if setting.path.startswith(("rewards", "rollout.")) and class_of(method).head == "reward":
        return False  # a reward model generates no completions
    return not setting.methods or class_of(method).name() in setting.methods


def entry_models(setting: Setting) -> list[type[BaseModel]]:
    """The groups of settings that a list setting accepts as entries."""
    return [model for entry in _entries_of(setting) for model in models_in(entry)]


def _entries_of(setting: Setting) -> list[Any]:
    """The annotations of the entries of a list setting."""
    return [get_args(option)[0] for option in options(setting.annotation) if get_origin(option) is tuple]


def _of_entries(models: list[type[BaseModel]]) -> str:
    """Describe the settings of a list's entries: the ones common to all types, then those of each type."""
    names = [{info.alias or name: None for name, info in model.model_fields.items()} for model in models]
    common = [name for name in names[0] if all(name in fields for fields in names)]
    own = [
        f"{kind}: {', '.join(name for name in fields if name not in common)}"
        for model, fields in zip(models, names, strict=True)
        for kind in [", ".join(kinds_of(model))]
        if set(fields) - set(common)
    ]
    return f"Settings of an entry: {', '.join(common)}." + (f" By type, also {'; '.join(own)}." if own else "")


def _entry(setting: Setting, value: Any, off: Setting | None = None) -> list[str]:
    """The lines of a setting; `off` is the commented-out group that the setting is or belongs to."""
    indent = "  " * (off or setting).path.count(".")
    inner = "  " * (setting.path.count(".") - len(indent) // 2)
    key = setting.path.rsplit(".", 1)[-1]
    text = f"{indent}{'#' if off else ''}{inner}{key}:{'' if off is setting else ' ' + flow(value)}"
    return commented(text, described(setting), indent)


def commented(text: str, comment: str, indent: str) -> list[str]:
    """A line of YAML with its comment: on the same line, or above if it is long."""
    if not comment:
        return [text]
    if max(len(text), 36) + len(comment) + 4 <= WIDTH:
        return [f"{text.ljust(36)}  # {comment}"]
    return [*(f"{indent}# {line}" for line in wrapped(comment, WIDTH - len(indent) - 2)), text]


def described(setting: Setting) -> str:
    """The description of a setting, and the allowed words unless the description names them."""
    words, listed = choices(setting.annotation), [word for entry in _entries_of(setting) for word in choices(entry)]
    unnamed = [word for word in (*words, *listed) if word not in setting.description and word not in ("true", "null")]
    if words in (["true", "false"], ["true", "false", "null"]) or len(words) == 1 or not unnamed:
        return setting.description
    return f"{setting.description} {'One' if words else 'Any'} of {', '.join(words or listed)}."


def wrapped(text: str, width: int) -> list[str]:
    """The lines of a text that is as wide as given at most, unless a word is wider."""
    return wrap(text, width, break_long_words=False, break_on_hyphens=False)


def flow(value: Any) -> str:
    """Write a value on one line of YAML."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    if isinstance(value, float) and value != 0 and (abs(value) < 1e-3 or abs(value) >= 1e6):
        mantissa, exponent = f"{value:e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    if isinstance(value, float):
        return f"{value:g}" if value != int(value) else f"{value:.1f}"
    text = write_yaml(list(value) if isinstance(value, tuple) else value, flow=True)
    return text.removesuffix("\n").removesuffix("\n...")


def json_schema() -> dict[str, Any]:
    """The JSON Schema, with what loading adds: `model`, `extends`, strings for models and methods, aliases. No setting
    is required, because `extends`, overrides and flags may supply what a file lacks."""
    schema = _readable(RunConfig.model_json_schema())
    groups, properties = schema["$defs"], schema["properties"]
    description = "The model to train: a hub id, a folder, or its settings."
    properties["model"] = {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/ModelConfig"}], "description": description}
    properties["models"]["items"] = properties["model"]
    properties["data"]["anyOf"] = [{"type": ["string", "array"]}, {"$ref": properties["data"].pop("$ref")}]
    properties["extends"] = {
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
        "description": "File or preset that this file extends, or a list of them.",
    }
    methods = [{"$ref": f"#/$defs/{method.__name__}"} for method in METHODS.values()]
    description = properties["method"]["description"]
    own = {"type": "string", "pattern": FUNCTION}  # a function or class of the user's
    of_own = {"type": "object", "properties": {"type": own}}
    kinds = [{"enum": list(METHOD_NAMES)}, own, *methods, of_own]
    properties["method"] = {"anyOf": kinds, "description": description}
    for name in ("SFTMethod", "KTOMethod", "GRPOMethod"):
        loss = groups[name]["properties"]["loss_type"]
        words = {key: loss.pop(key) for key in ("enum", "const", "type") if key in loss}
        loss["anyOf"] = [words, own]
    dpo = groups["DPOMethod"]["properties"]
    dpo["type"] = {"enum": ["dpo", "ipo"], "description": dpo["type"]["description"]}
    loss, description = {"anyOf": [dpo["loss_type"]["items"], own]}, dpo["loss_type"]["description"]
    several = {"type": "array", "items": loss, "minItems": 1}
    dpo["loss_type"] = {"anyOf": [loss, several], "description": description}
    for name in ON_OFF:
        groups["ModelConfig"]["properties"][name]["anyOf"].append({"type": "boolean"})
    named = [("models", "ModelConfig"), *(("method", method.__name__) for method in METHODS.values())]
    for section, group in named:
        for alias, target in ALIASES[section].items():
            known, names = groups[group]["properties"], target
            if group == "PPOMethod":
                names = tuple(PPO_NAMES.get(name, name) for name in target)
            if names[0] in known and alias not in known:
                known[alias] = {"description": f"Alias of {'.'.join(names)}."}
    return schema


def _readable(node: Any) -> Any:
    """The schema with JSON Schema's names of bounds, without titles (which repeat the names) and `required`."""
    if isinstance(node, list):
        return [_readable(item) for item in node]
    if not isinstance(node, dict):
        return node
    dropped = {"title": str, "required": list}  # dropped only with these types: settings may have these names
    return {
        _BOUNDS.get(key, key): _readable(value)
        for key, value in node.items()
        if not (key in dropped and isinstance(value, dropped[key]))
    }
