"""The Data page: the rows of a run or of draft settings as used in training, with masks, lengths and dropped rows.
`posttrain explore --json` reads the rows in a child process, one block at a time."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from posttrain.base.errors import ConfigError
from posttrain.base.words import counted
from posttrain.reports.chart import Line, chart
from posttrain.reports.markup import Markup, cards, el, join, link, message, number, table
from posttrain.runs.files import read_regular
from posttrain.ui.new_page import draft
from posttrain.ui.parts import Query, act, address, choice, entry, form, hidden, pager, seen, unfinished
from posttrain.ui.runs_page import run_links
from posttrain.ui.viewer import Viewer

PATH, FORM = "/data", "acts"
SORTS = {"row": "as in the data", "longest": "longest first", "shortest": "shortest first"}
PAGE, BLOCK = 10, 50  # examples shown on a page, and examples read at a time
LISTED = 100  # maximum number of dropped rows listed
EXAMPLES = 3  # maximum number of examples per finding
OWN = ("set", "sort", "row", "page")  # parameters of the address that are not settings
CHECK = ("--json", "--rows", "0")
# Of the two commands: the button, what it does, what is shown while it runs, and its name in an error.
READING = ("Read the data", " reads and tokenises it as a run would (a data set on the hub is downloaded)",
           "The data is being read and tokenised …", "Reading the data")  # fmt: skip
CHECKING = ("Check", " duplicates, validation rows in training, questions of evaluation suites, length bias",
            "The rows are being checked …", "The checks")  # fmt: skip
RELATIVE = "Relative paths in the settings are relative to the folder where posttrain ui was started."


def data_page(viewer: Viewer, query: Query) -> Markup:
    settings = _settings(viewer, query)
    if settings is None:
        return _choice(viewer, query.one("run"))
    (title, text), arguments, commands = settings, _arguments(query), viewer.commands
    # Without a click, data is read only for a run in this folder: an address can name any data, and another site's page
    # can link to any address.
    allowed = query.one("run") or commands.has_run("explore", text)
    if allowed and commands.find("explore", text, arguments) is None:
        commands.start("explore", text, arguments)
    output = commands.find("explore", text, arguments)
    acts = el("form", id=FORM, method="post", action=query.but(PATH))  # the buttons submit this form
    if output is None or output.code != 0:
        button = partial(act, "read", form=FORM, class_=None if output else "primary")
        left = unfinished(output, button, *READING)
        return join([title, acts, left, el("p", RELATIVE, class_="quiet") if output and output.code else None])
    explored = _parsed(output.text)
    dropped = [part for name, report in explored["reports"].items() for part in _dropped(name, report)]
    about_rows = [el("h2", "Dropped"), dropped or message("Every row is used as it is."), _checks(viewer, text)]
    return join([title, acts, _cards(explored), _lengths(explored), *about_rows, _rows(explored, query)])


def read(viewer: Viewer, query: Query) -> None:
    """Start reading the rows that an address names. Raises ConfigError if the settings cannot be read."""
    viewer.commands.start("explore", _required(viewer, query), _arguments(query))


def check(viewer: Viewer, query: Query) -> None:
    """Start the checks for duplicates, evaluation questions and length bias. Raises ConfigError as `read` does."""
    viewer.commands.start("explore", _required(viewer, query), CHECK)


def _required(viewer: Viewer, query: Query) -> str:
    if (settings := _settings(viewer, query)) is None:
        raise ConfigError("there is no such run")
    return settings[1]


def _settings(viewer: Viewer, query: Query) -> tuple[Markup, str] | None:
    """The page's title, and the text of the settings of a run in the folder or of those in the address. Raises
    ConfigError if they cannot be read."""
    if name := query.one("run"):
        run = viewer.runs.find(name)
        if run is None:
            return None
        try:
            text = read_regular(run.folder / "config.yaml").decode()
        except (OSError, ValueError) as error:
            raise ConfigError(f"the settings of {name} cannot be read: {error}") from error
        return el("h1", link(run.name, address("/run", run=run.name)), " ", el("small", f"data: {run.data}")), text
    if not any(key not in OWN for key, _ in query.pairs):
        return None
    made = draft(query, viewer.root)
    if made.config is None:
        raise ConfigError("\n".join(["these settings are incomplete:", *made.problems.values(), *made.elsewhere]))
    back = address("/new", **{key: value for key, value in query.pairs if key not in OWN})
    return el("h1", link("New run", back), " ", el("small", f"data: {made.name}")), made.text


def _choice(viewer: Viewer, name: str) -> Markup:
    rows = viewer.runs.all()
    text = f"There is no run {name}." if name else "Choose a run to see its data." if rows else "There are no runs yet."
    hint = el("p", "The page ", link("New run", "/new"), " leads to the data of draft settings.", class_="quiet")
    return join([el("h1", "Data"), message(text), hint, run_links(rows, PATH)])


def _arguments(query: Query) -> tuple[str, ...]:
    """The arguments of `explore` for the block that contains the examples at the address."""
    first, row = query.page * PAGE, query.integer("row")
    where = ("--row", str(row)) if row is not None else ("--first", str(first // BLOCK * BLOCK))
    order = ("--sort", query.choice("sort", list(SORTS)), "--set", query.one("set") or "train")
    return ("--json", "--no-quality", "--rows", str(BLOCK), *order, *where)


@lru_cache(maxsize=8)
def _parsed(text: str) -> dict[str, Any]:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError("there is more than a page can show: run posttrain explore --json in a terminal") from error


def _cards(shown: Mapping[str, Any]) -> Markup:
    report, sets = shown["reports"]["train"], shown["sets"]
    facts = {"rows read": report["read"]} | {f"{name} examples": part["examples"] for name, part in sets.items()}
    dropped = len(report["malformed"]) + report["identical"] + report["overlong_dropped"]
    facts |= {"rows dropped": dropped, "train tokens": sets["train"]["total"]}
    shape = f"Read as {', '.join(dict.fromkeys(report['formats']))}; at most {counted(report['max_length'], 'token')}"
    if report["max_prompt_length"] is not None:
        shape += f", {report['max_prompt_length']:,} of the prompt"
    return join([el("p", shape, class_="quiet"), cards({name: number(value) for name, value in facts.items()})])


def _lengths(shown: Mapping[str, Any]) -> Markup:
    width, sets = shown["width"], shown["sets"]
    lines = []
    for colour, (name, part) in enumerate(sets.items()):
        middles = [width * (interval + 0.5) for interval in range(len(part["counts"]))]
        lines.append(Line(name, middles, [count / part["examples"] for count in part["counts"]], colour))
    columns = ["set", "examples", "tokens", "mean", "P50", "P90", "P99", "max"]
    keys = ("examples", "total", "mean", "p50", "p90", "p99", "max")
    rows = [[name, *(f"{part[key]:,.0f}" for key in keys)] for name, part in sets.items()]
    figure = chart(lines, f"Share of examples, in steps of {counted(width, 'token')}", x_label="tokens")
    sizes = table(columns, rows, numbers=range(1, len(columns)))
    return join([el("h2", "Lengths"), sizes, el("div", figure, class_="charts")])


def _dropped(name: str, report: Mapping[str, Any]) -> list[Markup]:
    """What of a set is not used as it is, and the dropped rows."""
    bad = [[row["row"], f"{row['file']} line {row['line']}", row["reason"]] for row in report["malformed"]]
    long = [[row["row"], "", f"{row['tokens']:,} tokens, {row['prompt_tokens']:,} of the prompt"]
            for row in report["dropped"]]  # fmt: skip
    findings = [el("li", f"{name}: {text.removeprefix(f'{name}: ')}") for text in report["findings"]]
    parts = [el("ul", *findings, class_="notes")] if findings else []
    if bad or long:
        dropped = len(bad) + report["overlong_dropped"]
        rows = [*bad, *long][:LISTED]
        title = f"{name}: dropped rows" + (f", {len(rows):,} of {dropped:,}" if len(rows) < dropped else "")
        listed = table(["row", "where", "why"], rows, numbers=(0,))
        parts.append(el("details", el("summary", title), listed, open=dropped <= PAGE))
    return parts


def _checks(viewer: Viewer, text: str) -> Markup:
    """The results of the checks for duplicates, evaluation questions and length bias, after a click on Check."""
    output, title = viewer.commands.find("explore", text, CHECK), el("h2", "Checks of the rows")
    if output is None or output.code != 0:
        return join([title, unfinished(output, partial(act, "check", form=FORM), *CHECKING)])
    findings, found = _parsed(output.text)["findings"], []
    for what, same in findings["duplicates"].items():
        examples = [f"{later} repeats {earlier}" for later, earlier in same["rows"][:EXAMPLES]]
        found.append((what, len(same["rows"]), same["of"], examples))
    for name, suite in findings["contamination"].items():
        examples = [f"{question} in row {row}" for question, _, row in suite["hits"][:EXAMPLES]]
        found.append((f"questions of {name} in train", len(suite["hits"]), suite["checked"], examples))
    rows = [
        [what, f"{count:,}", f"{count / total:.1%}" if total else "–", "; ".join(examples)]
        for what, count, total, examples in found
    ]
    notes = el("ul", *(el("li", note) for note in findings["notes"]), class_="notes")
    return join([title, table(["finding", "rows", "share", "examples"], rows, numbers=(1, 2)), notes])


def _rows(shown: Mapping[str, Any], query: Query) -> Markup:
    names, sort = list(shown["sets"]), query.choice("sort", list(SORTS))
    which, row = query.choice("set", names), query.one("row")
    kept = [key for key, _ in query.pairs if key not in OWN]
    controls = form(
        PATH, hidden(query, *dict.fromkeys(kept)), choice("set", "Set", names, which),
        choice("sort", "Order", list(SORTS), sort, labels=SORTS), entry("row", "Row", row, "all"),
    )  # fmt: skip
    start = 0 if row else query.page * PAGE % BLOCK
    examples = shown["rows"][start : start + (len(shown["rows"]) if row else PAGE)]
    trained = el("span", el("span", "trained", class_="trained"), class_="masked inline")
    legend = el("p", "Tokens: ", trained, "; the rest is context. Point at a token to see its id.", class_="quiet")
    pages = None if row else pager(query, PATH, PAGE, shown["sets"][which]["examples"], "example")
    none = message("There is no such example in this set.") if not examples else None
    return join([el("h2", "Rows"), controls, legend, pages, none, *map(_example, examples), pages])


def _example(example: Mapping[str, Any]) -> Markup:
    facts = [f"margin {example['margin']:g}"] if example["margin"] is not None else []
    facts += ["a tie"] if example["tie"] else []
    facts += [f"answer {example['answer']}"] if example["answer"] is not None else []
    title = el("h3", f"Row {example['row']:,}", el("small", "".join(f" · {fact}" for fact in facts)))
    return el("section", title, *map(_part, example["parts"]))


def _part(part: Mapping[str, Any]) -> Markup:
    about = f"{part['title']}: {counted(part['tokens'], 'token')}, {part['trained']:,} trained"
    tokens = [_piece(piece, part["omitted"]) for piece in part["pieces"]]
    return join([el("p", about, class_="quiet"), el("div", *tokens, class_="tokens masked")])


def _piece(piece: Sequence[Any] | None, omitted: int) -> Markup:
    if piece is None:
        return el("em", f" … {counted(omitted, 'token')} … ")
    text, ids, trained = piece
    return el("span", seen(text), title=" ".join(map(str, ids)), class_="trained" if trained else None)
