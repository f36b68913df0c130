"""Python as an environment: programs of the model run in a restricted process."""

import contextlib
import os
import select
import signal
import sys
import time
import traceback
from typing import Any

from posttrain.environments import Environment
from posttrain.grading.worker import allow_cpu_seconds, die_with_parent, isolate

SECONDS = 10.0  # of a program
CHARACTERS = 10_000  # of its output
MEMORY_BYTES = 1_000_000_000


class Python(Environment):
    """Runs Python programs. It has no reward: grade the reply, for example with the rule `math`.

    A program can neither change files nor start programs and, as far as the system can forbid it, use the network
    (docs/security.md). It can read files.
    """

    def __init__(self, seconds: float = SECONDS):
        self._seconds = seconds

    def reset(self, **row: Any) -> None:
        self.programs: list[str] = []

    def python(self, code: str) -> str:
        """
        Run a Python program and return what it prints. Every program starts anew.

        Args:
            code: the program
        """
        self.programs.append(code)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            _run(code, writing, self._seconds)
        os.close(writing)
        try:
            output, in_time = _read(reading, time.monotonic() + self._seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            os.close(reading)
            os.waitpid(child, 0)
        if not in_time:
            raise TimeoutError(f"the program did not end within {self._seconds:g} s")
        text = output.decode(errors="replace")
        return text if len(text) <= CHARACTERS else f"{text[:CHARACTERS]}… {len(text):,} characters"


def _read(pipe: int, deadline: float) -> tuple[bytes, bool]:
    """All that is written to a pipe until the deadline, cut above four times CHARACTERS, and whether it has ended."""
    parts, size = [], 0
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([pipe], [], [], left)[0]:
            break
        part = os.read(pipe, 1 << 16)
        if not part:
            return b"".join(parts), True
        if size <= 4 * CHARACTERS:
            parts.append(part)
            size += len(part)
    return b"".join(parts), False


def _run(code: str, output: int, seconds: float) -> None:
    """Run a program in this process, which has been forked for it, and leave."""
    status = 1
    try:
        for stream in (1, 2):
            os.dup2(output, stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.closerange(3, 1024)
        isolate(MEMORY_BYTES)
        allow_cpu_seconds(seconds)
        die_with_parent()
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115 (until exit)
        try:
            exec(compile(code, "<program>", "exec"), {"__name__": "__main__"})
            status = 0
        except SystemExit:
            status = 0
        except BaseException as error:
            frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<program>"]
            lines = [f"line {frame.lineno}, in {frame.name}\n" for frame in frames]
            sys.stderr.write("".join([*lines, *traceback.format_exception_only(error)]))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)
