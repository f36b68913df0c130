"""Early stopping of bad trials by the median rule of Vizier (Golovin et al. 2017, section 3.2.2)."""

import math
import statistics
from collections.abc import Mapping, Sequence

FEWEST = 3  # trials to compare with; fewer stop none
PATIENCE = 2  # evaluations after step 0 before a trial may be stopped: one may be bad luck

Curve = Sequence[tuple[int, float | None]]  # (step, value) of every evaluation in order; None: not finite


def median_to_beat(step: int, earlier: Sequence[Curve], lower_is_better: bool) -> float | None:
    """The median, over the earlier trials that reached `step`, of the mean of their values up to it.

    None with fewer than FEWEST such trials. The evaluation before training, at step 0, does not count.
    """
    means = []
    for curve in earlier:
        values = [_worst(value, lower_is_better) for at, value in curve if 0 < at <= step]
        if values and max(at for at, _ in curve) >= step:
            means.append(statistics.fmean(values))
    return statistics.median(means) if len(means) >= FEWEST else None


def is_hopeless(curve: Curve, earlier: Sequence[Curve], lower_is_better: bool) -> bool:
    """Whether the best value of `curve` so far is worse than the median of the others at its last step."""
    values = [_worst(value, lower_is_better) for at, value in curve if at > 0]
    median = median_to_beat(curve[-1][0], earlier, lower_is_better) if len(values) >= PATIENCE else None
    if median is None:
        return False
    return min(values) > median if lower_is_better else max(values) < median


def _worst(value: float | None, lower_is_better: bool) -> float:
    if value is None or not math.isfinite(value):
        return math.inf if lower_is_better else -math.inf
    return value


def curve_of(lines: Sequence[Mapping[str, float | None]], metric: str) -> list[tuple[int, float | None]]:
    """The metric at every step where it was measured, from the lines of metrics.jsonl."""
    return [(int(line["step"] or 0), line[metric]) for line in lines if metric in line]
