"""Listening on an address, and saying which."""

import contextlib
import sys
import threading
import webbrowser
from pathlib import Path

from posttrain.base.errors import ConfigError
from posttrain.base.system import is_loopback
from posttrain.base.terminal import say
from posttrain.serving.listening import bounded_server, listen

SWITCH_S = 0.0005  # an answer of hundreds of database rows must not wait for the index's thread at each of them
READING_S = 10.0  # then the first page waits for the rest
SHORTEST = 8  # characters of a token


def serve(root: Path, host: str, port: int, token: str | None, browser: bool, page: str = "") -> None:
    """Serve the pages until Ctrl-C; a browser opens the address `page` of them. Raises ConfigError if the address
    cannot be used, or needs a token."""
    local = is_loopback(host)
    check(root, host, token)
    listening = listen(host, port)
    from posttrain.ui.app import application, place_of  # imports Gradio: only once the port is ours

    sys.setswitchinterval(SWITCH_S)
    place = place_of(root)
    reading = threading.Thread(target=place.viewer.warm, daemon=True)  # so that the first page is quick
    reading.start()
    app = application(place, token or None, local)
    reading.join(READING_S)
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}{page}"
    say(f"The runs of {root}: {address}   (Ctrl-C ends this)")
    if browser:
        threading.Timer(0.5, webbrowser.open, [address]).start()
    server = bounded_server(app, quiet=True, timeout_graceful_shutdown=1)  # open pages wait for events without an end
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listening])


def check(root: Path, host: str, token: str | None) -> None:
    if root.exists() and not root.is_dir():
        raise ConfigError(f"{root} is a file: name the folder that has the runs")
    if not root.exists():
        raise ConfigError(f"there is no folder {root}: name the one that has the runs (output_dir in the settings)")
    if not is_loopback(host) and not token:
        raise ConfigError(
            f"--host {host} lets other machines in: give a --token (or POSTTRAIN_UI_TOKEN), which the page asks for, "
            "or keep 127.0.0.1 and forward the port (ssh -L)"
        )
    if token and len(token) < SHORTEST:
        raise ConfigError(f"the token has {len(token)} characters, which can be guessed: give at least {SHORTEST}")
