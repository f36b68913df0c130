"""What a check is, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "limited", "absent", "broken"]


@dataclass(frozen=True, slots=True)
class Found:
    """What a check returns. `mend` is the command, or the instruction, that changes it."""

    detail: str
    state: State = "ok"
    mend: str = ""


class Broken(Exception):
    """A check's own finding that something does not work; any other exception is one, too."""

    def __init__(self, detail: str, mend: str = ""):
        super().__init__(detail)
        self.mend = mend


@dataclass(frozen=True, slots=True)
class Check:
    """One call that shows whether a part works.

    `target` is the `module:function` that is called with `arguments` in a helper process and returns a Found. Checks of
    one `lane` run one after the other, in one process as long as it lives, and lanes run side by side.
    """

    name: str
    target: str
    lane: str
    required: bool = False
    arguments: tuple[str, ...] = ()
    deadline: float = 30.0  # seconds
    mend: str = ""  # if the check raises an error that names no remedy


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of a check. `broken` and `required` together are what ends with exit status 1."""

    name: str
    state: State
    required: bool
    detail: str
    mend: str
    seconds: float

    @property
    def is_fatal(self) -> bool:
        return self.required and self.state == "broken"
