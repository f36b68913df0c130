"""vLLM as a server for the engine: `python -m posttrain.engines.vllm.server --port 8001`.

The trainer sends it the model's configuration, and the weights after every step (wire.py). Completions that several
ranks request at once are generated together. The server listens on loopback unless --host gives another address. That
needs a key in the environment (POSTTRAIN_SERVER_KEY), the same on both sides, because whoever may push weights may also
fill this machine's memory. With --child the server ends with its parent.
"""

import argparse
import hmac
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from posttrain.base.child import end_with_parent
from posttrain.base.errors import ConfigError, EngineError, EngineLostError, PosttrainError
from posttrain.base.system import is_loopback
from posttrain.engines.vllm import wire
from posttrain.engines.vllm.core import Core, import_vllm
from posttrain.engines.vllm.wire import Receiver

IDLE = 600.0  # seconds that a connection may be silent
BEAT = 1.0  # seconds of work between two heartbeats
LARGEST = 1 << 34  # maximum bytes of one request


class Desk:
    """The server's state between requests: the model, and the NCCL receiver. Several threads use it."""

    def __init__(self, vllm_version: str, gpu_memory_utilization: float):
        self.vllm_version, self.gpu_memory_utilization = vllm_version, gpu_memory_utilization
        self.core: Core | None = None
        self.receiver = Receiver()
        self._changing = threading.Lock()  # held while the model changes

    def health(self) -> dict[str, Any]:
        mark = self.core.mark if self.core is not None else ""
        return {"protocol": wire.PROTOCOL, "vllm": self.vllm_version, "mark": mark}

    def model(self, body: dict[str, Any]) -> dict[str, Any]:
        with self._changing:
            if self.core is not None:
                self.core.close()
            self.core = None
            settings = dict(body["config"])
            self.core = Core(
                AutoConfig.for_model(settings.pop("model_type"), **settings),
                body["architecture"],
                getattr(torch, body["dtype"]),
                gpu_memory_utilization=body.get("gpu_memory_utilization") or self.gpu_memory_utilization,
                tokenizer=_tokenizer(body.get("tokenizer")),
            )
            return {"vocabulary": self.core.vocabulary, "positions": self.core.positions}

    def load(self, body: dict[str, Any], arrived: dict[str, torch.Tensor]) -> dict[str, Any]:
        if len(arrived) != body["count"]:
            raise EngineError(f"{len(arrived)} of {body['count']} weights arrived")
        with self._changing:
            self.loaded().load(body["mark"], arrived.items())
        return {"mark": body["mark"]}

    def nccl(self, body: dict[str, Any]) -> dict[str, Any]:
        """Check that NCCL is available, join the trainer, or receive weights from the trainer (wire.py)."""
        with self._changing:
            if body.get("check"):
                wire.nccl_library()
                return {}
            if "join" in body:
                self.receiver.join(body["join"])
                return {}
            coming = self.receiver.tensors(body["tensors"])
            try:
                self.loaded().load(body["mark"], coming)
            finally:
                for _ in coming:
                    pass
            return {"mark": body["mark"]}

    def generate(self, body: dict[str, Any], tick: Callable[[], None]) -> dict[str, Any]:
        mark, requests, sampling = wire.question_from(body)
        return wire.answer(self.loaded().generate(mark, requests, sampling, tick))

    def loaded(self) -> Core:
        if self.core is None:
            raise EngineLostError("the server has no model: it was restarted")
        return self.core


def _tokenizer(files: dict[str, str] | None) -> PreTrainedTokenizerBase | None:
    """Load a tokenizer from the contents of its saved files, by name."""
    if files is None:
        return None
    with TemporaryDirectory(prefix="posttrain-vllm-") as folder:
        for name, text in files.items():
            if Path(name).name != name:
                raise ConfigError(f"{name!r} is not a tokenizer file")
            (Path(folder) / name).write_text(text, encoding="utf-8")
        return AutoTokenizer.from_pretrained(folder)


