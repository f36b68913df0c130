"""Servers of models as processes of this program, which ends without them only if it is killed outright."""

import atexit
import contextlib
import os
import queue
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import IO

from posttrain.base.errors import EngineError
from posttrain.serving.client import Client

START_S = 600.0  # a large model is read from a slow disk
STOP_S = 8.0
READY = "serving "
ERROR_CHARACTERS = 2000


class ModelServer:
    """`posttrain serve MODEL` as a child process on a free port of this machine, with a key of its own.

    Raises EngineError, with what it said, if it does not start. `stopped` is asked while it starts.
    """

    def __init__(self, model: str, options: Sequence[str] = (), stopped: Callable[[], bool] = lambda: False):
        self.model, key = model, secrets.token_urlsafe(24)
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "posttrain", "serve", "--port", "0", "--attached", *options, "--", model],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=os.environ | {"POSTTRAIN_API_KEY": key},
            text=True,
            start_new_session=True,  # Ctrl-C in the terminal is for the program, which decides
        )
        try:
            self.client = Client(self._address(stopped), key)
        except BaseException:
            self.close()
            raise

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()  # which ends it
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()

    def _address(self, stopped: Callable[[], bool]) -> str:
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=[lines], daemon=True).start()
        until = time.monotonic() + START_S
        while time.monotonic() < until and not stopped():
            try:
                line = lines.get(timeout=0.1)
            except queue.Empty:
                continue
            if not line:
                raise EngineError(self._said() or f"the server of {self.model} ended before it was ready")
            if line.startswith(READY):
                return line.rpartition(" at ")[2].partition("/v1")[0]
        raise EngineError(f"the server of {self.model} was not ready in {START_S:g} s, or is not wanted any more")

    def _read(self, lines: queue.SimpleQueue[str]) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):  # closed meanwhile
            for line in self._process.stdout:
                lines.put(line)
        lines.put("")

    def _said(self) -> str:
        self._process.wait(STOP_S)
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace")[-ERROR_CHARACTERS:].strip()
        return text.rpartition("error: ")[2]


class ModelServers:
    """The servers of the models in use: at most `most`, the one that was used longest ago makes place. Thread-safe."""

    def __init__(self, most: int = 2):
        self._most, self._servers, self._lock = most, OrderedDict[tuple[str, ...], ModelServer](), threading.Lock()
        atexit.register(self.close)

    def client(self, model: str, options: Sequence[str] = ()) -> Client:
        """The client of a model's server, which is started if it is not there. Raises EngineError."""
        key = (model, *options)
        with self._lock:  # one after another: two models that load at once may not fit
            server = self._servers.pop(key, None)
            if server is None or not server.is_alive:
                while len(self._servers) >= self._most:
                    self._servers.popitem(last=False)[1].close()
                server = ModelServer(model, options)
            self._servers[key] = server
            return server.client

    def close(self) -> None:
        with self._lock:
            while self._servers:
                self._servers.popitem()[1].close()
