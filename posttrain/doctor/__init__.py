"""Checks an installation: what is installed, what works (shown by one real call each), and how to fix the rest.

Checks run in helper processes with deadlines: a check that crashes or hangs is a finding and does not stop the others.
Each lane has one process for all its checks, because importing torch takes seconds. When a check crashes the process or
misses its deadline, a new process runs the remaining checks. This module imports nothing slow.
"""

import faulthandler
import importlib
import json
import os
import queue
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from posttrain.base.child import Child
from posttrain.base.errors import reason_of
from posttrain.base.redaction import redact
from posttrain.base.words import counted
from posttrain.doctor.checks import Broken, Check, Finding, Found, all_checks, chosen
from posttrain.runs.provenance import environment

__all__ = ["Finding", "all_checks", "as_json", "chosen", "examine", "summary", "table"]
STYLES = {"ok": "green", "limited": "yellow", "absent": "dim", "broken": "bold red"}

STARTUP_S = 60.0  # seconds in which a process must have imported this package
WAIT_S = 0.2  # seconds of one wait; Ctrl-C is handled between waits, also on Windows
TRACE_LINE = re.compile(r'File "([^"]+)", line (\d+)')
ENDING_S = 2.0  # seconds to wait for a killed process, which takes longer to end if it waits for a broken disk
DETAIL_CHARACTERS = 500


def table(findings: Sequence[Finding]) -> Table:
    """A table with one row per finding: state, name, detail, and how to fix the problem on the next line."""
    shown = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    shown.add_column("state", no_wrap=True)
    shown.add_column("what", no_wrap=True, style="bold")
    shown.add_column("", overflow="fold")
    for finding in findings:
        detail = Text(redact(finding.detail))
        if finding.fix:
            detail.append(f"\n-> {redact(finding.fix)}", style="cyan")
        state = f"{finding.state}{'' if finding.required or finding.state != 'broken' else '*'}"
        shown.add_row(Text(state, STYLES[finding.state]), Text(finding.name), detail)
    return shown


def summary(findings: Sequence[Finding]) -> str:
    """One line that says whether everything required works, and which optional parts do not."""
    fatal = [finding.name for finding in findings if finding.is_fatal]
    optional = [finding.name for finding in findings if finding.state == "broken" and not finding.required]
    limited = [finding.name for finding in findings if finding.state == "limited"]
    absent = sum(finding.state == "absent" for finding in findings)
    parts = [f"Required and broken: {', '.join(fatal)}." if fatal else "Everything that posttrain requires works."]
    parts += [f"Optional and broken (*): {', '.join(optional)}."] if optional else []
    parts += [f"Limited: {', '.join(limited)}."] if limited else []
    parts += [f"{counted(absent, 'optional part')} {'is' if absent == 1 else 'are'} absent."] if absent else []
    return " ".join(parts)


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """The findings with the versions and the platform of this process; secrets are redacted."""
    rows = [asdict(finding) | {"fix": finding.fix or None} for finding in findings]
    works = not any(finding.is_fatal for finding in findings)
    return redact({"works": works, "checks": rows, "environment": environment()})


