"""Shared by the kit's parts: cases and their results, a time budget, the JSON, the table.

A part is a function that yields its cases. Each case runs independently, prints a line and is saved at once, so that a
killed run keeps its results. A case that fails does not end the part.
"""

from __future__ import annotations

import importlib.util
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.common import add_results, machine
from posttrain.base.errors import is_out_of_memory
from posttrain.base.memory import release_memory
from posttrain.models.nodes import has_flash_attention
from posttrain.runs.files import load_json

# The title and format of each number, in the order of a table's columns.
COLUMNS = {
    "error": ("largest error", "{:.2e}"),
    "rms": ("RMS", "{:.4f}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "seconds_a_step": ("s a step", "{:.3f}"),
    "pass_ms": ("ms of passes", "{:.1f}"),
    "update_ms": ("ms of AdamW", "{:.1f}"),
    "mfu": ("MFU", "{:.1%}"),
    "memory_gib": ("GiB", "{:.2f}"),
    "speed_ratio": ("speed ÷ published", "{:.2f}"),
    "memory_ratio": ("memory ÷ published", "{:.2f}"),
    "trl_ratio": ("TRL time ÷ ours", "{:.2f}"),
    "trl_memory_ratio": ("memory ÷ TRL's", "{:.2f}"),
    "floor_ratio": ("time ÷ byte floor", "{:.2f}"),
    "growth": ("memory, end ÷ middle", "{:.3f}"),
    "note": ("", "{}"),
}
FLASH = "FlashAttention 4"  # a need of cases: the package, on a GPU that it is for
MOVED = 0.05  # a number that changed by less than this share has not moved


class CheckError(Exception):
    """A check failed; the message says what does not hold."""


class NotRunError(Exception):
    """Raised when a case turns out not to be runnable here; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Goal:
    """The range that a number should be in on a GPU."""

    name: str
    least: float = float("-inf")
    most: float = float("inf")

    def missed(self, numbers: Mapping[str, Any]) -> str | None:
        value = numbers.get(self.name)
        if value is None or self.least <= value <= self.most:
            return None
        limit = f"at least {self.least:g}" if value < self.least else f"at most {self.most:g}"
        return f"{COLUMNS[self.name][0]} {value:.3g}, goal {limit}"


@dataclass(frozen=True, slots=True)
class Case:
    """One check or measurement. `measure` returns numbers by name, or raises CheckError with what does not hold.

    `needs`: "CUDA" and packages that the case requires.
    """

    name: str
    measure: Callable[[], Mapping[str, Any]]
    needs: tuple[str, ...] = ()
    goals: tuple[Goal, ...] = ()


@dataclass(frozen=True, slots=True)
class Setup:
    """The device and the size. `models` is the folder of created models."""

    device: torch.device
    size: str
    models: Path

    @property
    def tiny(self) -> bool:
        return self.size == "tiny"

    @property
    def on_card(self) -> bool:
        return self.device.type == "cuda"

    @property
    def judged(self) -> bool:
        """Whether goals apply: only on a GPU, at full size."""
        return self.on_card and not self.tiny

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    def facts(self) -> dict[str, Any]:
        """The machine, versions and size that the numbers were measured with."""
        card = torch.cuda.get_device_name(self.device) if self.on_card else None
        versions = {"transformers": transformers.__version__, "cuda": torch.version.cuda}
        return {"machine": machine() | {"card": card} | versions, "size": self.size, "device": self.device.type}


@contextmanager
def after_each(owner: type, name: str, note: Callable[[float], None]) -> Iterator[None]:
    """During the block, call `note` with the seconds of each call of a method, after the call."""
    original = getattr(owner, name)

    def noted(*arguments, **named):
        began = time.perf_counter()
        try:
            return original(*arguments, **named)
        finally:
            note(time.perf_counter() - began)

    setattr(owner, name, noted)
    try:
        yield
    finally:
        setattr(owner, name, original)


PartOf = Callable[[Setup], Iterable[Case]]


def is_missing(package: str) -> bool:
    return importlib.util.find_spec(package) is None


class Book:
    """The JSON of all parts: the result of each case, by part and name."""

    def __init__(self, path: Path):
        self.path = path

    def whole(self) -> dict[str, Any]:
        return load_json(self.path) if self.path.exists() else {}

    def of(self, part: str) -> dict[str, Any]:
        """The results of the part's cases so far."""
        return self.whole().get(part, {}).get("cases", {})

    def write(self, part: str, setup: Setup, cases: Mapping[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        add_results(self.path, {part: setup.facts() | {"cases": dict(cases)}})


def run_part(part: str, cases: Iterable[Case], setup: Setup, book: Book, minutes: float) -> dict[str, Any]:
    """Run a part's cases and return all results; results that the book already has are kept.

    A case is not started if it would exceed the budget by taking as long as the longest case so far. Raises
    CardLostError if an error has made the GPU unusable for this process; the result of the case is saved first.
    """
    found = book.of(part)
    for case in cases:
        if case.name in found:
            continue
        spent = [result["seconds"] for result in found.values()]
        began = time.monotonic()
        missing = next((need for need in case.needs if not _has(need, setup)), None)
        if missing is not None:
            result = _not_run("needs CUDA" if missing == "CUDA" else f"{missing} is not installed")
        elif sum(spent) + max(spent, default=0.0) >= 60 * minutes:
            result = _not_run("time")
        else:
            result = _measured(case, setup)
        result["seconds"] = round(time.monotonic() - began, 2)
        found[case.name] = result
        book.write(part, setup, found)
        print(f"{part}: {line(case.name, result)}", flush=True)
        if result["status"] == "failed":
            release_memory()
            check_card(setup)
    book.write(part, setup, found)
    return found


class CardLostError(Exception):
    """An error has made the GPU unusable for this process."""


def check_card(setup: Setup) -> None:
    if setup.on_card:
        try:
            torch.cuda.synchronize(setup.device)
        except RuntimeError as error:
            raise CardLostError(str(error).splitlines()[0]) from error


def _has(need: str, setup: Setup) -> bool:
    if need == FLASH:
        return has_flash_attention()
    return setup.on_card if need == "CUDA" else not is_missing({"TRL": "trl"}.get(need, need))


def _not_run(why: str) -> dict[str, Any]:
    return {"status": "not run", "why": why}


def _measured(case: Case, setup: Setup) -> dict[str, Any]:
    try:
        numbers = dict(case.measure())
    except NotRunError as error:
        return _not_run(str(error))
    except CheckError as error:
        return {"status": "failed", "why": str(error)}
    except Exception as error:  # whatever it is, the next case is still run
        first = (str(error).strip().splitlines() or [""])[0]
        why = "out of memory" if is_out_of_memory(error) else f"{type(error).__name__}: {first}"
        return {"status": "failed", "why": why, "traceback": traceback.format_exc()}
    finally:
        release_memory()
    missed = [text for goal in case.goals if (text := goal.missed(numbers))] if setup.judged else []
    return {"status": "missed", "why": "; ".join(missed), **numbers} if missed else {"status": "ok", **numbers}


def outcome(result: Mapping[str, Any]) -> str:
    """The result of a case in words."""
    return {"ok": "ok", "missed": "goal missed"}.get(result["status"], result["status"]) + (
        f": {result['why']}" if result.get("why") else ""
    )


def line(name: str, result: Mapping[str, Any]) -> str:
    """The result of a case in one line."""
    numbers = [f"{title} {shown}".strip() for title, shown in _shown(result).items()]
    return ", ".join([f"{name}: {outcome(result)}", *numbers, f"{result['seconds']:.1f} s"])


def _shown(result: Mapping[str, Any]) -> dict[str, str]:
    return {title: form.format(result[key]) for key, (title, form) in COLUMNS.items() if result.get(key) is not None}


def table(part: str, found: Mapping[str, Mapping[str, Any]]) -> str:
    """A part's cases as Markdown."""
    titles = [title for key, (title, _) in COLUMNS.items() if any(r.get(key) is not None for r in found.values())]
    lines = [f"| {' | '.join([part, 'outcome', *titles])} |", "|---" * (len(titles) + 2) + "|"]
    for name, result in found.items():
        shown = _shown(result)
        lines.append(f"| {' | '.join([name, outcome(result), *(shown.get(title, '') for title in titles)])} |")
    return "\n".join(lines)


def moved(before: Mapping[str, Any], found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Lines of what changed since a book held `before`: outcomes, and numbers by more than MOVED."""
    lines = []
    for part, results in found.items():
        earlier = before.get(part, {}).get("cases", {})
        for name in results.keys() & earlier.keys():
            was, now = earlier[name], results[name]
            if "not run" in (was["status"], now["status"]):
                continue
            changes = [f"{outcome(was)} → {outcome(now)}"] if was["status"] != now["status"] else []
            for key, (title, form) in COLUMNS.items():
                old, new = was.get(key), now.get(key)
                if key not in ("error", "note") and old and new and abs(new / old - 1) > MOVED:
                    changes.append(f"{title} {form.format(old)} → {form.format(new)} ({new / old - 1:+.0%})")
            lines += [f"{part}: {name}: {', '.join(changes)}"] if changes else []
    return sorted(lines)


def is_bad(result: Mapping[str, Any]) -> bool:
    """Whether the result of a case makes the exit status 1."""
    return result["status"] in ("failed", "missed")
