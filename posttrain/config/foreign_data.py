"""Data sets as other systems describe them: TRL's names, LLaMA-Factory's dataset_info.json, axolotl's list."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posttrain.base.errors import ConfigError
from posttrain.config.foreign import Draft, table
from posttrain.config.reading.files import read_settings
from posttrain.config.schema.data import TEMPLATES

Entry = dict[str, Any]  # source, and where given split, max_rows, format, columns, template


def lay_data(draft: Draft) -> None:
    """Lay the sources, layout, template and validation rows of the data."""
    systems = {"trl": _trl, "llama-factory": _llama_factory, "axolotl": _axolotl}
    described = systems.get(draft.source.system)
    entries = [
        {key: value for key, value in entry.items() if value} for entry in (described(draft) if described else ())
    ]
    layouts = [{key: entry.pop(key, None) for key in ("format", "columns", "template")} for entry in entries]
    if len(entries) > 1:
        entries = [{"source": entries}]
    for key, value in [*(entries or [{}])[0].items(), *(layouts or [{}])[0].items()]:
        if value:
            draft.put(f"data.{key}", value, comment="of each data set, as there" if key == "max_rows" else "")
    if any(layout != layouts[0] for layout in layouts):
        draft.left["columns"] = "the data sets differ in their layouts; convert them to that of the first"
    template = draft.take("template", "chat_template")
    if template is not None:
        own = {"empty": "none", "alpaca": "alpaca", "chatml": "chatml"}.get(str(template), "chat")
        draft.put(
            "data.template", own, comment=f"{template} there; chat is the tokenizer's own" if own == "chat" else ""
        )
    whole = any(draft.rest.get(name) for name in ("train_on_prompt", "mask_history", "train_on_inputs"))
    conversations = draft.settings.get("data.format") not in ("text", "alpaca")
    if described not in (None, _trl) and draft.method == "sft" and conversations and not whole:
        draft.put("method.assistant_only_loss", True, comment="the other turns are masked there")
    share, split = draft.take("val_size", "val_set_size"), draft.take("dataset_test_split")
    if share:
        rows = isinstance(share, int | float) and share >= 1 and share is not True
        name = "val_size" if "val_size" in draft.source.values else "val_set_size"
        draft.put("data.validation", {"rows": int(share)} if rows else {"ratio": share}, name)
    elif described is _trl and draft.rest.get("eval_strategy") not in (None, "no", False):
        source = draft.settings.get("data.source")
        if isinstance(source, str):
            draft.put("data.validation", {"source": source, "split": split or "test"})
        else:
            draft.left["eval_strategy"] = "of a mixture; write data.validation: {source: ..., split: ...}"
    elif split is not None:
        draft.leave("dataset_test_split", "no effect there without eval_strategy")


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
    folder, beside = Path(str(draft.take("dataset_dir") or "data")), Path(draft.source.name).parent
    most = draft.whole("max_samples")
    file = next((f for at in (folder, beside / folder, beside) if (f := at / "dataset_info.json").is_file()), None)
    infos = read_settings(file).values if file else {}
    names = draft.take("dataset") or []
    for name in map(str.strip, map(str, names) if isinstance(names, list) else str(names).split(",")):
        if file and name not in infos:
            raise ConfigError(f"{file} has no data set {name}; it has {', '.join(infos)}")
        info, source = infos.get(name, {}), name
        if not all(isinstance(part, dict) for part in (info, info.get("columns", {}), info.get("tags", {}))):
            raise ConfigError(f"{file}: {name} must be a mapping, with columns and tags that are mappings")
        if "hf_hub_url" in info:
            source = "/".join(filter(None, (info["hf_hub_url"], info.get("subset"))))
        elif file and "file_name" in info:
            source = str(file.parent / info["file_name"])
        else:
            draft.left[f"dataset {name}"] = f"no dataset_info.json in {folder} or {beside} says its file or hub id"
        rows = [count for count in (info.get("num_samples"), most) if count]
        yield {
            "source": source,
            "split": info.get("split"),
            "max_rows": min(rows, default=None),
            **_layout(draft, info),
        }
        if strange := set(info.get("tags", {}).values()) - set(table("llama-factory")["tags"].split()):
            draft.left[f"tags of {name}"] = (
                f"{', '.join(sorted(strange))}: rename them in the data, e.g. to role, content, user"
            )


def _layout(draft: Draft, info: dict[str, Any]) -> Entry:
    """The format and columns of an entry of dataset_info.json."""
    columns = info.get("columns", {})
    labelled, alpaca = "kto_tag" in columns, info.get("formatting", "alpaca") == "alpaca"
    form = "kto" if labelled else "sharegpt" if not alpaca else "preference" if info.get("ranking") else "alpaca"
    ours = {"system": "system", "tools": "tools", "chosen": "chosen", "rejected": "rejected", "kto_tag": "label"}
    ours |= {"messages": "messages" if labelled else "conversations"} if not alpaca else {"prompt": "prompt"}
    if alpaca and form != "preference":
        own = {"prompt": "instruction", "query": "input", "response": "output", "history": "history"}
        ours |= {"response": "completion"} if labelled else own
    given = {"prompt": "instruction"} | columns if form in ("preference", "kto") and alpaca else columns
    if draft.source.values.get("stage") == "pt":
        form, ours, given = "text", {"prompt": "text"}, columns
    named = {ours[name]: column for name, column in given.items() if name in ours and ours[name] != column}
    unread = [name for name in columns if name not in ours]
    draft.left |= dict.fromkeys(unread, f"a column that format {form} does not have; posttrain trains text models")
    return {"format": form, "columns": named}


def _axolotl(draft: Draft) -> Iterator[Entry]:
    types, read = table("axolotl")["types"], table("axolotl")["entry"].split()
    for entry in draft.take("datasets") or []:
        source, kind = _source(draft, entry), entry.get("type") or "chat_template"
        own = kind if isinstance(kind, dict) else {}
        first, *others = str(kind).split(".")
        known = others[0] if others and first in TEMPLATES else first
        layout = types.get(known, {})
        form, columns = layout.get("format", "auto"), layout.get("columns", {})
        if not own and not layout:
            draft.left[f"type {kind}"] = "no format here has this name; write data.format and data.columns"
        fields = {key: value for key, value in (entry | own).items() if key.startswith("field") and value}
        columns = columns | {
            key.removeprefix("field_").replace("field", "text"): value for key, value in fields.items()
        }
        if form == "messages" and draft.kind.kind == "pair":
            form, columns = "preference", {"prompt": columns.pop("messages", "messages"), **columns}
        columns = {key: value for key, value in columns.items() if key != value}
        template = first if first in TEMPLATES else None
        yield {"source": source, "split": entry.get("split"), "format": form, "columns": columns, "template": template}
        unread = [key for key, value in entry.items() if value and key not in read and key not in fields]
        draft.left |= dict.fromkeys([f"datasets: {key}" for key in unread], "unknown to posttrain")
