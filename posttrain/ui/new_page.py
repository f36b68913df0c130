"""The page New run: a form of the schema, the settings file and the command that it makes, the plan, and the start."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from posttrain.base.errors import ConfigError
from posttrain.config.reading.fields import Setting, choices
from posttrain.config.render import EXAMPLES, HEADINGS, STARTER, described, flow
from posttrain.config.schema.datasets import KNOWN
from posttrain.config.schema.methods import METHOD_NAMES
from posttrain.reports.markup import Markup, el, join, message
from posttrain.ui.commands import CONFIGS, Launch
from posttrain.ui.draft import METHOD, NAME, Draft, draft, fields_of
from posttrain.ui.parts import SHOW, Query, act, address, choice
from posttrain.ui.viewer import Viewer, models_below

PATH, FORM = "/new", "draft"
ESSENTIAL = (
    NAME, "model.path", "model.lora", "data.source", "data.validation.ratio", "rewards", "training.learning_rate",
    "training.max_steps", "training.num_train_epochs", "training.batch_size",
)  # fmt: skip
HINTS = {"rewards": "[{type: math}]", "training.learning_rate": "the method's", "data.validation.ratio": "0.05"}
LOG_END = 3_000  # characters


def new_page(viewer: Viewer, query: Query) -> Markup:
    made = draft(query, viewer.root)
    title = el("h1", "New run")
    about = el("p", "Empty fields have the default that they show. docs/config.md has all settings.", class_="quiet")
    return join([title, about, el("div", _form(viewer, made), _made(viewer, made), class_="drafting")])


def plan(viewer: Viewer, query: Query) -> None:
    """Ask `posttrain plan` about the settings in an address."""
    viewer.commands.ask("plan", _whole(viewer, query).text)


def start(viewer: Viewer, query: Query) -> None:
    """Start a run with the settings in an address. Raises ConfigError."""
    made = _whole(viewer, query)
    viewer.launches.start(made.name, made.text)


def _whole(viewer: Viewer, query: Query) -> Draft:
    made = draft(query, viewer.root)
    if made.config is None:
        raise ConfigError("the settings are not whole yet")
    return made


# --- the form ---------------------------------------------------------------------------------------------------------


def _form(viewer: Viewer, made: Draft) -> Markup:
    fields = fields_of(made.method)
    essential = [one for one in fields if _is_essential(one)]
    essential.sort(key=lambda one: ESSENTIAL.index(one.path) if one.path in ESSENTIAL else len(ESSENTIAL) // 2)
    others = [one for one in fields if not _is_essential(one)]
    sections = [
        _section(heading, [one for one in others if one.section == section], made)
        for section, heading in HEADINGS.items()
    ]
    return el(
        "form",
        SHOW,
        choice(METHOD, "method", METHOD_NAMES, made.method),
        el("div", *(_field(one, made) for one in essential), class_="fields"),
        el("h2", "All other settings"),
        *sections,
        _list("models", [f"{folder}" for folder in models_below(viewer).values()]),
        _list("sources", [*KNOWN, "builtin:arithmetic"]),
        action=PATH,
        method="get",
        id=FORM,
        autocomplete="off",
    )


def _is_essential(setting: Setting) -> bool:
    return setting.path in ESSENTIAL or (setting.section == "method" and setting.path in STARTER)


def _section(heading: str, settings: Sequence[Setting], made: Draft) -> Markup | None:
    if not settings:
        return None
    open_ = any(one.path in made.problems or one.path in made.given for one in settings)
    fields = el("div", *(_field(one, made) for one in settings), class_="fields")
    return el("details", el("summary", heading), fields, open=open_)


def _field(setting: Setting, made: Draft) -> Markup:
    path, wrong = setting.path, made.problems.get(setting.path)
    wrong = None if path in made.missing else wrong
    about = el("span", described(setting), class_="about")
    said = el("span", wrong if wrong else "needed" if path in made.missing else "", class_="wrong")
    label = el("span", path, class_="label")
    return el("label", label, _control(setting, made), said if wrong or path in made.missing else None, about,
              class_="field" + (" invalid" if wrong else ""))  # fmt: skip


def _control(setting: Setting, made: Draft) -> Markup:
    path, value = setting.path, made.given.get(setting.path, "")
    words = ["true", "false"] if setting.switch and not choices(setting.annotation) else choices(setting.annotation)
    default = "" if setting.required else flow(setting.default)
    invalid = "true" if path in made.problems and path not in made.missing else None
    if words:
        kept = words if value in ("", *words) else [value, *words]
        options = [el("option", one or f"{default} (default)", value=one, selected=one == value) for one in ("", *kept)]
        return el("select", *options, name=path, aria_invalid=invalid)
    if path == NAME:
        hint = made.name
    elif setting.required and path in EXAMPLES[made.method]:
        hint = f"e.g. {EXAMPLES[made.method][path]}"
    else:
        hint = HINTS.get(path, default)
    offered = {"model.path": "models", "data.source": "sources"}.get(path)
    return el(
        "input", type="search", name=path, value=value, placeholder=hint, maxlength=400, spellcheck="false",
        list=offered, aria_invalid=invalid,
    )  # fmt: skip


def _list(name: str, values: Sequence[str]) -> Markup:
    return el("datalist", *(el("option", value=value) for value in values), id=name)


# --- what it makes ----------------------------------------------------------------------------------------------------


def _made(viewer: Viewer, made: Draft) -> Markup:
    launch = viewer.launches.find(made.name) if made.name else None
    mine = launch is not None and launch.text == made.text
    file = str(Path(viewer.root, CONFIGS, f"{made.name}.yaml"))
    command = shlex.join(["posttrain", "train", file])
    yaml = [
        el("h2", "Settings file ", _copy("Copy", made.text)),
        el("pre", made.text),
        el("h2", "Command ", _copy("Copy", command)),
        el("pre", command),
        el("p", f"Start writes the file to {file}. The run continues when this page is closed or posttrain ui ends.",
           class_="quiet"),
    ]  # fmt: skip
    parts = [_launched(viewer, made.name, launch) if launch is not None and mine else _state(viewer, made)]
    parts += [message(note) for note in made.notes]
    if made.config is not None:
        rows = address("/data", **{METHOD: made.method, **made.given})
        parts += [_plan(viewer, made), el("p", el("a", "The data", href=rows), " as it will be trained"), *yaml]
    return el("aside", *parts, aria_label="What the settings make")


def _state(viewer: Viewer, made: Draft) -> Markup:
    """What is wrong or missing; else the button that starts the run."""
    wrong = [path for path in made.problems if path not in made.missing]
    lines = [*(made.problems[path] for path in wrong), *made.elsewhere]
    if lines or made.missing:
        needed = message(f"Still needed: {', '.join(made.missing)}.") if made.missing else None
        return join([*(message(line, "error") for line in lines), needed])
    if (viewer.root / made.name).exists():
        return message(f"There is a run {made.name} already: give another name.", "error")
    return el("p", act("start", "Start", FORM, class_="primary"), " ", el("b", made.name))


def _launched(viewer: Viewer, name: str, launch: Launch) -> Markup:
    row = viewer.runs.find(name)
    if row is not None:
        there = el("a", name, href=address("/run", run=name))
        broken = row.state in ("failed", "damaged", "killed")
        works = f" is started: kill -INT {launch.process.pid} ends it with a checkpoint"
        now = f" {row.state}" if launch.ended else works
        said = f": {row.explanation}" if row.explanation else None
        return el("p", there, now, said, class_="message error" if broken else "message", role="status")
    if not launch.ended:
        return message(f"{name} is starting: its output is in {launch.log}.")
    said = launch.log.read_text(encoding="utf-8", errors="replace")[-LOG_END:] if launch.log.is_file() else ""
    again = el("p", act("start", "Start again", FORM))
    return join([message(f"{name} did not start (exit status {launch.process.returncode}):", "error"),
                 el("pre", said), again])  # fmt: skip


def _plan(viewer: Viewer, made: Draft) -> Markup:
    answer = viewer.commands.find("plan", made.text)
    if answer is None:
        return el(
            "p",
            act("plan", "Plan", FORM),
            el("span", " examples, tokens, steps and memory, before anything runs", class_="quiet"),
        )
    if answer.code is None:
        return message("Planning: the data is read and tokenised …")
    if answer.code:
        again = el("p", act("plan", "Plan again", FORM))
        return join([message(answer.said or "The plan failed without a message.", "error"), again])
    return join([el("h2", "Plan"), el("pre", answer.said)])


def _copy(label: str, said: str) -> Markup:
    return el("button", label, type="button", data_copy=said)
