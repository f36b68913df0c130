"""A reward computed by a user's Python function, named `module:function`.

The function is called as in TRL: `function(prompts=[…], completions=[…], answer=[…], column=[…]) -> [float, …]`, with
the arguments that it accepts. It runs in this process without isolation, because it is the user's code and not the
model's. It may be async, have a deadline, and be retried if it fails.
"""

import asyncio
import inspect
import json
import math
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from traceback import walk_tb
from typing import Any

from posttrain.base.errors import PosttrainError, RewardError
from posttrain.base.functions import find_function
from posttrain.base.log import log
from posttrain.base.words import counted
from posttrain.rewards.calls import Caller, ChangedError, OverdueError, folder_of_process, output_logged, unchanged
from posttrain.rewards.parts import TrainerState

PAUSE_S, LONGEST_PAUSE_S = 0.5, 8.0  # pause before the first retry, doubled for each further retry; longest pause
MEASURED = ("mean", "std", "timeout", "not_applicable")  # metrics of a function's rewards
OFFERED_BESIDE = ("trainer_state", "log_extra", "log_metric")  # arguments besides the columns, as in TRL


class Notes:
    """What a reward function notes in a call: a value for each completion, and metrics. Plain data, as JSON has it."""

    def __init__(self, count: int):
        self._count = count
        self.extra: dict[str, list[Any]] = {}
        self._metrics: dict[str, list[float]] = {}

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Store a value with each completion. Raises ValueError for another number of values."""
        plain = json.loads(json.dumps(list(values), default=str))
        if len(plain) != self._count:
            raise ValueError(f"log_extra({column!r}) has {len(plain)} values for {self._count} completions")
        self.extra[str(column)] = plain

    def log_metric(self, name: str, value: float) -> None:
        """Log a number; those of a step are averaged. Raises ValueError for the name of a metric that is measured."""
        if name in MEASURED:
            raise ValueError(f"log_metric({name!r}): rewards/FUNCTION/{name} is measured already; use another name")
        self._metrics.setdefault(str(name), []).append(float(value))

    @property
    def metrics(self) -> dict[str, float]:
        return {name: fmean(values) for name, values in self._metrics.items()}

    def of(self, index: int) -> dict[str, Any]:
        """The values of a completion."""
        return {column: values[index] for column, values in self.extra.items()}


class RewardFunction:
    """A reward function, given by name. Raises RewardError if it does not exist or is not callable.

    `timeout`: time limit of a call in seconds; calls then run in another thread. None: no limit; calls run in this
    thread unless the function is async. `retries`: number of further calls after an exception or a timeout.
    """

    def __init__(self, name: str, timeout: float | None = None, retries: int = 0):
        self.name, self.timeout, self._retries = name, timeout, retries
        self._caller, self._home, self._closed = Caller(name), os.getcwd(), False
        with output_logged(name), unchanged(name):  # loggers that the module creates keep the current streams
            self.function = find_function(name)
        parameters = inspect.signature(self.function).parameters.values()
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._takes = {p.name for p in named}
        self._needs = [p.name for p in named if p.default is p.empty]
        if not self._takes_all and "completions" not in self._takes:
            raise RewardError(
                f"{name} takes {', '.join(sorted(self._takes)) or 'nothing'}; a reward function takes `completions` "
                "and optionally prompts, answer, other columns or **kwargs"
            )

    def __call__(self, columns: Mapping[str, Sequence[Any]]) -> list[float | None]:
        """One number for each completion; None if the function returns None, which means not applicable. See `noted`
        for errors."""
        return self.noted(columns, TrainerState())[0]

    def noted(self, columns: Mapping[str, Sequence[Any]], state: TrainerState) -> tuple[list[float | None], Notes]:
        """The numbers, and what the function has noted. Besides the columns, a function may take TRL's `trainer_state`,
        `log_extra` and `log_metric`. Raises RewardError if the function fails on the last try or returns anything else,
        and OverdueError if it exceeds its deadline."""
        count = len(columns["completions"])
        missing = [name for name in self._needs if name not in (*columns, *OFFERED_BESIDE)]
        if missing:
            raise RewardError(
                f"{self.name} takes {', '.join(missing)}, which the data lacks; it has {', '.join(columns)}"
            )
        made, notes = self._tried(columns, state, count)
        return self._checked(made, count), notes

    def close(self) -> None:
        """End the thread that makes the calls, if there is one."""
        self._closed = True
        self._caller.close()

    def _tried(self, columns: Mapping[str, Sequence[Any]], state: TrainerState, count: int) -> tuple[object, Notes]:
        retries, pause = self._retries, PAUSE_S
        while True:
            notes = Notes(count)  # of this try
            beside = (state, notes.log_extra, notes.log_metric)
            every = {name: list(values) for name, values in columns.items()}
            every |= dict(zip(OFFERED_BESIDE, beside, strict=True))
            arguments = {name: value for name, value in every.items() if self._takes_all or name in self._takes}
            try:
                with output_logged(self.name):
                    return self._called(arguments), notes
            except OverdueError as error:
                failure = error
            except ChangedError:
                raise
            except (Exception, asyncio.CancelledError) as error:
                failure = _failure(self.name, self.function, error)
                failure.__cause__ = error
            if not retries:
                raise failure
            log.warning("%s: called again in %g s, %s left", failure, pause, counted(retries, "retry", "retries"))
            time.sleep(pause)
            retries, pause = retries - 1, min(2 * pause, LONGEST_PAUSE_S)

    def _called(self, arguments: dict[str, Any]) -> object:
        if self.timeout is not None:
            try:
                return self._caller.call(lambda: self._made(arguments), self.timeout)
            finally:
                if folder_of_process() != self._home:  # changed by an abandoned call
                    os.chdir(self._home)
        rewards = self._made(arguments)
        return self._caller.call(lambda: rewards, None) if inspect.isawaitable(rewards) else rewards

    def _made(self, arguments: dict[str, Any]) -> object:
        with unchanged(self.name, self._home, lambda: self._closed):
            made = self.function(**arguments)
        return self._awaited(made) if inspect.isawaitable(made) else made

    async def _awaited(self, made: Awaitable[Any]) -> Any:
        with unchanged(self.name, self._home, lambda: self._closed):
            return await made

    def _checked(self, rewards: object, count: int) -> list[float | None]:
        if hasattr(rewards, "tolist"):
            rewards = rewards.tolist()  # type: ignore[union-attr]
        if not isinstance(rewards, list | tuple):
            raise RewardError(f"{self.name} returned {type(rewards).__name__}; a list of {count} numbers is needed")
        if len(rewards) != count:
            raise RewardError(f"{self.name} returned {len(rewards)} rewards for {count} completions")
        return [self._number(reward, index) for index, reward in enumerate(rewards)]

    def _number(self, reward: Any, index: int) -> float | None:
        if reward is None:
            return None
        try:
            value = math.nan if isinstance(reward, str | bytes) else float(reward)
        except (TypeError, ValueError, OverflowError):
            value = math.nan
        if not math.isfinite(value):
            raise RewardError(
                f"{self.name} returned {reward!r:.60} for completion {index}; a finite number is needed, "
                "or None if the reward does not apply"
            )
        return value


def call_function(name: str, *arguments: Any) -> Any:
    """Return the result of a user's function that is not a reward; a generator's values are returned as a list.
    Raises RewardError, with the line in the user's file, if the function does not exist or fails."""
    with output_logged(name):
        with unchanged(name):
            function = find_function(name)
        try:
            with unchanged(name):
                result = function(*arguments)
                return list(result) if inspect.isgenerator(result) else result
        except PosttrainError:
            raise
        except Exception as error:
            raise _failure(name, function, error) from error


def _failure(name: str, function: Callable[..., Any], error: BaseException) -> RewardError:
    """The error of a function that failed, with the user's file and the line, if they are known."""
    code = getattr(function, "__code__", None)
    file = None if code is None else code.co_filename
    lines = [line for frame, line in walk_tb(error.__traceback__) if frame.f_code.co_filename == file]
    where = f" ({Path(str(file)).name} line {lines[-1]})" if lines else ""
    return RewardError(f"{name} failed{where} with {type(error).__name__}: {error}")
