"""`report.html`: a run, a pipeline of runs, or several runs side by side, on one self-contained page.
The page names what is missing or damaged, and shows the rest."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from posttrain.base.words import counted
from posttrain.reports.chart import COLOURS, Line, chart
from posttrain.reports.completions import completions
from posttrain.reports.curves import PANELS, SMOOTH_FROM, lines_of, single_panels, smoothing
from posttrain.reports.drawing import Drawing
from posttrain.reports.markup import Markup, el, join, number
from posttrain.reports.page import Facts, Html, Section, Table, Text, charts, messages, write_page
from posttrain.reports.series import FACTS, Series
from posttrain.runs.checks import advice
from posttrain.runs.files import as_mapping, flat, is_regular, open_regular, read_regular
from posttrain.runs.finding import find_runs
from posttrain.runs.metrics import NAME, of_method
from posttrain.runs.progress import duration
from posttrain.runs.summary import CONFIG, NOTES, RESULTS, SETTINGS, STATE, RunSummary

REPORT = "report.html"
POINTS = 40_000  # points of all curves of a page; a single curve has 60 to 400
SMOOTHED = "Faint: logged values; in front: smoothed values (moving average)."
SIZE = (380, 180)  # size of a chart in SVG units: fits one of three columns, or a phone
INCIDENTAL = ("name", "output_dir")  # settings that always differ
LOG_HEAD = 1 << 16  # bytes at the start of training.log that may have messages about the data


class ReportedRun(RunSummary):
    """A run with its curves. `missing` has a sentence for each file that cannot be read; sections add more."""

    def __init__(self, folder: Path, name: str = ""):
        super().__init__(folder, name)
        self.series = Series(folder).refresh()
        _ = self.facts, self.notes, self.config, self.results
        unread = [(what, self.problems.get(what)) for what in (STATE, NOTES, SETTINGS, CONFIG, RESULTS)]
        self.missing = [f"{what} not shown: {' '.join(problem.split())}." for what, problem in unread if problem]
        metrics, damaged = folder / NAME, self.series.damaged
        if damaged:
            self.missing.append(f"The curves omit {counted(damaged, 'line')} of {metrics} that cannot be read.")
        if self.series.cut_short:
            self.missing.append(f"The last line of {metrics} is incomplete and is not in the curves.")

    @property
    def step(self) -> int:
        return int(max(self.series.steps, default=0))

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """The last finite value of each metric."""
        return self.series.last()


def write_report(folder: Path, title: str = "", path: Path | None = None) -> Path:
    """Write a report about the run in `folder` to its report.html, or to `path`, atomically; returns the path.
    Raises RunError if the page cannot be written."""
    run, path = ReportedRun(folder), path or folder / REPORT
    title = title or (f"{run.method} of {run.model}" if run.config else run.name)
    write_page(path, title, run_page(run), cards(run))
    return path


def run_page(run: ReportedRun) -> list[Section]:
    """The sections about one run, most important first."""
    after = [
        Text("Data", data_messages(run.folder), code=True),
        Table("Metrics", *metrics_table(run.series), folded=True),
        Facts("Results", run.results, folded=True),
        Text("Settings", run.settings, code=True, folded=True),
        Facts("Provenance", run.provenance, folded=True),
    ]
    rows = [[check.what, check.outcome, check.found] for check in run.checks]
    checks = Table("Checks", ["check", "outcome", "found"], rows)
    middle = [alarms([run]), checks, curves(run), *completions(run.folder, run.config, run.missing)]
    return [Facts("Summary", summary(run)), messages("Not complete", run.missing), *middle, *after]


def cards(run: ReportedRun) -> dict[str, str]:
    """The most important numbers of a run, by name."""
    time = {} if run.seconds is None else {"time": duration(run.seconds)}
    headlines = {name: number(value) for name, value in run.headlines.items()}
    return {"state": run.state, "steps": f"{run.step:,}", **time, **headlines}


def summary(run: ReportedRun) -> dict[str, Any]:
    source = as_mapping(run.config.get("data")).get("source")
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
    several = len(runs) > 1
    named = [(run.name, alarm) for run in runs for alarm in alarms_of(run.series)]
    return messages("Alarms", [f"{name}: {alarm}" if several else alarm for name, alarm in named])


def alarms_of(series: Series) -> Iterator[str]:
    """A sentence for each alarm that was raised: in how many steps, since which step, and the remedy."""
    for name in (name for name in series.names if name.startswith("alarms/")):
        raised = [(step, count) for step, count in zip(*series.points(name), strict=True) if count > 0]
        if raised:
            short, (first, _), (_, count) = name.removeprefix("alarms/"), raised[0], raised[-1]
            yield f"{short}, in {counted(int(count), 'step')}, first seen at step {first:,.0f}: {advice(short)}."


def curves(run: ReportedRun, title: str = "Curves", most: int = 0) -> Html:
    panels = [(panel, lines) for panel in PANELS if (lines := list(lines_of(panel, run.series, "step")))]
    most = most or points_of(sum(len(lines) for _, lines in panels))
    smooth = [smoothing(lines, panel.small) for panel, lines in panels]
    made = (
        chart(lines, panel.title, smooth=weight, share=panel.share, ends=True, most=most, size=SIZE)
        for (panel, lines), weight in zip(panels, smooth, strict=True)
    )
    return charts(title, made, SMOOTHED if any(smooth) else "")


def points_of(lines: int) -> int:
    """The maximum points of one of `lines` lines (60 to 400), so that they have about POINTS in all."""
    return max(60, min(400, POINTS // max(1, lines)))


def metrics_table(series: Series) -> tuple[list[str], list[list[Any]]]:
    """The first and last values of every metric, in training and in validation."""
    finite = {name: list(filter(math.isfinite, series.points(name)[1])) for name in series.names}
    ends = {name: (values[0], values[-1]) if values else ("", "") for name, values in finite.items()}
    names = [name for name in ends if name not in FACTS and not name.startswith("eval_")]
    names += [name[5:] for name in ends if name.startswith("eval_") and name[5:] not in names]
    rows = [[name, *ends.get(name, ("", "")), *ends.get(f"eval_{name}", ("", ""))] for name in names]
    return ["", "training: first", "last", "validation: first", "last"], rows


def data_messages(folder: Path) -> str:
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


def below(root: Path) -> list[ReportedRun]:
    """The runs below a pipeline's folder (its stages and models), in the order in which they started."""
    runs = [ReportedRun(folder, str(folder.relative_to(root))) for folder in find_runs(root) if folder != root]
    return sorted(runs, key=lambda run: (not run.facts, run.started, run.name))


