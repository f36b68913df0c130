"""The Run page: curves, checks, data, log and command of one run."""

import shlex

from posttrain.base.words import counted, in_units
from posttrain.reports.chart import chart
from posttrain.reports.curves import PANELS, lines_of
from posttrain.reports.markup import Markup, cards, el, join, link, message, number, table
from posttrain.reports.report import alarms_of, data_messages
from posttrain.reports.series import Series
from posttrain.runs.progress import duration
from posttrain.runs.summary import RunSummary
from posttrain.ui.parts import Query, address
from posttrain.ui.runs_page import badge, curve_controls, run_links
from posttrain.ui.viewer import Viewer

PATH = "/run"
LOG_LINES = 60


def run_page(viewer: Viewer, query: Query) -> Markup:
    name = query.one("run")
    run = viewer.runs.find(name)
    if run is None:
        text = f"There is no run {name}." if name else "Choose a run."
        return join([message(text), run_links(viewer.runs.all(), PATH)])
    series, data = viewer.series(run.folder), data_messages(run.folder)
    alarms = [message(alarm, "warning") for alarm in alarms_of(series)]
    checks = [[el("span", each.outcome, class_=f"badge {each.outcome}"), each.what, each.found] for each in run.checks]
    lines = run.log_tail(1 << 16).splitlines()[-LOG_LINES:]
    log = el("pre", "\n".join(lines), class_="log", tabindex="0")
    return join(
        [
            _head(run),
            _cards(run),
            [el("h2", "Alarms"), *alarms] if alarms else None,
            _curves(run, series, query),
            [el("h2", "Checks"), table(["", "check", "found"], checks)] if checks else None,
            [el("h2", "Data"), el("pre", data)] if data else None,
            [el("h2", "Log"), log if lines else message("There is no training.log yet.")],
        ]
    )


def replay_command(run: RunSummary) -> str:
    """The command that trains again with the settings of this run, into a new folder next to it."""
    return shlex.join(["posttrain", "train", str(run.folder / "config.yaml"), "--name", f"{run.folder.name}-again"])


def _head(run: RunSummary) -> Markup:
    links = [link("Report", address("/report", run=run.name))] if (run.folder / "report.html").is_file() else []
    links += [link("Rollouts", address("/rollouts", run=run.name))] if run.has_rollouts else []
    links += [link("Data", address("/data", run=run.name)), link("Compare", address("/", chosen=run.name))]
    command = replay_command(run)
    copy = el("button", "Copy the command that repeats this run", type="button", data_copy=command, title=command)
    written = el("noscript", el("code", command))
    title = el("h1", run.name, " ", badge(run.state))
    about = el("p", f"{run.method} of {run.model} on {run.data}", class_="quiet")
    note = el("p", el("b", run.hashtags), " ", run.note) if run.tags or run.note else None
    kind = "error" if run.state in ("failed", "damaged") else "warning"
    why = message(run.explanation, kind) if run.explanation else None
    killed = message(KILLED, "warning") if run.state == "killed" else None
    above = el("p", join(links, " · "), " · ", copy, written)
    return join([title, about, note, above, why, killed])


KILLED = (
    "The process ended without recording why: it was killed, or the machine was switched off. No logged metric is "
    "lost; `posttrain train --resume` continues from the last checkpoint."
)


def _cards(run: RunSummary) -> Markup:
    facts = {
        run.metric or "result": number(run.result),
        "step": f"{run.step:,}" + (f" / {run.total:,}" if run.total else ""),
        "time left": run.eta,
        "time": duration(run.seconds) if run.ended and run.seconds is not None else "",
        "disk": in_units(run.size),
        "started": f"{run.started_at:%m-%d %H:%M}" if run.started_at else "",
    }
    return cards({name: value for name, value in facts.items() if value})


def _curves(run: RunSummary, series: Series, query: Query) -> Markup:
    axis, smooth, controls = curve_controls(PATH, query, "run")
    go = address("/rollouts", run=run.name) + "&step=" if run.has_rollouts and axis == "step" else None
    charts = [
        chart(lines, panel.title, x_label=axis, smooth=smooth, share=panel.share, go=go)
        for panel in PANELS
        if (lines := list(lines_of(panel, series, axis)))
    ]
    text = f"{counted(series.damaged, 'line')} of metrics.jsonl cannot be read and are not shown."
    damaged = message(text, "warning") if series.damaged else None
    hint = el("p", "Click a curve to open the rollouts of that step.", class_="quiet") if go and charts else None
    body = el("div", *charts, class_="charts") if charts else message("No metrics have been logged yet.")
    return el("section", el("h2", "Curves"), damaged, controls if charts else None, hint, body)
