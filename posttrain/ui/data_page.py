"""The page Data: the rows of a run, or of settings that are being written, as they are trained: masks, lengths, what
was dropped. `posttrain explore --json` reads them, a block at a time, in a process of its own."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from posttrain.base.errors import ConfigError
from posttrain.base.words import counted
from posttrain.reports.chart import Line, chart
from posttrain.reports.markup import Markup, cards, el, join, link, message, number, table
from posttrain.runs.files import read_regular
from posttrain.ui.commands import Answer
from posttrain.ui.draft import draft
from posttrain.ui.parts import Query, act, address, choice, entry, form, hidden
from posttrain.ui.runs_page import run_links
from posttrain.ui.viewer import Viewer
from posttrain.ui.votes import seen

PATH, FORM = "/data", "acts"
SORTS = {"row": "as in the data", "longest": "longest first", "shortest": "shortest first"}
PAGE, BLOCK = 10, 50  # examples shown, and read at a time
LISTED = 100  # dropped rows
EXAMPLES = 3  # of a finding
OWN = ("set", "sort", "row", "first")  # values of the address that are no settings
CHECK = ("--json", "--rows", "0")


@dataclass(frozen=True, slots=True)
class Settings:
    """Whose data is shown: the title, and the settings file."""

    title: Markup
    text: str
    of_run: bool


def data_page(viewer: Viewer, query: Query) -> Markup:
    found = _settings(viewer, query)
    if found is None:
        return _choice(viewer, query.one("run"))
    asked = _asked(query)
    commands = viewer.commands
    # Unasked only for a run of this folder: an address can name any data, and a foreign page any address.
    allowed = found.of_run or commands.has_asked("explore", found.text)
    if allowed and commands.find("explore", found.text, asked) is None:
        commands.ask("explore", found.text, asked)
    shown, waiting = _answer(commands.find("explore", found.text, asked))
    acts = el("form", id=FORM, method="post", action=query.but(PATH))  # of the buttons
    if shown is None:
        return join([found.title, acts, waiting])
    body = [acts, _cards(shown), _lengths(shown), _dropped(shown), _checks(viewer, found), _rows(shown, query)]
    return join([found.title, *body])


def read(viewer: Viewer, query: Query) -> None:
    """Read the rows that an address asks for. Raises ConfigError."""
    viewer.commands.ask("explore", _required(viewer, query).text, _asked(query))


def check(viewer: Viewer, query: Query) -> None:
    """Look for duplicates, questions of evaluations, and length bias. Raises ConfigError."""
    viewer.commands.ask("explore", _required(viewer, query).text, CHECK)


def _required(viewer: Viewer, query: Query) -> Settings:
    found = _settings(viewer, query)
    if found is None:
        raise ConfigError("there is no such run")
    return found


def _settings(viewer: Viewer, query: Query) -> Settings | None:
    """Those of a run in the folder, or those in the address. Raises ConfigError if they cannot be read."""
    name = query.one("run")
    if name:
        row = viewer.runs.find(name)
        if row is None:
            return None
        try:
            text = read_regular(row.folder / "config.yaml").decode()
        except (OSError, ValueError) as error:
            raise ConfigError(f"the settings of {name} cannot be read: {error}") from error
        link_ = el("a", row.name, href=address("/run", run=row.name))
        return Settings(el("h1", link_, " ", el("small", f"data: {row.data}")), text, True)
    if not any(key not in OWN for key, _ in query.pairs):
        return None
    made = draft(query, viewer.root)
    if made.config is None:
        lines = [*made.problems.values(), *made.elsewhere]
        raise ConfigError("\n".join(["these settings are not whole:", *lines]))
    kept = address("/new", **{key: value for key, value in query.pairs if key not in OWN})
    return Settings(el("h1", el("a", "New run", href=kept), " ", el("small", f"data: {made.name}")), made.text, False)


def _choice(viewer: Viewer, name: str) -> Markup:
    rows = viewer.runs.all()
    said = f"There is no run {name}." if name else "The data of which run?" if rows else "No run here has data yet."
    hint = el("p", "The page ", el("a", "New run", href="/new"), " shows the data of settings before a run.",
              class_="quiet")  # fmt: skip
    return join([el("h1", "Data"), message(said), hint, run_links(rows, PATH)])


# --- asking -----------------------------------------------------------------------------------------------------------


def _asked(query: Query) -> tuple[str, ...]:
    """The arguments of `explore` for the block of examples that the address is in."""
    first, row = query.integer("first") or 0, query.integer("row")
    given = ("--json", "--no-quality", "--rows", str(BLOCK), "--sort", query.choice("sort", list(SORTS)))
    given += ("--set", query.one("set") or "train")
    return (*given, "--row", str(row)) if row is not None else (*given, "--first", str(first // BLOCK * BLOCK))


def _answer(answer: Answer | None) -> tuple[dict[str, Any] | None, Markup]:
    """What was found; None while it is not there, and why."""
    if answer is None:
        button = act("read", "Read the data", FORM, class_="primary")
        said = " reads and tokenises it as a run would (a data set of the hub is downloaded)"
        return None, el("p", button, el("span", said, class_="quiet"))
    if answer.code is None:
        return None, message("The data is read and tokenised …")
    if answer.code:
        again = el("p", act("read", "Read again", FORM))
        where = "Relative paths in the settings are looked up in the folder where posttrain ui was started."
        said = message(answer.said or "Reading the data failed without a message.", "error")
        return None, join([said, el("p", where, class_="quiet"), again])
    return _parsed(answer.said), Markup("")


@lru_cache(maxsize=8)
def _parsed(said: str) -> dict[str, Any]:
    try:
        return json.loads(said)
    except ValueError as error:
        raise ConfigError("there is more than a page can show: run posttrain explore --json in a terminal") from error


# --- what was found ---------------------------------------------------------------------------------------------------


def _cards(shown: Mapping[str, Any]) -> Markup:
    report, train = shown["reports"]["train"], shown["sets"]["train"]
    facts = {"rows read": report["read"]} | {f"{name} examples": one["examples"] for name, one in shown["sets"].items()}
    facts |= {"rows dropped": len(report["malformed"]) + report["overlong_dropped"], "train tokens": train["total"]}
    shape = f"Read as {', '.join(dict.fromkeys(report['formats']))}."
    return join([el("p", shape, class_="quiet"), cards({name: number(value) for name, value in facts.items()})])


def _lengths(shown: Mapping[str, Any]) -> Markup:
    width, sets = shown["width"], shown["sets"]
    lines = []
    for colour, (name, one) in enumerate(sets.items()):
        middles = [width * (place + 0.5) for place in range(len(one["counts"]))]
        lines.append(Line(name, middles, [count / one["examples"] for count in one["counts"]], colour))
    columns = ["set", "examples", "tokens", "mean", "P50", "P90", "P99", "max"]
    keys = ("examples", "total", "mean", "p50", "p90", "p99", "max")
    rows = [[name, *(f"{one[key]:,.0f}" for key in keys)] for name, one in sets.items()]
    figure = chart(lines, f"Share of examples, in steps of {counted(width, 'token')}", x_label="tokens")
    sizes = table(columns, rows, numbers=range(1, len(columns)))
    return join([el("h2", "Lengths"), sizes, el("div", figure, class_="charts")])


def _dropped(shown: Mapping[str, Any]) -> Markup:
    """What was dropped, cut or noticed, of each source."""
    parts = [part for name, one in shown["reports"].items() for part in _dropped_of(name, one)]
    return join([el("h2", "Dropped"), *(parts or [message("Every row is used as it is.")])])


def _dropped_of(name: str, report: Mapping[str, Any]) -> list[Markup]:
    limit = f"{report['max_length']:,} tokens"
    if report["max_prompt_length"] is not None:
        limit += f", {report['max_prompt_length']:,} of the prompt"
    counts = {
        f"over the length limit ({limit}), dropped": report["overlong_dropped"],
        f"over the length limit ({limit}), truncated": report["overlong_truncated"],
        f"documents over the length limit ({limit}), split into chunks": report["overlong_split"],
        "malformed, dropped": len(report["malformed"]),
        "duplicates of an earlier row, used": report["duplicates"],
        "whose prompt is tokenised differently with its completion than alone": report["shifted"],
    }
    said = [el("li", f"{name}: {counted(count, 'row')} {what}") for what, count in counts.items() if count]
    unread = [f"not read: {what} in {counted(count, 'row')}" for what, count in report["unread"].items()]
    said += [el("li", f"{name}: {note}") for note in (*unread, *report["notes"])]
    bad = [[one["row"], f"{one['file']} line {one['line']}", one["reason"]] for one in report["malformed"]]
    long = [[one["row"], "", f"{one['tokens']:,} tokens, {one['prompt_tokens']:,} of the prompt"]
            for one in report["dropped"]]  # fmt: skip
    parts = [el("ul", *said, class_="notes")] if said else []
    if bad or long:
        dropped = len(bad) + report["overlong_dropped"]
        rows = [*bad, *long][:LISTED]
        title = f"{name}: the dropped rows" + (f", {len(rows):,} of {dropped:,}" if len(rows) < dropped else "")
        listed = table(["row", "where", "why"], rows, numbers=(0,))
        parts.append(el("details", el("summary", title), listed, open=dropped <= PAGE))
    return parts


def _checks(viewer: Viewer, found: Settings) -> Markup:
    """Duplicates, questions of evaluation suites and length bias, once they were asked for."""
    answer = viewer.commands.find("explore", found.text, CHECK)
    title = el("h2", "Checks of the rows")
    if answer is not None and answer.code is None:
        return join([title, message("The rows are compared …")])
    button = act("check", "Check" if answer is None else "Check again", FORM)
    if answer is None:
        said = " duplicates, validation rows in training, questions of evaluation suites, length bias"
        return join([title, el("p", button, el("span", said, class_="quiet"))])
    if answer.code:
        return join([title, message(answer.said or "The checks failed without a message.", "error"), el("p", button)])
    findings = _parsed(answer.said)["findings"]
    rows = [
        [what, f"{len(one['rows']):,}", f"{len(one['rows']) / one['of']:.1%}" if one["of"] else "–",
         "; ".join(f"{later} repeats {earlier}" for later, earlier in one["rows"][:EXAMPLES])]
        for what, one in findings["duplicates"].items()
    ]  # fmt: skip
    rows += [
        [f"questions of {name} in train", f"{len(one['hits']):,}",
         f"{len(one['hits']) / one['checked']:.1%}" if one["checked"] else "–",
         "; ".join(f"{question} in row {row}" for question, _, row in one["hits"][:EXAMPLES])]
        for name, one in findings["contamination"].items()
    ]  # fmt: skip
    notes = el("ul", *(el("li", note) for note in findings["notes"]), class_="notes")
    return join([title, table(["finding", "rows", "share", "examples"], rows, numbers=(1, 2)), notes])


# --- rows -------------------------------------------------------------------------------------------------------------


def _rows(shown: Mapping[str, Any], query: Query) -> Markup:
    names, sort = list(shown["sets"]), query.choice("sort", list(SORTS))
    which, row = query.choice("set", names), query.one("row")
    kept = [key for key, _ in query.pairs if key not in OWN]
    controls = form(
        PATH, hidden(query, *dict.fromkeys(kept)), choice("set", "Set", names, which),
        choice("sort", "Order", list(SORTS), sort, labels=SORTS), entry("row", "Row", row, "all"),
    )  # fmt: skip
    first, among = query.integer("first") or 0, shown["sets"][which]["examples"]
    start = 0 if row else first % BLOCK // PAGE * PAGE
    examples = shown["rows"][start : start + (len(shown["rows"]) if row else PAGE)]
    trained = el("span", el("span", "trained", class_="trained"), class_="masked inline")
    legend = el("p", "Tokens: ", trained, ", the rest is context. Each has its number in the vocabulary under the "
                "cursor.", class_="quiet")  # fmt: skip
    pager = None if row else _pager(query, first // PAGE * PAGE, among)
    none = message("There is no such example in this set.") if not examples else None
    return join([el("h2", "Rows"), controls, legend, pager, none, *(_example(one) for one in examples), pager])


def _pager(query: Query, first: int, among: int) -> Markup:
    links = []
    if first > 0:
        links.append(link("← before", query.but(PATH, first=max(0, first - PAGE))))
    links.append(el("span", f"examples {first + 1:,} to {min(first + PAGE, among):,} of {among:,}"))
    if first + PAGE < among:
        links.append(link("next →", query.but(PATH, first=first + PAGE)))
    return el("p", join(links, "  "), class_="quiet")


def _example(one: Mapping[str, Any]) -> Markup:
    facts = [f"margin {one['margin']:g}"] if one["margin"] is not None else []
    facts += ["a tie"] if one["tie"] else []
    facts += [f"answer {one['answer']}"] if one["answer"] is not None else []
    title = el("h3", f"Row {one['row']:,}", el("small", "".join(f" · {fact}" for fact in facts)))
    return el("section", title, *(_part(part) for part in one["parts"]))


def _part(part: Mapping[str, Any]) -> Markup:
    said = f"{part['title']}: {counted(part['tokens'], 'token')}, {part['trained']:,} trained"
    tokens = [_piece(piece, part["omitted"]) for piece in part["pieces"]]
    return join([el("p", said, class_="quiet"), el("div", *tokens, class_="tokens masked")])


def _piece(piece: Sequence[Any] | None, omitted: int) -> Markup:
    if piece is None:
        return el("em", f" … {counted(omitted, 'token')} … ")
    text, ids, trained = piece
    return el("span", seen(text), title=" ".join(map(str, ids)), class_="trained" if trained else None)
