"""The trainer's side of a vLLM server: one started and stopped here, or one at a given address."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from http.client import HTTPConnection, HTTPException, HTTPResponse
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any
from urllib.parse import urlsplit

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from posttrain.config.schema.rollout import VllmConfig
from posttrain.engines.protocol import Request, Sampling
from posttrain.engines.vllm import wire
from posttrain.engines.vllm.core import VERSIONS, RawCompletion
from posttrain.engines.vllm.weights import Named
from posttrain.errors import EngineError
from posttrain.extras import need

STOPPING = 3.0  # seconds that our own server has to end before it is killed
COMMAND = "python -m posttrain.engines.vllm.server --port 8001"


class Server:
    """A host (engine.py) in another process. Every wait ends after `settings.timeout` seconds without a heartbeat.

    Raises EngineError if the server is absent, silent, dead, or of another version.
    """

    def __init__(
        self,
        settings: VllmConfig,
        config: PreTrainedConfig,
        architecture: str,
        dtype: torch.dtype,
        tokenizer: PreTrainedTokenizerBase | None,
    ):
        self.timeout, self.process = settings.timeout, None
        self.key = os.environ.get(wire.KEY)
        if settings.base_url is None:
            self.process = Process(settings.timeout)
            self.url, self.key = self.process.url, self.process.key
        else:
            self.url = settings.base_url
        try:
            self._check_versions()
            # A server that we did not start has its own share of memory.
            share = None if self.process is None else settings.gpu_memory_utilization
            shape = self._post(
                "/model",
                {
                    "architecture": architecture,
                    "config": json.loads(json.dumps(config.to_dict(), default=str)),
                    "dtype": str(dtype).removeprefix("torch."),
                    "tokenizer": _files_of(tokenizer),
                    "gpu_memory_utilization": share,
                },
            )
        except BaseException:
            self.close()
            raise
        self.vocabulary: int = shape["vocabulary"]
        self.positions: int = shape["positions"]

    def load(self, mark: str, weights: Iterable[Named]) -> None:
        with self._connected() as connection:
            count = 0
            for name, tensor in weights:
                header, data = wire.tensor_to_wire(name, tensor)
                self._ask(connection, "/tensor", data, {wire.TENSOR_HEADER: header})
                count += 1
            loaded = self._ask(connection, "/load", json.dumps({"mark": mark, "count": count}).encode(), {})
        if loaded["mark"] != mark:
            raise EngineError(f"{self.where} took the weights {loaded['mark']!r}, and was sent {mark!r}")

    def generate(self, mark: str, asked: Sequence[Request], sampling: Sampling) -> list[list[RawCompletion]]:
        with self._connected() as connection:
            response = self._send(
                connection, "/generate", json.dumps(wire.question(mark, asked, sampling)).encode(), {}
            )
            line: dict[str, Any] = {}
            while "groups" not in line:  # lines before it are heartbeats
                text = response.readline()
                if not text.endswith(b"\n"):
                    raise ConnectionError("the answer is incomplete")
                line = json.loads(text)
                wire.raise_failure(line, self.where)
        return wire.answer_from(line)

    def close(self) -> None:
        if self.process is not None:
            self.process.stop()

    @property
    def where(self) -> str:
        return f"the vLLM server at {self.url}"

    def _check_versions(self) -> None:
        with self._connected() as connection:
            health = self._ask(connection, "/health", None, {})
        if health.get("protocol") != wire.PROTOCOL or not str(health.get("vllm", "")).startswith(VERSIONS):
            raise EngineError(
                f"{self.where} is of another version: it speaks protocol {health.get('protocol')} with vLLM "
                f"{health.get('vllm')}, and protocol {wire.PROTOCOL} with vLLM {' or '.join(VERSIONS)} is needed: "
                "install the same posttrain on both sides"
            )

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        with self._connected() as connection:
            return self._ask(connection, path, json.dumps(body).encode(), {})

    def _ask(
        self, connection: HTTPConnection, path: str, body: bytes | memoryview | None, headers: dict[str, str]
    ) -> dict[str, Any]:
        answer = json.loads(self._send(connection, path, body, headers).read())
        if not isinstance(answer, dict):
            raise ValueError("the answer is not a JSON object")
        wire.raise_failure(answer, self.where)
        return answer

    def _send(
        self, connection: HTTPConnection, path: str, body: bytes | memoryview | None, headers: dict[str, str]
    ) -> HTTPResponse:
        given = headers | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        connection.request("GET" if body is None else "POST", path, body, given)  # pyright: ignore[reportArgumentType]
        response = connection.getresponse()
        if response.status != 200:
            raise ValueError(f"it answers {path} with status {response.status}")
        return response

    @contextlib.contextmanager
    def _connected(self) -> Iterator[HTTPConnection]:
        """A connection whose failures are EngineErrors."""
        parts = urlsplit(self.url)
        connection = HTTPConnection(parts.hostname or "", parts.port, timeout=self.timeout)
        try:
            yield connection
        except TimeoutError as error:
            raise EngineError(
                f"{self.where} sent no heartbeat for {self.timeout:g} s: it is stuck, or its machine is too slow; "
                "raise rollout.vllm.timeout"
            ) from error
        except ConnectionRefusedError as error:
            raise EngineError(self._absent()) from error
        except (OSError, HTTPException) as error:
            gone = f"{self.where} closed the connection: {error or type(error).__name__}"
            raise EngineError(gone + (self.process.last_words() if self.process else "")) from error
        except (ValueError, KeyError) as error:
            raise EngineError(f"{self.where} is not one of posttrain's: {error}. Start it with `{COMMAND}`") from error
        finally:
            connection.close()

    def _absent(self) -> str:
        if self.process is not None:
            return f"{self.where} is gone{self.process.last_words()}"
        return f"nothing listens at {self.url} (rollout.vllm.base_url): start the server there with `{COMMAND}`"


class Process:
    """Our own server: on loopback, at any free port, with a key that only this process knows."""

    def __init__(self, timeout: float):
        if find_spec("vllm") is None:
            need("vllm", "vllm", "rollout.engine: vllm")
        self.key = secrets.token_hex(16)
        self.log = TemporaryFile()  # noqa: SIM115 (open as long as the server)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "posttrain.engines.vllm.server", "--port", "0", "--child", str(os.getpid())],
            stdin=subprocess.PIPE,  # when it closes, the server ends
            stdout=subprocess.PIPE,
            stderr=self.log,
            env=os.environ | {wire.KEY: self.key},
            start_new_session=True,  # Ctrl-C is for the trainer, which then stops it
        )
        try:
            self.url = self._listening(time.monotonic() + timeout, timeout)
        except BaseException:
            self.stop()
            raise

    def _listening(self, until: float, timeout: float) -> str:
        assert self.process.stdout is not None
        while (left := until - time.monotonic()) > 0:
            ready, _, _ = select.select([self.process.stdout], [], [], min(left, 1.0))
            if ready:
                line = self.process.stdout.readline()
                if line.startswith(b'{"listening"'):
                    return json.loads(line)["listening"]
                if not line:
                    self.process.wait(STOPPING)
                    raise EngineError(f"the vLLM server did not start{self.last_words()}")
        raise EngineError(f"the vLLM server did not start within {timeout:g} s: raise rollout.vllm.timeout")

    def last_words(self) -> str:
        """Its exit status, if it has ended, and its last output."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        status = self.process.poll()
        self.log.seek(0)
        lines = [line for line in self.log.read().decode(errors="replace").splitlines() if line.strip()]
        ended = "" if status is None else f" (it ended with status {status})"
        return ended + (f": {lines[-1].strip()}" if lines else "")

    def stop(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self.process.wait(STOPPING)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


def _files_of(tokenizer: PreTrainedTokenizerBase | None) -> dict[str, str] | None:
    """The text files that a tokenizer is saved as."""
    if tokenizer is None:
        return None
    with TemporaryDirectory(prefix="posttrain-vllm-") as folder:
        tokenizer.save_pretrained(folder)
        files = [path for path in Path(folder).iterdir() if path.is_file()]
        return {path.name: path.read_text(encoding="utf-8") for path in files}