def write_pipeline_report(root: Path, path: Path | None = None) -> Path:
    """Write a report about all runs below `root` to its report.html, or to `path`; returns the path.
    Raises RunError if the page cannot be written."""
    path, runs = path or root / REPORT, below(root)
    most = points_of(12 * len(runs))
    each = [_of_run(run, most) for run in runs]  # before the overview, because this adds to what is missing
    settings = root / "config.yaml"
    written = read_regular(settings).decode(errors="replace") if is_regular(settings) else ""
    after = [Text("Settings", written, code=True, folded=True), *_provenance(runs)]
    write_page(path, root.resolve().name, [*_overview(runs, path), *each, *after])
    return path


def _of_run(run: ReportedRun, most: int) -> Html:
    """The curves of a run, and its best and worst completions."""
    figures = curves(run, run.name, most)
    extremes = (
        [el("h3", section.title), el("p", section.note, class_="note"), section.body]
        for section in completions(run.folder, run.config, run.missing, count=1)
    )
    return Html(run.name, join([figures.body, *extremes]), figures.note)


def _overview(runs: Sequence[ReportedRun], path: Path) -> list[Section]:
    """The first sections about several runs: the table, notes, what cannot be read, alarms."""
    unread = [f"{run.name}: {text}" for run in runs for text in run.missing]
    notes = Facts("Notes", {run.name: run.note for run in runs if run.note})
    return [runs_table(runs, path), notes, messages("Not complete", unread), alarms(runs)]


