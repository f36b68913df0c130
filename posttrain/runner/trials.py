"""The trials of a sweep: their settings, over a grid or at random; their records in `sweep.json`; early stopping."""

import itertools
import math
import random
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rich.table import Table

from posttrain.base.console import text_table
from posttrain.base.errors import ConfigError, RunError
from posttrain.runs.files import load_json, save_json

MOST_TRIALS = 10_000
RANGE = re.compile(r"(?P<low>[-+]?[\d.]+(?:e[-+]?\d+)?)\.\.(?P<high>[-+]?[\d.]+(?:e[-+]?\d+)?)", re.IGNORECASE)
CLOSING = {"[": "]", "{": "}", "(": ")", '"': '"', "'": "'"}
TEXTS = ("trial", "folder", "")  # columns of texts in tables of trials
ATTEMPTS = 1000  # attempts per trial to sample settings that no other trial has

Settings = dict[str, str]  # dotted path -> value as typed


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `low` to `high`, both included; only whole numbers if both ends are written as whole numbers."""

    low: float
    high: float
    whole: bool

    def __len__(self) -> int:
        """The number of values; 0 for a range of fractions, which is endless."""
        return int(self.high) - int(self.low) + 1 if self.whole else 0

    @property
    def values(self) -> tuple[str, ...]:
        """Every whole number of the range."""
        return tuple(map(str, range(int(self.low), int(self.high) + 1)))

    def sample(self, source: random.Random) -> str:
        """A random number: log-uniform if `low` is above 0, otherwise uniform. Fractions have three digits."""
        low, high = (self.low - 0.5, self.high + 0.5) if self.whole else (self.low, self.high)
        value = math.exp(source.uniform(math.log(low), math.log(high))) if self.low > 0 else source.uniform(low, high)
        if self.whole:
            return str(min(max(round(value), int(self.low)), int(self.high)))
        return f"{min(max(float(f'{value:.3g}'), self.low), self.high):g}"


@dataclass(frozen=True, slots=True)
class Space:
    """`swept`: the values, or the range, of each swept setting; `fixed`: overrides that all trials share."""

    swept: Mapping[str, tuple[str, ...] | Range]
    fixed: tuple[str, ...]

    def trials(self, at_random: int | None, seed: int) -> list[Settings]:
        """All combinations, with the last setting varying fastest; or `at_random` different ones in random order.
        Raises ConfigError for a range of fractions in a grid, and for more trials than there are combinations."""
        endless = next((path for path, values in self.swept.items() if not len(values)), None)
        if endless is not None and at_random is None:
            raise ConfigError(f"{endless}: a range of fractions has too many values: add --random N, or list values")
        size = math.prod(map(len, self.swept.values()))  # 0: endless
        if size and at_random is not None and at_random > size:
            raise ConfigError(f"--random {at_random}: there are only {size} combinations; omit --random to try all")
        count = size if at_random is None else at_random
        if count > MOST_TRIALS:
            raise ConfigError(f"{count:,} trials are more than {MOST_TRIALS:,}: sweep fewer values, or use --random N")
        source = random.Random(seed)
        if not 0 < size <= MOST_TRIALS:
            return self._sampled(count, source)
        lists = (values.values if isinstance(values, Range) else values for values in self.swept.values())
        grid = [dict(zip(self.swept, values, strict=True)) for values in itertools.product(*lists)]
        return grid if at_random is None else source.sample(grid, at_random)

    def _sampled(self, count: int, source: random.Random) -> list[Settings]:
        trials: list[Settings] = []
        for _ in range(count * ATTEMPTS):
            if len(trials) == count:
                break
            trial = {
                path: values.sample(source) if isinstance(values, Range) else source.choice(values)
                for path, values in self.swept.items()
            }
            if trial not in trials:
                trials.append(trial)
        if len(trials) < count:
            raise ConfigError(f"--random {count}: only {len(trials)} different trials were found; widen the ranges")
        return trials


def read_space(overrides: Sequence[str]) -> Space:
    """Parse overrides such as `a.b=1,2,3` and `a.b=1e-6..1e-4`; an override with a single value is fixed.
    Raises ConfigError for an empty range, a value that is empty or given twice, and a setting that is given twice."""
    swept: dict[str, tuple[str, ...] | Range] = {}
    fixed: list[str] = []
    for text in overrides:
        path, equals, value = text.partition("=")
        path = path.strip().removeprefix("--")
        if path in swept or any(path == other.partition("=")[0].strip() for other in fixed):
            raise ConfigError(f"{path} is given twice")
        values = split_values(value) if equals else []
        if match := RANGE.fullmatch(value.strip()):
            swept[path] = _range(text, match["low"], match["high"])
        elif len(values) < 2:
            fixed.append(text)
        elif "" in values:
            raise ConfigError(f"{text}: a value is empty; give values such as {path}=1,2,3")
        elif len(set(values)) < len(values):
            raise ConfigError(f"{text}: a value is given twice")
        else:
            swept[path] = tuple(values)
    return Space(swept, tuple(fixed))


def split_values(text: str) -> list[str]:
    """The values of a list, split at the commas outside brackets and quotes."""
    values, start, inside = [""], 0, list[str]()
    for at, character in enumerate(text):
        if inside and character == inside[-1]:
            inside.pop()
        elif character in CLOSING and not (inside and inside[-1] in "\"'") and (character not in "\"'" or at == start):
            inside.append(CLOSING[character])
        elif character == "," and not inside:
            values.append("")
            start = at + 1
            continue
        values[-1] += character
    return [value.strip() for value in values]


def _range(text: str, low: str, high: str) -> Range:
    try:
        span = Range(float(low), float(high), all(re.fullmatch(r"[-+]?\d+", end) for end in (low, high)))
    except ValueError:
        raise ConfigError(f"{text}: a range has two numbers, such as 1e-6..1e-4") from None
    if not span.low < span.high:
        raise ConfigError(f"{text}: the range is empty: {low} is not below {high}")
    if not math.isfinite(span.high - span.low):
        raise ConfigError(f"{text}: the range is not finite")
    return span


def short_names(paths: Sequence[str]) -> dict[str, str]:
    """Each path's last part, or the whole path if two have the same last part."""
    last = [path.rpartition(".")[2] for path in paths]
    return {path: name if last.count(name) == 1 else path for path, name in zip(paths, last, strict=True)}


