"""The New run page: a form with all settings, the resulting settings file and command, the plan, and the start."""

import itertools
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from posttrain.base.errors import ConfigError
from posttrain.base.files import is_model
from posttrain.config import RunConfig, load
from posttrain.config.reading.fields import Setting, all_settings, choices, kinds_of, settings_in
from posttrain.config.reading.files import parse_value, write_yaml
from posttrain.config.reading.interpolation import escaped
from posttrain.config.reading.layers import Layers, override
from posttrain.config.reading.load import FlagText
from posttrain.config.render import EXAMPLES, HEADINGS, STARTER, described, entry_models, flow, reads
from posttrain.config.schema.datasets import known_sets
from posttrain.config.schema.methods import METHOD_NAMES
from posttrain.reports.markup import Markup, el, join, link, message
from posttrain.ui.commands import CONFIGS, Launch
from posttrain.ui.parts import SHOW, Query, act, address, choice, unfinished
from posttrain.ui.run_page import launched
from posttrain.ui.viewer import Viewer, models_below

PATH, FORM = "/new", "draft"
METHOD, NAME, OUTPUT = "method.type", "name", "output_dir"
# Group of settings that has no field in the form -> the field that shows the group's messages.
SHOWN_AT = {"models": "model.path", "data": "data.source", "method": METHOD}
REWARDS = next(setting for setting in all_settings() if setting.path == "rewards")
ESSENTIAL = (
    NAME, "model.path", "model.lora", "data.source", "data.validation.ratio", "rewards", "training.learning_rate",
    "training.max_steps", "training.num_train_epochs", "training.batch_size",
)  # fmt: skip
MODELS, SOURCES = ("method.ref_model", "method.teacher"), ("data.source", "data.validation.source")
REWARD = re.compile(r"rewards\.(\d{1,2})\.(\w+)")  # a field of a reward: `rewards.0.weight`
MEANING = re.compile(r"null: ([^;.]+)")  # what a setting without a value means, in its description
ROWS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".gz")
DEPTH, MOST = 2, 200  # levels below the current folder that are searched for models and rows; the most of each
PLANNING = ("Plan", " examples, tokens, steps and memory, before anything runs",
            "Planning: the data is being read and tokenised …", "The plan")  # fmt: skip
HINTS = {"training.learning_rate": "the method's", "data.validation.ratio": "0.05"}


@dataclass(frozen=True, slots=True)
class Draft:
    """The draft of a new run. `problems`: messages by setting. `missing`: settings whose only problem is a missing
    value."""

    method: str
    given: Mapping[str, str]  # values as typed, by path
    name: str
    text: str  # the settings file
    config: RunConfig | None  # None: there are problems
    problems: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()  # problems that belong to no field
    notes: tuple[str, ...] = ()


def fields_of(method: str) -> list[Setting]:
    """The settings that have a field in the form of a method. Groups have no field, except `rewards` and groups that
    can be switched on. The method and the folder of the runs are set by the page."""
    return [
        setting
        for setting in all_settings()
        if reads(method, setting)
        and setting.path not in (METHOD, OUTPUT)
        and (setting.switch or not setting.group or setting.path == "rewards")
    ]


def draft(query: Query, root: Path) -> Draft:
    """The settings in an address, with their problems. Unknown names are dropped."""
    method = query.choice(METHOD, METHOD_NAMES)
    known = [setting.path for setting in fields_of(method)]
    given = {path: value for path in known if (value := query.one(path).strip())}
    if "rewards" in known and (rewards := _rewards(query)):
        given["rewards"] = flow([{key: _parsed(value) for key, value in reward.items()} for reward in rewards])
    name = given.get(NAME) or ""
    values = {METHOD: method, OUTPUT: flow(escaped(str(root))), **given}
    config, notes, lines = _checked(values)
    if not name and config is not None:
        wanted = f"{config.method.type}-{config.models[0].folder_name}"
        names = (f"{wanted}-{number}" if number > 1 else wanted for number in itertools.count(1))
        name = next(name for name in names if not (root / name).exists())
        values[NAME] = flow(escaped(name))
        config, notes, lines = _checked(values)
    problems, elsewhere = _by_setting(lines, known)
    return Draft(
        method=method,
        given=given,
        name=(config.name or "") if config else name,
        text=_as_file(values),
        config=config,
        problems=problems,
        missing=tuple(path for path, problem in problems.items() if " is missing;" in problem),
        elsewhere=tuple(elsewhere),
        notes=tuple(notes),
    )


