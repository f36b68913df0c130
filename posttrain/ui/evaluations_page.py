"""The Evaluations page: means with intervals, the four classes, and answers side by side."""

from collections.abc import Mapping, Sequence
from itertools import starmap
from typing import Any

from posttrain.base.console import cells_of
from posttrain.base.words import counted
from posttrain.evaluation.comparing.differences import Difference, Flip, Suite, verdict
from posttrain.evaluation.comparing.page import HOW, differences_table, interval, notes, values_table
from posttrain.evaluation.records import Answer
from posttrain.reports.markup import Markup, cards, el, join, link, message, number, short, table
from posttrain.runs.files import as_mapping
from posttrain.runs.receipt import shown_turns
from posttrain.ui.parts import Query, address, choice, contains, form, hidden, pager, search
from posttrain.ui.receipt import said
from posttrain.ui.runs_page import toggle
from posttrain.ui.viewer import Evaluation, Viewer

PATH = "/evaluations"
PAGE = 20  # items per page
MOST = 4  # maximum number of evaluations compared
LOOKS = {"correct": "passed", "wrong": "failed", "scored": ""}  # verdict -> style of its badge
CLASSES = {"11": "right format, right answer", "10": "right format, wrong answer",
           "01": "wrong format, right answer", "00": "wrong format, wrong answer"}  # fmt: skip
SHOWS = ("flipped", "all")


def evaluations_page(viewer: Viewer, query: Query) -> Markup:
    every = viewer.evaluations.all()
    if not every:
        return message(
            f"There are no evaluations in {viewer.root} or next to it yet. Create one with: "
            "posttrain eval RUN --suite gsm8k"
        )
    named = [viewer.evaluations.find(name) for name in query.many("of")[:MOST]]
    chosen = [evaluation for evaluation in named if evaluation is not None]
    listing = _listing(every, chosen)
    if len(chosen) > 1:
        return join([_compared(viewer, chosen, query), listing])
    return join([_one(viewer, chosen[0], query), listing]) if chosen else listing


def _listing(every: Sequence[Evaluation], chosen: Sequence[Evaluation]) -> Markup:
    names = [evaluation.name for evaluation in chosen]
    rows = []
    for evaluation in every:
        at = names.index(evaluation.name) if evaluation.name in names else None
        others = [name for name in names if name != evaluation.name]
        where = address(PATH, of=others if at is not None else [*names, evaluation.name][:MOST])
        mark = toggle(evaluation.name, at, where)
        name = link(evaluation.name, address(PATH, of=evaluation.name), class_="name")
        for number_of, (key, facts) in enumerate(evaluation.suites.items() or [("", {})]):
            head = [mark, name] if number_of == 0 else ["", ""]
            rows.append([*head, *(_summary_cells(key, facts) if facts else [evaluation.problem, *[""] * 6])])
    header = ["", "evaluation", "suite", "metric", "mean", "95 % interval", "", "answers", "not graded"]
    hint = " · choose two to compare them" if len(chosen) < 2 else None
    summary = el("p", counted(len(every), "evaluation"), hint, class_="quiet")
    return join([el("h2", "All evaluations") if chosen else None, summary, table(header, rows, numbers=(4, 7, 8))])


def _summary_cells(key: str, facts: Mapping[str, Any]) -> list[object]:
    value, low, high = (facts.get(name) for name in ("value", "low", "high"))
    answers, graded = facts.get("answers"), facts.get("graded")
    missing = answers - graded if isinstance(answers, int) and isinstance(graded, int) else None
    suite = [key, el("small", " ", facts["partial"]) if facts.get("partial") else None]
    return [
        suite, str(facts.get("metric", "")), number(value, 3), interval(_float(low), _float(high)),
        interval_bar(_float(value), _float(low), _float(high)), number(answers), number(missing),
    ]  # fmt: skip


def interval_bar(value: float | None, low: float | None = None, high: float | None = None) -> Markup:
    """A mean between 0 and 1, drawn as a dot on its interval."""
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


