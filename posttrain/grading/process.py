"""The supervisor's side of a worker process: starts it, sends it one job at a time, and kills it at a deadline.

Where the platform can fork, a template process that has imported everything forks workers in milliseconds. The template
itself never grades. Each worker has its own pipes and a socket to its template, which reports the worker's process id
and exit status; when our end closes, the template kills the worker. Thus a reused process id is never killed, and all
workers end with this program.
"""

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO

from posttrain.base.errors import RewardError
from posttrain.grading.verdict import FORK, NUMBER, Grade, GradeRequest, read_grade

STARTUP_S = 120.0
TICK_S = 0.05  # interval of deadline checks
OUT_OF_CPU = -24  # SIGXCPU: the worker reached its CPU limit before the deadline
REPLY_BYTES = 64_000  # a longer line is not a valid reply
COMPLETION_CHARACTERS = 1_000_000  # only the end of a longer completion, where the answer is, is graded
# The environment variables of a worker, without keys, tokens and proxies.
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
UNKNOWN_STATUS = -9  # of a worker whose template was killed, which also kills the worker


class Forked:
    """A worker forked from a template, with the part of `Popen`'s interface that is needed."""

    def __init__(self, template: "Template", jobs: BinaryIO, replies: BinaryIO, link: socket.socket):
        self._template: Template | None = template  # the template lives as long as one of its workers
        self.stdin, self.stdout = jobs, replies
        self._link, self._poller = link, select.poll()  # unlike select(), for any number of open files
        self._poller.register(link, select.POLLIN)
        self._lock = threading.Lock()
        self._reports: list[int] = []  # the worker's process id, then its exit status

    @property
    def pid(self) -> int:
        """The worker's process id. Waits until the template has imported everything."""
        return self._read(1)

    def poll(self) -> int | None:
        """The worker's exit status if it has ended, otherwise None."""
        with self._lock:
            while len(self._reports) < 2 and self._poller.poll(0):
                self._next()
        return self._reports[1] if len(self._reports) > 1 else None

    def wait(self) -> int:
        """Wait until the worker ends, and return its exit status."""
        return self._read(2)

    def kill(self) -> None:
        with contextlib.suppress(OSError):  # the worker has already ended
            self._link.shutdown(socket.SHUT_WR)

    def forget(self) -> None:
        """Release a killed worker. Waits until it has ended, unless it has not been forked yet."""
        if self._template is None:
            return
        if self.poll() is None and self._reports:
            self.wait()
        self._link.close()
        self._template = None

    def _read(self, count: int) -> int:
        with self._lock:
            while len(self._reports) < count:
                self._next()
            return self._reports[count - 1]

    def _next(self) -> None:
        data = b""
        with contextlib.suppress(OSError):
            data = self._link.recv(NUMBER.size, socket.MSG_WAITALL)
        if len(data) == NUMBER.size:
            self._reports += NUMBER.unpack(data)
        else:
            self._reports += [0, UNKNOWN_STATUS][len(self._reports) :]


class Template:
    """Starts at once and imports `modules` in the background. Ends when it and all its workers are unreferenced."""

    def __init__(self, modules: Iterable[str], environment: Mapping[str, str]):
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair()
        with theirs:
            process = _start([FORK, *modules], environment, theirs.fileno(), subprocess.DEVNULL)
        weakref.finalize(self, _end, self._control, process, os.getpid())

    def fork(self) -> Forked:
        """A new worker. Raises OSError if the template has ended."""
        jobs_in, jobs_out = os.pipe()
        replies_in, replies_out = os.pipe()
        link, theirs = socket.socketpair()
        forked = Forked(self, os.fdopen(jobs_out, "wb"), os.fdopen(replies_in, "rb"), link)
        try:
            with self._lock:
                socket.send_fds(self._control, [b"f"], [jobs_in, replies_out, theirs.fileno()])
        except OSError:
            for end in (forked.stdin, forked.stdout, link):
                end.close()
            raise
        finally:
            theirs.close()
            os.close(jobs_in)
            os.close(replies_out)
        return forked


