"""The Rollouts page: curves and search for a run, and its steps, groups, completions and tokens."""

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
PAGE = 50  # rows per page
FALLS = 3  # maximum number of steps named for a falling reward


def rollouts_page(viewer: Viewer, query: Query) -> Markup:
    run = viewer.runs.find(query.one("run"))
    if run is None or not run.has_rollouts:
        return _choice(viewer, query.one("run"), run)
    step, prompt, rollout = (query.integer(name) for name in ("step", "prompt", "rollout"))
    series = viewer.series(run.folder)
    if step is None:
        return join([_head(run), _overview(run, series), _search(viewer, run, query)])
    with StoredRun(run.folder, looking=True) as stored:
        stored.require(step)
        head = [_head(run), _path(run, step, prompt, rollout)]
        if prompt is None:
            return join([*head, _beside(stored, step, query), step_view(stored, series, run, step)])
        if rollout is None:
            return join([*head, group_view(stored, run, step, prompt)])
        return join([*head, completion_view(stored, run, step, prompt, rollout, query)])


def _choice(viewer: Viewer, name: str, run: RunSummary | None) -> Markup:
    runs = [run for run in viewer.runs.all() if run.has_rollouts]
    if run is not None:
        text = f"{name} has no rollouts: only methods that sample completions store them, if rollout.save is true."
    elif name:
        text = f"There is no run {name}."
    else:
        text = "Choose a run to see its rollouts." if runs else "No run here has rollouts (rollouts.sqlite)."
    return join([message(text), run_links(runs, PATH)])


def _head(run: RunSummary) -> Markup:
    return el("h1", el("a", run.name, href=address("/run", run=run.name)), " ", el("small", "rollouts"))


def _path(run: RunSummary, step: int, prompt: int | None, rollout: int | None) -> Markup:
    """The path to what is shown, as links: run, step, group, completion."""
    links = [link("all steps", address(PATH, run=run.name))]
    links.append(link(f"step {step}", address(PATH, run=run.name, step=step)))
    if prompt is not None:
        links.append(link(f"prompt {prompt}", address(PATH, run=run.name, step=step, prompt=prompt)))
    if rollout is not None:
        links.append(el("span", f"completion {rollout}", aria_current="page"))
    return el("nav", *(el("span", each) for each in links), class_="path", aria_label="where")


def _beside(stored: StoredRun, step: int, query: Query) -> Markup:
    """Links to the previous and the next step."""
    steps = stored.steps()
    at = steps.index(step)
    links = [link(f"← step {before}", query.but(PATH, step=before)) for before in steps[:at][-1:]]
    links += [link(f"step {after} →", query.but(PATH, step=after)) for after in steps[at + 1 : at + 2]]
    return el("p", join(links, "  "))


def _overview(run: RunSummary, series: Series) -> Markup:
    go = address(PATH, run=run.name) + "&step="

    def drawn(title: str, metrics: Mapping[str, str], share: bool = False) -> Drawing | None:
        logged = [(name, label) for name, label in metrics.items() if name in series.names]
        lines = [Line(label, *series.points(name), colour=at) for at, (name, label) in enumerate(logged)]
        return chart(lines, title, go=go, share=share) if lines else None

    parts = [name for name in series.names if name.startswith("rewards/") and name.endswith("/mean")]
    ended = [name for name in series.names if name.startswith("episodes/") and any(series.points(name)[1])]
    shares = {"frac_reward_zero_std": "without spread", "completions/clipped_ratio": "truncated"}
    charts = [
        drawn("Reward", {"reward": "reward"}),
        drawn("Reward by part", {name: name.split("/")[1] for name in parts}),
        drawn("Completion length", {"completions/mean_length": "mean"}),
        drawn("Groups without spread, truncated completions", shares, share=True),
        drawn("Replies and calls of an episode", {"turns": "replies", "tools/call_frequency": "calls"}),
        drawn("Calls that failed", {"tools/failure_frequency": "failed"}, share=True),
        drawn("How episodes end", {name: name.split("/")[1] for name in ended}, share=True),
    ]
    text = "Click a curve to open that step: its groups, their completions, and the tokens."
    hint = el("p", text, class_="quiet") if any(charts) else None
    links = [link(f"step {at} ({by:+.3g})", address(PATH, run=run.name, step=at)) for at, by in falls(series)]
    fell = el("p", "The reward fell most at ", join(links, ", "), ".") if links else None
    return join([fell, el("div", *charts, class_="charts four"), hint])


