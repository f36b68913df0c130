"""Listening on an address, and running an application there until a signal."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from posttrain.errors import ConfigError

GRACE_S = 5  # for requests that are being answered, at the end


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
    import uvicorn

    serving = False

    async def serve() -> None:
        nonlocal serving
        started = await start()
        try:
            config = uvicorn.Config(
                app_of(started),
                log_level="warning",
                access_log=False,
                lifespan="off",
                server_header=False,
                timeout_graceful_shutdown=GRACE_S,
            )
            host, port = listening.getsockname()[:2]
            serving = True
            ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")
            await uvicorn.Server(config).serve([listening])
        finally:
            started.close()

    try:
        asyncio.run(serve())
    except KeyboardInterrupt:
        if not serving:  # else it is how one ends it
            raise
    finally:
        listening.close()


def _free_port(host: str, port: int) -> int | None:
    for other in range(port + 1, min(port + 50, 65536)):
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as trial:
            try:
                trial.bind((host, other))
            except OSError:
                continue
            return other
    return None
