"""`train CONFIG --method all`: compares every method that the data allows, with the same start and the same budget.

The settings define the budget: the same prompts or examples in the same order, `training.batch_size` per step, the same
number of steps, seed and validation prompts. Methods are compared by the rewards of their validation completions.

Everything is read from the run folders. Every evaluation of a run samples the completions of the validation prompts
with the same random numbers, so two runs, or the start and the end of one run, can be compared prompt by prompt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from posttrain.base.console import PlainConsole, cells_of, numbers_table
from posttrain.base.errors import ConfigError, DataError, RunError
from posttrain.base.log import log
from posttrain.config import Stage, load
from posttrain.config.options import CompareOptions
from posttrain.evaluation.comparing.differences import Comparison, compare, verdict
from posttrain.evaluation.comparing.page import as_facts, differences_table, interval, sections
from posttrain.evaluation.comparing.sources import Scores, Side, Source, read_validation
from posttrain.evaluation.records import Answer, scores_by_item
from posttrain.evaluation.statistics import Estimate, Paired, mean_by_prompt, paired_difference
from posttrain.models.load import load_tokenizer
from posttrain.reports import page as pages
from posttrain.reports.chart import COLOURS, Interval, Line, chart, intervals
from posttrain.reports.drawing import Drawing, write_drawings
from posttrain.runs.files import load_json, save_json
from posttrain.runs.metrics import read_metrics
from posttrain.runs.progress import duration
from posttrain.runs.stored_rollouts import StoredRun
from posttrain.runs.summary import RunSummary
from posttrain.training.job import data_of


def methods_as_stages(
    config: str | None, overrides: Sequence[str], flags: Mapping[str, str], names: Sequence[str]
) -> tuple[Stage, ...]:
    """The settings with each method in turn, as independent stages. A method is dropped with a warning if its settings
    or the data do not allow it. Raises ConfigError with the reasons if fewer than two methods remain."""
    stages: list[Stage] = []
    refused: dict[str, str] = {}
    for name in names:
        try:
            settings = load(config, overrides, {**flags, "method.type": name}).config
            if not (settings.rewards and settings.evaluates and settings.rollout.save):
                raise ConfigError(
                    "methods are compared by the rewards of their completions: set rewards, data.validation, e.g. "
                    "{rows: 100}, and evaluation.eval_steps above 0, and keep rollout.save: true"
                )
            data_of(settings, settings.models[0], load_tokenizer(settings.models[0]))
        except (ConfigError, DataError) as error:
            refused[name] = str(error)
            continue
        stages.append(Stage(name, None, settings))
    reasons = list(dict.fromkeys(refused.values()))
    if not stages and len(reasons) == 1:
        raise ConfigError(reasons[0])
    if len(stages) < 2:
        lines = "".join(f"\n  {name}: {reason}" for name, reason in refused.items())
        raise ConfigError(f"--method: fewer than two methods can be compared:{lines}")
    for name, reason in refused.items():
        log.warning("dropped from the comparison: %s: %s", name, " ".join(reason.split()))
    return tuple(stages)


def compare_methods(root: Path, stages: Sequence[Stage]) -> None:
    """For every model, write `comparison/` in the folder of the runs and print its tables, without failed runs."""
    models = stages[0].config.models
    for index, model in enumerate(models):
        folders = {stage.name: stage.folder(root, index, several_stages=True) for stage in stages}
        finished = {name: folder for name, folder in folders.items() if RunSummary(folder).state == "finished"}
        if not finished:
            continue
        folder = root / "comparison" / (model.folder_name if len(models) > 1 else "")
        write_comparison(folder, finished, PlainConsole())
        log.info("compared: %s", folder / "comparison.html")


SUITE = "reward on the validation prompts"


@dataclass(frozen=True, slots=True)
class Entry:
    """A method: its budget, and the final rewards of its completions."""

    name: str
    steps: int
    tokens: int  # number of tokens trained on
    seconds: float
    reward: Estimate
    change: Paired | None  # change since the start, prompt by prompt
    answer_accuracy: float | None
    curve: tuple[tuple[int, float], ...]  # (step, eval_reward)


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """A finished run's entry, its rewards before training if they were evaluated, and its last answers."""

    entry: Entry
    start: Estimate | None
    answers: Sequence[Answer]


def read_finished(name: str, folder: Path) -> ComparedRun:
    """Read a finished run for the comparison. Raises RunError if the run has no evaluation with rewards."""
    results, lines = load_json(folder / "results.json"), read_metrics(folder)
    with StoredRun(folder) as stored:
        by_step = read_validation(stored.evaluations())
    graded = {step: answers for step, answers in by_step.items() if any(a.score is not None for a in answers)}
    if not graded:
        raise RunError(f"{folder} has no evaluation in which completions were rewarded: nothing to compare")
    final = max(graded)
    last, first = scores_by_item(graded[final]), scores_by_item(graded[0]) if 0 in graded else None
    both = sorted(last.keys() & first.keys()) if first is not None and final > 0 else []
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
    return ComparedRun(entry, mean_by_prompt(list(first.values())) if first is not None else None, graded[final])


def against_each_other(runs: Sequence[ComparedRun]) -> tuple[Comparison, Comparison]:
    """Compare every pair of methods, with p adjusted for all pairs; and of these, the best method with the others.
    `runs`: best first; the better of a pair is B."""
    names = [run.entry.name for run in reversed(runs)]
    suites = [{SUITE: Scores("reward", run.answers)} for run in reversed(runs)]
    sides = [Side(name, (Source(name, "", suite),)) for name, suite in zip(names, suites, strict=True)]
    comparison = compare(sides, CompareOptions(all_pairs=True))
    (suite,) = comparison.suites
    of_best = [difference for difference in reversed(suite.differences) if difference.b == names[-1]]
    return comparison, replace(comparison, suites=[replace(suite, differences=of_best)])


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
    """Plots of the reward on validation prompts: over the steps, and at the end with 95 % intervals."""
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
    """The number of validation prompts that every run completed, and the number that at least one run completed."""
    items = [{answer.item for answer in run.answers} for run in runs]
    return len(set.intersection(*items)), len(set.union(*items))


def write_comparison(folder: Path, folders: Mapping[str, Path], console: Console) -> None:
    """Write `comparison.json`, `.svg` and `.html` for these finished runs to the folder, and print the tables.
    A single run is only compared with its start."""
    finished = [read_finished(name, path) for name, path in folders.items()]
    runs = sorted(finished, key=lambda run: -run.entry.reward.value)
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
        comparison, best = against_each_other(runs)
        console.print(differences_table(best.suites[0], "95 %"))
        for difference in best.suites[0].differences:
            console.print(verdict(difference))
        page += sections(best)
        pairs = [as_facts(difference, flips=False) for difference in comparison.suites[0].differences]
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