NAME = "sweep.json"
FORMAT = 1
WAITING, RUNNING, INTERRUPTED, FAILED = "waiting", "running", "interrupted", "failed"
FINISHED, STOPPED = "finished", "stopped early"
ENDED = (FINISHED, STOPPED)


@dataclass(slots=True)
class Trial:
    """One run: `name` is its folder, `value` the metric at the last evaluation, `best` the best value, at `best_step`.
    `stop_at`: the step after which the median rule ends the run. `reason`: why the run was stopped early or failed."""

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


def trials_of(settings: Sequence[Settings], earlier: int = 0) -> list[Trial]:
    """A trial for each of the settings. Folders are named by numbers, which continue after `earlier`, and settings."""
    width, trials = max(2, len(str(earlier + len(settings)))), list[Trial]()
    for number, values in enumerate(settings, start=earlier + 1):
        words = "-".join(f"{path.rpartition('.')[2]}-{value}" for path, value in values.items())
        name = f"{number:0{width}}-{re.sub(r'[^A-Za-z0-9_.+]+', '-', words)}"[:80].rstrip("-.")
        trials.append(Trial(name, values))
    return trials


@dataclass(slots=True)
class Sweep:
    """All trials in the order of their runs, and the metric that ranks them."""

    root: Path
    metric: str
    lower_is_better: bool
    stopping: str
    trials: list[Trial] = field(default_factory=list)

    def save(self) -> None:
        facts = asdict(self)
        del facts["root"]
        save_json(self.root / NAME, {"format": FORMAT, **facts})

    def ranked(self) -> list[Trial]:
        """All trials: first those that finished, then those stopped early, each best first; then the rest."""

        def key(trial: Trial) -> tuple[int, float]:
            group = ENDED.index(trial.state) if trial.state in ENDED else len(ENDED)
            value = math.inf if trial.value is None else trial.value if self.lower_is_better else -trial.value
            return group, value

        return sorted(self.trials, key=key)

    @property
    def best(self) -> Trial | None:
        first = next(iter(self.ranked()), None)
        return first if first is not None and first.state == FINISHED and first.value is not None else None

    def groups(self) -> list[tuple[Settings, list[Trial]]]:
        """The finished trials grouped by their settings without the seed; the group with the best mean comes first."""
        groups: dict[frozenset[tuple[str, str]], tuple[Settings, list[Trial]]] = {}
        for trial in self.trials:
            if trial.state == FINISHED and trial.value is not None:
                rest = {path: value for path, value in trial.settings.items() if path != "seed"}
                groups.setdefault(frozenset(rest.items()), (rest, []))[1].append(trial)
        sign = 1 if self.lower_is_better else -1
        return sorted(groups.values(), key=lambda group: sign * mean_of(group[1]))


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
        raise RunError(f"{root / NAME} is damaged or from another version of posttrain: {error!r}") from None


