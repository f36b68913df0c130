"""`curves.png`: the trainings side by side, and their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import PercentFormatter

from posttrain.quickstart.measure import Measured
from posttrain.reports.curves import plain_axes, png_of
from posttrain.reports.design import LIGHT

# Stage -> its title, and the plotted metric
STAGES = {
    "sft": ("1. SFT: loss", "loss"),
    "reward": ("2. Reward model: pairs in the right order", "accuracy"),
    "dpo": ("3. DPO: pairs in the right order", "rewards/accuracies"),
    "ppo": ("4. PPO: the reward model's reward", "reward"),
    "grpo": ("5. GRPO: the rule's reward", "reward"),
}


def picture(metrics: Mapping[str, Sequence[dict[str, Any]]], measured: Mapping[str, Measured]) -> bytes:
    """A PNG: a panel per stage with its metric over the steps, then right answers with 95 % intervals.

    `metrics` has the lines of every stage's `metrics.jsonl`.
    """
    figure = Figure((14, 7), dpi=110, facecolor=LIGHT.ground, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
    panels = figure.subplots(2, 3).flatten()
    for axes, (stage, (title, metric)) in zip(panels, STAGES.items(), strict=False):
        curve(axes, metrics[stage], metric)
        style(axes, title)
        if metric.endswith(("accuracy", "accuracies")):
            axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.set_xlabel("step", color=LIGHT.ink, fontsize=9)
    panels[0].legend(fontsize=9, frameon=False, labelcolor=LIGHT.ink)
    bars(panels[-1], measured)
    return png_of(figure)


def curve(axes: Axes, lines: Sequence[dict[str, Any]], name: str) -> None:
    """A metric in training as a line, in validation as dots joined by dashes."""
    for key, label, look in ((name, "training", "-"), (f"eval_{name}", "validation", "o--")):
        points = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
        colour = LIGHT.series[0 if label == "training" else 1]
        axes.plot(*zip(*points, strict=True), look, color=colour, lw=1.4, ms=4, label=label)


def bars(axes: Axes, measured: Mapping[str, Measured]) -> None:
    """Right answers on held-out problems."""
    for at, model in enumerate(measured.values()):
        low, high = model.right.interval
        value = model.right.value
        axes.bar(at, value, color=LIGHT.series[at], width=0.6)
        axes.errorbar(at, value, [[value - low], [high - value]], color=LIGHT.ink, capsize=5, lw=1.4)
        axes.text(at, high + 0.015, f"{value:.1%}", color=LIGHT.ink, ha="center", fontsize=11, fontweight="bold")
    axes.set_xticks(range(len(measured)), list(measured))
    axes.set_ylim(0, 1.05)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    style(axes, "Right answers, held-out problems")
    axes.tick_params(axis="x", labelsize=11, length=0)
    axes.grid(False, axis="x")


def style(axes: Axes, title: str) -> None:
    axes.set_title(title, color=LIGHT.ink, fontsize=11, loc="left")
    axes.set_facecolor(LIGHT.ground)
    plain_axes(axes)
