"""Suites by name: the files in `suites/`, or a user's file or function."""

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rich.table import Table

from posttrain.base.console import text_table
from posttrain.base.errors import ConfigError, RewardError
from posttrain.base.files import path_of, table_beside
from posttrain.config.reading.explain import checked
from posttrain.config.reading.files import read_settings
from posttrain.config.schema.suite import SuiteConfig
from posttrain.rewards.python import call_function

FOLDER = Path(__file__).parent / "suites"
ALIASES = table_beside(__file__, "aliases.yaml")


def suite_names() -> list[str]:
    """The names of the built-in suites."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def find_suite(name: str) -> SuiteConfig:
    """The suite of a built-in name, a YAML or JSON file, or a `module:function` that returns its settings.

    Raises ConfigError for an unknown name and for wrong settings."""
    if name.endswith((".yaml", ".yml", ".json")):
        return checked(SuiteConfig, read_settings(path_of(name)).values, "a suite", name)
    if ":" in name:
        try:
            made = call_function(name)
        except RewardError as error:
            raise ConfigError(f"suite {error}") from error
        if isinstance(made, SuiteConfig):
            return made
        if not isinstance(made, Mapping):
            raise ConfigError(f"the suite {name} returned {type(made).__name__}; it must return a dict of settings")
        return checked(SuiteConfig, {"name": name.partition(":")[2]} | dict(made), "a suite", name)
    name = ALIASES.get(name, name)
    path = FOLDER / f"{name}.yaml"
    if name not in suite_names():
        near = get_close_matches(name, [*suite_names(), *ALIASES], n=1)
        meant = f": did you mean {near[0]}?" if near else f"; there are {', '.join(suite_names())}."
        raise ConfigError(f"there is no suite {name}{meant} A suite of your own is a .yaml file or module:function")
    return checked(SuiteConfig, read_settings(path).values, "a suite", str(path))


def with_settings(suite: SuiteConfig, given: Mapping[str, Any]) -> SuiteConfig:
    """A copy of the suite with the `given` settings replaced, validated."""
    if not given:
        return suite
    return checked(SuiteConfig, suite.model_dump() | dict(given), "a suite", f"suite {suite.name}")


def suites_table() -> Table:
    """A table of the built-in suites, for the terminal."""
    table = text_table("suite", "items", "rule", "what is asked", left=("suite", "rule", "what is asked"))
    for name in suite_names():
        suite = find_suite(name)
        rule = suite.rule if suite.kind == "generate" else suite.kind
        table.add_row(name, f"{suite.items:,}" if suite.items else "", rule, suite.about)
    return table