def joined(old: Sweep, new: Sweep) -> Sweep:
    """The sweep `new` with the trials of `old`, followed by those whose settings `old` lacks.
    Raises RunError if the metric or the stopping rule differs, or if `new` lacks the settings of a trial of `old`."""
    known, wanted = ([trial.settings for trial in sweep.trials] for sweep in (old, new))
    for name in ("metric", "stopping"):
        if getattr(old, name) != getattr(new, name):
            raise RunError(
                f"{old.root} is a sweep with --{name} {getattr(old, name)}, not {getattr(new, name)}: use the "
                "same, or choose another name"
            )
    lost = [trial.name for trial in old.trials if trial.settings not in wanted]
    if lost:
        raise RunError(
            f"{old.root} has trials that these values do not include: {', '.join(lost[:5])}"
            f"{f' and {len(lost) - 5} more' if len(lost) > 5 else ''}; give the same values (you may add some), or "
            "choose another name"
        )
    added = [settings for settings in wanted if settings not in known]
    return replace(old, root=new.root, trials=[*old.trials, *trials_of(added, len(old.trials))])


# Early stopping of bad trials by the median rule of Vizier (Golovin et al. 2017, section 3.2.2).
FEWEST = 3  # number of earlier trials below which no trial is stopped
PATIENCE = 2  # evaluations after step 0 before a trial may be stopped: a single one may be bad luck

Curve = Sequence[tuple[int, float | None]]  # (step, value) of every evaluation in order; None: not finite


def median_to_beat(step: int, earlier: Sequence[Curve], lower_is_better: bool) -> float | None:
    """The median, over the earlier trials that reached `step`, of the mean of their values up to `step`.
    None with fewer than FEWEST such trials. The evaluation before training, at step 0, does not count."""
    reached = (curve for curve in earlier if any(at >= step for at, _ in curve))
    known = ([_worst(value, lower_is_better) for at, value in curve if 0 < at <= step] for curve in reached)
    means = [statistics.fmean(values) for values in known if values]
    return statistics.median(means) if len(means) >= FEWEST else None


def is_hopeless(curve: Curve, earlier: Sequence[Curve], lower_is_better: bool) -> bool:
    """Whether the best value of `curve` is worse than `median_to_beat` at its last step."""
    values = [_worst(value, lower_is_better) for at, value in curve if at > 0]
    median = median_to_beat(curve[-1][0], earlier, lower_is_better) if len(values) >= PATIENCE else None
    return median is not None and (min(values) > median if lower_is_better else max(values) < median)


def _worst(value: float | None, lower_is_better: bool) -> float:
    return (math.inf if lower_is_better else -math.inf) if value is None else value


def curve_of(lines: Sequence[Mapping[str, float | None]], metric: str) -> list[tuple[int, float | None]]:
    """The metric at every step where it was measured, from the lines of metrics.jsonl."""
    return [(int(line["step"] or 0), line[metric]) for line in lines if metric in line]


def planned(sweep: Sweep) -> Table:
    """The table of trials before they run, with the state of trials that an earlier sweep started."""
    shown = text_table("folder", *short_names(list(sweep.trials[0].settings)).values(), "", left=TEXTS)
    for trial in sweep.trials:
        shown.add_row(trial.name, *trial.settings.values(), "" if trial.state == WAITING else trial.state)
    return shown