def write_runs_report(folders: Mapping[str, Path], path: Path) -> None:
    """Write a page that shows runs side by side: results, settings that differ, overlaid curves, alarms."""
    runs = [ReportedRun(folder, name) for name, folder in folders.items()]
    names = [run.name for run in runs]
    curves = charts("Curves", overlaid(runs), SMOOTHED if max(map(_longest, runs)) >= SMOOTH_FROM else "")
    settings = Table("Settings that differ", ["", *names], differing([run.config for run in runs]))
    sections = [*_overview(runs, path), curves, settings, *_provenance(runs)]
    write_page(path, f"Comparison of {', '.join(names)}", sections)


def runs_table(runs: Sequence[ReportedRun], path: Path) -> Table:
    """A table with a row for each run, linked to its report if there is one."""
    metrics = list(dict.fromkeys(name for run in runs for name in run.headlines))
    tagged = ["tags"] if any(run.tags for run in runs) else []
    rows = [
        [_linked(run, path), *(run.hashtags for _ in tagged), el("span", run.state, class_=f"badge {run.state}"),
         run.method, run.model, run.step, "" if run.seconds is None else duration(run.seconds),
         *(number(run.headlines[name]) if name in run.headlines else "" for name in metrics)]
        for run in runs
    ]  # fmt: skip
    return Table("Runs", ["run", *tagged, "state", "method", "model", "steps", "time", *metrics], rows)


def _linked(run: ReportedRun, path: Path) -> str | Markup:
    own = run.folder / REPORT
    if not own.is_file() or own == path:
        return run.name
    return el("a", run.name, href=Path(os.path.relpath(own, path.parent)).as_posix())


def differing(configs: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """The settings that are not the same in all runs, with their values."""
    rows = _side_by_side([flat(config, lists=True) for config in configs])
    return [row for row in rows if row[0] not in INCIDENTAL and any(value != row[1] for value in row[2:])]


def _side_by_side(facts: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """A row for each fact: its name, and its value in each mapping, empty where it has none."""
    names = dict.fromkeys(name for values in facts for name in values)
    return [[name, *("" if values.get(name) is None else values[name] for values in facts)] for name in names]


def _longest(run: ReportedRun) -> int:
    """The number of points of the longest training curve."""
    return max((len(run.series.points(name)[0]) for name in run.series.names if name[:5] != "eval_"), default=0)


def overlaid(runs: Sequence[ReportedRun]) -> Iterator[Drawing]:
    """A chart for each metric that at least two runs have, with a line for each run."""
    first = [name for run in runs for name in of_method(run.method)]
    names = list(dict.fromkeys([*first, "loss", *(name for panel in PANELS for name in panel.metrics)]))
    kinds = [kind for name in names for kind in (name, f"eval_{name}")]
    shown = [(kind, having) for kind in kinds if len(having := [run for run in runs if kind in run.series.names]) > 1]
    most = points_of(sum(len(having) for _, having in shown))
    shares = {name for panel in PANELS if panel.share for name in panel.metrics}
    for kind, having in shown:
        bare = kind.removeprefix("eval_")
        title = next((panel.title for panel in single_panels() if bare in panel.metrics), bare)
        title += ", validation" if kind != bare else ""
        lines = [
            Line(run.name, *run.series.points(kind), runs.index(run) % COLOURS, runs.index(run) >= COLOURS)
            for run in having
        ]
        smooth = smoothing(lines, bare == "learning_rate")
        yield chart(lines, title, smooth=smooth, share=bare in shares, ends=True, most=most, size=SIZE)


def _provenance(runs: Sequence[ReportedRun]) -> list[Section]:
    """The provenance of the runs: a table of the facts that differ, and a list of the facts that are equal."""
    rows = _side_by_side([flat(run.provenance) for run in runs])
    same = {row[0]: row[1] for row in rows if all(value == row[1] for value in row[2:])}
    others = [row for row in rows if row[0] not in same]
    return [
        Table("Provenance", ["", *(run.name for run in runs)], others, folded=True),
        Facts("Provenance, equal in all runs", same, folded=True),
    ]
