"""The loop's state in a checkpoint, apart from weights, optimizer and random generators."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from posttrain.base.errors import DamagedError, RunError
from posttrain.runs.checkpoint import saved_step
from posttrain.runs.files import load_json


@dataclass(slots=True)
class State:
    """The loop's state, apart from weights, optimizer and random generators."""

    step: int = 0
    num_tokens: int = 0
    order: int = 0  # CRC-32 of the row numbers trained on so far, in their order
    updates: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    evaluated: bool = False  # at this step
    best: float | None = None
    best_loss: float | None = None  # of the same evaluation and validation set, if it has one
    evaluations_since_best: int = 0
    seconds: float = 0.0  # of steps and evaluations
    save_seconds: float = 0.0  # of checkpoints
    window: dict[str, float] = field(default_factory=dict)  # sums since the last log line
    window_steps: dict[str, int] = field(default_factory=dict)  # number of steps with the metric
    memory: dict[str, float] = field(default_factory=dict)  # the method's own state

    def take(self, metrics: Mapping[str, float]) -> None:
        """Add a step's metrics to the means of the next log line."""
        for name, value in metrics.items():
            self.window[name] = self.window.get(name, 0.0) + value
            self.window_steps[name] = self.window_steps.get(name, 0) + 1

    def means(self) -> dict[str, float]:
        """The means since the last log line; empty if all steps were skipped."""
        return {name: value / self.window_steps[name] for name, value in self.window.items()}

    def copy(self) -> State:
        """An independent copy."""
        return replace(self, window=dict(self.window), window_steps=dict(self.window_steps), memory=dict(self.memory))

    def as_json(self) -> dict[str, Any]:
        """The state for `from_json`, with null for NaN, which a metric may be even if loss and gradient are finite."""
        window = {name: value if math.isfinite(value) else None for name, value in self.window.items()}
        return asdict(self) | {"window": window}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> State:
        window = {name: math.nan if value is None else value for name, value in saved["window"].items()}
        facts: dict[str, Any] = {**saved, "window": window}
        return cls(**facts)


@dataclass(frozen=True, slots=True)
class Saved:
    """`state.json` of a checkpoint."""

    loop: State
    rng: dict[str, Any]  # the part that is not in rng.safetensors
    data: str  # the data's fingerprint
    total: int  # steps of the run
    tensors: int | None = None  # in optimizer.safetensors; None in checkpoints of earlier versions

    def as_json(self) -> dict[str, Any]:
        """The content of `state.json`, for `read`."""
        return {**{field.name: getattr(self, field.name) for field in fields(self)}, "loop": self.loop.as_json()}

    @classmethod
    def read(cls, checkpoint: Path) -> Saved:
        """Read a checkpoint's `state.json`. Raises DamagedError if it is invalid or of another step."""
        try:
            facts = load_json(checkpoint / "state.json")
            saved = cls(**{**facts, "loop": State.from_json(facts["loop"])})
        except (RunError, TypeError, KeyError, AttributeError) as error:
            raise DamagedError(f"state.json: it is not the state of a run ({error})") from error
        step = saved_step(checkpoint)
        if saved.loop.step != step:
            raise DamagedError(f"state.json: it is the state of step {saved.loop.step}, not of step {step}")
        return saved


def problems_of(checkpoint: Path) -> list[str]:
    """Problems that prevent resuming from a checkpoint with intact files, as far as they show without loading it."""
    try:
        Saved.read(checkpoint)
    except DamagedError as error:
        return [str(error)]
    return [] if (checkpoint / "config.yaml").is_file() else ["config.yaml: missing"]
