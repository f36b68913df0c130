"""Comparison of several methods on the same prompts from the same start: with the start, and with one another.

Everything is read from the run folders. Every evaluation of a run samples the completions of the validation prompts
with the same random numbers, so that two runs, or the start and the end of one, are compared prompt by prompt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from posttrain.base.console import cells_of, numbers_table
from posttrain.base.errors import RunError
from posttrain.config.options import CompareOptions
from posttrain.evaluation.comparing.differences import Comparison, compare, verdict
from posttrain.evaluation.comparing.page import as_facts, differences_table, interval, sections
from posttrain.evaluation.comparing.sources import Scores, Side, Source, read_validation
from posttrain.evaluation.records import Answer
from posttrain.evaluation.statistics import Estimate, Paired, mean_by_prompt, paired_difference
from posttrain.reports import page as pages
from posttrain.reports.chart import COLOURS, Interval, Line, chart, intervals
from posttrain.reports.drawing import Drawing, write_drawings
from posttrain.runs.files import load_json, save_json
from posttrain.runs.metrics import read_metrics
from posttrain.runs.progress import duration
from posttrain.runs.stored_rollouts import StoredRun
from posttrain.runs.summary import RunSummary

SUITE = "reward on the validation prompts"


@dataclass(frozen=True, slots=True)
class Entry:
    """A method: its budget, and the rewards of its completions at the end. `change` is prompt by prompt."""

    name: str
    steps: int
    tokens: int  # trained on
    seconds: float
    reward: Estimate
    change: Paired | None  # from the start
    answer_accuracy: float | None
    curve: tuple[tuple[int, float], ...]  # (step, eval_reward)


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """A finished run's entry, its rewards before training if they were evaluated, and its last answers."""

    entry: Entry
    start: Estimate | None
    answers: Sequence[Answer]


def read_finished(name: str, folder: Path) -> ComparedRun:
    """What a finished run adds to the comparison. Raises RunError if it has no evaluation with rewards."""
    results, lines = load_json(folder / "results.json"), read_metrics(folder)
    with StoredRun(folder) as stored:
        by_step = read_validation(stored.evaluations())
    graded = {step: answers for step, answers in by_step.items() if any(one.score is not None for one in answers)}
    if not graded:
        raise RunError(f"{folder} has no evaluation in which completions were rewarded: nothing to compare")
    last = _by_item(graded[max(graded)])
    first = _by_item(graded[0]) if 0 in graded else None
    both = sorted(last.keys() & first.keys()) if first is not None and max(graded) > 0 else []
    before, after = ([fmean(rewards[item]) for item in both] for rewards in (first or {}, last))
    entry = Entry(
        name=name,
        steps=results["steps"],
        tokens=results["num_tokens"],
        seconds=results["train_runtime"],
        reward=mean_by_prompt(list(last.values())),
        change=paired_difference(before, after) if both else None,
        answer_accuracy=results["final"].get("eval_answer_accuracy"),
        curve=tuple((line["step"], line["eval_reward"]) for line in lines if line.get("eval_reward") is not None),
    )
    start = mean_by_prompt(list(first.values())) if first is not None else None
    return ComparedRun(entry, start, graded[max(graded)])


def _by_item(answers: Sequence[Answer]) -> dict[str, list[float]]:
    """The rewards of each prompt that has one."""
    found: dict[str, list[float]] = {}
    for one in answers:
        if one.score is not None:
            found.setdefault(one.item, []).append(one.score)
    return found


def against_each_other(runs: Sequence[ComparedRun]) -> Comparison:
    """Every two methods, p adjusted for all of them; in the order of `runs`, the better one as B."""
    sides = [
        Side(run.entry.name, (Source(run.entry.name, "", {SUITE: Scores("reward", run.answers)}),))
        for run in reversed(runs)
    ]
    return compare(sides, CompareOptions(all_pairs=True))


