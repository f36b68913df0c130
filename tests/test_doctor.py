"""`posttrain doctor`: what breaks is a line and takes nothing else down; the real checks pass here and see faults."""

import json
import os
import shutil
import time
from importlib import import_module, metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from posttrain.base.child import Child
from posttrain.base.errors import ConfigError
from posttrain.base.imports import installing
from posttrain.cli import main
from posttrain.doctor import all_checks, answer, checks, chosen, examine, machine, services
from posttrain.doctor.checks import Broken, Check
from posttrain.models.devices import lacks_bfloat16


def check(function: str, lane: str = "a", **facts) -> Check:
    return Check(function, f"doctor_checks:{function}", lane, **{"fix": "reinstall it"} | facts)


def is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]
    except FileNotFoundError:
        return False


def test_a_crash_and_a_hang_are_findings_and_end_no_other_check(monkeypatch):
    """In one lane, so that each of them would take the next ones down."""
    monkeypatch.setattr("psutil.getloadavg", lambda: (0.1, 0.1, 0.1))
    names = ("fine", "segfault", "prints", "leave", "fail", "broken", "hang", "leave_quietly")
    checks = [check(name, deadline=0.5 if name == "hang" else 30) for name in names]
    checks += [check("process", "b"), Check("again", "doctor_checks:process", "b"), check("no_such_check", "b")]
    found = {one.name: one for one in examine(checks)}
    for one in found.values():
        print(one)
    states = {name: one.state for name, one in found.items()}
    assert states == dict.fromkeys(states, "broken") | {
        "fine": "ok", "prints": "limited", "process": "ok", "again": "ok"
    }  # fmt: skip
    assert (found["prints"].detail, found["prints"].fix) == ("mine", "do this"), "what is printed is no reply"
    assert found["segfault"].detail.startswith("the process was ended by SIGSEGV (ctypes/__init__.py line ")
    assert found["leave"].detail == "the process ended with status 3: the disk is on fire"
    assert found["fail"].detail.startswith("KeyError: 'no such thing' (doctor_checks.py line ")
    assert found["fail"].fix == "reinstall it" and found["broken"].fix == "turn it on"
    assert found["hang"].detail == "no answer within 0.5 s" and found["hang"].seconds < 15
    assert found["process"].detail == found["again"].detail, "one process per lane while it lives"
    assert "no_such_check" in found["no_such_check"].detail


def test_a_busy_machine_is_not_broken(monkeypatch):
    """A missed deadline proves nothing there; nor is an endless answer broken that is killed late."""
    monkeypatch.setattr("psutil.getloadavg", lambda: (99.0, 1.0, 1.0))
    [found] = examine([check("hang", deadline=0.5, required=True)])
    assert (found.state, found.is_fatal) == ("limited", False)
    assert found.detail.startswith("no answer within 0.5 s, but this machine is busy (load 99.0 on ")
    monkeypatch.setattr(services, "GRACE_S", -1.0)
    late = services.graders()
    assert late.state == "limited" and late.detail.endswith("which is late")


def test_a_trace_in_a_message_is_cut_to_its_reason():
    [found] = examine([check("compiler")])
    assert found.detail.startswith("RuntimeError: a kernel does not compile OSError: no gcc (doctor_checks.py line ")


def test_a_process_that_has_answered_everything_and_ended_is_not_replaced(monkeypatch):
    send = Child.send

    def send_and_wait(child, lines):
        send(child, lines)
        assert child.status(60) == 0, "no reply is read before it has ended"

    monkeypatch.setattr(Child, "send", send_and_wait)
    process, fine, again = examine([check("process"), check("fine"), Check("again", "doctor_checks:process", "a")])
    assert process.detail == again.detail and fine.state == "ok"


def test_an_end_between_two_checks_is_the_fault_of_neither():
    names = [check("leave_afterwards"), check("fine"), check("fail")]
    assert [one.state for one in examine(names)] == ["ok", "ok", "broken"]


def test_lanes_run_side_by_side_and_leaving_ends_their_processes():
    found = examine([check("sleep", "a"), check("process", "b"), Check("last", "doctor_checks:sleep", "b")])
    began = time.monotonic()
    first = next(found)
    assert first.name == "process" and time.monotonic() - began < 50, "it did not wait for the other lane"
    pid = int(first.detail)
    assert is_running(pid)
    found.close()
    for _ in range(100):
        if not is_running(pid):
            return
        time.sleep(0.05)
    raise AssertionError("the helper process is still there")


