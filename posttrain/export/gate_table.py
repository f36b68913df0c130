"""The checks of the gate as a table, and what they amount to."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich import box
from rich.table import Table

from posttrain.export.gate import Check
from posttrain.export.quantize import MARK, Quantised

TITLES = ("check", "value", "95 % interval", "limit", "")


def table(checks: Sequence[Check]) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column(TITLES[0], overflow="fold")
    for name in TITLES[1:-1]:
        shown.add_column(name, justify="right")
    shown.add_column(TITLES[-1])
    for check in checks:
        shown.add_row(*cells(check))
    return shown


def cells(check: Check) -> tuple[str, ...]:
    """The cells of a check under TITLES."""
    ends = [_number(check, end) for end in (check.low, check.high) if end is not None]
    return check.name, _number(check, check.value), " to ".join(ends), _number(check, check.limit), check.verdict


def _number(check: Check, value: float) -> str:
    """Nats and errors as they are, shares and accuracies in per cent."""
    if check.name in ("KL per token", "weight error"):
        return f"{value:.2g}" if abs(value) < 1 else f"{value:.3g}"
    return f"{value:.1%}"


def notes(made: Quantised) -> Iterator[str]:
    """What the checks were measured on, and the verdict in a sentence."""
    for of, checks in groupby(made.checks, key=lambda check: check.of):
        yield ", ".join(check.name + _change(check) for check in checks) + f": {of}"
    if len(made.checks) == 1:
        yield f"Only the weights were checked: {made.measured_on}."
    verdicts = {check.verdict for check in made.checks}
    if "failed" in verdicts:
        yield f"The gate is not passed: the model differs from the original by more than the limits ({MARK})."
    elif "unsure" in verdicts:
        yield "The gate is not passed: within the limits, but too few rows show it. Give more with --gate."
    else:
        yield "The gate is passed."


def _change(check: Check) -> str:
    return "" if check.before is None or check.after is None else f" ({check.before:.1%}, now {check.after:.1%})"
