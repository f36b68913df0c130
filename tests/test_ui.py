"""`posttrain ui` over HTTP: every page answers, what guards it, and what its process does not load."""

import base64
import hashlib
import http.client
import json
import os
import re
import shutil
import socket
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

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
    "/run?run=saved": "Copy the command that repeats this run",
    "/rollouts?run=saved": "Find rollouts",
    "/rollouts?run=saved&step=2&prompt=0&rollout=0": "The tokens with the largest push",
    "/data": "Choose a run to see its data.",
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


@pytest.mark.parametrize("make", [lambda path, other: path.symlink_to(other), lambda path, other: os.mkfifo(path)])
def test_a_report_that_is_a_link_or_a_pipe_is_not_served(ui, runs, make):
    address, _ = ui
    report, kept, other = runs / "saved/report.html", runs / "saved/kept.html", runs.parent / "other.html"
    other.write_text("someone's file")
    report.rename(kept)
    try:
        make(report, other)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            fetch(f"{address}/report?run=saved")
    finally:
        report.unlink()
        kept.rename(report)
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
            f"{address}/chat/gradio_api/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
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


def posted(address: str, body: str, **headers: str) -> tuple[int, str, str]:
    """The status, the place and the content of the answer to a form."""
    kind = {"Content-Type": "application/x-www-form-urlencoded"}
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=30)
    path = address.removeprefix(f"http://{urlsplit(address).netloc}")
    connection.request("POST", path, body.encode(errors="surrogateescape"), kind | headers)
    answer = connection.getresponse()
    place = answer.headers.get("Location") or answer.headers.get("Content-Location", "")
    return answer.status, place, answer.read().decode()


def test_pages_work_without_a_script_and_allow_no_other(ui):
    """Whole pages with links and forms; the policy names the two hashes of script and style, and compiles nothing."""
    address, _ = ui
    for path, words in PAGES.items():
        with urllib.request.urlopen(address + path, timeout=30) as reply:
            page, policy = reply.read().decode(), reply.headers["Content-Security-Policy"]
        assert words in page and page.count("<script>") == 1 and " style=" not in page and " onclick=" not in page
        assert "unsafe" not in policy and "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
        for name in ("script", "style"):
            source = page.partition(f"<{name}>")[2].partition(f"</{name}>")[0]
            digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
            assert f"{name}-src 'sha256-{digest}';" in policy
    with urllib.request.urlopen(f"{address}/chat?a=x", timeout=30) as reply:
        assert "'unsafe-eval'" in reply.headers["Content-Security-Policy"] and "window.gradio_config" in str(
            reply.read()
        )
    found = fetch(f"{address}/?find=no+such+run&state=&method=")
    assert "0 of 1 run" in found, "a form that is sent as it is"


def test_content_that_a_page_has_is_not_sent_again(ui):
    address, _ = ui
    version = re.search(r'data-version="([^"]+)"', shown(address, "/evaluations"))
    with urllib.request.urlopen(
        urllib.request.Request(f"{address}/evaluations", headers={"X-Shown": version[1]}), timeout=30
    ) as reply:
        assert (reply.status, reply.read()) == (204, b"")
    assert "<html" in fetch(f"{address}/evaluations") and "<html" not in shown(address, "/evaluations")


def test_actions_are_forms_of_these_pages(ui, runs):
    address, _ = ui
    fields = "method.type=sft&model.path=%2Fno%2Fmodel&data.source=gsm8k&training.max_steps="
    status, place, _ = posted(f"{address}/new", f"{fields}&act=plan")
    assert status == 303 and place == "/new?method.type=sft&model.path=%2Fno%2Fmodel&data.source=gsm8k"
    status, place, page = posted(f"{address}/new?seed=3", "act=start", **{"X-Shown": "0"})
    assert status == 200 and place == "/new?seed=3" and "the settings are incomplete" in page and "<html" not in page
    assert posted(f"{address}/new", "act=start")[0] == 200, "refused: the page says why"
    assert "There is no run" in posted(f"{address}/data?run=..%2Fx", "act=read")[2]
    for body in (
        "",
        "act=",
        "act=read",
        "act=__class__",
        "act=%00",
        "a" * 9000,
        "&" * 900,
        "act=start&act=plan&=%ED%A0%80",
    ):
        assert posted(f"{address}/new", body)[0] in (200, 303, 400, 413), body
    for body in ("\udcff\udc80", "%ff%fe=%00"):
        assert posted(f"{address}/new", body)[0] == 400
    assert posted(f"{address}/new", "act=plan", **{"Content-Type": "application/json"})[0] == 415
    assert posted(f"{address}/run?run=saved", "act=plan")[0] == 400
    assert posted(f"{address}/rollouts?run=saved", "act=plan")[0] == 405
    for origin in ("http://evil.example", "null"):
        assert posted(f"{address}/new", f"{fields}&act=start", Origin=origin)[0] == 403
    assert posted(f"{address}/new", "act=plan", Origin=address)[0] == 200
    assert not (runs / "configs").exists()


def test_a_folder_that_does_not_exist_yet_is_served(tmp_path):
    with served("ui", tmp_path / "nowhere", "--no-browser") as (found, _):
        page = fetch(found)
        assert "There are no runs yet" in page and "0 runs" in page and str(tmp_path / "nowhere") in page
        for path in ("/rollouts", "/evaluations", "/data", "/new", "/run?run=x"):
            assert "0 runs" in shown(found, path) and "cannot be shown" not in shown(found, path)
    assert not (tmp_path / "nowhere").exists()


def test_what_cannot_be_served_is_said(runs, tmp_path, capsys):
    port = str(free_port())
    for arguments, words in (
        ([str(runs / "saved/run.json")], "is a file"),
        ([str(runs), "--host", "0.0.0.0"], "give a --token"),
        ([str(runs), "--host", "0.0.0.0", "--token", "short"], "can be guessed"),
    ):
        assert main(["ui", *arguments, "--port", port]) == 1
        assert words in capsys.readouterr().err


def test_a_port_in_use_suggests_another(ui, runs, capsys):
    port = ui[0].rpartition(":")[2]
    assert main(["ui", str(runs), "--port", port]) == 1
    assert re.search(rf"{port}.*--port \d+ is free", capsys.readouterr().err)
