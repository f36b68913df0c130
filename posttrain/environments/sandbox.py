"""Python as an environment: programs of the model run in a restricted process."""

import os
import select
import signal
import sys
import time
import traceback
from typing import Any

from posttrain.environments import Environment
from posttrain.grading.worker import RESTRICTED, allow_cpu_seconds, die_with_parent, isolate

SECONDS = 10.0  # of a program
CHARACTERS = 10_000  # of its output
MEMORY_BYTES = 1_000_000_000


class Python(Environment):
    """Runs Python programs. It has no reward: grade the reply, for example with the rule `math`.

    A program can neither change files nor start programs; docs/security.md says what else is forbidden where. It can
    read files. Raises OSError where the system cannot restrict it so, unless `unrestricted`.
    """

    def __init__(self, seconds: float = SECONDS, unrestricted: bool = False):
        if not unrestricted and not _restricts():
            raise OSError(
                "this system cannot keep programs from changing files and starting others (Landlock, Linux 5.13): "
                "set args: {unrestricted: true} to run them all the same, where nothing can be lost"
            )
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
        deadline, status = time.monotonic() + self._seconds, None
        try:
            output = _read(reading, deadline)
            while status is None and time.monotonic() < deadline:  # it may go on without its output
                ended, found = os.waitpid(child, os.WNOHANG)
                if ended:
                    status = found
                else:
                    time.sleep(0.002)
        finally:
            if status is None:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            os.close(reading)
        if status is None:
            raise TimeoutError(f"the program did not end within {self._seconds:g} s")
        text = output.decode(errors="replace")
        if len(text) > CHARACTERS:
            text = f"{text[:CHARACTERS]}… (more is not shown)"
        return f"{text}\nended by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else text


def _restricts() -> bool:
    """Whether a process can be kept from changing files and starting programs; a child tries it."""
    child = os.fork()
    if child == 0:
        os._exit(int(RESTRICTED not in isolate(MEMORY_BYTES)))
    return os.waitpid(child, 0)[1] == 0


def _read(pipe: int, deadline: float) -> bytes:
    """What is written to a pipe until it is closed, or until the deadline; of much, only the beginning."""
    parts, size = [], 0
    while (left := deadline - time.monotonic()) > 0 and select.select([pipe], [], [], left)[0]:
        part = os.read(pipe, 1 << 16)
        if not part:
            break
        if size <= 4 * CHARACTERS:
            parts.append(part)
            size += len(part)
    return b"".join(parts)


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