def with_the_best(comparison: Comparison, best: str) -> Comparison:
    """The comparison with the differences between the best method and the others alone."""
    (suite,) = comparison.suites
    some = [one for one in reversed(suite.differences) if one.b == best]
    return replace(comparison, suites=[replace(suite, differences=some)])


def methods_table(entries: Sequence[Entry], start: Estimate | None) -> Table:
    """The table: the start, then the methods by reward, best first, each compared with the start."""
    shown = numbers_table("method", "tokens", "time", "reward", "change", "95 % interval", "+/-")
    if start is not None:
        shown.add_row("before training", "", "", f"{start.value:.3f}", "", "", "")
    for entry in entries:
        tokens = f"{entry.tokens / 1e6:.2f}M" if entry.tokens >= 1e6 else f"{entry.tokens / 1e3:.0f}k"
        cells, change = [entry.name, tokens, duration(entry.seconds), f"{entry.reward.value:.3f}"], entry.change
        if change is not None:
            counts = f"{change.wins}/{change.losses}"
            cells += [f"{change.value:+.3f}", interval(change.low, change.high, "+"), counts]
        shown.add_row(*cells)
    return shown


def methods_figures(entries: Sequence[Entry], start: Estimate | None) -> list[Drawing]:
    """Reward on the validation prompts over the steps, and at the end with 95 % intervals."""
    lines = [
        Line(entry.name, *zip(*entry.curve, strict=True), colour=at % COLOURS, dashed=at >= COLOURS)
        for at, entry in enumerate(entries)
    ]
    rows = [
        Interval(entry.name, entry.reward.value, entry.reward.low, entry.reward.high, at % COLOURS)
        for at, entry in enumerate(entries)
    ]
    if start is not None:
        rows.append(Interval("before training", start.value, start.low, start.high))
    return [chart(lines, "Reward on held-out prompts", ends=True), intervals("Reward at the end, 95 % interval", rows)]


def shared_prompts(runs: Sequence[ComparedRun]) -> tuple[int, int]:
    """How many validation prompts every run has completions of, and how many any of them has."""
    items = [{one.item for one in run.answers} for run in runs]
    return len(set.intersection(*items)), len(set.union(*items))


def write_comparison(folder: Path, folders: Mapping[str, Path], console: Console) -> None:
    """Write `comparison.json`, `.svg` and `.html` of these finished runs to the folder, and print the tables.

    One run alone is compared with its start only.
    """
    runs = sorted(
        (read_finished(name, path) for name, path in folders.items()), key=lambda run: -run.entry.reward.value
    )
    entries, start = [run.entry for run in runs], runs[0].start
    table = methods_table(entries, start)
    (shared, every), note = shared_prompts(runs), ""
    if len(runs) > 1:
        table.caption = note = f"validation prompts: {shared:,} of {every:,} shared"
        table.caption_justify = "left"
    console.print(table)
    figures = methods_figures(entries, start)
    page: list[pages.Section] = [pages.Table("Methods", *cells_of(table), note=note), pages.charts("Curves", figures)]
    summaries = {name: RunSummary(path, name) for name, path in folders.items()}
    notes = {name: f"{run.hashtags} {run.note}".strip() for name, run in summaries.items()}
    page.append(pages.Facts("Tags and notes", {name: text for name, text in notes.items() if text}))
    pairs = []
    if len(runs) > 1:
        found = against_each_other(runs)
        best = with_the_best(found, entries[0].name)
        console.print(differences_table(best.suites[0], "95 %"))
        for one in best.suites[0].differences:
            console.print(verdict(one))
        page += sections(best)
        pairs = [as_facts(one, flips=False) for one in found.suites[0].differences]
    folder.mkdir(parents=True, exist_ok=True)
    facts = {
        "start": start and asdict(start),
        "methods": [asdict(entry) for entry in entries],
        "prompts": {"shared": shared, "all": every},
        "pairs": pairs,
    }
    save_json(folder / "comparison.json", facts)
    write_drawings(folder / "comparison.svg", figures)
    pages.write_page(folder / "comparison.html", "Comparison of methods", page)
