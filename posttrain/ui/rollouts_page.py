"""The page Rollouts: a run's curves and search, then down a path: step, group, completion, token."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.base.words import counted
from posttrain.reports.chart import Line, chart
from posttrain.reports.drawing import Drawing
from posttrain.reports.markup import Markup, el, join, link, message, number, short, table
from posttrain.reports.series import Series
from posttrain.runs.stored_rollouts import StoredRun
from posttrain.runs.summary import RunSummary
from posttrain.ui.parts import Query, address, choice, entry, form, hidden, pager, search
from posttrain.ui.receipt import completion_view, group_view, step_view
from posttrain.ui.runs_page import run_links
from posttrain.ui.search import SORTS, Index, words_of
from posttrain.ui.viewer import Viewer

PATH = "/rollouts"
PAGE = 50  # rows
FALLS = 3  # steps of falling reward that are named


def rollouts_page(viewer: Viewer, query: Query) -> Markup:
    row = viewer.runs.find(query.one("run"))
    if row is None or not row.has_rollouts:
        return _choice(viewer, query.one("run"), row)
    step, prompt, rollout = (query.integer(name) for name in ("step", "prompt", "rollout"))
    series = viewer.series(row.folder)
    if step is None:
        return join([_head(row), _overview(row, series), _search(viewer, row, query)])
    with StoredRun(row.folder, looking=True) as stored:
        stored.require(step)
        head = [_head(row), _path(row, step, prompt, rollout)]
        if prompt is None:
            return join([*head, _beside(stored, step, query), step_view(stored, series, row, step)])
        if rollout is None:
            return join([*head, group_view(stored, row, step, prompt)])
        return join([*head, completion_view(stored, row, step, prompt, rollout, query)])


def _choice(viewer: Viewer, name: str, row: RunSummary | None) -> Markup:
    having = [one for one in viewer.runs.all() if one.has_rollouts]
    if row is not None:
        said = f"{name} has no rollouts: only methods that sample completions have, with rollout.save."
    elif name:
        said = f"There is no run {name}."
    else:
        said = "The rollouts of which run?" if having else "No run here has rollouts (rollouts.sqlite)."
    return join([message(said), run_links(having, PATH)])


def _head(row: RunSummary) -> Markup:
    return el("h1", el("a", row.name, href=address("/run", run=row.name)), " ", el("small", "rollouts"))


def _path(row: RunSummary, step: int, prompt: int | None, rollout: int | None) -> Markup:
    """Where one is: run, step, group, completion, each a link back to it."""
    places = [
        link("all steps", address(PATH, run=row.name)),
        link(f"step {step}", address(PATH, run=row.name, step=step)),
    ]
    if prompt is not None:
        places.append(link(f"prompt {prompt}", address(PATH, run=row.name, step=step, prompt=prompt)))
    if rollout is not None:
        places.append(el("span", f"completion {rollout}", aria_current="page"))
    return el("nav", *(el("span", place) for place in places), class_="path", aria_label="where")


def _beside(stored: StoredRun, step: int, query: Query) -> Markup:
    """The steps before and after."""
    steps = stored.steps()
    at = steps.index(step)
    links = []
    if at > 0:
        links.append(link(f"← step {steps[at - 1]}", query.but(PATH, step=steps[at - 1])))
    if at + 1 < len(steps):
        links.append(link(f"step {steps[at + 1]} →", query.but(PATH, step=steps[at + 1])))
    return el("p", *(part for one in links for part in (one, "  ")))


# --- over the steps ---------------------------------------------------------------------------------------------------


def _overview(row: RunSummary, series: Series) -> Markup:
    go = address(PATH, run=row.name) + "&step="

    def of(title: str, metrics: Mapping[str, str], share: bool = False) -> Drawing | None:
        there = [(name, label) for name, label in metrics.items() if name in series.names]
        lines = [Line(label, *series.points(name), colour=at) for at, (name, label) in enumerate(there)]
        return chart(lines, title, go=go, share=share) if lines else None

    parts = {
        name: name.split("/")[1] for name in series.names if name.startswith("rewards/") and name.endswith("/mean")
    }
    charts = [
        of("Reward", {"reward": "reward"}),
        of("Reward by part", parts),
        of("Completion length", {"completions/mean_length": "mean"}),
        of(
            "Groups without spread, truncated completions",
            {"frac_reward_zero_std": "without spread", "completions/clipped_ratio": "truncated"},
            share=True,
        ),
    ]
    said = "A click on a curve opens that step: its groups, then their completions, then the tokens."
    hint = el("p", said, class_="quiet") if any(charts) else None
    return join([_falls(row, series), el("div", *charts, class_="charts four"), hint])


def falls(series: Series) -> list[tuple[int, float]]:
    """The steps at which the reward fell most against the logged step before, with the difference."""
    steps, values = series.points("reward")
    found = [
        (int(step), now - before)
        for step, before, now in zip(steps[1:], values, values[1:], strict=False)
        if math.isfinite(now - before) and now < before
    ]
    return sorted(found, key=lambda one: one[1])[:FALLS]


def _falls(row: RunSummary, series: Series) -> Markup | None:
    found = falls(series)
    if not found:
        return None
    links = [link(f"step {step} ({change:+.3g})", address(PATH, run=row.name, step=step)) for step, change in found]
    parts = [part for one in links for part in (one, ", ")][:-1]
    return el("p", "The reward fell most at ", *parts, ".")


# --- search -----------------------------------------------------------------------------------------------------------


def _search(viewer: Viewer, row: RunSummary, query: Query) -> Markup:
    index = viewer.index(row.folder)
    choices = index.choices()
    sort = query.choice("sort", tuple(SORTS))
    controls = form(
        PATH,
        search("find", "Search prompts and completions", query.one("find"), 'words, or "a phrase"', wide=True),
        entry("from", "From step", query.one("from")),
        entry("to", "to", query.one("to")),
        entry("row", "Row of the data", query.one("row")),
        choice("part", "Reward", ["", *choices["part"]], query.one("part"), "total"),
        entry("least", "at least", query.one("least")),
        entry("most", "at most", query.one("most")),
        entry("shortest", "Tokens from", query.one("shortest")),
        entry("longest", "to", query.one("longest")),
        choice("verdict", "Verdict", ["", *choices["verdict"]], query.one("verdict"), "any")
        if choices["verdict"]
        else None,
        choice("ended", "Ended by", ["", *choices["ended"]], query.one("ended"), "any"),
        choice("sort", "Order", list(SORTS), sort),
        hidden(query, "run"),
    )
    matches = index.search(query, PAGE, PAGE * query.page)
    return el("section", el("h2", "Find rollouts"), controls, _progress(index), _results(row, matches, query))


def _progress(index: Index) -> Markup | None:
    if index.problem:
        return message(f"Not all rollouts are in the search: {index.problem}", "warning")
    if index.progress is not None:
        done, steps = index.progress
        return message(f"The search is being prepared: {done:,} of {counted(steps, 'step')}. What is there is shown.")
    return None


def _results(row: RunSummary, found: Found, query: Query) -> Markup:
    texts = _texts(row, found.rows)
    words = words_of(query.one("find"))
    body = []
    for one in found.rows:
        place = (one["step"], one["prompt"], one["rollout"])
        at = address(PATH, run=row.name, step=place[0], prompt=place[1], rollout=place[2])
        said = texts.get(place)
        body.append(
            [
                link(f"{place[0]} · {place[1]} · {place[2]}", at),
                number(one["reward"]),
                number(one["advantage"], 3),
                f"{one['length']:,}",
                one["ended"],
                one["verdict"] or "–",
                marked(said, words) if said is not None else el("span", "no longer stored", class_="quiet"),
            ]
        )
    said = pager(query, PATH, PAGE, found.total, "completion")
    header = ["step · prompt · completion", "reward", "advantage", "tokens", "ended by", "verdict", "completion"]
    return join([said, table(header, body, numbers=(1, 2, 3), class_="results") if body else None])


def _texts(row: RunSummary, rows: Sequence[Mapping[str, Any]]) -> dict[tuple[int, int, int], str]:
    """The completions of some rows, from the run itself."""
    if not rows:
        return {}
    places = [(one["step"], one["prompt"], one["rollout"]) for one in rows]
    marks = ", ".join("(?, ?, ?)" for _ in places)
    with StoredRun(row.folder, looking=True) as stored:
        found = stored.query(
            "SELECT step, prompt_index, rollout_index, completion FROM rollouts "
            f"WHERE (step, prompt_index, rollout_index) IN (VALUES {marks})",
            [value for place in places for value in place],
        )
    return {(step, prompt, rollout): completion for step, prompt, rollout, completion in found}


def marked(said: str, words: Sequence[str], around: int = 60) -> Markup:
    """One line of a completion, around the first of the words, with all of them marked."""
    flat = " ".join(said[:20_000].split())
    lower = flat.casefold()
    if len(lower) != len(flat):  # letters that change their length: mark nothing rather than the wrong place
        return el("span", short(flat))
    spots = sorted((lower.find(word.casefold()), len(word)) for word in words if word.casefold() in lower)
    start = max(0, spots[0][0] - around) if spots else 0
    end, parts, at = min(len(flat), start + 3 * around), ["…" if start else ""], start
    while at < end:
        hits = [(place, word) for word in words if (place := lower.find(word.casefold(), at, end)) >= 0]
        if not hits:
            break
        place, word = min(hits, key=lambda hit: (hit[0], -len(hit[1])))
        parts += [flat[at:place], el("mark", flat[place : place + len(word)])]
        at = place + len(word)
    parts += [flat[at:end], "…" if end < len(flat) else ""]
    return el("span", *parts)
