"""The buttons that change runs: stop, resume, rename, tag, note, delete, and clear failed starts."""

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pages import served
from test_ui import posted

from posttrain.base.errors import RunError
from posttrain.reports.markup import Markup
from posttrain.runs.folder import LOCK, Notes, interrupt, read_notes, write_notes
from posttrain.ui.parts import address, parse
from posttrain.ui.run_page import remove, resume, run_page, save, stop
from posttrain.ui.runs_page import clear, failed_starts, runs_page
from posttrain.ui.viewer import Viewer, attempt

SAVED = Path(__file__).parent / "saved_run/run"
# A process that holds a run's lock, as a run does, until it is interrupted.
HOLDER = """
import sys, time, pathlib
from posttrain.runs.folder import FolderLock
lock = FolderLock(pathlib.Path(sys.argv[1]))
print('held', flush=True)
try:
    time.sleep(60)
except KeyboardInterrupt:
    print('interrupted', flush=True)
    time.sleep(60)
"""


@pytest.fixture
def viewer(tmp_path) -> Viewer:
    shutil.copytree(SAVED, tmp_path / "runs/saved")
    return Viewer(tmp_path / "runs", tmp_path / "cache")


def state(folder: Path, name: str, **facts: object) -> None:
    known = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(known | {"state": name, "ended": None, **facts}))


def early(folder: Path, name: str = "failed", reason: str = "out of memory") -> None:
    """A run that ended before its first step."""
    folder.mkdir(parents=True)
    for file in ("run.json", "config.yaml"):
        shutil.copy(SAVED / file, folder)
    state(folder, name, reason=reason)


