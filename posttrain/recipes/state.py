"""Where a run stands, beside weights, optimizer and random generators: what a checkpoint keeps of its loop."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class State:
    """Where the loop stands, beside weights, optimizer and random generators."""

    step: int = 0
    num_tokens: int = 0
    order: int = 0  # CRC-32 of the row numbers trained on so far, as they came
    updates: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    evaluated: bool = False  # at this step
    best: float | None = None
    evaluations_since_best: int = 0
    seconds: float = 0.0  # of steps and evaluations
    save_seconds: float = 0.0  # of checkpoints
    window: dict[str, float] = field(default_factory=dict)  # sums since the last log line
    window_steps: dict[str, int] = field(default_factory=dict)  # those that had the metric
    memory: dict[str, float] = field(default_factory=dict)  # what the method itself has to remember

    def as_json(self) -> dict[str, Any]:
        """For `from_json`. JSON has no NaN, which a metric may be although loss and gradient are finite."""
        window = {name: value if math.isfinite(value) else None for name, value in self.window.items()}
        return asdict(self) | {"window": window}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> State:
        window = {name: math.nan if value is None else value for name, value in saved["window"].items()}
        facts: dict[str, Any] = {**saved, "window": window}
        return cls(**facts)
