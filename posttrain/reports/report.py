"""`report.html`: a run, a pipeline of runs, or several runs side by side, on one self-contained page.

What is missing or damaged is said on the page; everything else is shown.
"""

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from posttrain.base.words import counted
from posttrain.reports.chart import Line, chart
from posttrain.reports.completions import completions
from posttrain.reports.page import Facts, Html, Section, Table, Text, charts, messages, write_page
from posttrain.reports.panels import PANELS, lines_of
from posttrain.reports.reading import Run, read
from posttrain.reports.series import FACTS, Series
from posttrain.runs.checks import MESSAGES, checks_of
from posttrain.runs.files import open_regular
from posttrain.runs.progress import duration

REPORT = "report.html"
POINTS = 40_000  # of all curves of a page; a curve has 60 to 400
SMOOTH_FROM = 60  # points of a line
SMOOTHED = "Faint: as logged; in front of it smoothed (moving average)."
SIZE = (380, 180)  # of a chart, in its own units: as wide as a column of three, or a phone
LOG_HEAD = 1 << 16  # bytes of training.log that are searched for what was said of the data


def write_report(folder: Path, title: str = "", path: Path | None = None) -> Path:
    """Write a report about the run in `folder`, to its report.html or to `path`, atomically; returns the path.

    Raises RunError if the page cannot be written.
    """
    run, path = read(folder), path or folder / REPORT
    write_page(path, title or " of ".join(filter(None, (run.method, run.model))) or run.name, run_page(run), cards(run))
    return path


def run_page(run: Run) -> list[Section]:
    """The sections about one run, most important first."""
    data = run.config.get("data") or {}
    provenance = run.info.provenance if run.info else {}
    after = [
        Text("Data", data_said(run.folder), code=True),
        Table("Metrics", *metrics_table(run.series), folded=True),
        Facts("Results", run.results, folded=True),
        Text("Settings", run.settings, code=True, folded=True),
        Facts("Provenance", provenance, folded=True),
    ]
    middle = [alarms([run]), checks(run), curves(run), *completions(run.folder, run.config, run.missing)]
    return [Facts("Summary", summary(run, data)), messages("Not complete", run.missing), *middle, *after]


def cards(run: Run) -> dict[str, str]:
    """The most important numbers."""
    time = {} if run.seconds is None else {"time": duration(run.seconds)}
    return {"state": run.state, "steps": f"{run.step:,}", **time, **run.headlines}


def summary(run: Run, data: Any) -> dict[str, Any]:
    source = data.get("source") if isinstance(data, dict) else None
    entries = source if isinstance(source, list) else [source]
    sources = [one.get("source") if isinstance(one, dict) else one for one in entries if one is not None]
    lora = [(model.get("lora") or {}) for model in run.models]
    facts: dict[str, Any] = {
        "method": run.method,
        "model": ", ".join(str(model.get("path")) for model in run.models),
        "LoRA": ", ".join(f"r {one.get('r')}" for one in lora if isinstance(one, dict) and one),
        "data": ", ".join(map(str, sources)),
    }
    if run.info:
        facts["state"] = run.info.state + (f": {run.info.reason}" if run.info.reason else "")
        facts |= {"started": _when(run.info.started), "ended": _when(run.info.ended) if run.info.ended else "not yet"}
        facts |= {name.replace("_", " "): count for name, count in run.info.counters.items()}
    return {name: value for name, value in facts.items() if value}


def _when(time: str) -> str:
    return f"{datetime.fromisoformat(time).astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def alarms(runs: Sequence[Run]) -> Html:
    """Every alarm that was raised, how often and since when, with what helps."""
    found = []
    for run in runs:
        of = f"{run.name}: " if len(runs) > 1 else ""
        for name in (name for name in run.series.names if name.startswith("alarms/")):
            steps, counts = run.series.points(name)
            seen = [(step, count) for step, count in zip(steps, counts, strict=True) if math.isfinite(count) and count]
            if seen:
                short = name.removeprefix("alarms/")
                advice = MESSAGES.get(short, "an alarm of another version")
                raised = f"in {counted(int(seen[-1][1]), 'step')}, first seen at step {seen[0][0]:,.0f}"
                found.append(f"{of}{short}, {raised}: {advice}.")
    return messages("Alarms", found)


def checks(run: Run) -> Table:
    """Every vital check with what it found."""
    found = checks_of(run.info.checks, run.method, run.step) if run.info else []
    return Table("Checks", ["check", "outcome", "found"], [[one.what, one.outcome, one.found] for one in found])


def curves(run: Run, title: str = "Curves", most: int = 0) -> Html:
    panels = [(panel, list(lines_of(panel, run.series, "step"))) for panel in PANELS]
    panels = [(panel, lines) for panel, lines in panels if lines]
    most = most or points_of(sum(len(lines) for _, lines in panels))
    smooth = [smoothing(lines, panel.small) for panel, lines in panels]
    made = (
        chart(lines, panel.title, smooth=weight, share=panel.share, ends=True, most=most, size=SIZE)
        for (panel, lines), weight in zip(panels, smooth, strict=True)
    )
    return charts(title, made, SMOOTHED if any(smooth) else "")


def points_of(lines: int) -> int:
    """Points of a line, so that the curves of a page stay within its size."""
    return max(60, min(400, POINTS // max(1, lines)))


def smoothing(lines: Sequence[Line], small: bool = False) -> float:
    """The weight of the moving average: over about a fifteenth of the points, none for few points."""
    longest = max((len(line.xs) for line in lines if not line.dashed), default=0)
    return 0.0 if small or longest < SMOOTH_FROM else 1 - 15 / longest


def metrics_table(series: Series) -> tuple[list[str], list[list[Any]]]:
    """First and last value of every metric, of training and validation."""
    ends = {}
    for name in series.names:
        values = [value for value in series.points(name)[1] if math.isfinite(value)]
        ends[name] = (values[0], values[-1]) if values else ("", "")
    names = [name for name in ends if name not in FACTS and not name.startswith("eval_")]
    names += [name[5:] for name in ends if name.startswith("eval_") and name[5:] not in names]
    rows = [[name, *ends.get(name, ("", "")), *ends.get(f"eval_{name}", ("", ""))] for name in names]
    return ["", "training: first", "last", "validation: first", "last"], rows


def data_said(folder: Path) -> str:
    """What the run said of its data at its start: rows read, lengths, what was dropped."""
    try:
        with open_regular(folder / "training.log") as file:
            head = file.read(LOG_HEAD).decode("utf-8", "replace")
    except OSError:
        return ""
    said = []
    for line in head.splitlines():
        *_, level, message = line.split(" ", 3) if line.count(" ") >= 3 else ("", "")
        if message.startswith(("step ", "validation at step ")) or level not in ("INFO", "WARNING"):
            break
        said.append(message)
    return "\n".join(said)