@pytest.mark.parametrize(("required", "status"), [(True, 1), (False, 0)])
def test_only_what_is_required_decides_the_exit_status(required, status, monkeypatch, capsys):
    command = import_module("posttrain.doctor")
    monkeypatch.setattr(command, "all_checks", lambda output_dir: [check("broken", required=required), check("fine")])
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["doctor"]) == status
    shown = capsys.readouterr().out
    assert "turn it on" in shown and ("Required and broken: broken." in shown) == required
    assert main(["doctor", "--json"]) == status
    data = json.loads(capsys.readouterr().out)
    assert data["works"] == (not required) and [one["state"] for one in data["checks"]] == ["broken", "ok"]
    assert main(["doctor", "fine"]) == 0


def test_names_that_are_not_known():
    checks = all_checks(Path("runs"))
    assert [one.name for one in chosen(checks, ["TORCH", "python"])] == ["python", "torch"]
    with pytest.raises(ConfigError, match=r"no check 'grader': did you mean 'graders'\? the checks are python, "):
        chosen(checks, ["grader"])
    with pytest.raises(ConfigError, match="no check 'disk': the checks are python, "):
        chosen(checks, ["disk"])


# --- the real checks --------------------------------------------------------------------------------------------------

IN_PROCESS = ["python", "cores", "run folder", "packages", "torch", "transformers", "peft", "datasets", "safetensors"]
IN_PROCESS += ["GPU", "FlexAttention", "flash-attn", "hub", "hub token", "hub cache", "data cache"]
IN_PROCESS += ["bitsandbytes"]


