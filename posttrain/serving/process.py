"""Servers of models as processes of this program, with which they end."""

import atexit
import os
import secrets
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence

from posttrain.base.child import Child
from posttrain.base.errors import EngineError
from posttrain.serving.client import Client

START_S = 600.0  # a large model is read from a slow disk
STOP_S = 8.0
ERROR_CHARACTERS = 2000


class ModelServer(Child):
    """`posttrain serve MODEL` on a free port of this machine, with a key that only this program knows.

    Raises EngineError, with its last words, if it does not start.
    """

    def __init__(self, model: str, options: Sequence[str] = ()):
        key = secrets.token_urlsafe(24)
        command = [sys.executable, "-m", "posttrain", "serve", "--port", "0", "--attached", *options, "--", model]
        super().__init__(command, environment=os.environ | {"POSTTRAIN_API_KEY": key}, session=True, grace=STOP_S)
        try:
            line = self.line(START_S, b"serving ").decode()
        except TimeoutError:
            raise EngineError(f"the server of {model} was not ready in {START_S:g} s") from None
        except EOFError:
            self.status(STOP_S)
            said = self.last_words()[-ERROR_CHARACTERS:].rpartition("error: ")[2]
            self.end()
            raise EngineError(said or f"the server of {model} ended before it was ready") from None
        self.client = Client(line.rpartition(" at ")[2].partition("/v1")[0], key)


class ModelServers:
    """The servers of the models in use: at most `most`; the least recently used is stopped first. Thread-safe."""

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
                    self._servers.popitem(last=False)[1].end()
                server = ModelServer(model, options)
            self._servers[key] = server
            return server.client

    def close(self) -> None:
        with self._lock:
            while self._servers:
                self._servers.popitem()[1].end()
