"""One grading worker: `python -m posttrain.grading.worker`. Its arguments are modules to import first.

If the first argument is `--fork`, the process is a template: it imports the modules and forks workers on request
(`process.py`). If the first module is a `module:function`, workers run that function instead of grading
(posttrain/environments/worker.py).

A worker reads jobs from stdin and writes replies to stdout, one JSON object per line:

    in    {"rule": "module:NAME", "completion": …, "gold": …, "options": {…}, "deadline": seconds}
    out   {"ready": [active restrictions]}            once, when everything is imported; or {"failed": reason}
          {"gold": true}                              the reference answer is usable; the verdict is the next reply
          {"verdict": …, "score": …, "extracted": …, "parts": {…}}  or  {"verdict": …, "reason": …}
          with "retire": true                         in the last reply of a worker that exits

Completions and grades are JSON, and grades have a bounded length; nothing is pickled.

After its imports a worker calls `isolate` once, which drops rights that grading does not need, as far as the platform
supports this. `isolate` never fails: it returns the names of the active restrictions for the parent to show. Linux:
resource limits (setrlimit(2)), Landlock (landlock(7)) for files, programs and TCP, and a separate network namespace if
an unprivileged process may create one. macOS: resource limits. Windows: none of these.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any, BinaryIO

from posttrain.base.memory import address_space, peak_of_process
from posttrain.base.system import IS_LINUX, leave_signals_to_parent, resource
from posttrain.grading.verdict import EXTRACTED_CHARACTERS, FORK, NUMBER, BadGold, Rule

RESTRICTED = "no writable files, no programs"  # what Landlock forbids
MEMORY_BYTES = 1_000_000_000  # limit on address space, which also limits memory
ROOM_BYTES = 500_000_000  # minimum address space for answers, if a rule's packages leave less of the limit
# Landlock's system call numbers are the same on every architecture.
CREATE_RULESET, RESTRICT_SELF = 444, 446
NO_NEW_PRIVS, PARENT_DEATH_SIGNAL = 38, 1
# The rights of each version of Landlock's interface except reading.
EXECUTE, WRITE_FILE, REMOVE_AND_MAKE, REFER, TRUNCATE, DEVICE_CONTROL = 1, 2, 0x1FF0, 1 << 13, 1 << 14, 1 << 15
TCP = 0b11  # bind, connect
SCOPE = 0b11  # abstract sockets and signals of processes outside
NEW_USER, NEW_NET = 0x10000000, 0x40000000


def isolate(memory_bytes: int = MEMORY_BYTES) -> list[str]:
    """Drop rights that grading does not need. Returns the names of the active restrictions."""
    in_force = []
    if IS_LINUX:
        with contextlib.suppress(OSError, AttributeError):  # containers often forbid an empty network namespace
            if ctypes.CDLL(None, use_errno=True).unshare(NEW_USER | NEW_NET) == 0:
                in_force.append("no network")
        files, network = _landlock()
        if files:
            in_force.append(RESTRICTED)
        if network and "no network" not in in_force:
            in_force.append("no TCP")
    return in_force + limits(memory_bytes, files_open=RESTRICTED not in in_force)


def allow_cpu_seconds(seconds: float) -> None:
    """Limit this process's further CPU time: the last resort if its parent has died."""
    if resource is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        soft = int(used.ru_utime + used.ru_stime + seconds) + 2
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def die_with_parent() -> None:
    """On Linux, have this process killed when the thread that forked it ends: an endless computation cannot check that.

    Call it after `isolate`, whose new user namespace would undo it."""
    if IS_LINUX:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def limits(memory_bytes: int, files_open: bool) -> list[str]:
    """Limit this process's memory and, with `files_open`, the growth of its open files; returns what is in force."""
    if resource is None:
        return []
    in_force = []
    memory_bytes = max(memory_bytes, address_space() + ROOM_BYTES)
    # macOS accepts the limit but does not enforce it
    kept = f"at most {memory_bytes / 1e9:.2g} GB of memory" if IS_LINUX else ""
    wanted = [(resource.RLIMIT_AS, memory_bytes, kept), (resource.RLIMIT_CORE, 0, "")]
    wanted += [(resource.RLIMIT_FSIZE, 0, "no growing files")] if files_open else []
    for limit, value, name in wanted:
        # macOS refuses some of these limits
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(limit, (value, value))
            in_force += [name] if name else []
    return in_force


