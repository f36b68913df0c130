"""Checkpoints survive kills, full disks and damage."""

import inspect
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from posttrain.base.errors import RunError
from posttrain.runs.atomic import recover, write_file, write_folder
from posttrain.runs.checkpoint import (
    list_checkpoints,
    named_checkpoint,
    newest_complete,
    save_checkpoint,
    save_folder,
    saved_step,
    set_aside_after,
    verify,
)


def write_some(folder: Path, seed: int = 0) -> None:
    generator = random.Random(seed)
    (folder / "model.bin").write_bytes(generator.randbytes(700))
    (folder / "config.json").write_text(json.dumps({"seed": seed, "layers": [1, 2, 3]}))
    (folder / "adapter").mkdir()
    (folder / "adapter" / "weights.bin").write_bytes(generator.randbytes(300))


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if ".tmp-" in path.name or ".old-" in path.name]


# Saving


def test_save_verify_prune(tmp_path):
    for step in (5, 10, 9, 100):
        save_checkpoint(tmp_path, step, write_some, limit=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-10", "checkpoint-100"]
    newest, skipped = newest_complete(tmp_path)
    assert (newest.name, skipped, verify(newest), saved_step(newest)) == ("checkpoint-100", [], [], 100)
    assert leftovers(tmp_path) == []


def test_prune_spares_saved_and_newest(tmp_path):
    for step in (1, 3):
        save_checkpoint(tmp_path, step, write_some, limit=1)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-3"]
    save_checkpoint(tmp_path, 2, write_some, limit=1)  # an earlier step, saved later: it must survive its own pruning
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-3"]
    save_checkpoint(tmp_path, 4, write_some, limit=None)
    assert len(list_checkpoints(tmp_path)) == 3


def test_replacing_a_folder_and_failing_to(tmp_path):
    save_folder(tmp_path / "best", 1, lambda folder: write_some(folder, 1))
    save_folder(tmp_path / "best", 2, lambda folder: write_some(folder, 2))
    assert saved_step(tmp_path / "best") == 2

    def fails(folder: Path) -> None:
        write_some(folder, 3)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_folder(tmp_path / "best", 3, fails)
    assert saved_step(tmp_path / "best") == 2 and verify(tmp_path / "best") == []
    assert leftovers(tmp_path) == []


def test_everything_is_synced_before_it_is_renamed(tmp_path, monkeypatch):
    events: list[tuple[str, int]] = []
    fsync, rename = os.fsync, os.rename

    def recording_fsync(descriptor):
        events.append(("fsync", os.fstat(descriptor).st_ino))
        fsync(descriptor)

    def recording_rename(source, target):
        events.append(("rename", os.stat(source).st_ino))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(os, "rename", recording_rename)
    path = save_checkpoint(tmp_path, 7, write_some, limit=None)
    (renamed,) = [index for index, (kind, _) in enumerate(events) if kind == "rename"]
    before = {inode for _, inode in events[:renamed]}
    for inside in [path, *path.rglob("*")]:
        assert inside.stat().st_ino in before, f"{inside.name} was renamed into place before it was synced"
    assert ("fsync", tmp_path.stat().st_ino) in events[renamed:], "the rename itself was not synced"


# Kills

# In a fork for every system call boundary of a save that replaces, saves anew and prunes: die right there.
KILL_EVERYWHERE = """
import os, shutil, signal, sys
from pathlib import Path
from posttrain.runs.atomic import recover
from posttrain.runs.checkpoint import list_checkpoints, newest_complete, save_checkpoint, verify

os.fsync = lambda descriptor: None  # slow, and no matter here: what a killed process wrote stays with the system
BOUNDARIES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.scandir"}
root, work = Path(sys.argv[1]), Path(sys.argv[1]) / "work"

def dies_at(point):
    seen = 0
    def hook(event, arguments):
        nonlocal seen
        if event in BOUNDARIES:
            seen += 1
            if seen == point:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    save_checkpoint(work, 2, write_some, limit=2)
    save_checkpoint(work, 3, write_some, limit=2)
    os._exit(0)

point, found = 0, {2: 0, 3: 0}
while True:
    point += 1
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    for step in (1, 2):
        save_checkpoint(work, step, write_some, limit=2)
    child = os.fork()
    if child == 0:
        dies_at(point)
    _, status = os.waitpid(child, 0)
    recover(work)
    newest, skipped = newest_complete(work)
    assert not skipped, (point, skipped)
    assert not leftovers(work), (point, leftovers(work))
    assert not any(map(verify, list_checkpoints(work))), point
    found[int(newest.name.removeprefix("checkpoint-"))] += 1
    if status == 0:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL, (point, status)
print(point - 1, "kills", found)
assert point > 30 and found[2] > 10 and found[3] > 3, (point, found)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_kill_at_every_system_call_of_a_save(tmp_path):
    # A process without torch, so that forking is quick and safe.
    code = inspect.getsource(write_some) + inspect.getsource(leftovers) + KILL_EVERYWHERE
    code = "import json, random\nfrom pathlib import Path\n" + code
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    print(done.stdout)
    assert done.returncode == 0, done.stderr


SAVE_FOR_EVER = """
import itertools, sys
from pathlib import Path
from posttrain.runs.atomic import recover
from posttrain.runs.checkpoint import list_checkpoints, save_checkpoint
run = Path(sys.argv[1])
recover(run)
first = max([int(path.name[11:]) for path in list_checkpoints(run)], default=0) + 1
def write(folder):
    for name in "abc":
        (folder / name).write_bytes(bytes(range(256)) * 800)
for step in itertools.count(first):
    save_checkpoint(run, step, write, limit=2)
    if step == first:
        print("ready", flush=True)
"""


def kill_saves(run: Path, kills: int, figure) -> None:
    generator = random.Random(kills)
    newest_step = inside = lost = 0
    for kill in range(kills):
        with subprocess.Popen([sys.executable, "-c", SAVE_FOR_EVER, str(run)], stdout=subprocess.PIPE) as child:
            assert child.stdout is not None and child.stdout.readline() == b"ready\n"
            time.sleep(generator.uniform(0, 0.03))
            child.send_signal(signal.SIGKILL)
        inside += bool(leftovers(run))
        recover(run)
        newest, skipped = newest_complete(run)
        assert skipped == [] and leftovers(run) == [], f"kill {kill}: {skipped}"
        lost += saved_step(newest) <= newest_step
        newest_step = saved_step(newest)
    print(f"{kills} kills, {inside} left something half done, newest step {newest_step}")
    figure("kills of a save", kills)
    figure("checkpoints lost", lost)
    assert inside > kills // 4, "too few kills fell inside a save to prove anything"


def test_random_kills(tmp_path, figure):
    kill_saves(tmp_path, 12, figure)


@pytest.mark.slow
def test_two_hundred_random_kills(tmp_path, figure):
    kill_saves(tmp_path, 200, figure)


def test_recover_touches_nothing_else(tmp_path):
    save_checkpoint(tmp_path, 1, write_some, limit=None)
    (tmp_path / "notes.tmp-old").write_text("mine")
    (tmp_path / "results.json.tmp-123").write_text("half")
    (tmp_path / "best.old-77").mkdir()
    (tmp_path / "final.old-77.tmp-78").mkdir()
    assert recover(tmp_path) == ["best.old-77", "final.old-77.tmp-78", "results.json.tmp-123"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "checkpoint-1", "notes.tmp-old"]


# Damage


@pytest.fixture
def two(tmp_path) -> Path:
    for step in (1, 2):
        save_checkpoint(tmp_path, step, lambda folder, step=step: write_some(folder, step), limit=None)
    return tmp_path


def assert_falls_back(run: Path, name: str) -> None:
    problems = verify(run / "checkpoint-2")
    assert len(problems) == 1 and problems[0].startswith(f"{name}: "), (name, problems)
    newest, skipped = newest_complete(run)
    assert newest.name == "checkpoint-1"
    assert len(skipped) == 1 and "checkpoint-2" in skipped[0] and name in skipped[0]


FILES = ["model.bin", "config.json", "adapter/weights.bin", "manifest.json"]


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_seen(two, name):
    path = two / "checkpoint-2" / name
    whole = path.read_bytes()
    generator = random.Random(name)
    for _ in range(75):  # 300 in all
        bit = generator.randrange(8 * len(whole))
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        assert_falls_back(two, name)
    path.write_bytes(whole)
    assert newest_complete(two)[0].name == "checkpoint-2"


@pytest.mark.parametrize("name", FILES)
def test_truncation_growth_and_deletion_are_seen(two, name):
    path = two / "checkpoint-2" / name
    whole = path.read_bytes()
    generator = random.Random(name)
    for _ in range(25):  # 100 in all
        path.write_bytes(whole[: generator.randrange(len(whole))])
        assert_falls_back(two, name)
    path.write_bytes(whole + b"\n")
    assert_falls_back(two, name)
    path.unlink()
    assert_falls_back(two, name)
    assert "missing" in verify(two / "checkpoint-2")[0]


def test_an_added_file_is_seen_but_not_a_hidden_one(two):
    (two / "checkpoint-2" / ".DS_Store").write_text("x")
    assert verify(two / "checkpoint-2") == []
    (two / "checkpoint-2" / "adapter_config.json").write_text("{}")
    assert_falls_back(two, "adapter_config.json")


def deep(path: Path) -> None:
    path.write_text("[" * 200_000)


def deep_inside(path: Path) -> None:
    path.write_text('{"version": 1, "step": 2, "files": {"model.bin": ' + "[" * 400 + "]" * 400 + '}, "check": "x"}')


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def a_pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("manifest.json", deep, "damaged"),
        ("manifest.json", deep_inside, "damaged"),
        ("manifest.json", a_folder, "not a regular file"),
        ("manifest.json", a_pipe, "not a regular file"),
        ("model.bin", a_folder, "missing"),
        ("model.bin", a_pipe, "not a regular file"),
        ("adapter/new", a_pipe, "not in the manifest"),
    ],
)
def test_what_is_no_file_or_no_manifest_is_seen(two, name, damage, said):
    """A pipe would be read without end, and what is nested too deep is no plain error of JSON's."""
    damage(two / "checkpoint-2" / name)
    assert_falls_back(two, name)
    assert verify(two / "checkpoint-2") == [f"{name}: {said}"]
    with pytest.raises(RunError, match=f"checkpoint-2 is damaged .*{name}"):
        named_checkpoint(two / "checkpoint-2")


def test_a_checkpoint_under_the_name_of_another_step_is_seen(two):
    (two / "checkpoint-2").rename(two / "checkpoint-9")
    newest, skipped = newest_complete(two)
    assert newest.name == "checkpoint-1"
    assert skipped == ["checkpoint-9 is damaged (manifest.json: it belongs to step 2: the folder was renamed)"]


def test_a_manifest_of_another_version_says_so(two):
    path = two / "checkpoint-2" / "manifest.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    assert "version 2" in verify(two / "checkpoint-2")[0]


def test_no_usable_checkpoint(two, tmp_path_factory):
    for step in (1, 2):
        (two / f"checkpoint-{step}" / "model.bin").unlink()
    with pytest.raises(RunError, match=r"checkpoint-2 is damaged \(model.bin: missing\).*checkpoint-1 is damaged"):
        newest_complete(two)
    with pytest.raises(RunError, match="no checkpoint to resume from"):
        newest_complete(tmp_path_factory.mktemp("empty"))


def test_named_checkpoint(two):
    assert named_checkpoint(two / "checkpoint-1") == two / "checkpoint-1"
    with pytest.raises(RunError, match=r"there is no checkpoint .*checkpoint-3.*there are checkpoint-1, checkpoint-2"):
        named_checkpoint(two / "checkpoint-3")
    (two / "checkpoint-2" / "config.json").unlink()
    with pytest.raises(RunError, match=r"checkpoint-2 is damaged \(config.json: missing\).*checkpoint-1"):
        named_checkpoint(two / "checkpoint-2")


def test_setting_later_checkpoints_aside(two):
    save_checkpoint(two, 3, write_some, limit=None)
    assert [path.name for path in set_aside_after(two, 1)] == ["checkpoint-3.set-aside", "checkpoint-2.set-aside"]
    assert newest_complete(two)[0].name == "checkpoint-1"
    save_checkpoint(two, 2, write_some, limit=1)
    assert [path.name for path in list_checkpoints(two)] == ["checkpoint-2"]
    set_aside_after(two, 0)  # takes the place of the one set aside before
    assert verify(two / "checkpoint-2.set-aside") == []


# A full disk

FILL = """
import os, sys
from pathlib import Path
import torch
from posttrain.base.errors import RunError
from posttrain.runs.checkpoint import newest_complete, save_checkpoint, saved_step
from posttrain.runs.files import save_json, save_tensors
from posttrain.runs.run import Run
from posttrain.runs.metrics import read_metrics

run, kind = Path(sys.argv[1]), sys.argv[2]
def write(folder):
    save_json(folder / "state.json", {"a": list(range(20))})
    save_tensors(folder / "model.safetensors", {"w": torch.ones(12_000)})
    (folder / "vocab.txt").write_text("x" * 9_000)
"""

LIMITED = """
import resource
save_checkpoint(run, 1, write, limit=2)
for attempt, size in enumerate([0, 10, 60, 100, 300, 5_000, 8_999, 40_000, 47_000, 48_000]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    try:
        save_checkpoint(run, 2, write, limit=2)
        raise SystemExit(f"saved within {size} bytes a file")
    except RunError as error:
        assert "no space to write" in str(error) and "checkpoint-2" in str(error), error
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert [path.name for path in run.iterdir()] == ["checkpoint-1"], list(run.iterdir())
    assert newest_complete(run) == (run / "checkpoint-1", [])
save_checkpoint(run, 2, write, limit=2)
assert saved_step(newest_complete(run)[0]) == 2
"""

MOUNTED = """
import shutil
disk = run / "disk"
with Run.create(disk / "run", "name: x", {}) as opened:
    folder = opened.folder
    opened.save_checkpoint(1, write, limit=2)
    opened.log(1, {"loss": 1.0})
    for left in [0, 4096, 8192, 12288, 20480, 32768, 45056, 53248, 57344, 65536]:
        free = shutil.disk_usage(disk).free
        (disk / "ballast").write_bytes(b"x" * (free - left))
        try:
            opened.save_checkpoint(2, write, limit=2)
            raise SystemExit(f"saved within {left} bytes")
        except RunError as error:
            assert "no space to write" in str(error), error
        if left == 0:
            try:
                for step in range(2, 200):
                    opened.log(step, {"loss": 0.5})
                raise SystemExit("logged on a full disk")
            except RunError as error:
                assert "metrics.jsonl" in str(error), error
        (disk / "ballast").unlink()
        assert newest_complete(folder) == (folder / "checkpoint-1", []), left
        assert not [path for path in folder.iterdir() if ".tmp-" in path.name], left
with Run.open(folder) as opened:
    opened.rewind(1)
    opened.log(2, {"loss": 0.25})
    opened.save_checkpoint(2, write, limit=2)
    assert [line["loss"] for line in read_metrics(opened.folder)] == [1.0, 0.25]
assert saved_step(newest_complete(folder)[0]) == 2
"""


def test_no_room_for_a_file_at_ten_points(tmp_path):
    pytest.importorskip("resource", reason="needs Unix's limit on a file's size")
    code = [sys.executable, "-c", FILL + LIMITED, str(tmp_path), "limit"]
    done = subprocess.run(code, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_full_disk_at_ten_points(tmp_path):
    (tmp_path / "disk").mkdir()
    mount = 'mount -t tmpfs -o size=256k tmpfs "$1/disk" || exit 77; exec "$0" -c "$2" "$1" disk'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, sys.executable, str(tmp_path)]
    if shutil.which("unshare") is None or subprocess.run([*command[:4], "true"], capture_output=True).returncode:
        pytest.skip("this system does not let users mount a small disk")
    done = subprocess.run([*command, FILL + MOUNTED], capture_output=True, text=True, timeout=100)
    if done.returncode == 77:
        pytest.skip("this system does not let users mount a small disk")
    assert done.returncode == 0, done.stdout + done.stderr


def test_ctrl_c_leaves_the_old_file_and_no_half_of_the_new(tmp_path, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    write_file(tmp_path / "x.json", "old")
    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_file(tmp_path / "x.json", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("x.json", "old")]


def test_an_unwritable_place(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write"):
        save_checkpoint(tmp_path / "file", 1, write_some, limit=None)
    with pytest.raises(RunError, match="cannot write"):
        write_file(tmp_path / "missing" / "x.json", "{}")
    with pytest.raises(ZeroDivisionError):  # not the disk's fault: passed on as it is
        write_folder(tmp_path / "x", lambda folder: print(1 / 0))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
