"""`report.html`: a run, a pipeline of runs, or several runs side by side, on one self-contained page.

The page names what is missing or damaged, and shows the rest.
"""

import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from posttrain.base.words import counted
from posttrain.reports.chart import Line, chart
from posttrain.reports.completions import completions
from posttrain.reports.curves import PANELS, SMOOTH_FROM, lines_of
from posttrain.reports.markup import number
from posttrain.reports.page import Facts, Html, Section, Table, Text, charts, messages, write_page
from posttrain.reports.series import FACTS, Series
from posttrain.runs.checks import advice
from posttrain.runs.files import open_regular
from posttrain.runs.metrics import NAME
from posttrain.runs.progress import duration
from posttrain.runs.summary import CONFIG, NOTES, RESULTS, SETTINGS, STATE, RunSummary

REPORT = "report.html"
POINTS = 40_000  # of all curves of a page; a curve has 60 to 400
SMOOTHED = "Faint: as logged; in front of it smoothed (moving average)."
SIZE = (380, 180)  # of a chart, in its own units: as wide as a column of three, or a phone
LOG_HEAD = 1 << 16  # bytes of training.log that may have messages about the data


class ReportedRun(RunSummary):
    """A run with its curves. `missing` has a sentence for each file that cannot be read; others add to it."""

    def __init__(self, folder: Path, name: str = ""):
        super().__init__(folder, name)
        self.series = Series(folder).refresh()
        _ = self.facts, self.notes, self.config, self.results
        unread = [(what, self.problems.get(what)) for what in (STATE, NOTES, SETTINGS, CONFIG, RESULTS)]
        self.missing = [f"{what} not shown: {' '.join(problem.split())}." for what, problem in unread if problem]
        metrics, damaged = folder / NAME, self.series.damaged
        if damaged:
            self.missing.append(f"{counted(damaged, 'line')} of {metrics} cannot be read: not in the curves.")
        if self.series.cut_short:
            self.missing.append(f"The last line of {metrics} is incomplete: not in the curves.")

    @property
    def step(self) -> int:
        return int(max(self.series.steps, default=0))

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """The last finite value of each metric."""
        return self.series.last()


def write_report(folder: Path, title: str = "", path: Path | None = None) -> Path:
    """Write a report about the run in `folder`, to its report.html or to `path`, atomically; returns the path.

    Raises RunError if the page cannot be written.
    """
    run, path = ReportedRun(folder), path or folder / REPORT
    title = title or (f"{run.method} of {run.model}" if run.config else run.name)
    write_page(path, title, run_page(run), cards(run))
    return path


def run_page(run: ReportedRun) -> list[Section]:
    """The sections about one run, most important first."""
    data = run.config.get("data") or {}
    after = [
        Text("Data", data_said(run.folder), code=True),
        Table("Metrics", *metrics_table(run.series), folded=True),
        Facts("Results", run.results, folded=True),
        Text("Settings", run.settings, code=True, folded=True),
        Facts("Provenance", run.provenance, folded=True),
    ]
    middle = [alarms([run]), checks(run), curves(run), *completions(run.folder, run.config, run.missing)]
    return [Facts("Summary", summary(run, data)), messages("Not complete", run.missing), *middle, *after]


def cards(run: ReportedRun) -> dict[str, str]:
    """The most important numbers."""
    time = {} if run.seconds is None else {"time": duration(run.seconds)}
    headlines = {name: number(value) for name, value in run.headlines.items()}
    return {"state": run.state, "steps": f"{run.step:,}", **time, **headlines}


def summary(run: ReportedRun, data: Any) -> dict[str, Any]:
    source = data.get("source") if isinstance(data, dict) else None
    entries = source if isinstance(source, list) else [source]
    sources = [entry.get("source") if isinstance(entry, dict) else entry for entry in entries if entry is not None]
    lora = [(model.get("lora") or {}) for model in run.model_settings]
    facts: dict[str, Any] = {
        "tags": run.hashtags,
        "note": run.note,
        "method": run.method if run.config else "",
        "model": ", ".join(str(model.get("path")) for model in run.model_settings),
        "LoRA": ", ".join(f"r {adapter.get('r')}" for adapter in lora if isinstance(adapter, dict) and adapter),
        "data": ", ".join(map(str, sources)),
    }
    if run.facts:
        facts["state"] = run.state + (f": {run.reason}" if run.reason else "")
        facts |= {"started": _when(run.started_at), "ended": _when(run.ended_at) or "not yet"}
        facts |= {name.replace("_", " "): count for name, count in run.counters.items()}
    return {name: value for name, value in facts.items() if value}


def _when(time: datetime | None) -> str:
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC" if time else ""


def alarms(runs: Sequence[ReportedRun]) -> Html:
    """Every alarm of the runs."""
    names = {run.name: f"{run.name}: " if len(runs) > 1 else "" for run in runs}
    return messages("Alarms", [names[run.name] + alarm for run in runs for alarm in alarms_of(run.series)])


def alarms_of(series: Series) -> Iterator[str]:
    """Every alarm that was raised: how often, since when, and the remedy."""
    for name in (name for name in series.names if name.startswith("alarms/")):
        raised = [(step, count) for step, count in zip(*series.points(name), strict=True) if count > 0]
        if raised:
            short, (first, _), (_, count) = name.removeprefix("alarms/"), raised[0], raised[-1]
            yield f"{short}, in {counted(int(count), 'step')}, first seen at step {first:,.0f}: {advice(short)}."


def checks(run: ReportedRun) -> Table:
    """Every vital check with its result."""
    return Table(
        "Checks", ["check", "outcome", "found"], [[check.what, check.outcome, check.found] for check in run.checks]
    )


def curves(run: ReportedRun, title: str = "Curves", most: int = 0) -> Html:
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
    """Points of a line, so that all curves of a page have at most POINTS."""
    return max(60, min(400, POINTS // max(1, lines)))


def smoothing(lines: Sequence[Line], small: bool = False) -> float:
    """The weight of the moving average over about a fifteenth of the points; 0 for short lines."""
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
    """The messages about the data in training.log: rows read, lengths, rows dropped."""
    try:
        with open_regular(folder / "training.log") as file:
            head = file.read(LOG_HEAD).decode("utf-8", "replace")
    except OSError:
        return ""
    messages = []
    for line in head.splitlines():
        *_, level, message = line.split(" ", 3) if line.count(" ") >= 3 else ("", "")
        if message.startswith(("step ", "validation at step ")) or level not in ("INFO", "WARNING"):
            break
        messages.append(message)
    return "\n".join(messages)