class Handler(BaseHTTPRequestHandler):
    """One connection; each has its own thread."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = IDLE
    desk: Desk  # set by `serve`
    key: str | None

    def setup(self) -> None:
        super().setup()
        self.arrived: dict[str, torch.Tensor] = {}  # weights that arrived over this connection and are not loaded yet

    def do_GET(self) -> None:
        self._answer(lambda: self.desk.health() if self.path == "/health" else self._unknown())

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        if not self._allowed() or length > LARGEST:
            self.close_connection = True  # the body is not read
            refusal = EngineError("the server refuses the request: its key differs, or it is too large")
            self._send(wire.failure(refusal))
            return
        data = bytearray(length)
        if self.rfile.readinto(data) != length:
            self.close_connection = True
            return
        if self.path == "/tensor":
            self._answer(lambda: self._tensor(self.headers[wire.TENSOR_HEADER], data))
        elif self.path == "/generate":
            self._stream(json.loads(data))
        else:
            verbs = {"/model": self.desk.model, "/load": self._load, "/nccl": self.desk.nccl}
            self._answer(lambda: verbs[self.path](json.loads(data)) if self.path in verbs else self._unknown())

    def _tensor(self, header: str, data: bytearray) -> dict[str, Any]:
        name, tensor = wire.tensor_from_wire(header, data)
        self.arrived[name] = tensor
        return {}

    def _load(self, body: dict[str, Any]) -> dict[str, Any]:
        arrived, self.arrived = self.arrived, {}
        return self.desk.load(body, arrived)

    def _stream(self, body: dict[str, Any]) -> None:
        """Send lines: a heartbeat every second while the engine runs steps, then the answer."""
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        last = time.monotonic()

        def tick() -> None:
            nonlocal last
            if time.monotonic() - last > BEAT:
                last = time.monotonic()
                self.wfile.write(b"{}\n")  # fails when the client has left, which ends the work

        self.wfile.write(json.dumps(self._tried(lambda: self.desk.generate(body, tick))).encode() + b"\n")

    def _answer(self, work: Callable[[], dict[str, Any]]) -> None:
        self._send(self._tried(work))

    def _tried(self, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if not self._allowed():
            refusal = EngineError(f"the server's key differs: set {wire.KEY} to the same value on both sides")
            return wire.failure(refusal)
        try:
            return work()
        except ConnectionError:
            raise
        except Exception as error:
            if not isinstance(error, PosttrainError):
                traceback.print_exc()
            return wire.failure(error)

    def _allowed(self) -> bool:
        sent = self.headers.get("Authorization") or ""
        return self.key is None or hmac.compare_digest(sent.encode(), f"Bearer {self.key}".encode())

    def _unknown(self) -> dict[str, Any]:
        raise EngineError(f"the server has no {self.path}: it runs another version of posttrain")

    def _send(self, answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because a push makes hundreds of requests."""


class _Server(ThreadingHTTPServer):
    server_bind = TCPServer.server_bind  # HTTPServer's also looks up the host's name

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):  # a client that left is not an error
            traceback.print_exc()


def server_at(host: str, port: int, key: str | None, desk: Desk) -> HTTPServer:
    """Return a server that is bound but does not serve yet. Raises ConfigError for a public address without a key, and
    if the address cannot be used."""
    if not key and not is_loopback(host):
        raise ConfigError(
            f"--host {host} is reachable from other machines: set {wire.KEY} to a secret, here and for the trainer"
        )
    try:
        return _Server((host, port), type("BoundHandler", (Handler,), {"desk": desk, "key": key or None}))
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m posttrain.engines.vllm.server", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8001, help="0: any free port")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.7)
    parser.add_argument("--child", type=int, metavar="PID", help="end when this parent process ends")
    arguments = parser.parse_args()
    if arguments.child is not None:
        end_with_parent(arguments.child)
    try:
        desk = Desk(import_vllm().__version__, arguments.gpu_memory_utilization)
        server = server_at(arguments.host, arguments.port, os.environ.get(wire.KEY), desk)
    except PosttrainError as error:
        raise SystemExit(f"error: {error}") from error
    host, port = server.server_address[:2]
    print(json.dumps({"listening": f"http://{host!s}:{port}"}), flush=True)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # vLLM writes to stdout, which is no longer read
    server.serve_forever()


if __name__ == "__main__":
    main()
