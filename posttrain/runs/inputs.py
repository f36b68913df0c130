"""The models that a run reads: their exact content and their paths.

`run.json` records them under `provenance.models`, by the setting that names them:

    path       as in the setting
    content    SHA-256 of a folder's files, or the commit of a hub model; for an adapter, also the content of its base
    from_here  path relative to the run folder, for a model inside the whole run, which moves together with it

The whole run is the folder of all models and stages of a configuration.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from posttrain.base.errors import ModelError, RunError
from posttrain.config import DataConfig, ModelConfig, RunConfig, load
from posttrain.config.reading.layers import Layers
from posttrain.models.adapters import base_settings
from posttrain.models.load import load_config
from posttrain.runs.checkpoint import MANIFEST, file_hashes
from posttrain.runs.files import as_mapping, flat, load_json
from posttrain.runs.finding import is_inside

START, REFERENCES = "models.0.path", ("method.ref_model", "method.teacher")
# Endings of the files that transformers and PEFT load; other files, such as a README, may change.
LOADED = (".safetensors", ".bin", ".json", ".model", ".txt", ".jinja", ".py")


def models_of(config: RunConfig) -> dict[str, ModelConfig]:
    """The models that the settings of a run name, by setting: the trained model, the reference, reward models."""
    values = flat(config.model_dump(mode="json"), lists=True)
    models = {START: config.models[0]}
    for setting in REFERENCES:
        if values.get(setting) is not None:
            models[setting] = reference_settings(config.models[0], values[setting])
    for setting, kind in values.items():
        path = setting.removesuffix("type") + "path"
        if setting.endswith(".type") and kind == "model" and values.get(path) is not None:
            models[path] = ModelConfig(path=values[path])
    return models


def reference_settings(model: ModelConfig, ref_model: str | None) -> ModelConfig:
    """The settings for loading the reference; the policy's revision does not apply to another model."""
    return model if ref_model is None else model.model_copy(update={"path": ref_model, "revision": None})


def content_of(model: ModelConfig) -> str:
    """A string that identifies the exact content of a model. Raises ModelError if the model is missing. For a folder, a
    hash of the names and content of the files that are loaded; for a hub model, the commit that would be loaded now."""
    folder = Path(model.path)
    if folder.is_dir():
        names = [path.name for path in folder.iterdir() if path.suffix in LOADED and path.name != MANIFEST]
        hashes = file_hashes(folder, sorted(name for name in names if not name.startswith(".")))
        content = f"sha256 {hashlib.sha256(json.dumps(hashes).encode()).hexdigest()}"
    else:
        load_config(model)  # updates the cache if the hub can be reached
        cached = try_to_load_from_cache(model.path, "config.json", revision=model.revision or "main")
        content = f"commit {Path(cached).parent.name if isinstance(cached, str) else None}"
    base = base_settings(model)
    return content if base is model else f"{content}, on {content_of(base)}"


def models_read(config: RunConfig, folder: Path) -> dict[str, dict[str, str]]:
    """The models that the settings name, as recorded in `run.json` of `folder`."""
    models: dict[str, dict[str, str]] = {}
    for setting, model in models_of(config).items():
        models[setting] = {"path": model.path, "content": content_of(model)}
        path = Path(model.path).resolve()
        if is_inside(path, folder):
            models[setting]["from_here"] = os.path.relpath(path, folder.resolve())
    return models


def recorded(folder: Path) -> dict[str, dict[str, str]]:
    """The models that the run read, from `run.json`; empty without that file or for runs of earlier versions."""
    return _provenance(folder).get("models", {})


def as_recorded(config: RunConfig, folder: Path) -> RunConfig:
    """The settings of the run in `folder` with the values that were resolved at its start: the date, for chat templates
    that contain it, and the method's default learning rate.

    Runs of earlier versions did not record them: their templates contain the date of rendering.
    """
    facts = _provenance(folder)
    day, rate = facts.get("date"), facts.get("resolved", {}).get("training.learning_rate")
    if config.data.date is None and day is not None:
        values = config.data.model_dump(mode="json") | {"date": day}
        config = config.model_copy(update={"data": DataConfig.model_validate(values)})
    if config.training.learning_rate is None and rate is not None:
        training = config.training.model_copy(update={"learning_rate": rate})
        config = config.model_copy(update={"training": training})
    return config


def _provenance(folder: Path) -> dict[str, Any]:
    path = folder / "run.json"
    return as_mapping(load_json(path) if path.exists() else {}).get("provenance", {})


def located(config: RunConfig, folder: Path) -> RunConfig:
    """The settings of the run in `folder`, with the current paths of its models inside the whole run; a path that
    differs from the recorded one and exists is kept."""
    layers, models, changed = Layers(config.model_dump(mode="json")), models_of(config), False
    for setting, facts in recorded(folder).items():
        if setting not in models or "from_here" not in facts:
            continue
        path, current = models[setting].path, Path(os.path.normpath(folder / facts["from_here"]))
        moved = not (Path(path).is_dir() and Path(path).resolve() == current.resolve())
        if moved and current.is_dir() and (path == facts["path"] or not Path(path).is_dir()):
            layers.put(setting.split("."), str(current), "run.json")
            changed = True
    return RunConfig.model_validate(layers.values) if changed else config


def run_settings(folder: Path, file: Path | None = None, imports: bool = False) -> RunConfig:
    """The settings of the run in `folder`, from its config.yaml or a checkpoint's `file`, with the date of its start
    and the current paths of its models. `imports`: as in `load`."""
    return located(as_recorded(load(file or folder / "config.yaml", imports=imports).config, folder), folder)


def refuse_other_models(folder: Path, config: RunConfig) -> dict[str, dict[str, str]]:
    """The models that the settings name, as recorded in `run.json`. Raises RunError if one has changed since then."""
    before = recorded(folder)
    try:
        now = models_read(config, folder)
    except ModelError as error:
        settings = ", ".join(f"{setting}=..." for setting in before)
        raise RunError(f"{folder} cannot be resumed: {error}. Give the model's current path: {settings}") from error
    for setting, facts in now.items():
        if setting in before and before[setting]["content"] != facts["content"]:
            raise RunError(
                f"{facts['path']} is no longer the model that {folder} was trained with ({setting}): its content was "
                f"{before[setting]['content']} and is now {facts['content']}. Restore the former model, give "
                f"its path ({setting}=...), or delete {folder} to train with the new one"
            )
    return now