def _landlock() -> tuple[bool, bool]:
    """Forbid changing files, running programs, and TCP. Returns which bans are in force: (files and programs, TCP)."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        version = libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1)
        if version < 1:
            return False, False
        rights = EXECUTE | WRITE_FILE | REMOVE_AND_MAKE
        rights |= (REFER if version >= 2 else 0) | (TRUNCATE if version >= 3 else 0)
        rights |= DEVICE_CONTROL if version >= 5 else 0
        attributes = struct.pack("=Q", rights) + (struct.pack("=Q", TCP) if version >= 4 else b"")
        attributes += struct.pack("=Q", SCOPE) if version >= 6 else b""
        ruleset = libc.syscall(CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
        if ruleset < 0:
            return False, False
        done = libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0) == 0 and libc.syscall(RESTRICT_SELF, ruleset, 0) == 0
        os.close(ruleset)
        return done, done and version >= 4
    except (OSError, AttributeError):
        return False, False


RETIRE_BYTES = MEMORY_BYTES // 2  # above this, ordinary answers might run out of memory
ORPHAN_S = 0.25  # interval at which a worker checks whether its parent is alive


def main() -> None:
    leave_signals_to_parent()
    if sys.argv[1:2] == [FORK]:
        _be_a_template(sys.argv[2:])
        return
    jobs, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")  # private; output of libraries is discarded
    _silence()
    _loaded(sys.argv[1:])(jobs, replies)


def _loaded(modules: list[str]) -> Callable[..., None]:
    """Import modules and warm them up. Returns what a worker does: the function that the first module names, else
    grading; after an error, report it."""
    try:
        for module in modules:
            getattr(importlib.import_module(module.partition(":")[0]), "warm_up", lambda: None)()
        return named(modules[0]) if modules and ":" in modules[0] else _serve
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"[:EXTRACTED_CHARACTERS]
        return lambda _, replies, *__: say(replies, {"failed": failure})


def _serve(jobs: BinaryIO, replies: BinaryIO, template: int | None = None) -> None:
    """Grade jobs until stdin ends. `template`: the id of the process that this worker was forked from."""
    in_force = isolate()
    if not end_with(template):
        return
    say(replies, {"ready": in_force})
    for line in jobs:
        job = json.loads(line)
        allow_cpu_seconds(job["deadline"])
        reply = grade(job, replies)
        retire = reply.pop("retire", False) or peak_of_process() > RETIRE_BYTES
        say(replies, reply | ({"retire": True} if retire else {}))
        if retire:
            return


def end_with(template: int | None) -> bool:
    """End this process when its parent ends. Returns False if `template`, which forked it, has ended already."""
    if template is not None:
        die_with_parent()
        if os.getppid() != template:
            return False
    threading.Thread(target=_leave_with, args=(os.getppid(),), daemon=True).start()
    return True


# --- the template -----------------------------------------------------------------------------------------------------


def _be_a_template(modules: list[str]) -> None:
    """Import everything, then fork a worker for each request and kill those whose socket is closed.

    The template and its workers end when its parent does. It is single-threaded from the first fork on."""
    parent, loaded = os.getppid(), threading.Event()
    watch = threading.Thread(target=_leave_with, args=(parent, loaded), daemon=True)
    watch.start()
    control = socket.socket(fileno=os.dup(0))
    _silence()
    body = _loaded(modules)
    gc.collect()
    gc.freeze()  # so that garbage collection in a worker does not copy the memory that workers share
    loaded.set()
    watch.join()
    ended, ring = socket.socketpair()
    for end in (ended, ring):
        end.setblocking(False)
    signal.set_wakeup_fd(ring.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    links: dict[socket.socket, int] = {}
    watched = {control, ended}
    while os.getppid() == parent:
        ready, _, _ = select.select(list(watched), [], [], ORPHAN_S)
        if ended in ready:
            _collect(ended, links, watched)
        for link in set(ready) & links.keys():
            _kill(links[link])  # not yet waited for, so its process id is not reused
            watched.discard(link)
        if control in ready:
            request, descriptors, *_ = socket.recv_fds(control, 1, 3)
            if not request:
                break
            jobs, replies = os.fdopen(descriptors[0], "rb"), os.fdopen(descriptors[1], "wb")
            link = socket.socket(fileno=descriptors[2])
            links[link] = _fork(body, jobs, replies, {*watched, *links, ring, link})
            jobs.close()
            replies.close()
            _tell(link, links[link])
            watched.add(link)
    for pid in links.values():
        _kill(pid)


def _kill(pid: int) -> None:
    """Kill a worker, and with it what it has started if it leads a group of processes."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _fork(body: Callable[..., None], jobs: BinaryIO, replies: BinaryIO, others: set[socket.socket]) -> int:
    """In the template, return the process id of a new worker; in the worker, never return."""
    template = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for other in others:
        other.close()
    body(jobs, replies, template)
    os._exit(0)


