"""The page Run: curves, checks, data, log and command of one run."""

import shlex

from posttrain.base.words import counted, in_units
from posttrain.reports.chart import chart
from posttrain.reports.curves import PANELS, lines_of
from posttrain.reports.markup import Markup, cards, el, join, link, message, number, table
from posttrain.reports.report import alarms_of, data_messages
from posttrain.reports.series import AXES, Series
from posttrain.runs.progress import duration
from posttrain.runs.summary import RunSummary
from posttrain.ui.parts import Query, address, choice, form, hidden, slider
from posttrain.ui.runs_page import SMOOTH, badge, run_links
from posttrain.ui.viewer import Viewer

PATH = "/run"
LOG_LINES = 60


def run_page(viewer: Viewer, query: Query) -> Markup:
    name = query.one("run")
    row = viewer.runs.find(name)
    if row is None:
        text = f"There is no run {name}." if name else "Which run?"
        return join([message(text), run_links(viewer.runs.all(), PATH)])
    series = viewer.series(row.folder)
    above = [_head(row), _cards(row, series), _alarms(series), _curves(row, series, query)]
    return join([*above, _checks(row), _data(row), _log(row)])


def replay_command(row: RunSummary) -> str:
    """The command that trains with the settings of this run again, into a new folder beside it."""
    return shlex.join(["posttrain", "train", str(row.folder / "config.yaml"), "--name", f"{row.folder.name}-again"])


def _head(row: RunSummary) -> Markup:
    links = [link("Report", address("/report", run=row.name))] if (row.folder / "report.html").is_file() else []
    links += [link("Rollouts", address("/rollouts", run=row.name))] if row.has_rollouts else []
    links += [link("Data", address("/data", run=row.name)), link("Compare", address("/", chosen=row.name))]
    command = replay_command(row)
    copy = el("button", "Copy the command that replays this", type="button", data_copy=command, title=command)
    written = el("noscript", el("code", command))
    title = el("h1", row.name, " ", badge(row.state))
    about = el("p", f"{row.method} of {row.model} on {row.data}", class_="quiet")
    note = el("p", el("b", row.hashtags), " ", row.note) if row.tags or row.note else None
    kind = "error" if row.state in ("failed", "damaged") else "warning"
    why = message(row.explanation, kind) if row.explanation else None
    killed = message(KILLED, "warning") if row.state == "killed" else None
    above = el("p", *(part for each in links for part in (each, " · ")), copy, written)
    return join([title, about, note, above, why, killed])


KILLED = (
    "Its process ended without recording why: it was killed, or the machine was switched off. No logged metric is "
    "lost; `posttrain train --resume` continues from the last checkpoint."
)


def _cards(row: RunSummary, series: Series) -> Markup:
    facts = {
        row.metric or "result": number(row.result),
        "step": f"{row.step:,}" + (f" / {row.total:,}" if row.total else ""),
        "time left": row.eta,
        "time": duration(row.seconds) if row.ended and row.seconds is not None else "",
        "disk": in_units(row.size),
        "started": f"{row.started_at:%m-%d %H:%M}" if row.started_at else "",
    }
    return cards({name: value for name, value in facts.items() if value})


def _alarms(series: Series) -> Markup | None:
    lines = [message(alarm, "warning") for alarm in alarms_of(series)]
    return join([el("h2", "Alarms"), *lines]) if lines else None


def _curves(row: RunSummary, series: Series, query: Query) -> Markup:
    axis, smooth = query.choice("x", AXES), query.choice("smooth", SMOOTH)
    go = address("/rollouts", run=row.name) + "&step=" if row.has_rollouts and axis == "step" else None
    charts = [
        chart(lines, panel.title, x_label=axis, smooth=float(smooth), share=panel.share, go=go)
        for panel in PANELS
        if (lines := list(lines_of(panel, series, axis)))
    ]
    controls = form(
        PATH, choice("x", "Over", AXES, axis), slider("smooth", "Smoothing", SMOOTH, smooth), hidden(query, "run")
    )
    text = f"{counted(series.damaged, 'line')} of metrics.jsonl cannot be read and are not shown."
    damaged = message(text, "warning") if series.damaged else None
    hint = el("p", "A click on a curve opens the rollouts of that step.", class_="quiet") if go and charts else None
    body = el("div", *charts, class_="charts") if charts else message("No metrics have been logged yet.")
    return el("section", el("h2", "Curves"), damaged, controls if charts else None, hint, body)


def _checks(row: RunSummary) -> Markup | None:
    rows = [
        [el("span", check.outcome, class_=f"badge {check.outcome}"), check.what, check.found] for check in row.checks
    ]
    return join([el("h2", "Checks"), table(["", "check", "found"], rows)]) if rows else None


def _data(row: RunSummary) -> Markup | None:
    text = data_messages(row.folder)
    return join([el("h2", "Data"), el("pre", text)]) if text else None


def _log(row: RunSummary) -> Markup:
    lines = row.log_tail(1 << 16).splitlines()[-LOG_LINES:]
    text = el("pre", "\n".join(lines), class_="log", tabindex="0")
    return join([el("h2", "Log"), text if lines else message("There is no training.log yet.")])
