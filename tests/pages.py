"""A `posttrain` server as a process of its own, and its pages over HTTP as a browser asks for them."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
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


def config(page: str) -> dict:
    """Gradio's description of a page, with the calls that the page makes."""
    start = page.index("window.gradio_config = ") + len("window.gradio_config = ")
    return json.JSONDecoder().raw_decode(page[start:])[0]


def shown(address: str, path: str) -> str:
    """The HTML that a page gets when it is opened in a browser."""
    page = fetch(address + path)
    name = path.partition("?")[0].strip("/")
    call = next(
        one["id"]
        for one in config(page)["dependencies"]
        if any(event == "load" for _, event in one["targets"])
        and (one.get("rendered_in") or name) == name
        and one["id"] in config(page)["page"][name]["dependencies"]
    )
    query = path.partition("?")[2]
    fetch(f"{address}/gradio_api/queue/join?{query}", {"data": [], "fn_index": call, "session_hash": "test"})
    events = fetch(f"{address}/gradio_api/queue/data?session_hash=test")
    found = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: ")]
    return next(one["output"]["data"][0] for one in found if one["msg"] == "process_completed")
