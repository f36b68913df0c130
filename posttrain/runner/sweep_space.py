"""The trials of a sweep: values of settings, over a grid or at random. Imports no torch."""

import itertools
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from posttrain.base.errors import ConfigError

MOST_TRIALS = 10_000
RANGE = re.compile(r"(?P<low>[-+]?[\d.]+(?:e[-+]?\d+)?)\.\.(?P<high>[-+]?[\d.]+(?:e[-+]?\d+)?)", re.IGNORECASE)
CLOSING = {"[": "]", "{": "}", "(": ")", '"': '"', "'": "'"}
ATTEMPTS = 1000  # for another random trial than those there are

Settings = dict[str, str]  # dotted path -> value as typed


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `low` to `high`, both included; whole ones if both are written so."""

    low: float
    high: float
    whole: bool

    def __len__(self) -> int:
        """Number of values; 0 for fractions, which are endless."""
        return int(self.high) - int(self.low) + 1 if self.whole else 0

    @property
    def values(self) -> tuple[str, ...]:
        """Every whole number."""
        return tuple(map(str, range(int(self.low), int(self.high) + 1)))

    def sample(self, source: random.Random) -> str:
        """A number: log-uniform if all are above 0, else uniform. Fractions have three digits."""
        low, high = (self.low - 0.5, self.high + 0.5) if self.whole else (self.low, self.high)
        value = math.exp(source.uniform(math.log(low), math.log(high))) if self.low > 0 else source.uniform(low, high)
        if self.whole:
            return str(min(max(round(value), int(self.low)), int(self.high)))
        return f"{min(max(float(f'{value:.3g}'), self.low), self.high):g}"


@dataclass(frozen=True, slots=True)
class Space:
    """`swept`: the values of each swept setting, or their range; `fixed`: overrides that all trials share."""

    swept: Mapping[str, tuple[str, ...] | Range]
    fixed: tuple[str, ...]

    def trials(self, at_random: int | None, seed: int) -> list[Settings]:
        """All combinations, the last setting varying fastest; or `at_random` different ones, in random order.

        Raises ConfigError for a range of fractions in a grid, and for more trials than there are combinations.
        """
        endless = next((path for path, values in self.swept.items() if not len(values)), None)
        if endless is not None and at_random is None:
            raise ConfigError(f"{endless}: a range of fractions has no end of values: add --random N, or list values")
        size = math.prod(map(len, self.swept.values()))  # 0: endless
        if size and at_random is not None and at_random > size:
            raise ConfigError(f"--random {at_random}: there are only {size} combinations; leave --random out for all")
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
        found: list[Settings] = []
        for _ in range(count * ATTEMPTS):
            if len(found) == count:
                break
            trial = {
                path: values.sample(source) if isinstance(values, Range) else source.choice(values)
                for path, values in self.swept.items()
            }
            if trial not in found:
                found.append(trial)
        if len(found) < count:
            raise ConfigError(f"--random {count}: only {len(found)} different trials were found; widen the ranges")
        return found


def read_space(overrides: Sequence[str]) -> Space:
    """The space of `a.b=1,2,3` and `a.b=1e-6..1e-4`; an override with a single value is fixed.

    Raises ConfigError for an empty range, a value that is empty or given twice, and a setting that is given twice.
    """
    swept: dict[str, tuple[str, ...] | Range] = {}
    fixed: list[str] = []
    for text in overrides:
        path, equals, value = text.partition("=")
        path = path.strip().removeprefix("--")
        if path in swept or any(path == other.partition("=")[0].strip() for other in fixed):
            raise ConfigError(f"{path} is given twice")
        values = split_values(value) if equals else []
        if found := RANGE.fullmatch(value.strip()):
            swept[path] = _range(text, found["low"], found["high"])
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
    """The values between the commas outside of brackets and quotes."""
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
        found = Range(float(low), float(high), all(re.fullmatch(r"[-+]?\d+", end) for end in (low, high)))
    except ValueError:
        raise ConfigError(f"{text}: a range has two numbers, such as 1e-6..1e-4") from None
    if not found.low < found.high:
        raise ConfigError(f"{text}: the range is empty: {low} is not below {high}")
    if not math.isfinite(found.high - found.low):
        raise ConfigError(f"{text}: the range is not finite")
    return found


def names_of(trials: Sequence[Settings], taken: Sequence[str] = ()) -> list[str]:
    """A folder name for each trial: its number, after those that are `taken`, and its settings."""
    width = max(2, len(str(len(taken) + len(trials))))
    return [_name(number, trial, width) for number, trial in enumerate(trials, start=len(taken) + 1)]


def _name(number: int, trial: Settings, width: int) -> str:
    words = "-".join(f"{path.rpartition('.')[2]}-{value}" for path, value in trial.items())
    return f"{number:0{width}}-{re.sub(r'[^A-Za-z0-9_.+]+', '-', words)}"[:80].rstrip("-.")


def short_names(paths: Sequence[str]) -> dict[str, str]:
    """Each path's last part, or the whole path where the last parts of two are equal."""
    last = [path.rpartition(".")[2] for path in paths]
    return {path: name if last.count(name) == 1 else path for path, name in zip(paths, last, strict=True)}
