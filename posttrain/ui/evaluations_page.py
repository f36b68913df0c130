"""The page Evaluations: means with their intervals, the four classes, answers side by side."""

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.base.console import cells_of
from posttrain.base.words import counted
from posttrain.evaluation.comparing.differences import Difference, Suite, verdict
from posttrain.evaluation.comparing.items import Flip
from posttrain.evaluation.comparing.page import HOW, differences_table, interval, notes, values_table
from posttrain.evaluation.records import Answer
from posttrain.reports.markup import Markup, cards, el, join, link, message, number, short, table
from posttrain.ui.parts import Query, address, choice, form, hidden, pager, search
from posttrain.ui.viewer import Evaluation, Viewer

PATH = "/evaluations"
PAGE = 20  # items
MOST = 4  # evaluations that are compared
LOOKS = {"correct": "passed", "wrong": "failed", "scored": ""}  # as badges
CLASSES = {"11": "right format, right answer", "10": "right format, wrong answer",
           "01": "wrong format, right answer", "00": "wrong format, wrong answer"}  # fmt: skip
SHOWS = ("flipped", "all")


def evaluations_page(viewer: Viewer, query: Query) -> Markup:
    every = viewer.evaluations.all()
    if not every:
        return message(
            f"There are no evaluations in {viewer.root} or beside it yet. `posttrain eval` makes one: "
            "posttrain eval RUN --suite gsm8k"
        )
    named = [viewer.evaluations.find(name) for name in query.many("of")[:MOST]]
    chosen = [one for one in named if one is not None]
    listing = _listing(every, chosen, query)
    if len(chosen) > 1:
        return join([_compared(viewer, chosen, query), listing])
    return join([_one(viewer, chosen[0], query), listing]) if chosen else listing


def _listing(every: Sequence[Evaluation], chosen: Sequence[Evaluation], query: Query) -> Markup:
    names = [one.name for one in chosen]
    rows = []
    for one in every:
        at = names.index(one.name) if one.name in names else None
        others = [name for name in names if name != one.name]
        where = address(PATH, of=others if at is not None else [*names, one.name][:MOST])
        label = f"{'remove' if at is not None else 'choose'} {one.name}"
        on = "" if at is None else f" on c{at}"
        toggle = link("✓" if at is not None else "+", where, class_=f"toggle{on}", aria_label=label)
        name = link(one.name, address(PATH, of=one.name), class_="name")
        for first, (key, facts) in enumerate(one.suites.items() or [("", {})]):
            head = [toggle, name] if not first else ["", ""]
            rows.append([*head, *(_summary_cells(key, facts) if facts else [one.problem, *[""] * 6])])
    header = ["", "evaluation", "suite", "metric", "mean", "95 % interval", "", "answers", "not graded"]
    hint = " · choose two to compare them" if len(chosen) < 2 else None
    said = el("p", counted(len(every), "evaluation"), hint, class_="quiet")
    return join([el("h2", "All evaluations") if chosen else None, said, table(header, rows, numbers=(4, 7, 8))])


def _summary_cells(key: str, facts: Mapping[str, Any]) -> list[object]:
    value, low, high = (facts.get(name) for name in ("value", "low", "high"))
    answers, graded = facts.get("answers"), facts.get("graded")
    missing = answers - graded if isinstance(answers, int) and isinstance(graded, int) else None
    return [
        key, str(facts.get("metric", "")), number(value, 3), interval(_float(low), _float(high)),
        interval_bar(_float(value), _float(low), _float(high)), number(answers), number(missing),
    ]  # fmt: skip


def interval_bar(value: float | None, low: float | None, high: float | None) -> Markup:
    """A mean between 0 and 1 as a dot on its interval."""
    if value is None or not 0 <= value <= 1:
        return Markup("")
    start = 2 + 116 * max(0.0, low if low is not None else value)
    end = 2 + 116 * min(1.0, high if high is not None else value)
    parts = [
        el("line", x1=2, x2=118, y1=7, y2=7, class_="grid"),
        el("line", x1=f"{start:.1f}", x2=f"{end:.1f}", y1=7, y2=7, class_="line range"),
        el("circle", cx=f"{2 + 116 * value:.1f}", cy=7, r=3, class_="end"),
    ]
    return el("svg", *parts, viewBox="0 0 120 14", class_="interval c0", role="img", aria_label=f"{value:.3f}")


