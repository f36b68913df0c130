"""The Run page: curves, checks, data, log and command of one run, and the buttons that change it."""

import shlex
import signal
from pathlib import Path

from posttrain.base.errors import RunError
from posttrain.base.words import counted, in_units
from posttrain.reports.chart import chart
from posttrain.reports.curves import PANELS, lines_of
from posttrain.reports.markup import Markup, cards, el, join, link, message, number, table
from posttrain.reports.report import alarms_of, data_messages
from posttrain.reports.series import Series
from posttrain.runs.folder import Notes, interrupt, write_notes
from posttrain.runs.managing.paths import described, needed, rename
from posttrain.runs.managing.removing import delete
from posttrain.runs.progress import duration
from posttrain.runs.summary import RunSummary
from posttrain.ui.parts import Query, act, address, search
from posttrain.ui.runs_page import badge, curve_controls, run_links, whole_of
from posttrain.ui.viewer import Viewer

PATH, FORM = "/run", "acts"
LOG_LINES = 60


def run_page(viewer: Viewer, query: Query) -> Markup:
    name = query.one("run")
    run = viewer.runs.find(name)
    if run is None:
        if (started := launched(viewer, name)) is not None:
            return join([el("h1", name), started])
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
            _acts(viewer, run, query),
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


def launched(viewer: Viewer, name: str) -> Markup | None:
    """The state of a run that was started or resumed here and is not running yet."""
    launch, run = viewer.launches.find(name), viewer.runs.find(name)
    if launch is None or (run is not None and (run.state == "running" or launch.text)):
        return None
    if not launch.ended:
        return message(f"{name} is starting: its output is in {launch.log}.")
    if launch.process.returncode in (0, 128 + signal.SIGINT):
        return None
    problem = message(f"{name} was not started (exit status {launch.process.returncode}):", "error")
    return join([problem, el("pre", launch.output)])


def _acts(viewer: Viewer, run: RunSummary, query: Query) -> Markup:
    """The buttons that stop, resume, rename, describe and delete a run."""
    here = address(PATH, run=run.name)
    if query.one("delete"):
        return _confirmation(viewer, run, here)
    running = run.state == "running"
    button = act("stop", "Stop", FORM) if running else act("resume", "Resume", FORM)
    about = " finishes the step and saves a checkpoint first" if running else None
    if running and _process(run) in viewer.stopped:
        button, about = el("b", "Stopping"), ": it finishes the step and saves a checkpoint first"
    note = el("textarea", run.note, name="note", rows=2)
    fields = [
        search("name", "Name", run.folder.name),
        search("tags", "Tags, separated by spaces", " ".join(run.tags)),
        el("label", el("span", "Note", class_="label"), note, class_="field wide-field"),
        act("save", "Save", FORM),
    ]
    first = [button, el("span", about, class_="quiet"), " "] if run.state != "finished" else None
    line = el("p", first, None if running else link("Delete …", query.but(PATH, delete=1)))
    edit = el("details", el("summary", "Name, tags, note"), el("div", *fields, class_="controls"))
    return el("form", launched(viewer, run.name), line, edit, id=FORM, method="post", action=here, autocomplete="off")


def _confirmation(viewer: Viewer, run: RunSummary, here: str) -> Markup:
    keep = link("Keep it", here)
    if needs := needed([run.folder], [viewer.root]):
        needed_by = message(f"{run.name} is {described(needs)}. Delete what needs it first.", "warning")
        return join([needed_by, el("p", keep)])
    what = f"{run.method} of {run.model}, {run.state} at step {run.step:,}, {in_units(run.size)}"
    question = message(f"Permanently delete {run.name} ({what})?", "warning")
    return el("form", question, el("p", act("delete", "Delete", FORM), " ", keep), id=FORM, method="post", action=here)


def stop(viewer: Viewer, query: Query) -> str:
    """Interrupt the run, once. Raises RunError if that is impossible (`interrupt`)."""
    run = _required(viewer, query)
    if _process(run) not in viewer.stopped:  # a second signal would end it without saving
        interrupt(run.folder)
        viewer.stopped.add(_process(run))
    return address(PATH, run=run.name)


def _process(run: RunSummary) -> str:
    """Tells the processes in a folder apart: one for each start, and one for each resume."""
    return f"{run.folder} {run.started} {len(run.facts.get('resumes', []))}"


def resume(viewer: Viewer, query: Query) -> str:
    """Resume the run; with all its stages and models, if it is one of several."""
    run = _required(viewer, query)
    if run.state == "running":
        raise RunError(f"{run.name} is running")
    viewer.launches.resume(run.name, whole_of(viewer, run.folder))
    return address(PATH, run=run.name)


def save(viewer: Viewer, query: Query) -> str:
    """Write the run's tags and note, and give it another name. Raises RunError if one of them is refused."""
    run, name = _required(viewer, query), query.one("name").strip()
    tags = tuple(word.lstrip("#") for word in query.one("tags").split())
    write_notes(run.folder, Notes(tags, query.one("note").replace("\r\n", "\n").strip()))
    viewer.runs.renew()
    if name != run.folder.name and (left := rename(run.folder, name, [viewer.root]).left):
        raise RunError(f"{run.name} is now {name}; the old path is still in: {', '.join(left)}")
    return address(PATH, run=str(Path(run.name).with_name(name)))


def remove(viewer: Viewer, query: Query) -> str:
    """Delete the run. Raises RunError if it is running or other runs need it."""
    delete(_required(viewer, query).folder, [viewer.root])
    viewer.runs.renew()
    return "/"


def _required(viewer: Viewer, query: Query) -> RunSummary:
    if (run := viewer.runs.find(query.one("run"))) is None:
        raise RunError(f"there is no run {query.one('run')}")
    if run.folder == viewer.root:
        raise RunError(f"{run.folder} is the folder served: serve the one above, or use `posttrain runs`")
    return run


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