def _one(viewer: Viewer, evaluation: Evaluation, query: Query) -> Markup:
    title = el("h1", evaluation.name)
    if evaluation.problem:
        return join([title, message(evaluation.problem, "warning")])
    key = query.choice("suite", tuple(evaluation.suites)) if evaluation.suites else ""
    facts = evaluation.suites.get(key, {})
    scores = viewer.evaluations.source(evaluation).suites.get(key)
    answers = list(scores.answers) if scores else []
    kinds = list(dict.fromkeys(answer.verdict for answer in answers))
    classes = [name for name in CLASSES if any(answer.format_and_answer == name for answer in answers)]
    controls = form(
        PATH,
        choice("suite", "Suite", list(evaluation.suites), key),
        search("find", "Find in prompts and answers", query.one("find"), wide=True),
        choice("verdict", "Verdict", ["", *kinds], query.one("verdict"), "any"),
        choice("class", "Class", ["", *classes], query.one("class"), "any", CLASSES) if classes else None,
        hidden(query, "of"),
    )
    kept = [answer for answer in answers if _fits(answer, query)]
    items = [_item(answer.item, answer.prompt, answer.gold, [("", answer)]) for answer in _paged(kept, query)]
    about = [title, _facts(facts), _four_classes(facts), _groups(facts)]
    return join([*about, controls, pager(query, PATH, PAGE, len(kept), "item"), *items])


def _facts(facts: Mapping[str, Any]) -> Markup:
    low, high = _float(facts.get("low")), _float(facts.get("high"))
    shown = {str(facts.get("metric", "mean")): number(facts.get("value"), 3), "95 % interval": interval(low, high)}
    counts = ("items", "answers", "graded", "truncated")
    shown |= {name: number(facts[name]) for name in counts if facts.get(name) is not None}
    shown |= {"items": facts["partial"]} if facts.get("partial") else {}
    missing = [f"{reason}: {count:,}" for reason, count in as_mapping(facts.get("ungraded")).items()]
    return join([cards(shown), message(f"Not graded: {'; '.join(missing)}", "warning") if missing else None])


def _four_classes(facts: Mapping[str, Any]) -> Markup | None:
    """The number and share of completions in each class: format right or wrong, answer right or wrong."""
    if not (counts := as_mapping(facts.get("classes"))):
        return None
    whole = sum(counts.values()) or 1
    cell = {name: f"{counts.get(name, 0):,}  ({counts.get(name, 0) / whole:.0%})" for name in CLASSES}
    rows = [["format right", cell["11"], cell["10"]], ["format wrong", cell["01"], cell["00"]]]
    return el("div", table(["", "answer right", "answer wrong"], rows, numbers=(1, 2)), class_="small")


def _groups(facts: Mapping[str, Any]) -> Markup | None:
    if not (groups := as_mapping(facts.get("groups"))):
        return None
    rows = [
        [name, number(value := group.get("value"), 3), interval_bar(_float(value)), number(group.get("items"))]
        for name, group in groups.items()
        if isinstance(group, dict)
    ]
    shown = table(["group", "mean", "", "items"], rows, numbers=(1, 3))
    return el("details", el("summary", counted(len(rows), "group")), shown)


def _fits(answer: Answer, query: Query) -> bool:
    texts = (answer.item, answer.prompt, answer.completion, answer.extracted, answer.gold)
    return (
        query.one("verdict") in ("", answer.verdict)
        and query.one("class") in ("", answer.format_and_answer)
        and contains(query.one("find"), *texts)
    )


