"""Listening on an address, and running an application there until a signal."""

import asyncio
import logging
import signal
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from posttrain.base.errors import ConfigError
from posttrain.base.system import resource

GRACE_S = 5  # for requests that are being answered, at the end
HEADERS_S, BODY_S = 10.0, 60.0  # for a request to arrive
MOST_CONNECTIONS = 512  # at a time; fewer where the process may open fewer files
FULL = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there. Raises ConfigError, which names the next free port if this one is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
        found.listen(512)
    except OSError as error:
        found.close()
        free = _free_port(host, port) if port else None
        advice = f": --port {free} is free" if free else ""
        raise ConfigError(f"cannot listen on {host}:{port} ({error.strerror or error}){advice}") from error
    return found


class Closing(Protocol):
    def close(self) -> None: ...


Started = TypeVar("Started", bound=Closing)


def run(
    start: Callable[[], Awaitable[Started]],
    app_of: Callable[[Started], Any],
    listening: socket.socket,
    ready: Callable[[str], None],
) -> None:
    """Start what the application needs, and serve it until SIGINT or SIGTERM; `ready` is called with its address.

    Raises what `start` raises.
    """
    serving = False

    async def serve() -> None:
        nonlocal serving
        started = await start()
        try:
            settings = {"access_log": False, "lifespan": "off", "server_header": False}
            server = bounded_server(app_of(started), timeout_graceful_shutdown=GRACE_S, **settings)
            host, port = listening.getsockname()[:2]
            serving = True
            ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")
            await server.serve([listening])
        finally:
            started.close()

    try:
        asyncio.run(serve())
    except KeyboardInterrupt:
        if not serving:  # else it is how one ends it
            raise
    finally:
        listening.close()


def bounded_server(app: Any, quiet: bool = False, **settings: Any) -> Any:
    """A uvicorn server whose connections are counted and whose requests have to arrive in time.

    A second signal ends the process at once, whatever it does. `quiet`: requests that the end cuts off are no error.
    """
    import uvicorn

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

    return Server(uvicorn.Config(app, log_level="warning", http=_bounded_connection(), **settings))


def _bounded_connection() -> Any:
    """uvicorn's connection, closed if it is one too many, or if a request does not arrive in time."""
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    base: Any = AutoHTTPProtocol
    most = MOST_CONNECTIONS
    if resource is not None:
        most = min(most, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)

    class Connection(base):
        arriving: asyncio.TimerHandle | None = None
        part = ""  # of a request, that has a deadline

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > most:
                transport.write(FULL)
                transport.close()
            self.wait("headers")

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            cycle: Any = self.cycle
            if self.transport.get_protocol() is not self:  # a web socket's from now on
                self.wait("")
            elif cycle is None or cycle.response_complete:
                self.wait("headers")
            else:
                self.wait("body" if cycle.more_body else "")

        def connection_lost(self, exc: Exception | None) -> None:
            self.wait("")
            super().connection_lost(exc)

        def wait(self, part: str) -> None:
            """Close the connection if this part of a request is not complete in time."""
            if part == self.part and self.arriving is not None:
                return
            if self.arriving is not None:
                self.arriving.cancel()
            self.part, self.arriving = part, None
            if part:
                self.arriving = self.loop.call_later(HEADERS_S if part == "headers" else BODY_S, self.transport.close)

    return Connection


def _free_port(host: str, port: int) -> int | None:
    for other in range(port + 1, min(port + 50, 65536)):
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as trial:
            try:
                trial.bind((host, other))
            except OSError:
                continue
            return other
    return None
