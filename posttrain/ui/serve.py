"""Listening on an address, and saying which."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import threading
import webbrowser
from pathlib import Path

import uvicorn

from posttrain.errors import ConfigError
from posttrain.terminal import say

NEXT = 20  # ports that are tried for a suggestion
SHORTEST = 8  # characters of a token


def serve(root: Path, host: str, port: int, token: str | None, browser: bool) -> None:
    """Serve the pages until Ctrl-C. Raises ConfigError if the address cannot be used, or needs a token."""
    local = is_local(host)
    check(root, host, token)
    listening = listen(host, port)
    from posttrain.ui.app import application, place_of  # imports Gradio: only once the port is ours

    app = application(place_of(root), token or None, local)
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    say(f"The runs of {root}: {address}   (Ctrl-C ends this)")
    if browser:
        threading.Timer(0.5, webbrowser.open, [address]).start()
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listening])


def check(root: Path, host: str, token: str | None) -> None:
    if root.exists() and not root.is_dir():
        raise ConfigError(f"{root} is a file: name the folder that has the runs")
    if not root.exists():
        raise ConfigError(f"there is no folder {root}: name the one that has the runs (output_dir in the settings)")
    if not is_local(host) and not token:
        raise ConfigError(
            f"--host {host} lets other machines in: give a --token (or POSTTRAIN_UI_TOKEN), which the page asks for, or "
            "keep 127.0.0.1 and forward the port (ssh -L)"
        )
    if token and len(token) < SHORTEST:
        raise ConfigError(f"the token has {len(token)} characters, which can be guessed: give at least {SHORTEST}")


def is_local(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int) -> socket.socket:
    """A socket on the address. Raises ConfigError, which names the next free port if this one is in use."""
    try:
        return _bound(host, port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            reason = error.strerror or str(error)
            raise ConfigError(f"cannot listen on {host} port {port}: {reason}") from None
    for other in range(port + 1, min(port + NEXT, 65536)):
        with contextlib.suppress(OSError):
            _bound(host, other).close()
            raise ConfigError(f"port {port} is in use, perhaps by another posttrain ui: --port {other} is free")
    raise ConfigError(f"port {port} and the {NEXT} after it are in use: give another --port")


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen(128)
    except OSError:
        made.close()
        raise
    return made