def _rewards(query: Query) -> list[dict[str, str]]:
    """The rewards as typed: in their fields, otherwise in `rewards`, a YAML list. A reward without a type, and settings
    that its type lacks, are dropped."""
    typed: dict[int, dict[str, str]] = {}
    for name, value in query.pairs:
        if (match := REWARD.fullmatch(name)) and value.strip():
            typed.setdefault(int(match[1]), {})[match[2]] = value.strip()
    rewards = [typed[at] for at in sorted(typed)]
    if not typed and isinstance(listed := _parsed(query.one("rewards")), list):
        listed = [each if isinstance(each, dict) else {"type": each} for each in listed]
        rewards = [{key: flow(value) for key, value in each.items()} for each in listed]
    kinds = [(each, {setting.path for setting in _settings_of(each.get("type", ""), ".")}) for each in rewards]
    return [{key: value for key, value in each.items() if f".{key}" in known} for each, known in kinds if known]


def _settings_of(kind: str, prefix: str) -> list[Setting]:
    """The settings of a type of reward; none for an unknown type."""
    models = (model for model in entry_models(REWARDS) if kind in kinds_of(model))
    return [setting for model in models for setting in settings_in(model, prefix)]


def _parsed(text: str) -> Any:
    try:
        return parse_value(text, "rewards").values["value"]
    except ConfigError:
        return text


def _checked(values: Mapping[str, str]) -> tuple[RunConfig | None, list[str], list[str]]:
    """The settings (None if there are problems), notes about them, and one line per problem."""
    try:
        loaded = load(None, (), {path: FlagText(text, path) for path, text in values.items()})
    except ConfigError as error:
        first, *rest = str(error).split("\n")
        return None, [], [line.strip() for line in rest] or [first]
    return loaded.config, loaded.notes, []


def _by_setting(lines: list[str], known: list[str]) -> tuple[dict[str, str], list[str]]:
    """The messages by setting, for the field that shows them, and the messages that belong to no field."""
    by_setting: dict[str, str] = {}
    others: list[str] = []
    for line in lines:
        where, _, problem = line.partition(": ")
        if where not in (*known, METHOD, OUTPUT):
            problem = line
        named = problem.partition(" ")[0]
        named = SHOWN_AT.get(named, named)
        # A message about several settings begins with one of them, which may differ from `where`.
        path = next((path for path in (named, where) if path in known), "")
        if path:
            inside = named == path or named.startswith(f"{path}.")
            by_setting.setdefault(path, problem if inside else f"{path}: {problem}")
        else:
            others.append(line)
    return by_setting, others


def _as_file(values: Mapping[str, str]) -> str:
    """The text of a settings file equivalent to these values; empty if the values cannot be read."""
    layers = Layers()
    try:
        override(layers, [(path, text, path) for path, text in values.items()])
    except ConfigError:
        return ""
    tree: dict[str, Any] = dict(layers.values)
    if models := tree.pop("models", None):
        tree["model"] = models[0]["path"] if list(models[0]) == ["path"] else models[0]
    if isinstance(tree.get("method"), dict) and list(tree["method"]) == ["type"]:
        tree["method"] = tree["method"]["type"]
    first = [NAME, OUTPUT, "seed", "model", "method", "data", "rewards"]
    order = {key: at for at, key in enumerate(first)}
    return write_yaml({key: tree[key] for key in sorted(tree, key=lambda key: order.get(key, len(order)))})


