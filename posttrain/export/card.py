"""The model card, README.md: what the model is, how to load it, how it was trained, and its results.

It contains no secrets, and no local paths, host name or user name. Its text is in `card.md.jinja`.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from posttrain import __version__
from posttrain.base.files import from_template, read_yaml
from posttrain.base.hub import stay_offline_without_network
from posttrain.base.redaction import redact
from posttrain.base.words import hub_id_of, model_name
from posttrain.config import ModelConfig
from posttrain.config.reading.files import write_yaml
from posttrain.export.source import Source
from posttrain.models.files import found_file

FRONT = re.compile(r"\A---\s*\n(.*?)\n---\s*$", re.MULTILINE | re.DOTALL)
# Matches the folders of a path inside a text, from the root, the home folder or a drive to the last separator. Skips
# URLs (://), tags (</a>), relative paths and hub ids.
FOLDERS = re.compile(r"(?<![\w.~:/<\\-])(?:~|[A-Za-z]:)?[/\\](?:[^\s'\"<>|:;,()\[\]{}/\\]+[/\\])+")
LICENSE = ("license", "license_name", "license_link")


@dataclass(frozen=True, slots=True)
class WrittenModel:
    """What the card says about the written model."""

    dtype: str  # dtype of the weights
    check: str  # the result of the export's check, as a sentence
    notes: tuple[str, ...]
    chat: bool  # whether training used the chat template
    merged: bool = True  # false: the folder has only an adapter


def card(
    source: Source, written: WrittenModel, name: str, address: str, evaluations: Sequence[Mapping[str, Any]] = ()
) -> str:
    """The text of README.md. `address`: the argument of `from_pretrained`. `evaluations`: contents of summary.json, in
    which `of` names the model, if it is another one."""
    config = source.config
    variables = config.data.chat_template_kwargs if config is not None else {}
    filters = {"short": _number, "interval": _interval, "public": public}
    text = from_template(
        __file__,
        "card.md.jinja",
        filters,
        source=source,
        written=written,
        name=name,
        address=address,
        evaluations=evaluations,
        header=_header(source, written.merged),
        about=_about(source),
        was_in_4bit=config is not None and config.models[0].load_in_4bit and source.quantised is None,
        license=license_of(start_of(source)),
        defaults=", ".join(f"`{key}={json.dumps(value, ensure_ascii=False)}`" for key, value in variables.items()),
        training=_training(source),
        settings=config and write_yaml(redact(public(config.model_dump(mode="json")))).rstrip(),
    )
    return redact(text)


def public(data: Any) -> Any:
    """A copy of nested settings in which each local path is reduced to its last name."""
    if isinstance(data, str):
        path = Path(data).expanduser()
        if path.is_absolute() and "\n" not in data:
            return path.name
        home = os.path.expanduser("~")
        data = FOLDERS.sub("", data)
        return data if home in ("/", "~") else data.replace(home, "~")
    if isinstance(data, dict):
        return {key: public(value) for key, value in data.items()}
    return [public(value) for value in data] if isinstance(data, list | tuple) else data


def start_of(source: Source) -> ModelConfig:
    """The model that this one derives from: the first known of the base given by the user, the model that training
    started from, the model that was quantised, and the adapter's base."""
    if source.given_base is not None:
        return source.base
    if source.config is not None:
        return source.config.models[0]
    hub_id = (source.quantised or {}).get("hub_id")
    return ModelConfig(path=hub_id) if hub_id else source.base


def license_of(model: ModelConfig) -> dict[str, str]:
    """The licence in the header of the model's card: `license`, and its name and link if given. Empty if unknown."""
    if not Path(model.path).is_dir():
        stay_offline_without_network()
    file = found_file(model.path, "README.md", model.revision)
    try:
        front = FRONT.search(file.read_text(encoding="utf-8")) if file else None
        header = read_yaml(front[1]) if front else None
    except (OSError, ValueError):
        return {}
    if not isinstance(header, dict):
        return {}
    return {name: header[name] for name in LICENSE if isinstance(header.get(name), str)}


def _header(source: Source, merged: bool) -> str:
    start, method = start_of(source), _method(source)
    header: dict[str, Any] = {"library_name": "transformers" if merged else "peft"}
    if (name := hub_id_of(start.path)) is not None:
        header["base_model"] = name
    header |= license_of(start)
    header["pipeline_tag"] = "text-classification" if source.reward else "text-generation"
    header["tags"] = [tag for tag in ("posttrain", method, "reward-model" if source.reward else None) if tag]
    if sets := [name for name in _sources(source) if hub_id_of(name)]:
        header["datasets"] = sets
    return yaml.safe_dump(header, sort_keys=False, allow_unicode=True)


def _about(source: Source) -> str:
    """What the model is and what it was made from, as a sentence."""
    start, method = start_of(source), _method(source)
    what = "A reward model" if source.reward else "A language model"
    name = hub_id_of(start.path)
    base = f"[{name}](https://huggingface.co/{name})" if name else f"`{model_name(str(Path(start.path).absolute()))}`"
    made = f"trained from {base}" + (f" with {method}" if method else "")
    if source.run is None:
        made = f"the adapter `{source.name}` on {base}" if source.adapter else base
        made += ", exported"
    return f"{what}, {made} by posttrain {__version__}."


def _training(source: Source) -> dict[str, Any]:
    if source.run is None:
        return {}
    provenance, config = source.run.provenance, source.config
    return {
        "method": _method(source),
        "data": ", ".join(f"`{public(name)}`" for name in _sources(source)),
        "fingerprint of the data": _code(provenance.get("dataset_fingerprint")),
        "steps": _steps(source),
        "trained tokens": f"{source.results['num_tokens']:,}" if source.is_last else "",
        "seed": config.seed if config else "",
        "adapter": _adapter(source),
        "run": f"{source.run.state}, started {source.run.started[:10]}",
        "versions": ", ".join(f"{name} {value}" for name, value in (provenance.get("versions") or {}).items() if value),
        "posttrain commit": _code(provenance.get("git_commit")),
    }


def _steps(source: Source) -> str:
    """The step of these weights, and the run's last step if it differs."""
    total = source.results.get("steps")
    numbers = [f"{number:,}" for number in dict.fromkeys((source.step, total)) if number is not None]
    return " of ".join(numbers) if source.step is not None else ""


def _interval(suite: Mapping[str, Any]) -> str:
    low, high, confidence = suite.get("low"), suite.get("high"), suite.get("confidence")
    return f"{_number(low)} to {_number(high)} ({confidence:.0%})" if low is not None and confidence else ""


def _code(value: str | None) -> str:
    return f"`{value}`" if value else ""


def _number(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _method(source: Source) -> str | None:
    return source.config.method.type if source.config is not None else None


def _sources(source: Source) -> list[str]:
    if source.config is None:
        return []
    sources = source.config.data.source
    return [sources] if isinstance(sources, str) else [part.source for part in sources]


def _adapter(source: Source) -> str:
    model = source.config.models[0] if source.config else None
    if model is None or model.lora is None:
        return ""
    return f"LoRA, r {model.lora.r}, alpha {model.lora.alpha:g}" + (", on a 4-bit base" if model.load_in_4bit else "")
