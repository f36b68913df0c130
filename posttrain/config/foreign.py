"""Settings of other systems as they are written there: files, command lines and descriptions of data sets."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from posttrain.base.errors import ConfigError
from posttrain.base.terminal import visible
from posttrain.config.reading.files import parse_settings, parse_value, read_settings, read_text
from posttrain.config.reading.hints import hint
from posttrain.config.schema.data import TEMPLATES
from posttrain.config.schema.methods import METHOD_NAMES, AnyMethod, class_of
from posttrain.config.schema.run import RunConfig

SYSTEMS = {"llama-factory": "LLaMA-Factory", "axolotl": "axolotl", "trl": "TRL", "other": "that system"}
_TOLD = ("llama-factory", "axolotl", "other", "trl")  # the first one with a mark in a file is taken
Entry = dict[str, Any]  # source, and where given split, max_rows, format, columns, template
_PROGRAMS = {"trl": "trl", "llamafactory-cli": "llama-factory", "axolotl": "axolotl"}
_COMMAND = re.compile(
    r"^\s*(?:\$ )?(?:\w+=\S*\s+)*(?:trl|llamafactory-cli|axolotl|accelerate|torchrun|deepspeed|uv|python3?)\s", re.M
)
_MAPPINGS = ("chat_template_kwargs", "columns", "deepspeed", "fsdp_config", "special_tokens", "lr_scheduler_kwargs",
             "gradient_checkpointing_kwargs")  # fmt: skip
_WORDS = {"rm": "reward", "reward_modeling": "reward", "gkd": "distill", "distillation": "distill", "pt": "sft"}


@dataclass(slots=True)
class Source:
    """What a file says: its system, the method if its command names it, and values by name, without sections."""

    name: str
    system: str
    method: str | None
    values: dict[str, Any]
    places: dict[str, str]
    devices: int = 1
    repeated: list[str] = field(default_factory=list)  # names that several sections give


@dataclass(slots=True)
class Draft:
    """Settings in the making, by dotted path, and what there is to say about them."""

    source: Source
    method: str
    rest: dict[str, Any]  # values of the source by name, its defaults first, that are not converted yet
    settings: dict[str, Any] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)  # path -> the source's name behind it, "" if there is none
    left: dict[str, str] = field(default_factory=dict)  # names that are not carried -> the reason
    lacks: list[str] = field(default_factory=list)  # what posttrain needs and the source does not say

    @property
    def kind(self) -> type[AnyMethod]:
        """The settings class of the method."""
        return class_of(self.method)

    def take(self, *names: str) -> Any:
        """Take the values of names out of the rest; the first one with a value counts."""
        found = [self.rest.pop(name) for name in names if name in self.rest]
        return next((value for value in found if value is not None), None)

    def whole(self, *names: str) -> int | None:
        """`take`, of a whole number of 1 or more."""
        name, value = next((name for name in names if name in self.rest), ""), self.take(*names)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            place = self.source.places.get(name, self.source.name)
            raise ConfigError(f"{place}: {name} is {value!r}; it must be a whole number of 1 or more")
        return value

    def leave(self, name: str, reason: str) -> None:
        """Say why a name is not carried; defaults of the source need no reason."""
        if name in self.source.values:
            self.left[name] = reason

    def put(self, path: str, value: Any, name: str = "", comment: str = "") -> None:
        """Set a setting. The comment on a default of the source says that it is one."""
        if (other := self.names.get(path)) and other != name:
            self.leave(other, f"{name} gives {path} too")
        default = f"default of {SYSTEMS[self.source.system]}" if name and name not in self.source.values else ""
        self.settings[path], self.names[path] = value, name
        self.comments[path] = " ".join(visible("; ".join(filter(None, [comment, default]))).split())


@cache
def table(name: str) -> dict[str, Any]:
    """A file of posttrain/config/systems: `marks`, `defaults` and more of a system of SYSTEMS, or `values` of all."""
    return parse_settings(read_text(Path(__file__).parent / "systems" / f"{name}.yaml"), name).values


def method_of(word: str) -> str | None:
    """The method that a word of another system names, such as `rm` or `dpo`; None if it names none."""
    word = _WORDS.get(word, word)
    return word if word in METHOD_NAMES else None


def parse(text: str, name: str, system: str | None = None, is_yaml: bool = False) -> Source:
    """Read the text of a file or shell script. `system` is a key of SYSTEMS; None: inferred from command and names.
    Raises ConfigError if it is neither YAML nor a command line, already a settings file, or of an unknown system."""
    if not is_yaml and _COMMAND.search(text):
        source = _command(text, name)
    else:
        tree = parse_settings(text, name, name.endswith(".json"))
        if tree.values and tree.values.keys() <= {*RunConfig.model_fields, "model", "extends", "stages"}:
            raise ConfigError(
                f"{name} is a settings file of posttrain already; see it with: posttrain config show {name}"
            )
        source = Source(name, "", None, {}, {})
        _flatten(source, tree.values, {path[-1]: place for path, place in tree.origins.items()})
    names = source.values.keys()
    known = next((kind for kind in _TOLD if names & set(table(kind)["marks"].split())), None)
    source.system = system or source.system or known or ("other" if any(map(hint, names)) else "")
    if not source.system:
        raise ConfigError(f"{name} has no name of a known system; say which it is with --from {'|'.join(SYSTEMS)}")
    return source


def _flatten(source: Source, values: dict[str, Any], places: dict[Any, str]) -> None:
    for key, value in values.items():
        if isinstance(value, dict) and key not in _MAPPINGS:
            _flatten(source, value, places)
        elif key in source.values:
            source.repeated.append(key)
        else:
            source.values[key], source.places[key] = value, places.get(key, source.name)


def _command(text: str, name: str) -> Source:
    found = [
        (number, words, index)
        for number, words in _lines(text, name)
        for index, word in enumerate(words[:-1])
        if Path(word).name in _PROGRAMS or word.endswith(".py")
    ]
    if len({number for number, *_ in found}) != 1:
        lines = f"several commands (lines {', '.join(str(number) for number, *_ in found)})" if found else "no command"
        raise ConfigError(f"{name} has {lines} of a known system; give a file with one, such as trl dpo --beta 0.1")
    number, words, index = found[0]
    place, program, arguments = f"{name}:{number}", Path(words[index]).name, words[index + 1 :]
    verb = Path(program).stem
    if program in _PROGRAMS:
        verb, *arguments = arguments
    method = next(filter(None, map(method_of, [verb, *re.split("[_-]", verb)])), None)
    source = Source(name, _PROGRAMS.get(program, ""), method, {}, {})
    values, files = _flags(arguments, place)
    if isinstance(config := values.pop("config", None), str):
        files.append(config)
    if files:
        base = read_settings(Path(files[0]) if Path(files[0]).is_file() else Path(name).parent / files[0])
        _flatten(source, base.values, {path[-1]: origin for path, origin in base.origins.items()})
    source.values |= values
    source.places |= dict.fromkeys(values, place)
    launcher, _ = _flags(words[:index], place)
    counts = [source.values.pop(key, launcher.get(key)) for key in ("num_processes", "nproc_per_node", "num_gpus")]
    if listed := re.search(r"CUDA_VISIBLE_DEVICES=([\d,]+)", " ".join(words[:index])):
        counts.append(listed[1].strip(",").count(",") + 1)
    source.devices = next((count for count in counts if isinstance(count, int)), 1)
    return source


def _lines(text: str, name: str) -> Iterator[tuple[int, list[str]]]:
    """The words of each line of a script, with the number of its first line; its variables are filled in."""
    variables = dict(re.findall(r"^\s*(?:export )?(\w+)=[\"']?([^\s\"'$]+)[\"']?\s*$", text, re.M))
    for found in re.finditer(r"(?:.*\\\r?\n)*.*", text):
        line, number = re.sub(r"\\\r?\n", " ", found[0]), text.count("\n", 0, found.start()) + 1
        line = re.sub(r"\$\{?(\w+)\}?", lambda name: variables.get(name[1], name[0]), line)
        try:
            if _COMMAND.match(line):
                yield number, shlex.split(line.strip().removeprefix("$ "), comments=True)
        except ValueError as error:
            raise ConfigError(f"{name}:{number}: not a command line: {error}") from error


def _flags(words: list[str], place: str) -> tuple[dict[str, Any], list[str]]:
    """The values of flags by name, and the other words that are files. A flag without a value is true."""
    given: dict[str, list[str]] = {}
    files, name = list[str](), ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            if name in given:
                raise ConfigError(f"{place}: --{name} is given twice; keep one")
            given[name] = [value] if equals else []
        elif re.fullmatch("-[A-Za-z]", word):  # of a launcher, such as -m
            name = ""
        elif name:
            given[name].append(word)
        elif word.endswith((".yaml", ".yml", ".json")):
            files.append(word)
    if unset := [word for words in given.values() for word in words if re.search(r"\$[\w{(]", word)]:
        raise ConfigError(f"{place}: {unset[0]} has no value in the file; write it out")
    read = {name: [parse_value(word, place).values["value"] for word in words] for name, words in given.items()}
    return {name: (some[0] if len(some) == 1 else some or True) for name, some in read.items()}, files


def lay_data(draft: Draft) -> None:
    """Lay the sources, layout, template and validation rows of the data."""
    system = draft.source.system
    described = {"trl": _trl, "llama-factory": _llama_factory, "axolotl": _axolotl}.get(system, lambda draft: ())
    entries = [{key: value for key, value in entry.items() if value} for entry in described(draft)]
    layouts = [{key: entry.pop(key, None) for key in ("format", "columns", "template")} for entry in entries]
    if entries:
        layout = _shared(draft, [str(entry.get("source")) for entry in entries], layouts)
        for key, value in (({"source": entries} if len(entries) > 1 else entries[0]) | layout).items():
            draft.put(f"data.{key}", value, comment="of each data set, as there" if key == "max_rows" else "")
    template = draft.take("template", "chat_template")
    if template is not None:
        own = {"empty": "none", "alpaca": "alpaca", "chatml": "chatml"}.get(str(template), "chat")
        comment = f"{template} there; chat is the tokenizer's own" if own == "chat" else ""
        draft.put("data.template", own, comment=comment)
    whole = any(draft.rest.get(name) for name in ("train_on_prompt", "mask_history", "train_on_inputs"))
    conversations = draft.settings.get("data.format") not in ("text", "alpaca")
    if system in ("llama-factory", "axolotl") and draft.method == "sft" and conversations and not whole:
        draft.put("method.assistant_only_loss", True, comment="the other turns are masked there")
    share, split = draft.take("val_size", "val_set_size"), draft.take("dataset_test_split")
    if share:
        rows = isinstance(share, int | float) and share >= 1 and share is not True
        name = "val_size" if "val_size" in draft.source.values else "val_set_size"
        draft.put("data.validation", {"rows": int(share)} if rows else {"ratio": share}, name)
    elif system == "trl" and draft.rest.get("eval_strategy") not in (None, "no", False):
        source = draft.settings.get("data.source")
        if isinstance(source, str):
            draft.put("data.validation", {"source": source, "split": split or "test"})
        else:
            draft.left["eval_strategy"] = "of a mixture; write data.validation: {source: ..., split: ...}"
    elif split is not None:
        draft.leave("dataset_test_split", "no effect there without eval_strategy")


def _shared(draft: Draft, sources: list[str], layouts: list[Entry]) -> Entry:
    """What the data sets have in common, since one layout is for all; a missing format is inferred."""
    if len(layouts) > 1 and draft.kind.kind != "pair":  # the inferred formats read both names
        same = ({"conversations": "messages"}, {"messages": "conversations"})
        layouts = [each | {"columns": None} if each["columns"] in same else each for each in layouts]
    shared = {key: value for key, value in layouts[0].items() if all(each[key] == value for each in layouts)}
    if "template" not in shared:
        draft.left["template of each data set"] = "they differ, and data.template is for all"
    for source, layout in zip(sources, layouts, strict=True):
        if "columns" not in shared and layout["columns"]:
            names = ", ".join(f"{column} to {name}" for name, column in layout["columns"].items())
            draft.lacks.append(f"data.columns is for all data sets, and theirs differ: in {source}, rename {names}")
    return {key: value for key, value in shared.items() if value}


def _trl(draft: Draft) -> Iterator[Entry]:
    named = {"path": draft.take("dataset_name"), "name": draft.take("dataset_config")}
    named["split"] = draft.take("dataset_train_split")
    for entry in draft.take("datasets") or ([named] if named["path"] else []):
        yield {"source": _source(draft, entry), "split": entry.get("split")}
        draft.left |= {f"datasets: {key}": "not supported" for key in ("columns", "fraction") if entry.get(key)}
    if (text := draft.take("dataset_text_field")) not in (None, "text"):
        draft.put("data.columns", {"text": text})


def _source(draft: Draft, entry: Any) -> str:
    """The file or hub id of an entry in a list of data sets."""
    if not isinstance(entry, dict):
        raise ConfigError(f"{draft.source.places['datasets']}: each entry of datasets must be a mapping with a path")
    files = entry.get("data_files")
    if isinstance(files, list) and len(files) == 1:
        files = files[0]
    return files if isinstance(files, str) else "/".join(filter(None, (entry.get("path"), entry.get("name"))))


def _llama_factory(draft: Draft) -> Iterator[Entry]:
    given, beside = draft.take("dataset_dir"), Path(draft.source.name).parent
    folders = [Path(str(given or "data")), beside / str(given or "data"), *([] if given else [beside])]
    most = draft.whole("max_samples")
    file = next((file for folder in folders if (file := folder / "dataset_info.json").is_file()), None)
    infos = read_settings(file).values if file else {}
    names = draft.take("dataset") or []
    for name in map(str.strip, map(str, names) if isinstance(names, list) else str(names).split(",")):
        info, source = infos.get(name, {}), name
        if not all(isinstance(part, dict) for part in (info, info.get("columns", {}), info.get("tags", {}))):
            raise ConfigError(f"{file}: {name} must be a mapping, with columns and tags that are mappings")
        if "hf_hub_url" in info:
            source = "/".join(filter(None, (info["hf_hub_url"], info.get("subset"))))
        elif file and "file_name" in info:
            source = str(file.parent / info["file_name"])
        elif file:
            known = "says neither the file nor the hub id of" if info else "has no data set"
            draft.left[f"dataset {name}"] = f"{file.resolve()} {known} {name}; it has {', '.join(infos)}"
        else:
            where = " or ".join(dict.fromkeys(str(folder.resolve()) for folder in folders))
            draft.left[f"dataset {name}"] = f"no dataset_info.json in {where} says its file or hub id"
        rows = min(filter(None, (info.get("num_samples"), most)), default=None)
        layout = _layout(draft, info) if info else {}
        yield {"source": source, "split": info.get("split"), "max_rows": rows} | layout
        if strange := set(info.get("tags", {}).values()) - set(table("llama-factory")["tags"].split()):
            words = ", ".join(sorted(strange))
            draft.left[f"tags of {name}"] = f"{words}: rename them in the data, e.g. to role, content, user"


def _layout(draft: Draft, info: dict[str, Any]) -> Entry:
    """The format and columns of an entry of dataset_info.json."""
    columns, turns = info.get("columns", {}), info.get("formatting", "alpaca") != "alpaca"
    form = "kto" if "kto_tag" in columns else "sharegpt" if turns else "preference" if info.get("ranking") else "alpaca"
    if draft.source.values.get("stage") == "pt":
        form = "text"
    elif form in ("kto", "preference") and not turns:
        columns = {"prompt": "instruction"} | columns
    ours = table("llama-factory")["layouts"]["kto of turns" if form == "kto" and turns else form]
    named = {ours[name]: column for name, column in columns.items() if ours.get(name, column) != column}
    unread = [name for name in columns if name not in ours]
    draft.left |= dict.fromkeys(unread, f"a column that format {form} does not have; posttrain trains text models")
    return {"format": form, "columns": named}


def _axolotl(draft: Draft) -> Iterator[Entry]:
    known = table("axolotl")
    for entry in draft.take("datasets") or []:
        source, kind = _source(draft, entry), entry.get("type") or "chat_template"
        own = kind if isinstance(kind, dict) else {}
        first, *others = str(kind).split(".")
        template = first if first in TEMPLATES else None
        layout = known["types"].get(others[0] if others and template else first, {})
        if not own and not layout:
            draft.left[f"type {kind}"] = "no format here has this name; write data.format and data.columns"
        fields = {key: value for key, value in (entry | own).items() if key.startswith("field") and value}
        named = {key.removeprefix("field_").replace("field", "text"): value for key, value in fields.items()}
        form, columns = layout.get("format", "auto"), layout.get("columns", {}) | named
        if form == "messages" and draft.kind.kind == "pair":
            form, columns = "preference", {"prompt": columns.pop("messages", "messages"), **columns}
        columns = {key: value for key, value in columns.items() if key != value}
        yield {"source": source, "split": entry.get("split"), "format": form, "columns": columns, "template": template}
        unread = [key for key, value in entry.items() if value and key not in [*known["entry"].split(), *fields]]
        draft.left |= dict.fromkeys([f"datasets: {key}" for key in unread], "unknown to posttrain")
