"""Runs checks in helper processes with deadlines: one that crashes or hangs is a finding and ends no other.

Each lane has one process for all its checks, because importing torch takes seconds. When a check crashes the process or
passes its deadline, a new process takes the rest.
"""

import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import IO, Any

from posttrain.doctor.checks import Check, Finding, Found

STARTUP_S = 60.0  # until a process has imported this package
WAIT_S = 0.2  # of one wait, so that Ctrl-C is handled in between on Windows, too
PLACE = re.compile(r'File "([^"]+)", line (\d+)')
ENDING_S = 2.0  # a killed process that waits for a broken disk stays longer
DETAIL_CHARACTERS = 500

Lines = queue.SimpleQueue[bytes]


def examine(checks: Sequence[Check]) -> Iterator[Finding]:
    """Yield the finding of each check as soon as there is one, in any order. Ends its processes however it is left."""
    found: queue.SimpleQueue[Finding | BaseException] = queue.SimpleQueue()
    names = dict.fromkeys(check.lane for check in checks)
    lanes = [Lane([check for check in checks if check.lane == name], found) for name in names]
    try:
        for lane in lanes:
            lane.start()
        for _ in checks:
            item = None
            while item is None:
                try:
                    item = found.get(timeout=WAIT_S)
                except queue.Empty:
                    continue
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        for lane in lanes:
            lane.end()
        for lane in lanes:
            if lane.is_alive():
                lane.join(ENDING_S)


class Lane(threading.Thread):
    """The thread that runs a lane's checks and puts their findings into `found`, or the error that ended it."""

    def __init__(self, checks: Sequence[Check], found: queue.SimpleQueue[Finding | BaseException]):
        super().__init__(name="posttrain-doctor", daemon=True)
        self._checks, self._found = list(checks), found
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False

    def run(self) -> None:
        try:
            left = self._checks
            while left and not self._ended:
                with tempfile.TemporaryFile() as errors:
                    left = self._run_some(left, errors)
        except BaseException as error:
            self._found.put(error)

    def end(self) -> None:
        """Kill the process, if there is one, and start no other."""
        with self._lock:
            self._ended = True
            if self._process is not None:
                self._process.kill()

    def _run_some(self, checks: Sequence[Check], errors: IO[bytes]) -> Sequence[Check]:
        """Run checks in a new process until one of them ends it; returns the rest."""
        with self._start(errors) as process:
            assert process.stdin is not None and process.stdout is not None
            lines: Lines = queue.SimpleQueue()
            threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
            try:
                process.stdin.write(json.dumps([[check.target, check.arguments] for check in checks]).encode() + b"\n")
                process.stdin.flush()
            except OSError:  # it has died already, which shows below
                pass
            for number, check in enumerate(checks):
                reply, seconds = _reply(lines, check)
                if reply is None or isinstance(reply, str):
                    process.kill()
                    status = process.wait()
                    reply = asdict(Found(reply or crash(status, errors), "broken"))
                self._found.put(_finding(check, reply, seconds))
                if process.returncode is not None:
                    return checks[number + 1 :]
            process.kill()
        return ()

    def _start(self, errors: IO[bytes]) -> subprocess.Popen[bytes]:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path)}
        with self._lock:
            if self._ended:
                raise RuntimeError("the checks have been ended")
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "posttrain.doctor.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
            )
            return self._process


def _read(replies: IO[bytes], lines: Lines) -> None:
    """Queue the lines of a process; an empty one is its end."""
    for line in replies:
        lines.put(line)
    lines.put(b"")


def _reply(lines: Lines, check: Check) -> tuple[dict[str, Any] | str | None, float]:
    """A check's reply and its seconds; the reason if it passes the deadline, None if the process has ended."""
    began = time.monotonic()
    for limit in (STARTUP_S, check.deadline):
        began = time.monotonic()
        try:
            line = lines.get(timeout=limit)
        except queue.Empty:
            return f"no answer within {limit:g} s", time.monotonic() - began
        if not line:
            return None, time.monotonic() - began
    return json.loads(line), time.monotonic() - began


def _finding(check: Check, reply: dict[str, Any], seconds: float) -> Finding:
    detail = " ".join(str(reply["detail"]).split())[:DETAIL_CHARACTERS]
    mend = reply["mend"] or (check.mend if reply["state"] == "broken" else "")
    return Finding(check.name, reply["state"], check.required, detail, mend, round(seconds, 2))


def crash(status: int, errors: IO[bytes]) -> str:
    """How a process has ended, and where: by the trace that Python writes at a crash, or its last words."""
    errors.seek(0)
    text = errors.read().decode(errors="replace").strip()
    what = f"the process ended with status {status}"
    if status < 0:
        known = {number.value: number.name for number in signal.Signals}
        what = f"the process was ended by {known.get(-status, f'signal {-status}')}"
    place = PLACE.search(text)
    if place:
        return f"{what} ({'/'.join(place[1].replace(os.sep, '/').split('/')[-2:])} line {place[2]})"
    return f"{what}: {text.splitlines()[-1]}" if text else what
