"""The model card, README.md: what the model is, how to load it, how it was trained, and its results.

It contains no secrets, and no local paths, host name or user name.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from posttrain import __version__
from posttrain.base.files import read_yaml
from posttrain.base.hub import stay_offline_without_network
from posttrain.base.redaction import redact
from posttrain.base.words import model_name
from posttrain.config import ModelConfig
from posttrain.config.reading.files import write_yaml
from posttrain.export.source import Source
from posttrain.models.files import found_file

FRONT = re.compile(r"\A---\s*\n(.*?)\n---\s*$", re.MULTILINE | re.DOTALL)
# Matches the folders of a path inside a text, from the root, the home folder or a drive to the last separator. Skips
# URLs (://), tags (</a>), relative paths and hub ids.
FOLDERS = re.compile(r"(?<![\w.~:/<\\-])(?:~|[A-Za-z]:)?[/\\](?:[^\s'\"<>|:;,()\[\]{}/\\]+[/\\])+")
LICENSE = ("license", "license_name", "license_link")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


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
    parts = [_header(source, written.merged), f"# {name}", _about(source, written)]
    parts += ["## Use", _use(source, address, written.merged, written.chat)]
    if source.run is not None:
        parts += ["## Training", _training(source)]
    if results := list(_results(source)):
        parts += ["## Results", *results]
    for summary in evaluations:
        parts += ["## Evaluation", _evaluation(summary)]
    if source.config is not None:
        settings = write_yaml(redact(public(source.config.model_dump(mode="json")))).rstrip()
        parts += ["## Settings", "<details><summary>All settings of the run</summary>"]
        parts += [f"```yaml\n{settings}\n```", "</details>"]
    return redact("\n\n".join(part for part in parts if part)) + "\n"


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


def origin(model: ModelConfig) -> str | None:
    """A model's hub id; None for a folder."""
    return model.path if HUB_ID.fullmatch(model.path) and not Path(model.path).expanduser().exists() else None


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
    if (name := origin(start)) is not None:
        header["base_model"] = name
    header |= license_of(start)
    header["pipeline_tag"] = "text-classification" if source.reward else "text-generation"
    header["tags"] = [tag for tag in ("posttrain", method, "reward-model" if source.reward else None) if tag]
    if sets := [name for name in _sources(source) if HUB_ID.fullmatch(name) and not Path(name).exists()]:
        header["datasets"] = sets
    return f"---\n{yaml.safe_dump(header, sort_keys=False, allow_unicode=True)}---"


def _about(source: Source, written: WrittenModel) -> str:
    start, method = start_of(source), _method(source)
    what = "A reward model" if source.reward else "A language model"
    name = origin(start)
    base = f"[{name}](https://huggingface.co/{name})" if name else f"`{model_name(str(Path(start.path).absolute()))}`"
    made = f"trained from {base}" + (f" with {method}" if method else "")
    if source.run is None:
        made = f"the adapter `{source.name}` on {base}" if source.adapter else base
        made += ", exported"
    lines = [
        f"{what}, {made} by posttrain {__version__}. Weights: {written.dtype}. {written.check}".rstrip(),
        *written.notes,
    ]
    if source.config is not None and source.config.models[0].load_in_4bit and source.quantised is None:
        lines.append(
            "The adapter was trained on its base in 4 bits. Here the base has full precision, so outputs differ from "
            "those in training, where the base was rounded to 4 bits."
        )
    if not license_of(start):
        lines.append("The licence of the base model is unknown.")
    return "\n\n".join(lines)


