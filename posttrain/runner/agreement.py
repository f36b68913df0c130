"""What all ranks of a run must have in common when they start: settings, options, versions, their number on a machine.

The first rank decides what is trained, with its own settings; a rank that was started with others is refused here,
before anything is written. The data of the ranks is compared once it is read (training/job.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.config import Stage
from posttrain.errors import RankError
from posttrain.ranks import Ranks
from posttrain.store.files import flat
from posttrain.store.provenance import environment, redact

OWN = ("name",)  # of an unnamed run, it has the time


def refuse_differences(ranks: Ranks, stages: Sequence[Stage], options: Mapping[str, Any]) -> None:
    """Raise RankError on every rank if one was started otherwise than the first; `options` are those of the command."""
    if ranks.size == 1:
        return
    here = environment()
    versions = {"Python": here["python"], **here["versions"], "commit of posttrain": here["git_commit"]}
    facts = {**_settings(stages), **options, **versions, "processes on the machine (--nproc)": ranks.locals}
    if lines := ranks.differences(facts):
        raise RankError(
            redact("\n  ".join(["the ranks were not started alike:", *lines]))
            + "\nStart every machine with the same command and settings, and install the same versions on each"
        )


def _settings(stages: Sequence[Stage]) -> dict[str, Any]:
    """Every setting by its key; that of a named stage, with its name."""
    found: dict[str, Any] = {}
    for stage in stages:
        before = f"stage {stage.name}: " if stage.name else ""
        values = flat(stage.config.model_dump(mode="json"), lists=True) | {"init_from": stage.init_from}
        found |= {f"{before}{key}": value for key, value in values.items() if key not in OWN}
    return found
