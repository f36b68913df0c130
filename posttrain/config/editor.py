"""JSON Schema of settings files for editors, with short forms."""

from typing import Any

from posttrain.config.reading.layers import ALIASES, ON_OFF
from posttrain.config.schema.methods import METHOD_NAMES, METHODS, PPO_NAMES
from posttrain.config.schema.run import RunConfig

# pydantic's name of a bound after a validator, not JSON Schema's.
_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}


def json_schema() -> dict[str, Any]:
    """The schema with the additions of loading: `model`, `extends`, strings for models and methods, aliases.

    Nothing is required, since `extends`, overrides and flags may add what a file lacks.
    """
    schema = _readable(RunConfig.model_json_schema())
    groups, properties = schema["$defs"], schema["properties"]
    entry = {"$ref": "#/$defs/ModelConfig"}
    model = {
        "anyOf": [{"type": "string"}, entry],
        "description": "The model to train: a hub id, a folder, or its settings.",
    }
    properties["models"]["items"] = model
    properties["model"] = model
    properties["extends"] = {
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
        "description": "File or preset, or a list of them, under this file.",
    }
    description = properties["method"]["description"]
    methods = [{"$ref": f"#/$defs/{method.__name__}"} for method in METHODS.values()]
    properties["method"] = {"anyOf": [{"enum": list(METHOD_NAMES)}, *methods], "description": description}
    kind = groups["DPOMethod"]["properties"]["type"]
    groups["DPOMethod"]["properties"]["type"] = {"enum": ["dpo", "ipo"], "description": kind["description"]}
    losses = groups["DPOMethod"]["properties"]["loss_type"]
    groups["DPOMethod"]["properties"]["loss_type"] = {
        "anyOf": [losses["items"], {"type": "array", "items": losses["items"], "minItems": 1}],
        "description": losses["description"],
    }
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
    """The schema with JSON Schema's names of bounds, without titles (they repeat the names) and requirements."""
    if isinstance(node, list):
        return [_readable(item) for item in node]
    if not isinstance(node, dict):
        return node
    kept = {
        key: value
        for key, value in node.items()
        if not (key == "title" and isinstance(value, str)) and not (key == "required" and isinstance(value, list))
    }
    return {_BOUNDS.get(key, key): _readable(value) for key, value in kept.items()}