def _use(source: Source, address: str, merged: bool, chat: bool) -> str:
    """Example code that loads and calls the model."""
    reward = source.reward
    stops = not merged and not reward  # plain PEFT does not read the adapter's generation_config.json
    auto = f"Auto{'' if merged else 'Peft'}ModelFor{'SequenceClassification' if reward else 'CausalLM'}"
    lines = [f"from transformers import {auto}, AutoTokenizer"]
    if not merged:
        names = "AutoTokenizer, GenerationConfig" if stops else "AutoTokenizer"
        lines = [f"from peft import {auto}", f"from transformers import {names}"]
    lines += ["", f'tokenizer = AutoTokenizer.from_pretrained("{address}")']
    lines.append(f'model = {auto}.from_pretrained("{address}", dtype="auto")')
    if chat:
        reply = ', {"role": "assistant", "content": "…"}' if reward else ""
        lines.append(f'messages = [{{"role": "user", "content": "…"}}{reply}]')
        generate = "" if reward else ", add_generation_prompt=True"
        call = f'apply_chat_template(messages{generate}, return_dict=True, return_tensors="pt")'
        lines.append(f"inputs = tokenizer.{call}")
    else:
        lines.append('inputs = tokenizer("…", return_tensors="pt")')
    if stops:
        lines.append(f'stops = GenerationConfig.from_pretrained("{address}").eos_token_id')
    completion = f"completion = model.generate(**inputs, max_new_tokens=256{', eos_token_id=stops' * stops})"
    lines.append("reward = model(**inputs).logits[0, 0]" if reward else completion)
    variables = source.config.data.chat_template_kwargs if source.config is not None else {}
    defaults = ", ".join(f"`{name}={json.dumps(value, ensure_ascii=False)}`" for name, value in variables.items())
    note = (
        f"\n\nThe model was trained with {defaults} in the chat template, and these are the template's defaults. To "
        "change them, pass arguments to `apply_chat_template`, or `chat_template_kwargs` in requests to a server."
    )
    return "```python\n" + "\n".join(lines) + "\n```" + note * bool(defaults and chat)


def _training(source: Source) -> str:
    assert source.run is not None
    provenance, config = source.run.provenance, source.config
    rows = {
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
    lines = [f"| {name} | {value} |" for name, value in rows.items() if value not in ("", None)]
    return "\n".join(["| | |", "|---|---|", *lines])


def _steps(source: Source) -> str:
    """The step of these weights, and the run's last step if it differs."""
    total = source.results.get("steps")
    numbers = [f"{number:,}" for number in dict.fromkeys((source.step, total)) if number is not None]
    return " of ".join(numbers) if source.step is not None else ""


def _results(source: Source) -> Iterator[str]:
    """A table of the run's metrics before and after training. Empty unless these are the weights at the run's end."""
    start, final = source.results.get("start") or {}, source.results.get("final") or {}
    if not final or not source.is_last:
        return
    lines = [
        f"| {name} | {_number(start.get(name))} | {_number(value)} |"
        for name, value in final.items()
        if isinstance(value, int | float)
    ]
    if source.quantised is not None:
        yield "Before quantisation:"
    yield "\n".join(["| metric | first | last |", "|---|---|---|", *lines])
    for name, value in (source.results.get("best") or {}).items():
        yield f"Best `{name}` of the run: {_number(value)}."


def _evaluation(summary: Mapping[str, Any]) -> str:
    """A table of the suites in one summary.json."""
    lines = [f"Evaluated model: `{summary['of']}`", ""] if "of" in summary else []
    lines += ["| suite | metric | value | interval | items |", "|---|---|---|---|---|"]
    remarks = []
    for key, suite in summary["suites"].items():
        low, high, confidence = suite.get("low"), suite.get("high"), suite.get("confidence")
        interval = f"{_number(low)} to {_number(high)} ({confidence:.0%})" if low is not None and confidence else ""
        cells = (key, suite.get("metric", ""), _number(suite.get("value")), interval, suite.get("items", ""))
        lines.append(f"| {' | '.join(map(str, cells))} |")
        if suite.get("partial"):
            remarks.append(f"{key}: {suite['partial']}.")
        if ungraded := sum((suite.get("ungraded") or {}).values()):
            remarks.append(f"{key}: {ungraded:,} answers are not graded.")
    return "\n".join(lines) + "".join(f"\n\n{public(remark)}" for remark in remarks)


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