def falls(series: Series) -> list[tuple[int, float]]:
    """The steps at which the reward fell most since the previous logged step, with the difference."""
    steps, values = series.points("reward")
    changes = [(int(step), now - before) for step, before, now in zip(steps[1:], values, values[1:], strict=False)]
    return sorted((fall for fall in changes if -math.inf < fall[1] < 0), key=lambda fall: fall[1])[:FALLS]


def _search(viewer: Viewer, run: RunSummary, query: Query) -> Markup:
    index = viewer.index(run.folder)
    choices = index.choices()

    def number_field(name: str, label: str) -> Markup:
        return entry(name, label, query.one(name))

    def choice_of(name: str, label: str, empty: str) -> Markup:
        return choice(name, label, ["", *choices[name]], query.one(name), empty)

    controls = form(
        PATH,
        search("find", "Search prompts and completions", query.one("find"), 'words, or "a phrase"', wide=True),
        number_field("from", "From step"), number_field("to", "to"), number_field("row", "Row of the data"),
        choice_of("part", "Reward", "total"), number_field("least", "at least"), number_field("most", "at most"),
        number_field("shortest", "Tokens from"), number_field("longest", "to"),
        choice_of("verdict", "Verdict", "any") if choices["verdict"] else None, choice_of("ended", "Ended by", "any"),
        choice("sort", "Order", list(SORTS), query.choice("sort", tuple(SORTS))), hidden(query, "run"),
    )  # fmt: skip
    results = _results(run, *index.search(query, PAGE, PAGE * query.page), query)
    return el("section", el("h2", "Find rollouts"), controls, _progress(index), results)


def _progress(index: Index) -> Markup | None:
    if index.problem:
        return message(f"Not all rollouts can be searched: {index.problem}", "warning")
    if index.progress is not None:
        done, steps = index.progress
        return message(f"The search index is being built: {done:,} of {counted(steps, 'new step')} can be searched.")
    return None


def _results(run: RunSummary, total: int, matches: Sequence[Mapping[str, Any]], query: Query) -> Markup:
    keys = [(match["step"], match["prompt"], match["rollout"]) for match in matches]
    texts, words = _texts(run, keys), words_of(query.one("find"))
    gone = el("span", "no longer stored", class_="quiet")
    body = [
        [
            link(" · ".join(map(str, key)), address(PATH, run=run.name, step=key[0], prompt=key[1], rollout=key[2])),
            number(match["reward"]), number(match["advantage"], 3), f"{match['length']:,}", match["ended"],
            match["verdict"] or "–",
            gone if (text := texts.get(key)) is None else marked(text, words),
        ]
        for key, match in zip(keys, matches, strict=True)
    ]  # fmt: skip
    header = ["step · prompt · completion", "reward", "advantage", "tokens", "ended by", "verdict", "completion"]
    shown = table(header, body, numbers=(1, 2, 3), class_="results") if body else None
    return join([pager(query, PATH, PAGE, total, "completion"), shown])


def _texts(run: RunSummary, keys: Sequence[tuple[int, int, int]]) -> dict[tuple[int, int, int], str]:
    """The completions with these numbers (step, prompt, rollout), read from the run's database."""
    if not keys:
        return {}
    marks = ", ".join("(?, ?, ?)" for _ in keys)
    with StoredRun(run.folder, looking=True) as stored:
        rows = stored.query(
            "SELECT step, prompt_index, rollout_index, completion FROM rollouts "
            f"WHERE (step, prompt_index, rollout_index) IN (VALUES {marks})",
            [number for key in keys for number in key],
        )
    return {(step, prompt, rollout): completion for step, prompt, rollout, completion in rows}


def marked(text: str, words: Sequence[str], around: int = 60) -> Markup:
    """One line of a completion around the first match of a word; all matches in the line are marked."""
    flat = " ".join(text[:20_000].split())
    lower = flat.casefold()
    if len(lower) != len(flat):  # casefold changed the length: mark nothing rather than the wrong characters
        return el("span", short(flat))
    spots = sorted((lower.find(word.casefold()), len(word)) for word in words if word.casefold() in lower)
    start = max(0, spots[0][0] - around) if spots else 0
    end, parts, at = min(len(flat), start + 3 * around), ["…" if start else ""], start
    while at < end:
        hits = [(spot, word) for word in words if (spot := lower.find(word.casefold(), at, end)) >= 0]
        if not hits:
            break
        spot, word = min(hits, key=lambda hit: (hit[0], -len(hit[1])))
        parts += [flat[at:spot], el("mark", flat[spot : spot + len(word)])]
        at = spot + len(word)
    parts += [flat[at:end], "…" if end < len(flat) else ""]
    return el("span", *parts)
