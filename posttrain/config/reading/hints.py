"""Names of settings in other systems, and what to write instead: for messages, docs/migrating.md and imports."""

import re
from functools import cache

from posttrain.base.files import table_beside
from posttrain.config.reading.layers import ALIASES
from posttrain.config.schema.methods import PPO_NAMES

_TARGET = re.compile(
    r"write ([a-z_]+(?:\.[a-z_0-9]+)*)(?:: ([\w-]+))?(?:, one of .*|[;,] (?!e\.g\. )(.*))?( \(ppo: [\w.]+\))?"
)


@cache
def hints() -> dict[str, str]:
    """The hints of hints.yaml by name."""
    return {name: text for text, names in table_beside(__file__, "hints.yaml").items() for name in names.split()}


def hint(name: str) -> str | None:
    """The hint for an unknown name that another system has; otherwise None."""
    if name in hints():
        return hints()[name]
    for section, aliases in ALIASES.items():
        if name in aliases:
            own = PPO_NAMES.get(aliases[name][0]) if section == "method" else None
            path = ".".join([section.removesuffix("s"), *aliases[name]])
            return f"write {path}" + (f" (ppo: method.{own})" if own else "")
    return None


def target(name: str) -> tuple[str, str | None, str] | None:
    """The setting that a name of another system stands for, the word that it takes if the name's value is true (None:
    the value itself), and what the hint adds; None if no hint says that."""
    found = _TARGET.fullmatch(hint(name) or "")
    return (found[1], found[2], found[3] or "") if found else None