def new_page(viewer: Viewer, query: Query) -> Markup:
    made = draft(query, viewer.root)
    title = el("h1", "New run")
    about = el("p", "Empty fields use the default shown. docs/config.md lists all settings.", class_="quiet")
    return join([title, about, el("div", _form(viewer, made, query), _made(viewer, made), class_="drafting")])


def plan(viewer: Viewer, query: Query) -> None:
    """Start `posttrain plan` with the settings in an address. Raises ConfigError if they are incomplete."""
    viewer.commands.start("plan", _complete(viewer, query).text)


def start(viewer: Viewer, query: Query) -> None:
    """Start a run with the settings in an address. Raises ConfigError if they are incomplete or the run exists."""
    made = _complete(viewer, query)
    viewer.launches.start(made.name, made.text)


def _complete(viewer: Viewer, query: Query) -> Draft:
    made = draft(query, viewer.root)
    if made.config is None:
        raise ConfigError("the settings are incomplete")
    return made


def _form(viewer: Viewer, made: Draft, query: Query) -> Markup:
    fields, (models, files) = fields_of(made.method), in_reach(viewer.root)
    essential = [s for s in fields if s.path in ESSENTIAL or (s.section == "method" and s.path in STARTER)]
    order = {path: at for at, path in enumerate(ESSENTIAL)}
    essential.sort(key=lambda setting: order.get(setting.path, len(ESSENTIAL) // 2))
    others = [setting for setting in fields if setting not in essential]
    sections = [(heading, [s for s in others if s.section == section]) for section, heading in HEADINGS.items()]
    parts = [
        choice(METHOD, "method", METHOD_NAMES, made.method),
        el("div", *(_field(setting, made) for setting in essential if setting != REWARDS), class_="fields"),
        _reward_fields(made, query) if REWARDS in essential else None,
        el("h2", "All other settings"),
        *(_section(heading, settings, made) for heading, settings in sections if settings),
        _list("models", [*models_below(viewer).values(), *models]),
        _list("sources", [*files, *known_sets(), "builtin:arithmetic"]),
    ]
    return el("form", SHOW, *parts, action=PATH, method="get", id=FORM, autocomplete="off")


def _reward_fields(made: Draft, query: Query) -> Markup:
    """The fields of each reward, and a list of types that adds another."""
    problem = made.problems.get("rewards")
    rewards, parts = _rewards(query), []
    for at, reward in enumerate([*rewards, {}]):
        prefix = f"rewards.{at}."
        own = replace(made, given={prefix + key: value for key, value in reward.items()})
        kinds = [kind for model in entry_models(REWARDS) for kind in kinds_of(model)]
        about = "Empty: this reward is removed." if reward else "Type of a further reward."
        kind = Setting(f"{prefix}type", Literal[*kinds], None, False, about)
        settings = [kind, *(s for s in _settings_of(reward.get("type", ""), prefix) if s.path != kind.path)]
        parts.append(el("div", *(_field(setting, own) for setting in settings), class_="fields reward"))
    needed = el("p", "needed" if "rewards" in made.missing else problem, class_="wrong") if problem else None
    return el("section", el("h2", "Rewards"), needed, *parts)


def in_reach(root: Path) -> tuple[list[str], list[str]]:
    """The folders of models and the files of rows in the current folder and DEPTH levels below, outside `root`."""
    models, files = [], []
    for path, folders, names in os.walk("."):
        here = Path(path)
        if is_model(here):
            models.append(str(here))
            names, folders[:] = [], []
        files += [str(here / name) for name in sorted(names) if name.endswith(ROWS)]
        deep = len(here.parts) >= DEPTH or len(files) > MOST
        folders[:] = sorted(name for name in folders if not deep and name[0] != "." and name != root.name)
    return models[:MOST], files[:MOST]


def _section(heading: str, settings: Sequence[Setting], made: Draft) -> Markup:
    open_ = any(setting.path in made.problems or setting.path in made.given for setting in settings)
    fields = el("div", *(_field(setting, made) for setting in settings), class_="fields")
    return el("details", el("summary", heading), fields, open=open_)


def _field(setting: Setting, made: Draft) -> Markup:
    missing = setting.path in made.missing
    problem = None if missing else made.problems.get(setting.path)
    about = setting.description if choices(setting.annotation) else described(setting)  # a list shows its choices
    about = el("span", about if setting.default is not None else about.replace("null: ", "empty: "), class_="about")
    note = el("span", "needed" if missing else problem, class_="wrong") if missing or problem else None
    label = el("span", setting.path, class_="label")
    return el("label", label, _control(setting, made), note, about, class_="field invalid" if problem else "field")


def _control(setting: Setting, made: Draft) -> Markup:
    path, value = setting.path, made.given.get(setting.path, "")
    words = ["true", "false"] if setting.switch and not choices(setting.annotation) else choices(setting.annotation)
    meaning = found[1] if (found := MEANING.search(setting.description)) else "none"
    default = "" if setting.required else meaning if setting.default is None else flow(setting.default)
    invalid = "true" if path in made.problems and path not in made.missing else None
    if words:
        values = ["", *words] if value in ("", *words) else ["", value, *words]
        labels = {"": f"{default} (default)", "null": meaning}
        options = [el("option", labels.get(word, word), value=word, selected=word == value) for word in values]
        return el("select", *options, name=path, aria_invalid=invalid)
    if path == NAME:
        hint = made.name
    elif setting.required and path in EXAMPLES[made.method]:
        hint = f"e.g. {EXAMPLES[made.method][path]}"
    else:
        hint = HINTS.get(path, default)
    offered = "models" if path in MODELS or path.endswith(".path") else "sources" if path in SOURCES else None
    return el("input", type="search", name=path, value=value, placeholder=hint, maxlength=400, spellcheck="false",
              list=offered, aria_invalid=invalid)  # fmt: skip


def _list(name: str, values: Sequence[str]) -> Markup:
    return el("datalist", *(el("option", value=value) for value in values), id=name)


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
        el("p", f"Start writes the file to {file}. The run continues if this page is closed or posttrain ui stops.",
           class_="quiet"),
    ]  # fmt: skip
    parts = [_launched(viewer, made.name, launch) if launch is not None and mine else _state(viewer, made)]
    parts += [message(note) for note in made.notes]
    if made.config is not None:
        rows = address("/data", **{METHOD: made.method, **made.given})
        parts += [_plan(viewer, made), el("p", link("The data", rows), " as used in training"), *yaml]
    return el("aside", *parts, aria_label="Result of the settings")


def _state(viewer: Viewer, made: Draft) -> Markup:
    """What is wrong or missing; if nothing is, the button that starts the run."""
    problems = [problem for path, problem in made.problems.items() if path not in made.missing]
    lines = [message(line, "error") for line in (*problems, *made.elsewhere)]
    lines += [message(f"Still needed: {', '.join(made.missing)}.")] if made.missing else []
    if lines:
        return join(lines)
    if (viewer.root / made.name).exists():
        return message(f"A run named {made.name} already exists: give another name.", "error")
    return el("p", act("start", "Start", FORM, class_="primary"), " ", el("b", made.name))


def _launched(viewer: Viewer, name: str, launch: Launch) -> Markup:
    run = viewer.runs.find(name)
    if run is None and launch.ended:
        return join([launched(viewer, name), el("p", act("start", "Start again", FORM))])
    now = f" is {run.state}" if run is not None else f" is starting: its output is in {launch.log}"
    why = f": {run.explanation}" if run is not None and run.explanation else None
    look = "error" if run is not None and run.state in ("failed", "damaged", "killed") else ""
    return el("p", link(name, address("/run", run=name)), now, why, class_=f"message {look}", role="status")


def _plan(viewer: Viewer, made: Draft) -> Markup:
    output = viewer.commands.find("plan", made.text)
    if left := unfinished(output, partial(act, "plan", form=FORM), *PLANNING):
        return left
    return join([el("h2", "Plan"), el("pre", output.text if output else "")])


def _copy(label: str, text: str) -> Markup:
    return el("button", label, type="button", data_copy=text)
