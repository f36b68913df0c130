"""Known data sets: short names, hub ids and column mappings."""

from dataclasses import dataclass, field
from functools import cache

from posttrain.base.files import table_beside


@dataclass(frozen=True, slots=True)
class KnownSet:
    """A data set on the hub, and its short name. `source` is its hub id: owner/name or owner/name/subset, with the
    default subset. `columns` maps the fields of `format` to the data's columns, and `splits` maps train and test to the
    data set's splits. `files` lists the files of a split if the repository does not."""

    name: str
    source: str
    about: str
    columns: dict[str, str] = field(default_factory=dict)
    format: str = "problem_answer"
    splits: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    @property
    def repo(self) -> str:
        """owner/name."""
        return "/".join(self.source.split("/")[:2])


@cache
def known_sets() -> dict[str, KnownSet]:
    """The known sets of datasets.yaml by short name."""
    return {name: KnownSet(name, **entry) for name, entry in table_beside(__file__, "datasets.yaml").items()}


def known_set(source: str) -> KnownSet | None:
    """The known set that a `source` names: by its short name, or by its hub id with or without a subset."""
    repo = "/".join(source.split("/")[:2]).lower()
    named = (known for known in known_sets().values() if known.repo.lower() == repo)
    return known_sets().get(source) or next(named, None)