def _float(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


# --- one evaluation ---------------------------------------------------------------------------------------------------


def _one(viewer: Viewer, one: Evaluation, query: Query) -> Markup:
    title = el("h1", one.name)
    if one.problem:
        return join([title, message(one.problem, "warning")])
    key = query.choice("suite", tuple(one.suites)) if one.suites else ""
    facts = one.suites.get(key, {})
    scores = viewer.evaluations.source(one).suites.get(key)
    answers = list(scores.answers) if scores else []
    kinds = list(dict.fromkeys(answer.verdict for answer in answers))
    classes = [name for name in CLASSES if any(answer.format_and_answer == name for answer in answers)]
    controls = form(
        PATH,
        choice("suite", "Suite", list(one.suites), key),
        search("find", "Find in prompts and answers", query.one("find"), wide=True),
        choice("verdict", "Verdict", ["", *kinds], query.one("verdict"), "any"),
        choice("class", "Class", ["", *classes], query.one("class"), "any", CLASSES) if classes else None,
        hidden(query, "of"),
    )
    kept = [answer for answer in answers if _fits(answer, query)]
    items = [_item(answer.item, answer.prompt, answer.gold, [("", answer)]) for answer in _paged(kept, query)]
    return join(
        [
            title,
            _facts(facts),
            _four_classes(facts),
            _groups(facts),
            controls,
            pager(query, PATH, PAGE, len(kept), "item"),
            *items,
        ]
    )


def _facts(facts: Mapping[str, Any]) -> Markup:
    low, high = _float(facts.get("low")), _float(facts.get("high"))
    shown = {str(facts.get("metric", "mean")): number(facts.get("value"), 3), "95 % interval": interval(low, high)}
    for name in ("items", "answers", "graded", "truncated"):
        if facts.get(name) is not None:
            shown[name] = number(facts[name])
    ungraded = facts.get("ungraded") or {}
    missing = [f"{reason}: {count:,}" for reason, count in ungraded.items()] if isinstance(ungraded, dict) else []
    return join([cards(shown), message(f"Not graded: {'; '.join(missing)}", "warning") if missing else None])


def _four_classes(facts: Mapping[str, Any]) -> Markup | None:
    """Format and answer, right and wrong: the four classes with their shares."""
    found = facts.get("classes")
    if not isinstance(found, dict) or not found:
        return None
    whole = sum(found.values()) or 1
    cell = {name: f"{found.get(name, 0):,}  ({found.get(name, 0) / whole:.0%})" for name in CLASSES}
    rows = [["format right", cell["11"], cell["10"]], ["format wrong", cell["01"], cell["00"]]]
    return el("div", table(["", "answer right", "answer wrong"], rows, numbers=(1, 2)), class_="small")


def _groups(facts: Mapping[str, Any]) -> Markup | None:
    groups = facts.get("groups")
    if not isinstance(groups, dict) or not groups:
        return None
    rows = []
    for name, one in groups.items():
        if isinstance(one, dict):
            value, items = one.get("value"), one.get("items")
            rows.append([name, number(value, 3), interval_bar(_float(value), None, None), number(items)])
    shown = table(["group", "mean", "", "items"], rows, numbers=(1, 3))
    return el("details", el("summary", counted(len(rows), "group")), shown)


def _fits(answer: Answer, query: Query) -> bool:
    words, kind, quarter = query.one("find").casefold().split(), query.one("verdict"), query.one("class")
    return (
        (not kind or answer.verdict == kind)
        and (not quarter or answer.format_and_answer == quarter)
        and _says(words, answer.item, answer.prompt, answer.completion, answer.extracted, answer.gold)
    )


# --- several ----------------------------------------------------------------------------------------------------------


def _compared(viewer: Viewer, chosen: Sequence[Evaluation], query: Query) -> Markup:
    broken = [message(f"{one.name}: {one.problem}", "warning") for one in chosen if one.problem]
    whole = [one for one in chosen if not one.problem]
    if len(whole) < 2:
        return join(broken)
    comparison = viewer.evaluations.comparison(whole)
    key = query.choice("suite", [suite.key for suite in comparison.suites])
    suite = next(suite for suite in comparison.suites if suite.key == key)
    names = [one.b for one in suite.differences]
    difference = suite.differences[names.index(query.choice("against", names))]
    shows = query.choice("show", SHOWS)
    controls = form(
        PATH,
        choice("suite", "Suite", [one.key for one in comparison.suites], key),
        choice("against", f"{difference.a} and", names, difference.b) if len(names) > 1 else None,
        choice("show", "Items", SHOWS, shows, labels={"flipped": "flipped only", "all": "all in common"}),
        choice("won", "Better", ["", "a", "b"], query.one("won"), "either", {"a": difference.a, "b": difference.b}),
        search("find", "Find", query.one("find"), wide=True),
        hidden(query, "of"),
    )
    items = _pairs(viewer, whole, suite, difference, query, shows)
    blocks = [
        _item(one.item, one.prompt, one.gold, [(difference.a, one.a), (difference.b, one.b)])
        for one in _paged(items, query)
    ]
    left = [message(f"{name} is not compared: {why}", "warning") for name, why in comparison.left_out.items()]
    return join(
        [
            el("h1", " and ".join(one.name for one in whole)),
            *broken,
            *left,
            el("p", *(el("strong", verdict(one), " ") for one in suite.differences)),
            *(
                table(*cells_of(made), numbers=tuple(range(1, 6)))
                for made in (values_table(suite, "95 %"), differences_table(suite, "95 %"))
            ),
            el(
                "details", el("summary", "How this was tested"), el("p", HOW), *(el("p", line) for line in notes(suite))
            ),
            controls,
            pager(query, PATH, PAGE, len(items), "item"),
            *blocks,
        ]
    )


def _pairs(
    viewer: Viewer, chosen: Sequence[Evaluation], suite: Suite, difference: Difference, query: Query, shows: str
) -> list[Flip]:
    """The items of two sides: those that flipped, or all that they have in common."""
    found = list(difference.flips)
    if shows == "all":
        flipped = {one.item: one for one in found}
        answers = []
        for name in (difference.a, difference.b):
            side = next(one for one in chosen if one.name == name)
            every = viewer.evaluations.source(side).suites[suite.key].answers
            answers.append({answer.item: answer for answer in every[::-1]})
        scores = zip(difference.items.items, difference.items.a_C, difference.items.b_C, strict=True)
        found = [
            flipped.get(item)
            or Flip(item, answers[0][item].prompt, answers[0][item].gold, a, b, answers[0][item], answers[1][item])
            for item, a, b in scores
        ]
    won, words = query.one("won"), query.one("find").casefold().split()
    return [
        one
        for one in found
        if (won != "a" or one.a_score > one.b_score)
        and (won != "b" or one.b_score > one.a_score)
        and _says(words, one.item, one.prompt, one.gold, one.a.completion, one.b.completion)
    ]


def _says(words: Sequence[str], *texts: str | None) -> bool:
    said = " ".join(map(str, texts)).casefold() if words else ""
    return all(word in said for word in words)


def _paged(items: Sequence[Any], query: Query) -> Sequence[Any]:
    return items[PAGE * query.page : PAGE * (query.page + 1)]


def _item(item: str, prompt: str, gold: str | None, answers: Sequence[tuple[str, Answer]]) -> Markup:
    asked = el("details", el("summary", el("b", f"item {item} "), short(prompt, 150)), el("pre", prompt))
    right = el("p", el("span", "right answer ", class_="quiet"), gold) if gold is not None else None
    return el("article", asked, right, el("div", *(_side(*one) for one in answers), class_="sides"), class_="item")


def _side(name: str, answer: Answer) -> Markup:
    score = number(answer.score, 3) if answer.verdict == "scored" else None
    head = [
        el("b", name, " ") if name else None,
        el("span", answer.verdict, class_=f"badge {LOOKS.get(answer.verdict, 'alarm')}"),
        " ", score, el("span", f" {answer.extracted}", class_="quiet") if answer.extracted is not None else None,
        el("span", f" · {answer.reason}", class_="quiet") if answer.reason else None,
        el("span", " · truncated", class_="quiet") if answer.finish_reason == "length" else None,
    ]  # fmt: skip
    return el("div", el("p", *head), el("div", answer.completion, class_="text"), class_="side")
