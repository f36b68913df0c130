"""The sides of a comparison: a source each, or several runs that differ by their seed alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, takewhile
from pathlib import Path

from posttrain.base.errors import RunError
from posttrain.base.words import counted
from posttrain.evaluation.comparing.sources import Scores, Source
from posttrain.evaluation.records import Answer


@dataclass(frozen=True, slots=True)
class Side:
    """One side: its runs, and the suites that all of them have."""

    name: str
    sources: Sequence[Source]

    def suites(self) -> list[str]:
        return [key for key in self.sources[0].suites if all(key in source.suites for source in self.sources)]

    def metric(self, key: str) -> str:
        return self.sources[0].suites[key].metric

    def is_scored(self, key: str) -> bool:
        return any(one.score is not None for source in self.sources for one in source.suites[key].answers)

    def by_item(self, key: str) -> dict[str, list[Answer]]:
        """The answers of all runs by item."""
        found: dict[str, list[Answer]] = {}
        for source in self.sources:
            for answer in source.suites[key].answers:
                found.setdefault(answer.item, []).append(answer)
        return found

    def runs(self, key: str) -> list[Scores]:
        return [source.suites[key] for source in self.sources]


def split_name(argument: str) -> tuple[str | None, str]:
    """NAME=PATH as (NAME, PATH); a path alone, even one with an equals sign, as (None, path)."""
    name, equals, path = argument.partition("=")
    if not equals or not name or not path or "/" in name or Path(argument).expanduser().exists():
        return None, argument
    return name, path


def make_sides(named: Sequence[tuple[str | None, Source]]) -> list[Side]:
    """The sides, in order: sources of one name are one side; without names, runs whose settings differ by the seed.

    If that would leave one side, every source is its own: two seeds of one method can be compared, too.
    Raises RunError if fewer than two sides are left.
    """
    grouped: dict[tuple[str, object], list[Source]] = {}
    for number, (name, source) in enumerate(named):
        seeded = source.settings is not None and source.seed is not None
        alike = ("settings", source.settings) if seeded else ("source", number)
        grouped.setdefault(("name", name) if name is not None else alike, []).append(source)
    for key, sources in list(grouped.items()):
        seeds = [source.seed for source in sources]
        if key[0] == "settings" and len(set(seeds)) < len(seeds):  # one run's checkpoints or steps
            del grouped[key]
            grouped |= {("seed", (key[1], number)): [source] for number, source in enumerate(sources)}
    if len(grouped) == 1 and named[0][0] is None:
        grouped = {("source", number): [source] for number, (_, source) in enumerate(named)}
    if len(grouped) < 2:
        raise RunError(f"there is one side only, {named[0][0]}: name at least two, such as a=RUN b=RUN")
    order = {id(source): number for number, (_, source) in enumerate(named)}
    sides = [Side(_name(key, sources), tuple(sources)) for key, sources in grouped.items()]
    return _distinct(sorted(sides, key=lambda side: order[id(side.sources[0])]))


def _name(key: tuple[str, object], sources: Sequence[Source]) -> str:
    if key[0] == "name":
        return str(key[1])
    if len(sources) == 1:
        return sources[0].name
    alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*(source.name for source in sources), strict=False))
    common = "".join(letters[0] for letters in alike).rstrip("-_./ ")
    return f"{common or sources[0].name} ({counted(len(sources), 'seed')})"


def _distinct(sides: Sequence[Side]) -> list[Side]:
    """The sides with distinct names: equal ones get the parts of their paths that differ, or a number."""
    found = []
    for name, same in groupby(sorted(sides, key=lambda side: side.name), key=lambda side: side.name):
        group = list(same)
        paths = [str(side.sources[0].path) for side in group]
        names = paths if len(set(paths)) == len(paths) else [f"{name} #{number}" for number in range(1, len(group) + 1)]
        found += [replace(side, name=new) if len(group) > 1 else side for side, new in zip(group, names, strict=True)]
    order = {id(side.sources): number for number, side in enumerate(sides)}
    return sorted(found, key=lambda side: order[id(side.sources)])


def settings_that_differ(sides: Sequence[Side], key: str) -> Mapping[str, Sequence[object]]:
    """Settings under which the answers of a suite came about that are not the same for all sides, with their values."""
    found: list[dict[str, object]] = []
    for side in sides:
        facts: dict[str, object] = {}
        for name, value in side.runs(key)[0].about.items():
            facts |= {str(inner): one for inner, one in value.items()} if isinstance(value, Mapping) else {name: value}
        facts.pop("seed", None)
        found.append(facts)
    names = dict.fromkeys(name for facts in found for name in facts)
    values = {name: [facts.get(name) for facts in found] for name in names}
    return {name: several for name, several in values.items() if any(value != several[0] for value in several)}