def examine(checks: Sequence[Check]) -> Iterator[Finding]:
    """Yield the finding of each check as soon as it is available, in any order. Always ends the helper processes."""
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
    """The thread that runs a lane's checks. It puts their findings, or the error that ended the thread, in `found`."""

    def __init__(self, checks: Sequence[Check], found: queue.SimpleQueue[Finding | BaseException]):
        super().__init__(name="posttrain-doctor", daemon=True)
        self._checks, self._found = list(checks), found
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._ended = False

    def run(self) -> None:
        try:
            left = self._checks
            while left and (child := self._start()) is not None:
                with child:
                    left = self._run_some(left, child)
        except BaseException as error:
            self._found.put(error)

    def end(self) -> None:
        """Kill the helper process, if there is one, and start no other."""
        with self._lock:
            self._ended = True
            if self._child is not None:
                self._child.kill()

    def _start(self) -> Child | None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path)}
        command = [sys.executable, "-P", "-c", "from posttrain.doctor import work; work()"]
        with self._lock:
            if not self._ended:
                self._child = Child(command, environment=environment)
            return None if self._ended else self._child

    def _run_some(self, checks: Sequence[Check], child: Child) -> Sequence[Check]:
        """Run checks until the process ends or a check misses its deadline; returns the checks that have not started.

        The end of the process is detected from its replies: it may have ended before the first reply is read.
        """
        child.send([json.dumps([[check.target, check.arguments] for check in checks]).encode() + b"\n"])
        for number, check in enumerate(checks):
            began, limit, has_started = time.monotonic(), STARTUP_S, False
            try:
                child.line(limit)
                began, limit, has_started = time.monotonic(), check.deadline, True
                reply, has_ended = json.loads(child.line(limit)), False
            except TimeoutError:
                reply, has_ended = asdict(late(f"no answer within {limit:g} s")), True
            except EOFError:
                if number and not has_started:  # the process ended between two checks: a new one runs this check
                    return checks[number:]
                reply, has_ended = asdict(Found(crash(child), "broken")), True
            seconds = round(time.monotonic() - began, 2)
            detail = " ".join(str(reply["detail"]).split())[:DETAIL_CHARACTERS]
            fix = reply["fix"] or (check.fix if reply["state"] == "broken" else "")
            self._found.put(Finding(check.name, reply["state"], check.required, detail, fix, seconds))
            if has_ended:
                return checks[number + 1 :]
        return ()


def late(detail: str) -> Found:
    """The finding of a missed deadline: a busy machine proves nothing about the part."""
    import psutil

    load, cores = psutil.getloadavg()[0], psutil.cpu_count() or 1
    if load <= cores:
        return Found(detail, "broken")
    busy = f"{detail}, but this machine is busy (load {load:.1f} on {counted(cores, 'core')})"
    return Found(busy, "limited", "run posttrain doctor again when it is idle")


def crash(child: Child) -> str:
    """How a process ended, and where: from the trace that Python writes at a crash, or the last line of its stderr."""
    child.kill()
    status, text = child.status(ENDING_S), child.last_words()
    what = f"the process ended with status {status}"
    if status is not None and status < 0:
        known = {number.value: number.name for number in signal.Signals}
        what = f"the process was ended by {known.get(-status, f'signal {-status}')}"
    if line := TRACE_LINE.search(text):
        return f"{what} ({'/'.join(line[1].replace(os.sep, '/').split('/')[-2:])} line {line[2]})"
    return f"{what}: {text.splitlines()[-1]}" if text else what


def work() -> None:
    """The body of a helper process: run checks one after the other.

    It reads one line from stdin, a JSON list of `[target, arguments]`, and writes a line to stdout when a check starts,
    `{"started": 0}`, and one when it ends, `{"state": …, "detail": …, "fix": …}`. Whatever a check or a library prints
    goes to stderr, as does the place of a crash. The process ends when its stdin is closed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and kills this process
    faulthandler.enable(all_threads=False)
    jobs, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    targets = json.loads(jobs.readline())
    threading.Thread(target=lambda: (jobs.read(), os._exit(0)), daemon=True).start()

    def reply(line: dict[str, Any]) -> None:
        replies.write(json.dumps(line) + "\n")
        replies.flush()

    for number, (target, arguments) in enumerate(targets):
        reply({"started": number})
        reply(answer(target, arguments))
    os._exit(0)  # without the exit handlers of imported modules, which may hang


def answer(target: str, arguments: list[str]) -> dict[str, Any]:
    """A check's finding as JSON. Any exception is the finding that the part is broken."""
    module, _, function = target.partition(":")
    try:
        return asdict(getattr(importlib.import_module(module), function)(*arguments))
    except Broken as error:
        return asdict(error.found)
    except BaseException as error:
        return asdict(Found(reason_of(error), "broken"))
