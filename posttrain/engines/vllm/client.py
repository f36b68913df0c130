"""The trainer's side of one vLLM server: started and stopped here, or at a configured address.

It uses http.client for two reasons. `interrupt` aborts a request that another thread waits for by shutting down its
socket, which httpx does not expose before the response begins. And tensors are sent without another copy.
"""

import contextlib
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse
from importlib.util import find_spec
from typing import Any, TypeVar
from urllib.parse import urlsplit

from posttrain.base.child import Child
from posttrain.base.errors import ConfigError, EngineError, EngineLostError
from posttrain.base.imports import need
from posttrain.base.signals import in_thread
from posttrain.config.schema.rollout import VllmConfig
from posttrain.engines.protocol import Request, Sampling
from posttrain.engines.vllm import wire
from posttrain.engines.vllm.core import VERSIONS, RawCompletion
from posttrain.engines.vllm.wire import Named, Sender

T = TypeVar("T")
Body = bytes | memoryview | None  # of a POST request; None: a GET request
PROGRAM = ["-m", "posttrain.engines.vllm.server"]
COMMAND = "python -m posttrain.engines.vllm.server --port 8001"
POLL_S = 0.5  # seconds between two checks whether a server has come back
STOPPING_S = 3.0  # seconds from the request to end until our server is killed
VISIBLE = "CUDA_VISIBLE_DEVICES"


class OwnServer(Child):
    """A server that we start: on loopback, at any free port, with a key that only this process knows. With `gpu`, the
    server sees only our GPU with this index. Raises EngineError if it does not start in time."""

    def __init__(self, timeout: float, gpu: int | None = None):
        if find_spec("vllm") is None:
            need("vllm", "vllm", "rollout.engine: vllm")
        self.key = secrets.token_hex(16)
        super().__init__(
            [sys.executable, *PROGRAM, "--port", "0", "--child", str(os.getpid())],
            environment=os.environ | {wire.KEY: self.key} | _visible(gpu),
            session=True,  # Ctrl-C reaches only the trainer, which then stops the server
            grace=STOPPING_S,
        )
        try:
            self.url: str = json.loads(self.line(timeout, b'{"listening"'))["listening"]
        except TimeoutError:
            raise EngineError(
                f"the vLLM server did not start within {timeout:g} s: raise rollout.vllm.timeout"
            ) from None
        except EOFError:
            reason = self.reason()
            self.end()
            raise EngineError(f"the vLLM server did not start{reason}") from None

    def reason(self) -> str:
        """Return the end of an error message: the exit status, if the server has ended, and its last line of output."""
        status, lines = self.status(1.0), self.last_words().splitlines()
        ended = "" if status is None else f" (it ended with status {status})"
        return ended + (f": {lines[-1].strip()}" if lines else "")


def _visible(gpu: int | None) -> dict[str, str]:
    if gpu is None:
        return {}
    seen = os.environ.get(VISIBLE)
    names = seen.split(",") if seen else []
    if seen is not None and gpu >= len(names):
        raise ConfigError(f"rollout.vllm.gpus has {gpu}, but {VISIBLE} is {seen!r}: give indices into it, from 0")
    return {VISIBLE: names[gpu] if names else str(gpu)}


@dataclass(frozen=True, slots=True)
class Address:
    """A server's URL and key, and the limits of its model. The server's owner announces them to the other ranks."""

    url: str
    key: str | None
    vocabulary: int = 0
    positions: int = 0