def _collect(ended: socket.socket, links: dict[socket.socket, int], watched: set[socket.socket]) -> None:
    """Report the exit status of ended workers."""
    with contextlib.suppress(BlockingIOError):
        ended.recv(4096)
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            link = next(link for link, pid in links.items() if pid == found[0])
            del links[link]
            watched.discard(link)
            _tell(link, os.waitstatus_to_exitcode(found[1]))
            link.close()


def _tell(link: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the other end is closed
        link.sendall(NUMBER.pack(number))


# --- a job ------------------------------------------------------------------------------------------------------------


def grade(job: dict[str, Any], replies: BinaryIO) -> dict[str, Any]:
    """The reply to one job. An exception in a rule is a crash; rules themselves judge an unreadable answer as wrong."""
    try:
        rule: Rule = named(job["rule"])
        try:
            _check_gold(job["rule"], job["gold"], json.dumps(job["options"], sort_keys=True))
        except BadGold as error:
            return {"verdict": "bad_gold", "reason": str(error)[:EXTRACTED_CHARACTERS]}
        say(replies, {"gold": True})
        judged = rule.judge(job["completion"], job["gold"], **job["options"])
        extracted = judged.extracted
        return {
            "verdict": "correct" if judged.correct else "wrong",
            "score": judged.score,
            "extracted": None if extracted is None else extracted[:EXTRACTED_CHARACTERS],
            "parts": dict(judged.parts),
        }
    except MemoryError:
        return {"verdict": "crashed", "reason": "out of memory", "retire": True}
    except Exception as error:  # never str(error): it may contain an expression that takes forever to print
        return {"verdict": "crashed", "reason": type(error).__name__}


@lru_cache
def named(name: str) -> Any:
    """The object that `module:NAME` names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


@lru_cache(maxsize=256)
def _check_gold(rule: str, gold: str | None, options: str) -> None:
    named(rule).check_gold(gold, **json.loads(options))


def _silence() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)


def say(replies: BinaryIO, reply: dict[str, Any]) -> None:
    try:
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()
    except OSError:
        os._exit(0)  # the parent has closed the pipe


def _leave_with(parent: int, done: threading.Event | None = None) -> None:
    """Exit when the parent ends, even if a fork of it holds the other end of our pipe open. Return if `done` is set."""
    done = done or threading.Event()
    with contextlib.suppress(Exception):
        while os.getppid() == parent:
            if done.wait(ORPHAN_S):
                return
    os._exit(0)


if __name__ == "__main__":
    main()
