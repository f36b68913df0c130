"""`sweep.json`: the trials of a sweep, their settings, states and metrics."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from posttrain.base.errors import RunError
from posttrain.runner.sweep_space import Settings, names_of
from posttrain.runs.files import load_json, save_json

NAME = "sweep.json"
FORMAT = 1
WAITING, RUNNING, INTERRUPTED, FAILED = "waiting", "running", "interrupted", "failed"
FINISHED, STOPPED = "finished", "stopped early"
ENDED = (FINISHED, STOPPED)


@dataclass(slots=True)
class Trial:
    """One run: `name` is its folder, `value` the metric at its last evaluation, `best` the best one, at `best_step`.

    `stop_at`: the step after which the median rule ends it. `reason`: why it was stopped, or failed.
    """

    name: str
    settings: Settings
    state: str = WAITING
    value: float | None = None
    best: float | None = None
    best_step: int | None = None
    steps: int | None = None
    seconds: float | None = None
    stop_at: int | None = None
    reason: str | None = None

    @property
    def number(self) -> str:
        return self.name.partition("-")[0]


@dataclass(slots=True)
class Sweep:
    """All trials in the order they run, and what ranks them."""

    root: Path
    metric: str
    lower_is_better: bool
    stopping: str
    trials: list[Trial] = field(default_factory=list)

    def save(self) -> None:
        facts: dict[str, Any] = {
            "format": FORMAT,
            "metric": self.metric,
            "lower_is_better": self.lower_is_better,
            "stopping": self.stopping,
            "trials": [asdict(trial) for trial in self.trials],
        }
        save_json(self.root / NAME, facts)

    def ranked(self) -> list[Trial]:
        """The trials that have ended, best first: finished ones, then those stopped early; then the others."""

        def key(trial: Trial) -> tuple[int, float]:
            place = ENDED.index(trial.state) if trial.state in ENDED else len(ENDED)
            value = math.inf if trial.value is None else trial.value if self.lower_is_better else -trial.value
            return place, value

        return sorted(self.trials, key=key)

    @property
    def best(self) -> Trial | None:
        first = next(iter(self.ranked()), None)
        return first if first is not None and first.state == FINISHED and first.value is not None else None

    def groups(self) -> list[tuple[Settings, list[Trial]]]:
        """The finished trials by their settings without the seed, with the mean value of each group best first."""
        found: list[tuple[Settings, list[Trial]]] = []
        for trial in self.trials:
            if trial.state == FINISHED and trial.value is not None:
                rest = {path: value for path, value in trial.settings.items() if path != "seed"}
                group = next((members for settings, members in found if settings == rest), None)
                if group is None:
                    found.append((rest, [trial]))
                else:
                    group.append(trial)
        sign = 1 if self.lower_is_better else -1
        return sorted(found, key=lambda group: sign * mean_of(group[1]))


def mean_of(trials: Sequence[Trial]) -> float:
    """The mean of the trials' values."""
    return statistics.fmean(trial.value for trial in trials if trial.value is not None)


def read_sweep(root: Path) -> Sweep:
    """The sweep in a folder. Raises RunError if its file is missing or damaged."""
    facts = load_json(root / NAME)
    try:
        if facts["format"] != FORMAT:
            raise ValueError(f"format {facts['format']}")
        trials = [Trial(**trial) for trial in facts["trials"]]
        return Sweep(root, facts["metric"], facts["lower_is_better"], facts["stopping"], trials)
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{root / NAME} is damaged or of another version of posttrain: {error!r}") from None


def joined(old: Sweep, new: Sweep, settings: Sequence[Settings]) -> Sweep:
    """A sweep with the trials that `old` has and those of `settings` that it lacks, after them.

    Raises RunError if the metric or the rule differs, or if `settings` lack a trial of `old`.
    """
    for name in ("metric", "stopping"):
        if getattr(old, name) != getattr(new, name):
            raise RunError(
                f"{old.root} is a sweep with --{name} {getattr(old, name)}, not {getattr(new, name)}: give that, or "
                "another name"
            )
    lost = [trial.name for trial in old.trials if trial.settings not in settings]
    if lost:
        raise RunError(
            f"{old.root} has trials that these settings do not give: {', '.join(lost[:5])}"
            f"{f' and {len(lost) - 5} more' if len(lost) > 5 else ''}; give the same values, with further ones if you "
            "like, or another name"
        )
    known = [trial.settings for trial in old.trials]
    added = [one for one in settings if one not in known]
    names = names_of(added, [trial.name for trial in old.trials])
    new.lower_is_better = old.lower_is_better
    new.trials = [*old.trials, *(Trial(name, one) for name, one in zip(names, added, strict=True))]
    return new
