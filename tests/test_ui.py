"""`posttrain ui` over HTTP: every page answers, what guards it, and what its process does not load."""

import json
import re
import shutil
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from pages import fetch, free_port, served, shown

from posttrain.cli import main

SAVED = Path(__file__).parent / "saved_run/run"
MOST_MB = 600


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ui") / "runs"
    shutil.copytree(SAVED, folder / "saved")
    (folder / "saved/report.html").write_text("<h1>the report</h1>")
    (folder / "saved/training.log").write_text("2026-11-24 04:59:41,000 INFO train: 16 rows read\n")
    return folder


@pytest.fixture(scope="module")
def ui(runs):
    with served("ui", runs, "--no-browser") as found:
        yield found


PAGES = {
    "/": "saved",
    "/run?run=saved": "Copy the command that replays this",
    "/rollouts?run=saved": "Find rollouts",
    "/rollouts?run=saved&step=2&prompt=0&rollout=0": "The tokens that pushed most",
    "/data": "The data of which run?",
    "/evaluations": "There are no evaluations",
    "/new": "Still needed: model.path, data.source",
}


def test_every_page_answers_and_loads_no_torch(ui):
    address, process = ui
    for path, words in PAGES.items():
        assert words in shown(address, path), path
    memory = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    assert "libtorch" not in Path(f"/proc/{process}/maps").read_text()
    assert int(memory[1]) / 1000 < MOST_MB, f"{memory[1]} kB"


def test_nothing_outside_the_list_is_read(ui, runs):
    """Names of addresses are looked up: neither paths nor markup in them do anything."""
    address, _ = ui
    (runs.parent / "secret").mkdir()
    shutil.copy(SAVED / "run.json", runs.parent / "secret/run.json")
    for name in ("../secret", str(runs.parent / "secret"), "saved/../../secret", "%00", "<script>alert(1)</script>"):
        made = shown(address, f"/run?run={urllib.request.quote(name)}")
        assert "There is no run" in made and "<script" not in made
        with pytest.raises(urllib.error.HTTPError, match="404"):
            fetch(f"{address}/report?run={urllib.request.quote(name)}")
    assert "the report" in fetch(f"{address}/report?run=saved")


def test_foreign_pages_are_refused(ui):
    address, _ = ui
    for headers in ({"Origin": "http://evil.example"}, {"Origin": "http://["}, {"Host": "evil.example"}):
        with pytest.raises(urllib.error.HTTPError, match="403"):
            fetch(f"{address}/", **headers)


def test_events_that_no_page_sends_are_no_error_of_the_server(ui):
    """Inputs of other kinds and numbers, half of a surrogate pair, and files."""
    address, _ = ui
    events = [
        {"fn_index": index, "data": data, "session_hash": session, "event_data": {"address": what, "act": what}}
        for index in (0, -1)
        for data in ([], ["\ud800"] * 2, [{"path": "/etc/passwd"}] * 9)
        for session, what in (("a", 5), ("\ud800", "?\ud800"))
    ]
    sent = [(path, event) for event in events for path in ("run/predict", "queue/join", "cancel", "reset", "call/x")]
    for path, body in [*sent, ("upload", {}), ("upload/", {}), ("run/predict", [None]), ("queue/join", {"data": 5})]:
        request = urllib.request.Request(
            f"{address}/gradio_api/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            status = urllib.request.urlopen(request, timeout=30).status
        except urllib.error.HTTPError as error:
            status = error.code
        assert status in ((404,) if "upload" in path else (200, 400, 404, 405, 422)), (path, body)
    port = int(address.rpartition(":")[2])
    for headers in (
        ["Host: evil.example@127.0.0.1"],
        ["Host: 127.0.0.1"] * 2,
        ["Host: 127.0.0.1", "Origin: null", "Origin: x"],
    ):
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            connection.sendall("\r\n".join(["GET / HTTP/1.1", *headers, "Connection: close", "", ""]).encode())
            assert connection.recv(100).split()[1] == b"403", headers


def test_what_cannot_be_served_is_said(runs, tmp_path, capsys):
    port = str(free_port())
    for arguments, words in (
        ([str(tmp_path / "nowhere")], "there is no folder"),
        ([str(runs), "--host", "0.0.0.0"], "give a --token"),
        ([str(runs), "--host", "0.0.0.0", "--token", "short"], "can be guessed"),
    ):
        assert main(["ui", *arguments, "--port", port]) == 1
        assert words in capsys.readouterr().err


def test_a_port_in_use_suggests_another(ui, runs, capsys):
    port = ui[0].rpartition(":")[2]
    assert main(["ui", str(runs), "--port", port]) == 1
    assert re.search(rf"{port}.*--port \d+ is free", capsys.readouterr().err)
