"""Progress of a training run: a live bar on a terminal; lines elsewhere and in the log."""

import logging
import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Self

from rich.console import Console
from rich.progress import TextColumn
from rich.table import Column

from posttrain.base.console import PlainConsole, bar
from posttrain.runs.logs import QUIET_LOGGER

SPEED_WINDOW_S = 60.0  # time window of speed and ETA
# What a validation shows first: the methods' main metrics, then the five numbers of the tagged format.
MAIN = ("loss", "rewards/accuracies", "rewards/margins", "reward", "format_accuracy", "answer_accuracy",
        "reasoning_share", "reasoning_length", "accuracy")  # fmt: skip
VERDICTS = ("/correct", "/wrong", "/timeout", "/crashed", "/bad_gold", "/not_applicable", "/left_out", "_ratio")
log = logging.getLogger(QUIET_LOGGER)


class TrainingProgress:
    """Progress of a training run: step, `shown` metrics, tokens/s and ETA. A context manager around the loop.

    On a terminal, a bar is updated at every step; elsewhere, a line is printed every `logging_steps`. These lines and
    validation lines also go to `training.log`.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        start_step: int = 0,
        logging_steps: int = 10,
        shown: Sequence[str] = ("loss",),
        console: Console | None = None,
    ):
        self._total, self._step, self._logging_steps, self._shown = total_steps, start_step, logging_steps, shown
        self._console = console or PlainConsole(stderr=True)
        self._tokens = 0
        self._marks = deque([(time.monotonic(), start_step, 0)])  # time (s), step, tokens since the start
        self._values: dict[str, Any] = {}
        self._validated: Mapping[str, Any] = {}  # the metrics of the last validation
        facts = TextColumn("{task.fields[facts]}", table_column=Column())  # this column wraps on a narrow terminal
        room = max(4, min(40, self._console.width - 100))
        self._bar = bar(self._console, facts, width=room) if self._console.is_terminal else None
        if self._bar:
            self._task = self._bar.add_task("training", total=total_steps, completed=start_step, facts="")

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar:
            self._bar.stop()

    def step(self, step: int, tokens: int, metrics: Mapping[str, Any]) -> None:
        """Report that `step` is done, with its tokens and metrics."""
        self._step, self._tokens = step, self._tokens + tokens
        self._values = {name: metrics[name] for name in self._shown if name in metrics}
        self._marks.append((time.monotonic(), step, self._tokens))
        while len(self._marks) > 2 and self._marks[-1][0] - self._marks[1][0] > SPEED_WINDOW_S:
            self._marks.popleft()
        facts = self._facts()
        if self._bar:
            self._bar.update(self._task, completed=step, facts=facts)
        if step % self._logging_steps == 0 or step == self._total:
            line = f"step {step}/{self._total}  {facts}"
            log.info(line)
            if not self._bar:
                self._console.print(line, soft_wrap=True)

    def validation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Report the metrics of a validation: all in the log; on the console the main ones with their change since the
        last validation, then the others that have changed, but for verdicts that no completion got."""
        title, before = f"validation at step {step}", self._validated
        log.info("  ".join([title, *(f"{name} {_show(value)}" for name, value in metrics.items())]))
        found = (name for ending in MAIN for name in metrics if re.fullmatch(rf"(eval_(\w+_)?)?{ending}", name))
        main = list(dict.fromkeys(found))
        parts = [title, *(f"{name} {_show(metrics[name])}{_change(metrics[name], before.get(name))}" for name in main)]
        parts += [
            f"{name} {_show(value)}"
            for name, value in metrics.items()
            if name not in main and value != before.get(name) and not (value == 0 and name.endswith(VERDICTS))
        ]
        self._console.print(_wrapped(parts, self._console.width), soft_wrap=True)
        self._validated = dict(metrics)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second over the last minute; 0 before the first step."""
        (begin, _, before), (now, _, after) = self._marks[0], self._marks[-1]
        return (after - before) / (now - begin) if now > begin else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Remaining seconds at the last minute's speed; None before the first step."""
        (begin, first, _), (now, last, _) = self._marks[0], self._marks[-1]
        return (now - begin) / (last - first) * (self._total - last) if last > first else None

    def _facts(self) -> str:
        parts = [f"{name.rpartition('/')[2]} {_show(value)}" for name, value in self._values.items()]
        parts.append(f"{_count(self.tokens_per_second)} tokens/s")
        if self.seconds_left is not None:
            parts.append(f"ETA {duration(self.seconds_left)}")
        return "  ".join(parts)


def _wrapped(parts: Sequence[str], width: int) -> str:
    """The parts in lines of at most `width` characters; later lines are indented, and parts are not split."""
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines.append(f"    {part}")
    return "\n".join(lines)


def duration(seconds: float) -> str:
    """Seconds in readable units: 42s, 3m 20s, 2h 05m, 3d 04h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02}h"


def _count(value: float) -> str:
    """A count in two or three digits: 873, 8.7k, 87k, 1.2M."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.{1 if value < 10 * size else 0}f}{unit}"
    return f"{value:.0f}"


def _change(value: Any, before: Any) -> str:
    """The change of a metric, such as ` (+0.02)`; empty if it is unknown or 0."""
    return "" if value is None or before is None or value == before else f" ({value - before:+.2g})"


def _show(value: Any) -> str:
    value = value.item() if hasattr(value, "item") else value
    return "none" if value is None else f"{value:.4g}"
