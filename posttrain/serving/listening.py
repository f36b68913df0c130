"""Listening on an address, running an application until a signal, and a guard that checks every request.

A page of another site that is open in a browser can send requests to a server on this machine. It cannot hide its
origin, and without permission it cannot send JSON. A site whose name was pointed at this machine (DNS rebinding) sends
its own name as the host.
"""

import asyncio
import hmac
import logging
import re
import signal
import socket
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from posttrain.base.errors import ConfigError
from posttrain.base.system import is_loopback, resource
from posttrain.base.terminal import say

MOST_BYTES = 4 << 20
OPEN = {"/health"}  # paths that need no key
HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[\w.-]+)(:\d{0,5})?", re.ASCII)
GRACE_S = 5  # seconds that requests in progress have at shutdown
HEADERS_S, BODY_S = 10.0, 60.0  # time limits for the arrival of a request
MOST_CONNECTIONS = 512  # maximum open connections; fewer if the process may open few files
FULL = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def host_name(host: str) -> str:
    """The host name in a `Host` header, without its port; empty if the header has no valid host name."""
    match = HOST.fullmatch(host)
    return "" if match is None else match[1].strip("[]").lower()


def ambiguous(headers: Headers) -> str | None:
    """Why the site of a request is ambiguous (repeated header, or invalid host name); None if it is clear."""
    for name in ("host", "origin"):
        if len(headers.getlist(name)) > 1:
            return f"the request repeats the header {name}"
    host = headers.get("host", "")
    return f"{host!r} is not a host name" if host and not host_name(host) else None


def is_foreign(origin: str | None, host: str) -> bool:
    """Whether a request comes from a page of another site, judged by its `Origin` and `Host` headers."""
    try:
        return origin is not None and urlsplit(origin).netloc != host
    except ValueError:
        return True


class Guard:
    """ASGI middleware that checks host, origin, key, type and size. Without a key, only loopback hosts are allowed."""

    def __init__(self, app: ASGIApp, key: str | None = None, most_bytes: int = MOST_BYTES):
        self.app, self.key, self.most_bytes = app, key, most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refusal = self._refusal(scope, Headers(scope=scope))
        if refusal is not None:
            await _answer(*refusal)(scope, receive, send)
            return
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            return message if received <= self.most_bytes else {"type": "http.disconnect"}

        async def sending(message: Message) -> None:
            if received <= self.most_bytes:
                await send(message)

        await self.app(scope, limited, sending)
        if received > self.most_bytes:
            too_long = _answer(413, f"the body has more than {self.most_bytes:,} bytes", "invalid_request_error")
            await too_long(scope, receive, send)

    def _refusal(self, scope: Scope, headers: Headers) -> tuple[int, str, str] | None:
        if (unclear := ambiguous(headers)) is not None:
            return 403, unclear, "forbidden"
        host = host_name(headers.get("host", ""))
        if self.key is None and not is_loopback(host):
            return 403, f"{host!r} is not a local host name: start the server with --api-key", "forbidden"
        if is_foreign(headers.get("origin"), headers.get("host", "")):
            return 403, "requests from web pages of other sites are refused", "forbidden"
        sent = next(reversed(headers.getlist("authorization")), "").removeprefix("Bearer ").encode()
        if self.key is not None and scope["path"] not in OPEN and not hmac.compare_digest(sent, self.key.encode()):
            return 401, "the API key is missing or wrong: send `Authorization: Bearer KEY`", "invalid_api_key"
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["method"] == "POST" and kind != "application/json":
            return 415, "send JSON, with the header `Content-Type: application/json`", "invalid_request_error"
        size = headers.get("content-length", "0")
        if not size.isdecimal() or len(size) > 18 or int(size) > self.most_bytes:  # `int` refuses thousands of digits
            return 413, f"the body has more than {self.most_bytes:,} bytes", "invalid_request_error"
        return None


def error_body(message: str, code: str | None, kind: str = "invalid_request_error", param: str | None = None) -> Any:
    """An error in the format of OpenAI's API."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _answer(status: int, message: str, code: str) -> JSONResponse:
    return JSONResponse(error_body(message, code), status)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on `host` and `port`. If the port is taken, raises ConfigError that names a free port."""
    listening = _socket(host)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(512)
    except OSError as error:
        listening.close()
        free = _free_port(host, port) if port else None
        advice = f": --port {free} is free" if free else ""
        raise ConfigError(f"cannot listen on {host}:{port} ({error.strerror or error}){advice}") from error
    return listening


def _socket(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)


def _free_port(host: str, port: int) -> int | None:
    for other in range(port + 1, min(port + 50, 65536)):
        with _socket(host) as trial, suppress(OSError):
            trial.bind((host, other))
            return other
    return None


def run(
    start: Callable[[], Awaitable[Any]], app_of: Callable[[Any], ASGIApp], listening: socket.socket, name: str
) -> None:
    """Await `start()`, serve `app_of` its result until SIGINT or SIGTERM, and close the result. The address is printed
    with the `name` of the model before the first request is answered. Errors of `start` are raised.
    """
    serving = False

    async def serve() -> None:
        nonlocal serving
        with closing(await start()) as started:
            settings = {"access_log": False, "lifespan": "off", "server_header": False}
            server = bounded_server(app_of(started), timeout_graceful_shutdown=GRACE_S, **settings)
            host, port = listening.getsockname()[:2]
            serving = True
            say(f"serving {name} at http://{f'[{host}]' if ':' in host else host}:{port}/v1 (Ctrl-C stops)")
            await server.serve([listening])

    try:
        with listening:
            asyncio.run(serve())
    except KeyboardInterrupt:
        if not serving:  # while serving, Ctrl-C is the normal way to stop
            raise


def bounded_server(app: Any, quiet: bool = False, **settings: Any) -> Any:
    """A uvicorn server that limits the number of connections and the time for a request to arrive. A second signal ends
    the process at once. `quiet`: no errors are logged for requests interrupted by the shutdown."""

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            if quiet:
                logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            await super().shutdown(sockets)

        def handle_exit(self, sig: int, frame: Any) -> None:
            if self.should_exit:
                signal.signal(sig, signal.SIG_DFL)
                signal.raise_signal(sig)
            super().handle_exit(sig, frame)

    return Server(uvicorn.Config(app, log_level="warning", http=BoundedConnection, **settings))


PROTOCOL: Any = AutoHTTPProtocol


class BoundedConnection(PROTOCOL):
    """uvicorn's connection class, extended: closes a connection if there are too many or a request is too slow."""

    arriving: asyncio.TimerHandle | None = None
    part = ""  # the part of the request that has a deadline: "headers", "body" or none

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        room = MOST_CONNECTIONS if resource is None else resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        if len(self.connections) > min(MOST_CONNECTIONS, room):
            transport.write(FULL)
            transport.close()
        self.wait("headers")

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        cycle: Any = self.cycle
        if self.transport.get_protocol() is not self:  # the connection has become a web socket
            self.wait("")
        elif cycle is None or cycle.response_complete:
            self.wait("headers")
        else:
            self.wait("body" if cycle.more_body else "")

    def connection_lost(self, exc: Exception | None) -> None:
        self.wait("")
        super().connection_lost(exc)

    def wait(self, part: str) -> None:
        """Close the connection if this part of the request is not complete in time."""
        if part == self.part and self.arriving is not None:
            return
        if self.arriving is not None:
            self.arriving.cancel()
        self.part, self.arriving = part, None
        if part:
            self.arriving = self.loop.call_later(HEADERS_S if part == "headers" else BODY_S, self.transport.close)
