"""A `posttrain` server as a process of its own, and its pages over HTTP as a browser asks for them."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WAIT_S = 60.0


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextmanager
def served(*arguments: str | Path, path: str = "/", folder: Path | None = None) -> Iterator[tuple[str, int]]:
    """`posttrain ARGUMENTS --port PORT` as a process of its own; its address and process id, once it answers."""
    port = free_port()
    command = [sys.executable, "-m", "posttrain", *map(str, arguments), "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder)
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + WAIT_S
        while not _answers(address + path):
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                raise RuntimeError(f"{' '.join(command)} does not answer:\n{process.communicate()[0]}")
            time.sleep(0.1)
        yield address, process.pid
    finally:
        process.terminate()
        said = process.communicate(timeout=20)[0]
    assert "Traceback" not in said, said


def _answers(address: str) -> bool:
    try:
        urllib.request.urlopen(address, timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def fetch(address: str, body: dict | None = None, **headers: str) -> str:
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(address, data, {"Content-Type": "application/json", **headers})
    with urllib.request.urlopen(asked, timeout=30) as reply:
        return reply.read().decode()


def shown(address: str, path: str) -> str:
    """What a page shows, as its script gets it."""
    return fetch(address + path, **{"X-Shown": ""})


def drawn(path: Path) -> list[str]:
    """The texts of a picture that is SVG without links, scripts, or numbers that are none."""
    root = ElementTree.parse(path).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    for one in root.iter():
        assert one.tag.rpartition("}")[2] in ("svg", "style", "rect", "line", "path", "circle", "text", "g"), one.tag
        assert not any("nan" in value or "inf" in value for name, value in one.items() if name != "aria-label"), (
            one.items()
        )
    return [one.text or "" for one in root.iter("{http://www.w3.org/2000/svg}text")]
