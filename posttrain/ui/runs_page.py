"""The Runs page: a table of all runs, and a comparison of the chosen runs."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from posttrain.base.words import counted, in_units
from posttrain.reports.chart import COLOURS, chart, spark
from posttrain.reports.curves import lines_of, single_panels
from posttrain.reports.markup import Markup, el, join, link, message, number, short, table
from posttrain.reports.report import differing
from posttrain.reports.series import AXES
from posttrain.runs.checks import advice
from posttrain.runs.finding import folders_of, root_of
from posttrain.runs.folder import never_stepped
from posttrain.runs.managing.removing import delete
from posttrain.runs.summary import RunSummary
from posttrain.ui.parts import Query, act, address, choice, contains, form, hidden, search, slider
from posttrain.ui.viewer import STATES, Viewer

PATH, FORM = "/", "acts"
SHOWN = 100  # rows of the table before "show all"
CHOSEN = COLOURS  # maximum number of runs overlaid
SORTS = ("latest", "name", "state", "method", "model", "result", "steps", "disk")
SMOOTH = ("0", "0.6", "0.9", "0.97")


def runs_page(viewer: Viewer, query: Query) -> Markup:
    rows = viewer.runs.all()
    if not rows:
        return _first(viewer)
    chosen = [run for name in query.many("chosen") if (run := viewer.runs.find(name)) is not None][:CHOSEN]
    runs = _table(viewer, arranged(rows, query), len(rows), chosen, query)
    return join([_controls(rows, query), _failed(viewer), runs, _overlay(viewer, chosen, query)])


def _first(viewer: Viewer) -> Markup:
    """How to make the first run."""
    tour = ["posttrain", "quickstart", "--output-dir", str(viewer.root / "quickstart")]
    own = ["posttrain", "train", "SETTINGS.yaml", "--output-dir", str(viewer.root)]
    ways = el("p", f"Runs in {viewer.root} appear here. Fill in ", link("New run", "/new"), ", or in a terminal:")
    commands = el("pre", f"{shlex.join(tour)}    # a tour in minutes, without a download\n{shlex.join(own)}")
    return join([el("h1", "There are no runs yet"), ways, commands])


def failed_starts(viewer: Viewer) -> list[Path]:
    """The folders of whole runs that ended before their first step, so that nothing in them is worth keeping."""
    unused = [run for run in viewer.runs.all() if not (run.step or run.tags or run.note or run.folder == viewer.root)]
    ended = [run.folder for run in unused if run.state in ("failed", "interrupted", "killed")]
    early = {folder.resolve() for folder in ended if never_stepped(folder)}
    whole = {whole_of(viewer, folder) for folder in early}
    return sorted(folder for folder in whole if early.issuperset(folders_of(folder)))


def whole_of(viewer: Viewer, run: Path) -> Path:
    """The folder of the whole run, with all models and stages, if it is below the folder served; otherwise the run."""
    whole = root_of(run)
    return whole if viewer.root.resolve() in whole.parents else run


def clear(viewer: Viewer, query: Query) -> None:
    """Delete the runs that failed to start. Raises RunError if other runs need one."""
    for folder in failed_starts(viewer):
        delete(folder, [viewer.root])
    viewer.runs.renew()


def _failed(viewer: Viewer) -> Markup | None:
    names = [folder.name for folder in failed_starts(viewer)]
    if not names:
        return None
    what = f"{counted(len(names), 'run')} ended before the first step ({short(', '.join(names))}). "
    return el("form", el("p", what, act("clear", "Delete", FORM)), id=FORM, method="post", action=PATH)


def arranged(rows: Sequence[RunSummary], query: Query) -> list[RunSummary]:
    """The runs that match the filters, in the chosen order."""
    find, state, method = (query.one(name) for name in ("find", "state", "method"))
    kept = [
        run
        for run in rows
        if state in ("", run.state) and method in ("", run.method)
        and contains(find, run.name, run.method, run.model, run.data, *run.tags, run.note)
    ]  # fmt: skip
    keys = {
        "name": lambda run: run.name.casefold(),
        "state": lambda run: STATES.index(run.state) if run.state in STATES else len(STATES),
        "method": lambda run: run.method,
        "model": lambda run: run.model.casefold(),
        "result": lambda run: (run.result is None, run.metric, -(run.result or 0.0)),
        "steps": lambda run: -run.step,
        "disk": lambda run: -run.size,
    }
    sort = query.choice("sort", SORTS)
    if sort != "latest":
        kept.sort(key=keys[sort])
    return kept[::-1] if query.one("reverse") else kept


def _controls(rows: Sequence[RunSummary], query: Query) -> Markup:
    states = [state for state in STATES if any(run.state == state for run in rows)]
    return form(
        PATH,
        search("find", "Find", query.one("find"), "name, method, model, data, tag, note", wide=True),
        choice("state", "State", ["", *states], query.one("state"), "all"),
        choice("method", "Method", ["", *sorted({run.method for run in rows})], query.one("method"), "all"),
        hidden(query, "chosen", "sort", "reverse", "x", "smooth"),
    )


def _table(
    viewer: Viewer, rows: Sequence[RunSummary], total: int, chosen: Sequence[RunSummary], query: Query
) -> Markup:
    shown = rows if query.one("all") else rows[:SHOWN]
    names = [run.name for run in chosen]
    columns = ("", "name", "state", "result", "", "steps", "ETA", "method", "model", "disk", "started")
    header = [_sorter(name, query) if name in SORTS else name for name in columns]
    body = [_cells(run, viewer.runs.spark(run), names, query) for run in shown]
    count = counted(len(rows), "run") if len(rows) == total else f"{len(rows):,} of {counted(total, 'run')}"
    more = link(f"show all {len(rows):,}", query.but(PATH, all=1)) if len(shown) < len(rows) else None
    hint = " · choose some to compare them" if not chosen else None
    summary = el("p", count, hint, " · " if more else None, more, class_="quiet")
    listed = table(header, body, numbers=(5, 9), class_="runs")
    return join([summary, el("div", listed, class_="above") if chosen else listed])


def _sorter(name: str, query: Query) -> Markup:
    """A column header that sorts the table by its column, or reverses the order if it is already sorted by it."""
    now, reversed_ = query.choice("sort", SORTS) == name, bool(query.one("reverse"))
    arrow = (" ↑" if reversed_ else " ↓") if now else ""
    return link(f"{name}{arrow}", query.but(PATH, sort=name, reverse=1 if now and not reversed_ else None))


def _cells(run: RunSummary, curve: Sequence[float], chosen: Sequence[str], query: Query) -> list[object]:
    at = chosen.index(run.name) if run.name in chosen else None
    others = [name for name in chosen if name != run.name]
    full = at is None and len(chosen) >= CHOSEN
    more = [*chosen[: CHOSEN - 1 if full else None], run.name]
    mark = toggle(run.name, at, query.but(PATH, chosen=others if at is not None else more))
    steps = f"{run.step:,}" + (f" / {run.total:,}" if run.total else "")
    result = el("span", number(run.result, 3), " ", el("small", run.metric)) if run.metric else "–"
    name = [el("a", run.name, href=address("/run", run=run.name), class_="name")]
    if marks := f"{run.hashtags}{' note' if run.note else ''}".strip():
        name += [" ", el("small", marks, title=run.note or None)]
    started = el("span", f"{run.started_at:%Y-%m-%d %H:%M}" if run.started_at else "", class_="nowrap")
    state = [badge(run.state, run.explanation)]
    for alarm, count in run.alarms.items():
        shown = el("span", f"{alarm} × {count:,}", class_="badge alarm")
        state.append(el("details", el("summary", shown), el("p", advice(alarm))))
    model = el("span", run.model, class_="clip", title=run.model)
    return [mark, name, state, result, spark(curve), steps, run.eta, run.method, model, in_units(run.size), started]


def toggle(name: str, at: int | None, where: str) -> Markup:
    """A link that chooses an entry of a list; or, if the entry is chosen as number `at`, removes it."""
    label, look = ("choose", "toggle") if at is None else ("remove", f"toggle on c{at}")
    return link("+" if at is None else "✓", where, class_=look, aria_label=f"{label} {name}")


def run_links(rows: Sequence[RunSummary], path: str) -> Markup | None:
    """A table of runs, the latest first, with links that open each run on the page at `path`."""
    cells = [[link(run.name, address(path, run=run.name)), run.method, run.model, run.data] for run in rows[:SHOWN]]
    return table(["run", "method", "model", "data"], cells) if cells else None


def badge(state: str, problem: str = "") -> Markup:
    shown = el("span", state, class_=f"badge {state if state in STATES else ''}")
    return el("details", el("summary", shown), el("p", problem)) if problem else shown


def curve_controls(path: str, query: Query, *kept: str) -> tuple[str, float, Markup]:
    """The chosen axis and smoothing of curves, and the form that changes them and keeps other parameters."""
    axis, smooth = query.choice("x", AXES), query.choice("smooth", SMOOTH)
    controls = [choice("x", "Over", AXES, axis), slider("smooth", "Smoothing", SMOOTH, smooth), hidden(query, *kept)]
    return axis, float(smooth), form(path, *controls)


def _overlay(viewer: Viewer, chosen: Sequence[RunSummary], query: Query) -> Markup | None:
    if not chosen:
        return None
    axis, smooth, controls = curve_controls(PATH, query, "chosen", "sort", "reverse", "find", "state", "method", "all")
    curves = [viewer.series(run.folder) for run in chosen]
    charts = []
    for panel in single_panels():
        lines = [
            replace(line, label=f"{run.name}, {line.label}" if line.dashed else run.name, colour=at)
            for at, (run, series) in enumerate(zip(chosen, curves, strict=True))
            for line in lines_of(panel, series, axis)
        ]
        if lines:
            charts.append(chart(lines, panel.title, x_label=axis, smooth=smooth, share=panel.share, keys=False))
    dashed = el("span", "dashed: validation", class_="quiet")
    keys = el("p", *(_key(run, at, chosen, query) for at, run in enumerate(chosen)), dashed, class_="keys")
    return el(
        "section",
        el("h2", f"{counted(len(chosen), 'run')} over {axis}"),
        keys,
        controls,
        el("div", *charts, class_="charts") if charts else message("These runs have no metrics yet."),
        settings_that_differ(chosen),
    )


def _key(run: RunSummary, at: int, chosen: Sequence[RunSummary], query: Query) -> Markup:
    others = [other.name for other in chosen if other is not run]
    remove = link("×", query.but(PATH, chosen=others), aria_label=f"remove {run.name}")
    return el("span", el("a", run.name, href=address("/run", run=run.name)), " ", remove, class_=f"key c{at}")


def settings_that_differ(chosen: Sequence[RunSummary]) -> Markup | None:
    """The settings in which the chosen runs differ."""
    if len(chosen) < 2:
        return None
    unread = [run.name for run in chosen if not run.config]
    several, common, lacked = len({run.method for run in chosen}) > 1, [], []
    for name, *values in differing([run.config for run in chosen]):
        of_method = several and name.startswith(("method.", "rollout.", "rewards."))
        (lacked if of_method and "" in values else common).append([el("code", name), *map(_value, values)])
    problem = message(f"The settings of {', '.join(unread)} cannot be read.", "warning") if unread else None
    header = ["setting", *(run.name for run in chosen)]
    body = table(header, common) if common else None if lacked else message("Their settings are the same.")
    title = el("summary", f"{counted(len(lacked), 'setting')} that not all of these methods have")
    folded = el("details", title, table(header, lacked)) if lacked else None
    return join([el("h3", "Settings that differ"), problem, body, folded])


def _value(value: object) -> str:
    return (value or "–") if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
