"""Two machines with a network and a name of their own (tests/machines.sh), and the launchers of other packages."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_launched_ranks import ENVIRONMENT, ROOT, launched, started

MACHINES = ["bash", str(ROOT / "tests/machines.sh")]
LOCAL = "127.0.0.1 localhost\n"
OWN, LOOPBACK = "10.9.0.1 node-a\n10.9.0.2 node-b\n", "127.0.1.1 node-a\n127.0.1.1 node-b\n"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(shared, tmp_path_factory):
    """Settings, the folder of their runs, and the weights after a run by `posttrain launch` on one machine."""
    folder = tmp_path_factory.mktemp("machines")
    file = started(shared, folder, 6)
    subprocess.run([*launched(str(file)), "--name", "here"], env=os.environ | ENVIRONMENT, check=True)
    return file, folder, (folder / "here/final/model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    """Runs a command on each of two machines with this in /etc/hosts; skips where there are no namespaces."""
    hosts = tmp_path_factory.mktemp("hosts") / "hosts"

    def on_both(named: str, first: str, second: str) -> subprocess.CompletedProcess[str]:
        hosts.write_text(LOCAL + named)
        command = [*MACHINES, str(hosts), first, second]
        return subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=150)

    if shutil.which("unshare") is None or on_both("", "true", "true").returncode:
        pytest.skip("no namespaces with a network between them on this system")
    return on_both


def on(node: int, file: Path, name: str) -> str:
    address = f"--address 10.9.0.1:29500 --nodes 2 --node-rank {node}"
    return f"{sys.executable} -m posttrain launch {file} --name {name} {address}"


@pytest.mark.parametrize("named", [OWN, LOOPBACK, ""], ids=["own", "loopback", "unknown"])
def test_two_machines_learn_what_one_does(run, machines, named, request):
    """Whatever address their names lead to."""
    file, folder, expected = run
    name = request.node.callspec.id
    done = machines(named, on(0, file, name), on(1, file, name))
    assert done.returncode == 0, done.stderr
    assert (folder / name / "final/model.safetensors").read_bytes() == expected


def test_machines_that_do_not_reach_one_another_end_in_time_and_say_why(run, machines):
    file, folder, _ = run
    wrong = [f"GLOO_SOCKET_IFNAME=lo {on(node, file, 'apart')}" for node in range(2)]
    done = machines(OWN, *wrong)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "cannot connect to the other ranks" in done.stderr and "GLOO_SOCKET_IFNAME" in done.stderr
    assert " on node-a" in done.stderr or " on node-b" in done.stderr
    assert not (folder / "apart").exists()


@pytest.mark.parametrize(
    "launcher",
    [
        ["torch.distributed.run", "--nproc-per-node", "2"],
        ["accelerate.commands.launch", "--multi-gpu", "--num-processes", "2"],  # for GPUs; it counts none of them
    ],
    ids=["torchrun", "accelerate"],
)
def test_other_launchers(run, launcher, request):
    file, folder, expected = run
    name = request.node.callspec.id
    command = [sys.executable, "-m", *launcher, "-m", "posttrain", "train", str(file), "--name", name]
    subprocess.run(command, env=os.environ | ENVIRONMENT, check=True, timeout=150)
    assert (folder / name / "final/model.safetensors").read_bytes() == expected
    assert (folder / name / "logs/rank-1.log").is_file()