class Server:
    """One server, as one rank uses it: at `url`, or, if that is None, started by us on the GPU with index `gpu`.

    Every wait ends after `settings.timeout` seconds without a heartbeat. Methods raise EngineLostError if the server
    has died or restarted, EngineError if it is silent, refuses, or runs another version.
    """

    def __init__(self, settings: VllmConfig, url: str | None, gpu: int | None = None):
        self.settings, self.gpu = settings, gpu
        self.is_ours = url is None
        self.at = Address(url or "", os.environ.get(wire.KEY))
        self.process: OwnServer | None = None
        self.nccl: Sender | None = None
        self.mark = ""  # the mark of the last weights that the server received from this rank
        self.deaths = 0
        self._open: set[HTTPConnection] = set()

    def start(self, model: Mapping[str, Any]) -> None:
        """Start the server, if it is ours, and send it the model."""
        if self.is_ours:
            self.process = OwnServer(self.settings.timeout, self.gpu)
            self.at = Address(self.process.url, self.process.key)
        try:
            self._check_versions()
            # A server that we did not start has its own limit on memory.
            share = self.settings.gpu_memory_utilization if self.is_ours else None
            shape = self._request("/model", {**model, "gpu_memory_utilization": share})
            self.at = Address(self.at.url, self.at.key, shape["vocabulary"], shape["positions"])
            if self.settings.push == "nccl":
                self.nccl = Sender(lambda body: self._request("/nccl", body), self.where, self.settings.timeout)
        except BaseException:
            self.close()
            raise

    def revive(self, model: Mapping[str, Any]) -> None:
        """Restart the server, if it is ours; otherwise wait until it is back. Then send it the model."""
        self.mark = ""
        self.close()
        if not self.is_ours:
            self._await()
        self.start(model)

    def load(self, mark: str, weights: Callable[[], Iterable[Named]]) -> None:
        self.mark = ""
        if self.nccl is not None:
            loaded = self.nccl.send(mark, weights)
        else:
            with self._connected() as connection:
                count = 0
                for name, tensor in weights():
                    header, data = wire.tensor_to_wire(name, tensor)
                    self._answer(connection, "/tensor", data, header)
                    count += 1
                loaded = self._answer(connection, "/load", json.dumps({"mark": mark, "count": count}).encode())
        if loaded["mark"] != mark:
            raise EngineError(f"{self.where} loaded the weights {loaded['mark']!r}, but was sent {mark!r}")
        self.mark = mark

    def generate(self, mark: str, requests: Sequence[Request], sampling: Sampling) -> list[list[RawCompletion]]:
        with self._connected() as connection:
            body = json.dumps(wire.question(mark, requests, sampling)).encode()
            response = self._response(connection, "/generate", body)
            line: dict[str, Any] = {}
            while "groups" not in line:  # the lines before it are heartbeats
                text = response.readline()
                if not text.endswith(b"\n"):
                    raise ConnectionError("the answer is incomplete")
                line = json.loads(text)
                wire.raise_failure(line, self.where)
        return wire.answer_from(line)

    def interrupt(self) -> None:
        """Abort the requests that other threads of this rank wait for."""
        for connection in [*self._open]:
            if connection.sock is not None:
                with contextlib.suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self.nccl is not None:
            self.nccl.close()
            self.nccl = None
        if self.process is not None:
            self.process.end()
            self.process = None

    @property
    def where(self) -> str:
        return f"the vLLM server at {self.at.url}"

    def _await(self) -> None:
        """Wait until something listens at the address."""
        until = time.monotonic() + self.settings.timeout
        while True:
            try:
                self._request("/health")
                return
            except EngineLostError as error:
                if time.monotonic() > until:
                    raise EngineError(
                        f"{self.where} has not come back within {self.settings.timeout:g} s (rollout.vllm.timeout): "
                        f"{error}. Start the server, then continue with --resume"
                    ) from error
                time.sleep(POLL_S)

    def _check_versions(self) -> None:
        try:
            health = self._request("/health")
        except EngineLostError:
            raise
        except EngineError as error:
            if other := self._plain_vllm():
                raise EngineError(
                    f"{self.where} is `vllm serve` of vLLM {other}, which cannot receive weights from a trainer: start "
                    f"posttrain's server there, with vLLM {' or '.join(VERSIONS)}: `{COMMAND}`"
                ) from error
            raise
        protocol, vllm = health.get("protocol"), str(health.get("vllm", ""))
        if protocol != wire.PROTOCOL:
            raise EngineError(
                f"{self.where} runs another version of posttrain: it speaks protocol {protocol}, but protocol "
                f"{wire.PROTOCOL} is needed: install the same posttrain on both sides"
            )
        if not vllm.startswith(tuple(f"{version}." for version in VERSIONS)):
            raise EngineError(
                f"{self.where} has another version of vLLM: {vllm}, but {' or '.join(VERSIONS)} is needed: run "
                "`pip install 'posttrain[vllm]'` there, and restart the server"
            )

    def _plain_vllm(self) -> str | None:
        """Return the version of vLLM if vLLM's own server listens there, otherwise None."""
        with contextlib.suppress(EngineError), self._connected() as connection:
            connection.request("GET", "/version")
            response = connection.getresponse()
            facts = json.loads(response.read(1 << 16)) if response.status == 200 else None
            if isinstance(facts, dict) and isinstance(facts.get("version"), str):
                return facts["version"]
        return None

    def _request(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        with self._connected() as connection:
            return self._answer(connection, path, None if body is None else json.dumps(body).encode())

    def _answer(self, connection: HTTPConnection, path: str, body: Body, tensor: str = "") -> dict[str, Any]:
        answer = json.loads(self._response(connection, path, body, tensor).read())
        if not isinstance(answer, dict):
            raise ValueError("the answer is not a JSON object")
        wire.raise_failure(answer, self.where)
        return answer

    def _response(self, connection: HTTPConnection, path: str, body: Body, tensor: str = "") -> HTTPResponse:
        headers = {"Authorization": f"Bearer {self.at.key}"} if self.at.key else {}
        headers |= {wire.TENSOR_HEADER: tensor} if tensor else {}
        connection.request("GET" if body is None else "POST", path, body, headers)  # pyright: ignore[reportArgumentType]
        response = connection.getresponse()
        if response.status != 200:
            raise ValueError(f"it answers {path} with status {response.status}")
        return response

    @contextlib.contextmanager
    def _connected(self) -> Iterator[HTTPConnection]:
        """A connection whose failures are EngineErrors."""
        parts = urlsplit(self.at.url)
        connection = HTTPConnection(parts.hostname or "", parts.port, timeout=self.settings.timeout)
        self._open.add(connection)
        try:
            yield connection
        except TimeoutError as error:
            silent = f"{self.where} sent no heartbeat for {self.settings.timeout:g} s: it is stuck, or its machine is "
            kind = EngineLostError if self.is_ours else EngineError  # ours can be replaced
            raise kind(f"{silent}too slow; raise rollout.vllm.timeout") from error
        except ConnectionRefusedError as error:
            gone = f"{self.where} is gone{self.process.reason() if self.process else ''}"
            absent = (
                f"nothing listens at {self.at.url} (rollout.vllm.base_url): start the server there with `{COMMAND}`"
            )
            raise EngineLostError(gone if self.is_ours else absent) from error
        except (OSError, HTTPException) as error:
            gone = f"{self.where} closed the connection: {error or type(error).__name__}"
            raise EngineLostError(gone + (self.process.reason() if self.process else "")) from error
        except (ValueError, KeyError) as error:
            raise EngineError(f"{self.where} is not a posttrain server: {error}. Start one with `{COMMAND}`") from error
        finally:
            self._open.discard(connection)
            connection.close()


def side_by_side(servers: Iterable[Server], work: Callable[[Server], T]) -> list[T]:
    """The results of `work` for every server: each in its own thread, or, for a single server, in this thread. Raises
    the first error after all threads have ended. If this thread is interrupted, requests in flight are aborted."""
    servers = [*servers]
    if len(servers) <= 1:
        return [*map(work, servers)]
    working = [in_thread(partial(work, server)) for server in servers]
    try:
        wait(working)
    except BaseException:
        for server in servers:
            server.interrupt()
        raise
    return [done.result() for done in working]
