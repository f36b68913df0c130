"""`report.html`: a self-contained page about a run, without scripts or requests, with all strings escaped."""

import base64
import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from posttrain.reports.curves import curves_png
from posttrain.reports.design import CSS
from posttrain.reports.headline import headlines
from posttrain.reports.progress import duration
from posttrain.store.atomic import write_file
from posttrain.store.files import flat, load_json
from posttrain.store.logs import harmless
from posttrain.store.metrics import NAME, read_metrics
from posttrain.store.runs import RunInfo, read_run

LONGEST = 20_000  # maximum characters of one string


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and values; nested mappings become dotted names."""

    title: str
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of strings and numbers; strings may have many lines."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Any]]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph, or with `code` a preformatted block."""

    title: str
    text: str
    code: bool = False


@dataclass(frozen=True, slots=True)
class Picture:
    """A PNG on white; on a dark page its lightness is inverted."""

    title: str
    png: bytes


Section = Facts | Table | Text | Picture


def write_report(folder: Path, title: str, sections: Sequence[Section] = ()) -> Path:
    """Write `folder/report.html` atomically and return its path.

    In a run folder the page holds summary, metrics, curves and results, then `sections` (data report, samples …), then
    settings and provenance; record the run's state before. In another folder it holds the sections alone.
    Raises RunError when a file of the run is damaged or the page cannot be written.
    """
    cards, before, after = "", [], []
    if (folder / "run.json").is_file():
        info, metrics = read_run(folder), read_metrics(folder)
        config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")) or {}
        results = load_json(folder / "results.json") if (folder / "results.json").is_file() else {}
        cards = _cards(info, metrics, results, (config.get("method") or {}).get("type", ""))
        before = [_summary(info, config), _metrics_table(metrics), _curves(folder, metrics)]
        before += [Facts("Results", results)] if results else []
        settings = (folder / "config.yaml").read_text(encoding="utf-8")
        after = [Text("Settings", settings, code=True), Facts("Provenance", info.provenance)]
        after += [Facts("Counters", info.counters)] if info.counters else []
    path = folder / "report.html"
    write_page(path, title, (*before, *sections, *after), cards)
    return path


def write_page(path: Path, title: str, sections: Sequence[Section], cards: str = "") -> None:
    """Write a page with these sections, those without content omitted, atomically. Raises RunError if it cannot."""
    write_file(path, _page(title, cards, [section for section in sections if not _is_empty(section)]))


def _curves(folder: Path, metrics: Sequence[dict[str, Any]]) -> Picture:
    """The curves of a run: `curves.png` if it is up to date."""
    picture, measured = folder / "curves.png", folder / NAME
    fresh = picture.is_file() and (not measured.is_file() or picture.stat().st_mtime >= measured.stat().st_mtime)
    return Picture("Curves", picture.read_bytes() if fresh else curves_png(metrics, ""))


def _is_empty(section: Section) -> bool:
    return (isinstance(section, Facts) and not section.facts) or (isinstance(section, Table) and not section.rows)


def _cards(info: RunInfo, metrics: list[dict[str, Any]], results: dict[str, Any], method: str) -> str:
    """The most important numbers."""
    cards = {"state": info.state, "steps": str(max((line["step"] for line in metrics), default=0))}
    cards["time"] = duration(results.get("train_runtime") or _seconds(info))
    last = {name: value for line in metrics for name, value in line.items() if value is not None}
    cards |= {label: _number(value) for label, value in headlines(method, last).items()}
    shown = "".join(f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in cards.items())
    return f'<dl class="cards">{shown}</dl>'


def _summary(info: RunInfo, config: dict[str, Any]) -> Facts:
    models = config.get("models") or [config.get("model") or {}]
    data = config.get("data") or {}
    source = data.get("source")
    return Facts(
        "Summary",
        {
            "method": (config.get("method") or {}).get("type"),
            "model": ", ".join(str(model.get("path")) for model in models if model),
            "LoRA": ", ".join("no" if not model.get("lora") else f"r {model['lora'].get('r')}" for model in models),
            "data": source if isinstance(source, str) else json.dumps(source, ensure_ascii=False),
            "state": info.state + (f": {info.reason}" if info.reason else ""),
            "started": info.started,
            "ended": info.ended or "not yet",
        },
    )


def _metrics_table(metrics: list[dict[str, Any]]) -> Table:
    """First and last value of every metric, of training and validation."""
    first: dict[str, Any] = {}
    last: dict[str, Any] = {}
    for line in metrics:
        for name, value in line.items():
            first.setdefault(name, value)
            last[name] = value
    names = [name for name in last if name not in ("step", "epoch", "time") and not name.startswith("eval_")]
    names += [name[5:] for name in last if name.startswith("eval_") and name[5:] not in names]
    rows = [[name, *(of.get(prefix + name, "") for prefix in ("", "eval_") for of in (first, last))] for name in names]
    return Table("Metrics", ["", "training: first", "last", "validation: first", "last"], rows)


def _seconds(info: RunInfo) -> float:
    ended = datetime.fromisoformat(info.ended) if info.ended else datetime.now(UTC)
    return (ended - datetime.fromisoformat(info.started)).total_seconds()


def _page(title: str, cards: str, sections: Sequence[Section]) -> str:
    links = " ".join(f'<a href="#s{n}">{_text(section.title)}</a>' for n, section in enumerate(sections))
    body = "\n".join(
        f'<section id="s{n}"><h2>{_text(section.title)}</h2>{_render(section)}</section>'
        for n, section in enumerate(sections)
    )
    written = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="color-scheme" content="light dark">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{_text(title)}</title>
<style>{CSS}</style>
</head>
<body class="view">
<header><h1>{_text(title)}</h1><p>posttrain report, {written}</p><nav>{links}</nav></header>
{cards}
{body}
</body>
</html>
"""


def _render(section: Section) -> str:
    if isinstance(section, Facts):
        facts = flat(section.facts)
        rows = "".join(f"<tr><th>{_text(name)}</th>{_cell(value)}</tr>" for name, value in facts.items())
        return f"<table>{rows}</table>"
    if isinstance(section, Table):
        head = "".join(f"<th>{_text(name)}</th>" for name in section.header)
        rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in section.rows)
        note = f"<p>{_text(section.note)}</p>" if section.note else ""
        return f'{note}<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    if isinstance(section, Text):
        return f"<pre>{_text(section.text)}</pre>" if section.code else f"<p>{_text(section.text)}</p>"
    return f'<img src="{_data(section.png)}" alt="{_text(section.title)}">'


def _cell(value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f'<td class="number">{_number(value)}</td>'
    if isinstance(value, list | tuple):
        value = ", ".join(map(str, value))
    return f"<td>{_text('' if value is None else str(value))}</td>"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _text(text: str) -> str:
    """Any string as HTML: markup escaped, control characters replaced, truncated if very long."""
    more = len(text) - LONGEST
    return html.escape(harmless(text[:LONGEST])) + (f" … ({more:,} more characters)" if more > 0 else "")


def _data(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()