def _end(control: socket.socket, process: subprocess.Popen, owner: int) -> None:
    control.close()
    if os.getpid() == owner:  # a fork of this program must not end the template when it drops it
        process.kill()
        process.wait()


class Deadlines:
    """Kills workers (calls `kill`) at their deadline, in a separate thread, so that deadlines hold whatever the program
    does. While this process itself is stopped (a sleeping laptop, SIGSTOP, an overloaded machine), no time counts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._due: dict[Any, float] = {}
        self._stop = threading.Event()
        threading.Thread(target=self._watch, name="posttrain-grading-deadlines", daemon=True).start()

    def start(self, worker: Any, seconds: float) -> None:
        with self._lock:
            self._due[worker] = time.monotonic() + seconds

    def end(self, worker: Any) -> bool:
        """End the worker's deadline. Returns whether it was met; if not, the worker was killed or is about to be."""
        with self._lock:
            return self._due.pop(worker, None) is not None

    def close(self) -> None:
        self._stop.set()

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._stop.wait(TICK_S):
            now = time.monotonic()
            stopped = now - before - 5 * TICK_S
            before = now
            with self._lock:
                if stopped > 0:
                    self._due = {worker: due + stopped for worker, due in self._due.items()}
                late = [worker for worker, due in self._due.items() if due <= now]
                for worker in late:
                    del self._due[worker]
            for worker in late:
                worker.kill()


class WorkerProcess:
    """One worker. It is owned by one thread at a time; `kill` may be called from any thread.

    `environment`: the worker's environment variables, see `worker_environment`. With a template, the worker is forked;
    otherwise it is started and imports everything itself.
    """

    def __init__(self, modules: Iterable[str], environment: Mapping[str, str], template: Template | None = None):
        self._ready = False
        self._is_taken = self._is_killed = False
        self.isolation: tuple[str, ...] = ()
        self.template = template
        pipe = subprocess.PIPE
        self._process = template.fork() if template else _start(modules, environment, pipe, pipe)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._jobs, self._replies = self._process.stdin, self._process.stdout

    @property
    def is_free(self) -> bool:
        """Whether the worker is alive, has no open job and can take another one."""
        return not (self._is_taken or self._is_killed) and self._process.poll() is None

    def wait_ready(self, deadlines: Deadlines) -> None:
        """Wait until the worker has imported everything. Raises RewardError if the worker does not start."""
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
        """Grade one job, whose deadline starts now. Check `is_free` afterwards."""
        asked = {"completion": job.completion[-COMPLETION_CHARACTERS:], "gold": job.gold, "options": dict(job.options)}
        line = json.dumps({"rule": job.rule, **asked, "deadline": deadline})
        self._is_taken = True  # until the verdict has been read in time
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
        except OSError:  # the worker died, or was killed, before it had read the job
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
        """Kill the worker. May be called again, and from any thread."""
        self._is_killed = True
        self._process.kill()

    def end(self) -> None:
        """Kill the worker and release its resources. May be called again."""
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
        """The next reply; None if the worker has died or the line is invalid."""
        line = self._replies.readline(REPLY_BYTES)
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError):
            return None
        return reply if isinstance(reply, dict) else None


def _start(arguments: Iterable[str], environment: Mapping[str, str], stdin: int, stdout: int) -> subprocess.Popen:
    command = [sys.executable, "-P", "-m", "posttrain.grading.worker", *arguments]
    root, nothing = os.path.abspath(os.sep), subprocess.DEVNULL
    return subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=nothing, env=environment, cwd=root)


def worker_environment() -> dict[str, str]:
    """The environment variables of a worker, with the module path of this process."""
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    return kept | SET_VARIABLES | {"PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path)}
