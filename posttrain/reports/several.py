"""Reports about several runs: the stages of a pipeline, or runs side by side."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.reports.chart import COLOURS, Line, chart
from posttrain.reports.completions import completions
from posttrain.reports.curves import PANELS
from posttrain.reports.drawing import Drawing
from posttrain.reports.markup import Markup, el, join, number
from posttrain.reports.page import Facts, Html, Section, Table, Text, charts, messages, write_page
from posttrain.reports.report import (
    REPORT,
    SIZE,
    SMOOTH_FROM,
    SMOOTHED,
    ReportedRun,
    alarms,
    curves,
    points_of,
    smoothing,
)
from posttrain.runs.files import flat, is_regular, read_regular
from posttrain.runs.finding import find_runs
from posttrain.runs.metrics import LABELS, of_method
from posttrain.runs.progress import duration

INCIDENTAL = ("name", "output_dir")  # settings that always differ


def below(root: Path) -> list[ReportedRun]:
    """The runs below the folder of a pipeline, its stages and models, in the order in which they started."""
    runs = [ReportedRun(folder, str(folder.relative_to(root))) for folder in find_runs(root) if folder != root]
    return sorted(runs, key=lambda run: (not run.facts, run.started, run.name))


def write_pipeline_report(root: Path, path: Path | None = None) -> Path:
    """Write a report about all runs below `root`, to its report.html or to `path`; returns the path.

    Raises RunError if the page cannot be written.
    """
    path = path or root / REPORT
    write_page(path, root.resolve().name, _pipeline_page(root, below(root), path))
    return path


def _pipeline_page(root: Path, runs: Sequence[ReportedRun], path: Path) -> list[Section]:
    most = points_of(12 * len(runs))
    each = [_of_run(run, most) for run in runs]
    settings = root / "config.yaml"
    written = read_regular(settings).decode(errors="replace") if is_regular(settings) else ""
    first = [runs_table(runs, path), notes(runs), not_complete(runs), alarms(runs)]
    return [*first, *each, Text("Settings", written, code=True, folded=True), *_provenance(runs)]


def _of_run(run: ReportedRun, most: int) -> Html:
    """The curves of a run, and its best and worst completion."""
    figures = curves(run, run.name, most)
    extremes = (
        [el("h3", section.title), el("p", section.note, class_="note"), section.body]
        for section in completions(run.folder, run.config, run.missing, count=1)
    )
    return Html(run.name, join([figures.body, *extremes]), figures.note)


def notes(runs: Sequence[ReportedRun]) -> Facts:
    return Facts("Notes", {run.name: run.note for run in runs if run.note})


def not_complete(runs: Sequence[ReportedRun]) -> Html:
    return messages("Not complete", [f"{run.name}: {text}" for run in runs for text in run.missing])


def write_runs_report(folders: Mapping[str, Path], path: Path) -> None:
    """Write a page about these runs side by side: results, settings that differ, overlaid curves, alarms."""
    runs = [ReportedRun(folder, name) for name, folder in folders.items()]
    sections: list[Section] = [
        runs_table(runs, path),
        notes(runs),
        not_complete(runs),
        alarms(runs),
        charts("Curves", overlaid(runs), SMOOTHED if max(map(_longest, runs)) >= SMOOTH_FROM else ""),
        Table("Settings that differ", ["", *(run.name for run in runs)], differing([run.config for run in runs])),
    ]
    write_page(path, "Comparison of " + ", ".join(run.name for run in runs), [*sections, *_provenance(runs)])


def runs_table(runs: Sequence[ReportedRun], path: Path) -> Table:
    """A row for each run, with a link to its report if there is one."""
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
    settings = [flat(config, lists=True) for config in configs]
    names = dict.fromkeys(name for values in settings for name in values if name not in INCIDENTAL)
    rows = [[name, *("" if values.get(name) is None else values[name] for values in settings)] for name in names]
    return [row for row in rows if any(value != row[1] for value in row[2:])]


def _longest(run: ReportedRun) -> int:
    """Points of the longest curve of training."""
    return max((len(run.series.points(name)[0]) for name in run.series.names if name[:5] != "eval_"), default=0)


def overlaid(runs: Sequence[ReportedRun]) -> Iterator[Drawing]:
    """A chart for each metric that at least two runs have, with a line for each run."""
    first = [name for run in runs for name in of_method(run.method)]
    names = list(dict.fromkeys([*first, "loss", *(name for panel in PANELS for name in panel.metrics)]))
    shown = [
        (kind, [run for run in runs if kind in run.series.names]) for name in names for kind in (name, f"eval_{name}")
    ]
    shown = [(kind, having) for kind, having in shown if len(having) > 1]
    most = points_of(sum(len(having) for _, having in shown))
    shares = {name for panel in PANELS if panel.share for name in panel.metrics}
    for kind, having in shown:
        bare = kind.removeprefix("eval_")
        title = LABELS.get(bare, bare) + (", validation" if kind != bare else "")
        lines = [
            Line(run.name, *run.series.points(kind), runs.index(run) % COLOURS, runs.index(run) >= COLOURS)
            for run in having
        ]
        smooth = smoothing(lines, bare == "learning_rate")
        yield chart(lines, title, smooth=smooth, share=bare in shares, ends=True, most=most, size=SIZE)


def _provenance(runs: Sequence[ReportedRun]) -> list[Section]:
    """The provenance of each run: a table of the facts that differ, and a list of the others."""
    facts = [flat(run.provenance) for run in runs]
    names = dict.fromkeys(name for values in facts for name in values)
    rows = [[name, *(values.get(name, "") for values in facts)] for name in names]
    same = {row[0]: row[1] for row in rows if all(value == row[1] for value in row[2:])}
    others = [row for row in rows if row[0] not in same]
    return [
        Table("Provenance", ["", *(run.name for run in runs)], others, folded=True),
        Facts("Provenance, the same in all", same, folded=True),
    ]
