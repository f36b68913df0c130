"""A template process that has imported everything, from which workers are forked in milliseconds.

A template never grades. Each worker has its own pipes and a socket to its template, which reports the worker's process
id and exit status; when our end closes, the template kills the worker. So a reused process id is never killed, and all
workers end with this program.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import BinaryIO

FORK = "--fork"  # first argument of a worker program that becomes a template
NUMBER = struct.Struct("=i")
UNKNOWN_STATUS = -9  # for a worker whose template was killed, which kills the worker too


class Forked:
    """A worker forked from a template, with the needed part of `Popen`'s interface."""

    def __init__(self, template: Template, jobs: BinaryIO, replies: BinaryIO, link: socket.socket):
        self._template: Template | None = template  # the template lives as long as one of its workers
        self.stdin, self.stdout = jobs, replies
        self._link = link
        self._lock = threading.Lock()
        self._told: list[int] = []  # process id, then status

    @property
    def pid(self) -> int:
        """Its process id; waits for the template to have imported everything."""
        return self._read(1)

    def poll(self) -> int | None:
        """Its status if it has ended."""
        with self._lock:
            while len(self._told) < 2 and self._can_read():
                self._next()
        return self._told[1] if len(self._told) > 1 else None

    def wait(self) -> int:
        """Its status; waits for its end."""
        return self._read(2)

    def kill(self) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self._link.shutdown(socket.SHUT_WR)

    def forget(self) -> None:
        """Release a killed worker. Waits for its end, unless it has not been forked yet."""
        if self._template is None:
            return
        if self.poll() is None and self._told:
            self.wait()
        self._link.close()
        self._template = None

    def _read(self, count: int) -> int:
        with self._lock:
            while len(self._told) < count:
                self._next()
            return self._told[count - 1]

    def _next(self) -> None:
        data = b""
        with contextlib.suppress(OSError):
            data = self._link.recv(NUMBER.size, socket.MSG_WAITALL)
        if len(data) == NUMBER.size:
            self._told += NUMBER.unpack(data)
        else:
            self._told += [0, UNKNOWN_STATUS][len(self._told) :]

    def _can_read(self) -> bool:
        poller = select.poll()  # unlike select(), for any number of open files
        poller.register(self._link, select.POLLIN)
        return bool(poller.poll(0))


class Template:
    """Starts at once and imports `modules` on its own time. Ends when it and all its workers are unreferenced."""

    def __init__(self, modules: Iterable[str], environment: Mapping[str, str]):
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "posttrain.grading.worker", FORK, *modules],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                cwd=os.path.abspath(os.sep),
            )
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
    if os.getpid() == owner:  # a fork of this program that drops the template must not end it
        process.kill()
        process.wait()
