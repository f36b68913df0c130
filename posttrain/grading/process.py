"""The supervisor's side of a worker process: started, given one job at a time, killed at a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

from posttrain.base.errors import RewardError
from posttrain.grading.template import Forked, Template
from posttrain.grading.verdict import Grade, GradeRequest, read_grade

STARTUP_S = 120.0
TICK_S = 0.05  # interval of deadline checks
OUT_OF_CPU = -24  # SIGXCPU: it reached its CPU limit before the deadline
REPLY_BYTES = 64_000  # a longer line is not a valid reply
COMPLETION_CHARACTERS = 1_000_000  # only the end of a longer completion, which has the answer, is graded
# A worker's environment variables, without keys, tokens and proxies.
KEPT_VARIABLES = ("SYSTEMROOT", "WINDIR", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
SET_VARIABLES = {
    # gmpy2 computes in C without checking signals or limits; plain integers are fast enough here
    "SYMPY_GROUND_TYPES": "python",
    "MPMATH_NOGMPY": "1",
    "SYMPY_CACHE_SIZE": "1000",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUTF8": "1",
    "OMP_NUM_THREADS": "1",
    "LC_ALL": "C.UTF-8",
}


class Deadlines:
    """Kills workers at their deadline, in a separate thread, so that deadlines hold whatever the program does.

    If this process itself was stopped (a sleeping laptop, SIGSTOP, an overloaded machine), deadlines move by that time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._due: dict[WorkerProcess, float] = {}
        self._stop = threading.Event()
        threading.Thread(target=self._watch, name="posttrain-grading-deadlines", daemon=True).start()

    def start(self, worker: WorkerProcess, seconds: float) -> None:
        with self._lock:
            self._due[worker] = time.monotonic() + seconds

    def end(self, worker: WorkerProcess) -> bool:
        """Whether it was in time; if not, it has been killed or is about to be."""
        with self._lock:
            return self._due.pop(worker, None) is not None

    def close(self) -> None:
        self._stop.set()

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._stop.wait(TICK_S):
            now = time.monotonic()
            stood_still = now - before - 5 * TICK_S
            before = now
            with self._lock:
                if stood_still > 0:
                    self._due = {worker: due + stood_still for worker, due in self._due.items()}
                late = [worker for worker, due in self._due.items() if due <= now]
                for worker in late:
                    del self._due[worker]
            for worker in late:
                worker.kill()


class WorkerProcess:
    """One worker. Owned by one thread at a time; `kill` may be called from any.

    `environment`: its environment variables, see `worker_environment`. With a template it is forked, else it is started
    and imports everything itself.
    """

    def __init__(self, modules: Iterable[str], environment: Mapping[str, str], template: Template | None = None):
        self._ready = False
        self._is_taken = self._is_killed = False
        self.isolation: tuple[str, ...] = ()
        self.template = template
        self._process = template.fork() if template else _start(modules, environment)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._jobs, self._replies = self._process.stdin, self._process.stdout

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_free(self) -> bool:
        """Whether it is alive, has no open job and can take another one."""
        return not (self._is_taken or self._is_killed) and self._process.poll() is None

    def wait_ready(self, deadlines: Deadlines) -> None:
        """Wait until it has imported everything. Raises RewardError if it does not start."""
        if self._ready:
            return
        deadlines.start(self, STARTUP_S)
        reply = self._read()
        in_time = deadlines.end(self)
        if reply is None or "ready" not in reply or not in_time:
            self.kill()
            why = (reply or {}).get("failed") or f"it ended with status {self._process.wait()}"
            why = why if in_time else f"it took over {STARTUP_S:g} s"
            raise RewardError(
                f"a grading worker does not start: {why}. To see more: "
                f"{os.path.basename(sys.executable)} -m posttrain.grading.worker < /dev/null"
            )
        self.isolation = tuple(str(item) for item in reply["ready"])
        self._ready = True

    def ask(self, job: GradeRequest, deadline: float, deadlines: Deadlines) -> Grade:
        """The grade of one job, whose deadline starts now; afterwards check `is_free`."""
        line = json.dumps(
            {
                "rule": job.rule,
                "completion": job.completion[-COMPLETION_CHARACTERS:],
                "gold": job.gold,
                "options": dict(job.options),
                "deadline": deadline,
            }
        )
        self._is_taken = True  # until its verdict is read, in time
        started = time.perf_counter()
        deadlines.start(self, deadline)
        gold_is_good = False
        reply = None
        try:
            self._jobs.write(line.encode() + b"\n")
            self._jobs.flush()
            reply = self._read()
            if reply == {"gold": True}:
                gold_is_good = True
                reply = self._read()
        except OSError:  # it died, or was killed, before it had read the job
            pass
        in_time = deadlines.end(self)
        seconds = time.perf_counter() - started
        if reply is not None:
            self._is_taken = not in_time or "verdict" not in reply or bool(reply.get("retire"))
            return read_grade(reply, seconds)
        self.kill()
        status = self._process.wait()
        if in_time and status != OUT_OF_CPU:
            return Grade("crashed", seconds=seconds, reason=f"the worker ended with status {status}")
        if gold_is_good:
            return Grade("timeout", seconds=seconds, reason=f"no answer within {deadline:g} s")
        return Grade("bad_gold", seconds=seconds, reason=f"the answer itself takes over {deadline:g} s to read")

    def kill(self) -> None:
        """Kill it. May be called again, and from any thread."""
        self._is_killed = True
        self._process.kill()

    def end(self) -> None:
        """Kill it and release its resources. May be called again."""
        self.kill()
        for pipe in (self._jobs, self._replies):
            with contextlib.suppress(OSError):
                pipe.close()
        if isinstance(self._process, Forked):
            self._process.forget()
        else:
            self._process.wait()
        self.template = None

    def _read(self) -> dict[str, Any] | None:
        """The next reply; None if it has died or the line is invalid."""
        line = self._replies.readline(REPLY_BYTES)
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError):
            return None
        return reply if isinstance(reply, dict) else None


def _start(modules: Iterable[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "posttrain.grading.worker", *modules],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        cwd=os.path.abspath(os.sep),
    )


def worker_environment() -> dict[str, str]:
    """A worker's environment variables, with the path of the same modules."""
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    return kept | SET_VARIABLES | {"PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path)}
