"""Data: sources, formats, templates and tokenisation. `prepare` runs every step; `explore` shows the result."""

from posttrain.data.explore import Selection, explore, overview
from posttrain.data.kinds import KINDS, Dataset
from posttrain.data.prepare import Options, Prepared, longest_sequence, prepare, prepare_run
from posttrain.data.tasks import arithmetic_problems

__all__ = [
    "KINDS", "Dataset", "Options", "Prepared", "Selection", "arithmetic_problems", "explore", "longest_sequence",
    "overview", "prepare", "prepare_run",
]  # fmt: skip
