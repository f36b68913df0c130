"""Comparison of several methods on the same prompts from the same start, with intervals, as a table and a picture.

Everything is read from the run folders. Every evaluation of a run samples the completions of the validation prompts
with the same random numbers, so that two runs, or the start and the end of one, are compared prompt by prompt.
"""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from posttrain.errors import RunError
from posttrain.reports.curves import COLOURS, GROUND, INK
from posttrain.reports.progress import duration
from posttrain.store.atomic import write_file
from posttrain.store.files import load_json, save_json
from posttrain.store.metrics import read_metrics
from posttrain.store.stored_rollouts import StoredRun

Z95 = 1.959964  # 97.5th percentile of the standard normal distribution
Rewards = dict[tuple[str, int], float]  # (data set, row) -> reward


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean and half the width of its 95 % interval (normal; undefined for a single value)."""

    value: float
    half: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        spread = statistics.stdev(values) if len(values) > 1 else math.nan
        return cls(statistics.fmean(values), Z95 * spread / math.sqrt(len(values)))

    def __str__(self) -> str:
        return f"{self.value:.3f} ± {self.half:.3f}"


@dataclass(frozen=True, slots=True)
class Entry:
    """A method: its budget, and the rewards of its completions at the end. `change` is prompt by prompt."""

    name: str
    steps: int
    tokens: int  # trained on
    seconds: float
    reward: Mean
    change: Mean | None  # from the start
    better: int = 0  # prompts with a higher reward than at the start
    worse: int = 0
    answer_accuracy: float | None = None
    curve: tuple[tuple[int, float], ...] = ()  # (step, eval_reward)


def read_entry(name: str, folder: Path) -> Entry:
    """A finished run's entry. Raises RunError if it has no evaluation with rewards."""
    results, lines = load_json(folder / "results.json"), read_metrics(folder)
    with StoredRun(folder) as stored:
        found: dict[int, dict[tuple[str, int], list[float]]] = {}
        for one in stored.evaluations():
            if one["reward"] is not None:
                found.setdefault(one["step"], {}).setdefault((one["dataset"], one["row"]), []).append(one["reward"])
    by_step: dict[int, Rewards] = {
        step: {key: statistics.fmean(rewards) for key, rewards in prompts.items()} for step, prompts in found.items()
    }
    if not by_step:
        raise RunError(f"{folder} has no evaluation in which completions were rewarded: nothing to compare")
    last, start = by_step[max(by_step)], by_step.get(0)
    both = sorted(last.keys() & start.keys()) if start is not None and max(by_step) > 0 else []
    changes = [last[key] - start[key] for key in both] if start is not None else []
    return Entry(
        name=name,
        steps=results["steps"],
        tokens=results["num_tokens"],
        seconds=results["train_runtime"],
        reward=Mean.of(list(last.values())),
        change=Mean.of(changes) if changes else None,
        better=sum(change > 0 for change in changes),
        worse=sum(change < 0 for change in changes),
        answer_accuracy=results["final"].get("eval_answer_accuracy"),
        curve=tuple((line["step"], line["eval_reward"]) for line in lines if line.get("eval_reward") is not None),
    )


def start_of(folder: Path) -> Mean | None:
    """The rewards before training, if evaluated: the same for every run of a comparison."""
    with StoredRun(folder) as stored:
        values = [one["reward"] for one in stored.evaluations() if one["step"] == 0 and one["reward"] is not None]
    return Mean.of(values) if values else None


def table(entries: Sequence[Entry], start: Mean | None) -> Table:
    """The table: the start, then the methods by reward, best first."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for name in ("method", "tokens", "time", "reward (95 %)", "change (95 %)", "+/-"):
        shown.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    if start is not None:
        shown.add_row("before training", "", "", str(start), "", "")
    for entry in entries:
        change = "" if entry.change is None else f"{entry.change.value:+.3f} ± {entry.change.half:.3f}"
        tokens = f"{entry.tokens / 1e6:.2f}M" if entry.tokens >= 1e6 else f"{entry.tokens / 1e3:.0f}k"
        counts = "" if entry.change is None else f"{entry.better}/{entry.worse}"
        reward, took = str(entry.reward), duration(entry.seconds)
        shown.add_row(entry.name, tokens, took, reward, change, counts)
    return shown


def picture(entries: Sequence[Entry], start: Mean | None) -> bytes:
    """A PNG: reward on the validation prompts over the steps, and at the end with 95 % intervals."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure((11, 0.6 + max(3.2, 0.42 * len(entries) + 1.2)), dpi=110, facecolor=GROUND)
    figure.set_layout_engine(ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
    curves, ends = figure.subplots(1, 2)
    for at, entry in enumerate(entries):
        colour, line = COLOURS[at % len(COLOURS)], "-" if at < len(COLOURS) else "--"
        curves.plot(*zip(*entry.curve, strict=True), line, color=colour, lw=1.4, marker="o", ms=3, label=entry.name)
        ends.errorbar(entry.reward.value, -at, xerr=entry.reward.half, fmt="o", color=colour, capsize=4, lw=1.6)
    if start is not None:
        ends.axvline(start.value, color=INK, lw=1, ls=":")
        ends.text(start.value, 0.6, " before training", color=INK, fontsize=8, va="bottom")
    ends.set_yticks([-at for at in range(len(entries))], [entry.name for entry in entries])
    ends.set_ylim(-len(entries) + 0.4, 1.1)
    curves.legend(fontsize=8, frameon=False, labelcolor=INK)
    curves.set_xlabel("step", color=INK, fontsize=9)
    ends.set_xlabel("reward at the end, 95 % interval", color=INK, fontsize=9)
    curves.set_title("Reward on held-out prompts", color=INK, fontsize=11, loc="left")
    for axes in (curves, ends):
        axes.tick_params(colors=INK, labelsize=9, length=3)
        axes.grid(color=INK, alpha=0.15, lw=0.6)
        axes.set_axisbelow(True)
        for side, spine in axes.spines.items():
            spine.set(visible=side in ("left", "bottom"), color=INK, linewidth=0.6, alpha=0.5)
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    return buffer.getvalue()


def write_comparison(folder: Path, runs: Mapping[str, Path]) -> Table:
    """Write `comparison.json` and `comparison.png` of these finished runs to the folder; returns the table."""
    entries = sorted((read_entry(name, run) for name, run in runs.items()), key=lambda entry: -entry.reward.value)
    start = start_of(next(iter(runs.values())))
    folder.mkdir(parents=True, exist_ok=True)
    facts: dict[str, Any] = {
        "start": None if start is None else finite(asdict(start)),
        "methods": [finite(asdict(entry)) for entry in entries],
    }
    save_json(folder / "comparison.json", facts)
    write_file(folder / "comparison.png", picture(entries, start))
    return table(entries, start)


def finite(facts: Any) -> Any:
    """The facts with null for what is not finite (the interval of a single value), which JSON does not have."""
    if isinstance(facts, float):
        return facts if math.isfinite(facts) else None
    if isinstance(facts, Mapping):
        return {key: finite(value) for key, value in facts.items()}
    return [finite(value) for value in facts] if isinstance(facts, list | tuple) else facts