def _compared(viewer: Viewer, chosen: Sequence[Evaluation], query: Query) -> Markup:
    broken = [message(f"{each.name}: {each.problem}", "warning") for each in chosen if each.problem]
    readable = [each for each in chosen if not each.problem]
    if len(readable) < 2:
        return join(broken)
    comparison = viewer.evaluations.comparison(readable)
    key = query.choice("suite", [suite.key for suite in comparison.suites])
    suite = next(suite for suite in comparison.suites if suite.key == key)
    names = [each.b for each in suite.differences]
    difference = suite.differences[names.index(query.choice("against", names))]
    shows = query.choice("show", SHOWS)
    controls = form(
        PATH,
        choice("suite", "Suite", [each.key for each in comparison.suites], key),
        choice("against", f"{difference.a} and", names, difference.b) if len(names) > 1 else None,
        choice("show", "Items", SHOWS, shows, labels={"flipped": "flipped only", "all": "all in common"}),
        choice("won", "Better", ["", "a", "b"], query.one("won"), "either", {"a": difference.a, "b": difference.b}),
        search("find", "Find", query.one("find"), wide=True),
        hidden(query, "of"),
    )
    items = _pairs(viewer, readable, suite, difference, query, shows)
    blocks = [
        _item(pair.a.item, pair.a.prompt, pair.a.gold, [(difference.a, pair.a), (difference.b, pair.b)])
        for pair in _paged(items, query)
    ]
    omitted = [message(f"{name} is not compared: {why}", "warning") for name, why in comparison.left_out.items()]
    tables = [
        table(*cells_of(made), numbers=tuple(range(1, 6)))
        for made in (values_table(suite, "95 %"), differences_table(suite, "95 %"))
    ]
    test = [el("summary", "How this was tested"), el("p", HOW), *(el("p", line) for line in notes(suite))]
    title = el("h1", " and ".join(each.name for each in readable))
    verdicts = el("p", *(el("strong", verdict(each), " ") for each in suite.differences))
    shown = [controls, pager(query, PATH, PAGE, len(items), "item"), *blocks]
    return join([title, *broken, *omitted, verdicts, *tables, el("details", *test), *shown])


def _pairs(
    viewer: Viewer, chosen: Sequence[Evaluation], suite: Suite, difference: Difference, query: Query, shows: str
) -> list[Flip]:
    """The items of a comparison of two evaluations: only the flipped items, or all common items."""
    pairs = list(difference.flips)
    if shows == "all":
        flipped = {flip.a.item: flip for flip in pairs}
        answers = []
        for name in (difference.a, difference.b):
            side = next(each for each in chosen if each.name == name)
            every = viewer.evaluations.source(side).suites[suite.key].answers
            answers.append({answer.item: answer for answer in every[::-1]})
        scores = zip(difference.items.items, difference.items.a_C, difference.items.b_C, strict=True)
        pairs = [flipped.get(item) or Flip(a, b, answers[0][item], answers[1][item]) for item, a, b in scores]
    won, find = query.one("won"), query.one("find")
    return [
        pair
        for pair in pairs
        if (won != "a" or pair.a_score > pair.b_score)
        and (won != "b" or pair.b_score > pair.a_score)
        and contains(find, pair.a.item, pair.a.prompt, pair.a.gold, pair.a.completion, pair.b.completion)
    ]


def _paged(items: Sequence[Any], query: Query) -> Sequence[Any]:
    return items[PAGE * query.page : PAGE * (query.page + 1)]


def _item(item: str, prompt: str, gold: str | None, answers: Sequence[tuple[str, Answer]]) -> Markup:
    question = el("details", el("summary", el("b", f"item {item} "), short(prompt, 150)), el("pre", prompt))
    right = el("p", el("span", "right answer ", class_="quiet"), gold) if gold is not None else None
    return el("article", question, right, el("div", *starmap(_side, answers), class_="sides"), class_="item")


def _side(name: str, answer: Answer) -> Markup:
    score = number(answer.score, 3) if answer.verdict == "scored" else None
    head = [
        el("b", name, " ") if name else None,
        el("span", answer.verdict, class_=f"badge {LOOKS.get(answer.verdict, 'alarm')}"),
        " ", score, el("span", f" {answer.extracted}", class_="quiet") if answer.extracted is not None else None,
        el("span", f" · {answer.reason}", class_="quiet") if answer.reason else None,
        el("span", " · truncated", class_="quiet") if answer.finish_reason == "length" else None,
    ]  # fmt: skip
    episode = shown_turns(answer.episode)
    shown = map(said, episode) if episode else [el("div", answer.completion, class_="text")]
    return el("div", el("p", *head), *shown, class_="side turns" if episode else "side")