@pytest.fixture
def held(viewer):
    """The run's folder and a process that runs in it."""
    folder = viewer.root / "saved"
    state(folder, "running")
    process = subprocess.Popen([sys.executable, "-c", HOLDER, folder], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield folder, process
    process.kill()
    process.wait()


def test_stop_interrupts_the_process_of_the_run_once(viewer, held):
    _, process = held
    page = run_page(viewer, parse("?run=saved"))
    assert 'value="stop"' in page and 'value="resume"' not in page
    for _ in range(2):  # a second SIGINT would end a run without saving
        assert attempt(stop, viewer, "?run=saved") == "/run?run=saved"
    assert process.stdout.readline() == "interrupted\n"
    time.sleep(0.2)
    assert process.poll() is None
    page = run_page(viewer, parse("?run=saved"))
    assert "Stopping" in page and 'value="stop"' not in page


def test_only_the_process_that_has_the_lock_is_interrupted(viewer, held):
    """Not one that was given the id later, none of another machine, and none where the lock file says nothing."""
    folder, process = held
    lock, mine = folder / LOCK, (folder / LOCK).read_text()
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        for text, words in (
            (f"process {other.pid} on {platform.node()}", f"process {other.pid} is not the run"),
            (mine.replace(platform.node(), "elsewhere"), "not this machine: stop it there with Ctrl-C or kill -INT"),
            (f"process 4194305 on {platform.node()}", "cannot be stopped"),
            ("", "does not name the process"),
            (f"process -1 on {platform.node()}", "does not name the process"),
        ):
            lock.write_text(text)
            with pytest.raises(RunError, match=words):
                interrupt(folder)
        assert other.poll() is None and process.poll() is None
    finally:
        other.kill()
        other.wait()
    lock.write_text(mine)
    process.kill()
    process.wait()
    with pytest.raises(RunError, match="no process runs in"):
        interrupt(folder)


def test_a_run_is_tagged_noted_and_renamed(viewer):
    folder = viewer.root / "saved"
    given = address("/run", run="saved", name="saved", tags="#keep  paper", note="two\r\nlines")
    assert attempt(save, viewer, given) == "/run?run=saved"
    assert read_notes(folder) == Notes(("keep", "paper"), "two\nlines")
    page = run_page(viewer, parse("?run=saved"))
    assert 'value="keep paper"' in page and "two\nlines</textarea>" in page
    assert attempt(save, viewer, "?run=saved&name=better") == "/run?run=better"
    assert not folder.exists() and read_notes(viewer.root / "better") == Notes()
    assert "name: better" in (viewer.root / "better/config.yaml").read_text()
    for wrong, words in (("name=a%2Fb", "cannot name a run"), ("name=better&tags=a%2Cb", "is not a tag")):
        error = attempt(save, viewer, f"?run=better&{wrong}")
        assert isinstance(error, Markup) and words in error
    assert "there is no run" in str(attempt(save, viewer, "?run=../better&name=x"))


def test_deleting_asks_first_and_names_what_needs_the_run(viewer):
    page = run_page(viewer, parse("?run=saved"))
    assert 'value="delete"' not in page and "delete=1" in page
    asked = run_page(viewer, parse("?run=saved&delete=1"))
    assert "Permanently delete saved (grpo of model, finished at step 2" in asked and 'value="delete"' in asked
    shutil.copytree(SAVED, viewer.root / "after")
    settings = (viewer.root / "after/config.yaml").read_text()
    model = viewer.root / "saved/checkpoint-2"
    (viewer.root / "after/config.yaml").write_text(settings.replace("- path: model\n", f"- path: {model}\n"))
    viewer.runs.renew()
    asked = run_page(viewer, parse("?run=saved&delete=1"))
    assert "needed by 1 other run" in asked and "after (models.0.path)" in asked and 'value="delete"' not in asked
    assert "after (models.0.path)" in str(attempt(remove, viewer, "?run=saved")) and model.exists()
    for name in ("after", "saved"):
        assert attempt(remove, viewer, f"?run={name}") == "/"
    assert list(viewer.root.iterdir()) == [] and viewer.runs.all() == []


def test_a_run_in_progress_and_the_folder_served_are_not_changed(viewer, held):
    folder, _ = held
    for act, query in ((save, "&name=other"), (remove, ""), (resume, "")):
        error = attempt(act, viewer, f"?run=saved{query}")
        assert isinstance(error, Markup) and ("in use by process" in error or "is running" in error), act
    alone = Viewer(folder, viewer.cache)
    for act in (stop, save, remove, resume):
        assert "is the folder served" in str(attempt(act, alone, "?run=saved&name=x"))
    assert folder.exists()


def program(monkeypatch, source: str) -> None:
    monkeypatch.setattr("posttrain.ui.commands.command", lambda given: [sys.executable, "-c", source, *given])


def ended(viewer: Viewer, name: str) -> int:
    launch = viewer.launches.find(name)
    assert launch is not None
    return launch.process.wait(20)


def test_a_run_is_resumed_with_its_stages(viewer, monkeypatch):
    program(monkeypatch, "import sys, time; print(sys.argv[1:], flush=True); time.sleep(30)")
    whole = viewer.root / "whole"
    shutil.move(viewer.root / "saved", whole / "sft")
    shutil.copy(SAVED / "config.yaml", whole)
    state(whole / "sft", "interrupted")
    assert 'value="resume"' in run_page(viewer, parse("?run=whole/sft"))
    assert attempt(resume, viewer, "?run=whole/sft") == "/run?run=whole%2Fsft"
    launch = viewer.launches.find("whole/sft")
    assert launch is not None and "whole/sft is starting" in run_page(viewer, parse("?run=whole/sft"))
    assert "is being resumed already" in str(attempt(resume, viewer, "?run=whole/sft"))
    until = time.monotonic() + 20
    while not launch.output and time.monotonic() < until:
        time.sleep(0.02)
    assert launch.output == f"['train', '--resume', '{whole.resolve()}']\n"
    launch.process.send_signal(signal.SIGKILL)
    ended(viewer, "whole/sft")
    page = run_page(viewer, parse("?run=whole/sft"))
    assert "was not started (exit status -9)" in page and "--resume" in page


def test_a_start_leads_to_its_run_and_failed_ones_are_cleared_in_one_go(viewer, monkeypatch):
    """Deleted: what ended before its first step, with its stages. Kept: what stepped, or has files of the user."""
    program(monkeypatch, "import sys; sys.exit('error: no such model')")
    viewer.launches.start("lost", "method: sft\n")
    ended(viewer, "lost")
    page = run_page(viewer, parse("?run=lost"))
    assert "lost was not started (exit status 1)" in page and "error: no such model" in page
    for name in ("one", "two"):
        early(viewer.root / name, "interrupted" if name == "two" else "failed")
    early(viewer.root / "stages/sft")
    shutil.copy(SAVED / "config.yaml", viewer.root / "stages")
    early(viewer.root / "half/sft")
    shutil.copy(SAVED / "config.yaml", viewer.root / "half")
    shutil.copytree(SAVED, viewer.root / "half/dpo")
    early(viewer.root / "mine")
    early(viewer.root / "noted")
    write_notes(viewer.root / "noted", Notes((), "why does it fail?"))
    (viewer.root / "mine/notes.txt").touch()
    shutil.copytree(SAVED, viewer.root / "stepped")
    state(viewer.root / "stepped", "failed", reason="out of memory")
    viewer.runs.renew()
    assert [folder.name for folder in failed_starts(viewer)] == ["one", "stages", "two"]
    assert "3 runs ended before the first step (one, stages, two)" in runs_page(viewer, parse("/"))
    assert attempt(clear, viewer, "/") is None
    assert sorted(path.name for path in viewer.root.iterdir()) == [
        "configs",
        "half",
        "mine",
        "noted",
        "saved",
        "stepped",
    ]
    assert "before the first step" not in runs_page(viewer, parse("/"))


def test_a_failed_start_that_others_need_is_kept_and_said(viewer):
    early(viewer.root / "one")
    (viewer.root / "saved/base").symlink_to(viewer.root / "one")
    assert "saved (base)" in str(attempt(clear, viewer, "/")) and (viewer.root / "one").exists()


def test_changes_are_forms_of_these_pages(tmp_path):
    runs = tmp_path / "runs"
    shutil.copytree(SAVED, runs / "saved")
    early(runs / "early")
    write_notes(runs / "saved", Notes(("keep",)))
    with served("ui", runs, "--no-browser") as (found, _):
        for act in ("stop", "resume", "save", "delete"):
            for headers in ({"Origin": "http://evil.example"}, {"Origin": "null"}, {"Host": "evil.example"}):
                assert posted(f"{found}/run?run=saved", f"act={act}&name=x", **headers)[0] == 403, act
            assert posted(f"{found}/run?run=saved", f"act={act}", **{"Content-Type": "text/plain"})[0] == 415
        assert posted(f"{found}/", "act=clear", Origin="http://evil.example")[0] == 403
        assert sorted(path.name for path in runs.iterdir()) == ["early", "saved"]
        status, place, _ = posted(f"{found}/run?run=saved", "act=save&name=new&tags=&note=a")
        assert (status, place) == (303, "/run?run=new") and read_notes(runs / "new") == Notes((), "a")
        status, place, _ = posted(f"{found}/run?run=new", "act=delete", Origin=found, **{"X-Shown": "0"})
        assert (status, place) == (200, "/") and not (runs / "new").exists()
        assert posted(f"{found}/", "act=clear")[:2] == (303, "/?") and os.listdir(runs) == []