@pytest.mark.parametrize("name", IN_PROCESS)
def test_real_checks_in_this_process(name, tmp_path, monkeypatch):
    """Without a crash to fear, since the installed packages work here; nothing stays in the folders."""
    monkeypatch.chdir(tmp_path)
    [one] = chosen(all_checks(tmp_path / "runs"), [name])
    found = answer(one.target, list(one.arguments))
    print(found)
    allowed = {"ok"} | ({"limited"} if name in ("cores", "torch") else set())
    optional = {"GPU", "flash-attn", "hub", "hub token", "bitsandbytes"}
    assert found["state"] in allowed | ({"absent", "limited"} if name in optional else set())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_whole_doctor(tmp_path, monkeypatch, capsys):
    """As a user runs it: everything required works, in 80 columns, with 40 seconds of CPU in its processes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("TRITON_INTERPRET")
    before = os.times()
    assert main(["doctor"]) == 0
    after = os.times()
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    shown = capsys.readouterr().out
    print(shown, f"{seconds:.1f} s of CPU")
    assert max(map(len, shown.splitlines())) <= 80
    rows = {line.split("  ")[0]: line for line in shown.splitlines()}
    assert "broken*" not in rows and "broken" not in rows
    assert "endless one killed after 1." in " ".join(shown.split())
    assert list(tmp_path.iterdir()) == [], "no file is left behind"
    assert 1 < seconds < 40


# --- faults they see --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "detail", "fix"),
    [
        ("4.57.1", "4.57.1, needs transformers<6,>=5.17", "pip install 'transformers<6,>=5.17'"),
        ("6.0.0", "6.0.0, needs transformers<6,>=5.17", "pip install 'transformers<6,>=5.17'"),
        (None, "not installed", "pip install 'transformers<6,>=5.17'"),
    ],
)
def test_versions_outside_the_range(version, detail, fix, monkeypatch):
    def known(package):
        if version is None:
            raise metadata.PackageNotFoundError(package)
        return version

    monkeypatch.setattr(metadata, "version", known)
    with pytest.raises(Broken) as error:
        checks.transformers()
    assert (str(error.value), error.value.found.fix) == (detail, fix)


def test_an_optional_package_that_is_not_there():
    with pytest.raises(Broken, match=r"not installed; for rollout\.engine: vllm") as error:
        checks.version_of("no-such-package", "rollout.engine: vllm", "vllm")
    assert (error.value.found.state, error.value.found.fix) == ("absent", installing("vllm"))


def test_faults_of_a_disk(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(Broken, match="is a file, not a folder"):
        machine.run_folder(str(tmp_path / "file" / "runs"))

    usage = shutil.disk_usage(tmp_path)
    for free, state in ((4_000_000_000, "limited"), (100_000_000, None)):
        monkeypatch.setattr(shutil, "disk_usage", lambda place, free=free: usage._replace(free=free))
        if state is None:
            with pytest.raises(Broken, match="100 MB free"):
                machine.run_folder(str(tmp_path))
        else:
            assert machine.run_folder(str(tmp_path)).state == state
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=10**12))

    monkeypatch.setattr(machine, "is_locked", lambda folder: None)
    assert machine.run_folder(str(tmp_path)).state == "limited", "a file system without locks"
    monkeypatch.setattr(machine, "is_locked", lambda folder: False)
    with pytest.raises(Broken, match="does not keep others out"):
        machine.run_folder(str(tmp_path))
    monkeypatch.setattr(machine, "is_locked", lambda folder: True)

    monkeypatch.setattr(machine, "RIVAL", "print(0); print('both write')")
    with pytest.raises(Broken, match="SQLite's locks do not work there: wal, both write"):
        machine.run_folder(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    def refuse(*arguments, **named):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(machine.tempfile, "TemporaryDirectory", refuse)
    with pytest.raises(Broken, match=r"cannot write in .*: Permission denied") as error:
        machine.run_folder(str(tmp_path))
    assert "chmod u+w" in error.value.found.fix


def test_a_container_share_of_the_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    for text, count in (("max 100000", 8), ("150000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8)):
        (tmp_path / "cpu.max").write_text(text)
        monkeypatch.setattr(machine, "QUOTAS", ((str(tmp_path / "cpu.max"),),))
        assert machine.usable_cores() == count
    monkeypatch.setattr(machine, "usable_cores", lambda: 64)
    found = machine.torch_works()
    assert found.state == "limited" and found.fix == "export OMP_NUM_THREADS=64"


@pytest.mark.parametrize("system", ["darwin", "win32", "sunos5"])
def test_what_a_platform_lacks_is_reported_and_does_not_fail(system):
    assert machine.platform_limits(system).state == "limited"


def test_a_wrong_product_and_a_backward_that_varies_are_seen(monkeypatch):
    import torch

    monkeypatch.setattr(machine, "WIDTH", 64)
    real = torch.randn
    with monkeypatch.context() as patch:
        patch.setattr(torch, "equal", lambda first, second: False)
        with pytest.raises(Broken, match="the same backward pass twice gives different gradients"):
            machine.torch_works()
    monkeypatch.setattr(torch, "randn", lambda *sizes, **named: real(*sizes, **named) * float("nan"))
    with pytest.raises(Broken, match="a matrix product is wrong"):
        machine.torch_works()


def test_no_token_is_shown(monkeypatch, capsys):
    token = "hf_" + "s3cr3tS3cr3t" * 3
    monkeypatch.setenv("HF_TOKEN", token)
    found = services.hub_token()
    assert found.state == "ok" and found.detail == "from HF_TOKEN; not checked, the hub is offline"
    command = import_module("posttrain.doctor")
    leak = Check("leak", "doctor_checks:fine", "a", arguments=(f"Bearer {token}",))
    monkeypatch.setattr(command, "all_checks", lambda output_dir: [leak])
    for arguments in (["doctor"], ["doctor", "--json"]):
        assert main(arguments) == 0
        assert token not in "".join(capsys.readouterr())


@pytest.mark.slow
def test_wrong_verdicts_are_seen(monkeypatch):
    rules = import_module("posttrain.rewards.rules")
    known = [(request, "wrong" if verdict == "correct" else verdict) for request, verdict in rules.canary("math", None)]
    monkeypatch.setattr(rules, "canary", lambda name, tags: known)
    with pytest.raises(Broken, match="of 20 known answers are graded wrongly: correct"):
        services.graders()


@pytest.mark.parametrize(
    ("capability", "built", "state", "fix"),
    [
        ((7, 5), ["sm_75", "sm_80"], "limited", "model.dtype: float16"),
        ((7, 0), ["sm_75", "sm_80"], "broken", "whl/cu126"),
        ((7, 0), ["sm_70", "sm_80"], "limited", "model.dtype: float16"),
        ((8, 6), ["sm_80"], "ok", ""),
    ],
)
def test_a_card_without_bfloat16_is_told_what_to_use(capability, built, state, fix, monkeypatch):
    facts = SimpleNamespace(name="a card", major=capability[0], minor=capability[1])
    for name, value in {
        "get_device_properties": facts, "mem_get_info": (1 << 30, 1 << 34), "device_count": 1,
        "is_available": True, "get_device_capability": capability, "get_arch_list": built,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    for name in ("_product", "_repeatable", "_driver"):
        monkeypatch.setattr(machine, name, lambda *_: None)
    lacks_bfloat16.cache_clear()
    try:
        found = machine._cuda()
    finally:
        lacks_bfloat16.cache_clear()
    print(found)
    assert found.state == state and fix in found.fix and found.detail.startswith("a card")
    assert ("float16" in found.detail) == (state == "limited")
    if state == "broken":
        assert "has no kernels for sm_70" in found.detail
