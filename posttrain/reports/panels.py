"""The panels of a run's curves: which metrics share a chart, on pages and in `curves.png`."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from posttrain.reports.chart import Line
from posttrain.reports.series import Series


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel of the grid: its metrics, and the scale of its axis."""

    title: str
    metrics: tuple[str, ...]
    share: bool = False  # between 0 and 1
    small: bool = False  # numbers such as 1e-6


PANELS = (
    Panel("Loss", ("loss",)),
    Panel("Reward", ("reward",)),
    Panel("Right format, right answer", ("format_accuracy", "answer_accuracy"), share=True),
    Panel("Accuracy: chosen above rejected", ("rewards/accuracies", "accuracy"), share=True),
    Panel("Margin: chosen − rejected", ("rewards/margins", "margin")),
    Panel("Rewards", ("rewards/chosen", "rewards/rejected", "min_reward", "mean_reward", "max_reward")),
    Panel("KL, or the baseline of rewards", ("kl", "delta")),
    Panel(
        "Groups without spread, truncated completions",
        ("frac_reward_zero_std", "completions/clipped_ratio"),
        share=True,
    ),
    Panel("Completion length", ("completions/mean_length",)),
    Panel("Share of tokens clipped", ("clip_ratio", "clip_ratio/low_mean", "clip_ratio/high_mean")),
    Panel("Explained variance of the returns", ("explained_variance",)),
    Panel("Token accuracy", ("mean_token_accuracy",), share=True),
    Panel("Entropy", ("entropy",)),
    Panel("Log-probabilities", ("logps/chosen", "logps/rejected")),
    Panel("Gradient norm", ("grad_norm",)),
    Panel("Learning rate", ("learning_rate",), small=True),
)
KNOWN = {name for panel in PANELS for name in panel.metrics}


def lines_of(panel: Panel, series: Series, axis: str) -> Iterator[Line]:
    """The panel's metrics of training, and the same of validation, dashed.

    `eval_{name}_{metric}` is that metric on the data set `name`, `eval_{metric}` on the validation set.
    """
    names = series.names
    metrics = KNOWN.union(name for name in names if not name.startswith("eval_"))
    several = len([name for name in panel.metrics if name in names]) > 1
    colour = 0
    for name in panel.metrics:
        short = name.rpartition("/")[2].removesuffix("_reward")
        for kind in [name, *(kind for kind in names if _owner(kind, metrics) == name)]:
            if kind in names:
                whose = "" if kind == name else kind.removeprefix("eval_").removesuffix(name).strip("_") or "validation"
                label = f"{short} {whose}".strip() if several else whose or "train"
                yield Line(label, *series.points(kind, axis), colour=colour, dashed=kind != name)
                colour += 1


def _owner(kind: str, metrics: Iterable[str]) -> str | None:
    """The metric that a validation's name ends with, the longest: nll_loss before loss. None for one of training."""
    if not kind.startswith("eval_"):
        return None
    return max((metric for metric in metrics if kind.endswith(f"_{metric}")), key=len, default=None)
