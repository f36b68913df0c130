"""Ranks started by `posttrain launch`: resume on as many and on others; ranks and machines that die, hang or differ."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from posttrain.base.errors import RankError, RunError
from posttrain.cli import main
from posttrain.parallel import rendezvous
from posttrain.parallel.rendezvous import launch as start
from posttrain.runs.metrics import read_metrics

ROOT = Path(__file__).parents[1]
SETTINGS = {"tracking": {"logging_steps": 1}, "devices": {"type": "cpu"}}


def launched(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "posttrain", "launch", *arguments, "--nproc", "2"]


def started(shared: Path, folder: Path, steps: int, **sections) -> Path:
    hh = {"source": str(shared / "data/hh-harmless"), "template": "none", "max_length": 200, "max_rows": 40}
    file = folder / "run.json"
    settings = {"model": str(shared / "models/stories260K"), "method": "dpo", "data": hh, "output_dir": str(folder)}
    settings |= {"training": {"batch_size": 4, "max_steps": steps, "learning_rate": 1e-3}, **SETTINGS}
    settings |= {"checkpoint": {"save_steps": 3, "save_total_limit": None}, **sections}
    file.write_text(json.dumps(settings))
    return file


ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
DROPOUT = {"method": "sft", "model": {"lora": {"r": 4, "dropout": 0.3}}}
FSDP = {"devices": {"type": "cpu", "strategy": "fsdp"}}

FOLLOWED = {"method": {"type": "dpo", "sync_ref_model": True, "ref_model_sync_steps": 1}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "numbers", "sections"),
    [
        (2, (2, 1), {}),
        (2, (2,), DROPOUT),
        (2, (2, 1), FSDP),
        (2, (2,), FSDP | DROPOUT),
        (1, (2,), FSDP),
        (1, (2,), FSDP | FOLLOWED),
        (2, (2, 1), FSDP | FOLLOWED),
    ],
    ids=[
        *("dpo", "sft with dropout", "fsdp", "fsdp with dropout", "fsdp from one process"),
        *("fsdp and a reference that follows, from one process", "fsdp and a reference that follows"),
    ],
)
def test_resumed_on_as_many_ranks_to_the_bit_and_on_others_to_rounding(shared, tmp_path, first, numbers, sections):
    lora = "model" in sections
    if lora:
        sections = sections | {"model": {"path": str(shared / "models/stories260K"), **sections["model"]}}
    file, environment = started(shared, tmp_path, 6, **sections), os.environ | ENVIRONMENT
    name = "adapter_model.safetensors" if lora else "model.safetensors"
    alone = [sys.executable, "-m", "posttrain", "train"]
    start = [*alone, str(file)] if first == 1 else launched(str(file))
    subprocess.run([*start, "--name", "whole"], env=environment, check=True)
    whole = load_file(tmp_path / "whole/final" / name)
    for ranks in numbers:
        folder = tmp_path / f"resumed-{ranks}"
        shutil.copytree(tmp_path / "whole", folder)
        for later in ("checkpoint-6", "final"):
            shutil.rmtree(folder / later)
        command = launched("--resume", str(folder))
        if ranks == 1:
            command = [*alone, "--resume", str(folder)]
        subprocess.run(command, env=environment, check=True)
        again = load_file(folder / "final" / name)
        largest = max(float((whole[key] - again[key]).abs().max()) for key in whole)
        assert largest == 0 if ranks == first else largest < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("sections", [{}, FSDP], ids=["replicas", "sharded"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_hangs_is_named_and_the_run_is_saved(shared, tmp_path, how, sections):
    file = started(shared, tmp_path, 400, **sections)
    run = subprocess.Popen(
        launched(str(file), "--name", "run"), env=os.environ | ENVIRONMENT, stderr=subprocess.PIPE, text=True
    )
    until(lambda: (tmp_path / "run/checkpoint-3").exists())
    os.kill(rank_of(run.pid, 1), how)
    said = run.communicate(timeout=120)[1]
    assert run.returncode == 1 and "rank 1" in said and "is lost" in said and "Traceback" not in said
    facts = json.loads((tmp_path / "run/run.json").read_text())
    assert facts["state"] == "failed" and "rank 1" in facts["reason"]
    last = [line["step"] for line in read_metrics(tmp_path / "run")][-1]
    if sections:  # the lost rank had a part of the weights
        assert (tmp_path / "run/checkpoint-3").exists()
    else:
        assert (tmp_path / f"run/checkpoint-{last}").exists(), "the steps that were finished are saved"


def rank_of(launcher: int, rank: int) -> int:
    """The process of a rank below a launcher."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            variables = (folder / "environ").read_bytes().split(b"\0")
        except (OSError, ValueError):
            continue
        if parent == launcher and f"RANK={rank}".encode() in variables:
            return int(folder.name)
    raise AssertionError(f"there is no rank {rank}")


def until(holds, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def occupied() -> Iterator[str]:
    """The address of a port at which a program listens that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_port_in_use_is_named_and_another_proposed(occupied, nodes):
    port = occupied.rpartition(":")[2]
    with pytest.raises(RankError, match=rf"port {port} of --address .*already in use.*Give a free one, such as \d+"):
        start(["sft.yaml"], 2, nodes, 0, occupied)


@pytest.mark.slow
def test_machines_that_do_not_join_or_answer_are_named(occupied, monkeypatch):
    monkeypatch.setattr(rendezvous, "NODE_PATIENCE_S", 1)
    monkeypatch.setattr(rendezvous, "ANSWER_S", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(RankError, match=rf"was not reached at {address} within 1 sec.*--node-rank 0` there"):
        start(["sft.yaml"], 2, 2, 1, address)
    with pytest.raises(RunError, match=r"not all 2 machines joined within 1 seconds: .* --node-rank 0 to 1"):
        start(["sft.yaml"], 2, 2, 0, address)
    ended = []
    monkeypatch.setattr(rendezvous.os, "_exit", ended.append)  # what would end this process
    monkeypatch.setattr(rendezvous, "say", lambda text, error: ended.append(text))
    monkeypatch.setattr("torch.distributed.TCPStore", lambda *given, **named: until(lambda: ended, 10))
    rendezvous.reach("127.0.0.1", int(occupied.rpartition(":")[2]), 1)
    assert f"no answer from a launcher at {occupied} within 2 seconds" in ended[0] and ended[1] == 1


@pytest.mark.parametrize("address", ["10.0.0.1", ":29500", "10.0.0.1:x", "10.0.0.1:70000"])
def test_an_address_without_a_port_is_refused(address, capsys):
    assert main(["launch", "sft", "--address", address]) == 2
    assert "it must be HOST:PORT with a port from 1 to 65535" in capsys.readouterr().err


def test_a_process_for_each_gpu_that_is_named(shared, tmp_path, capsys):
    file = started(shared, tmp_path, 1, devices={"type": "cuda", "ids": [0, 1, 3]})
    assert main(["launch", str(file), "--nproc", "2"]) == 2
    assert "devices.ids names 3 GPUs: give --nproc 3" in capsys.readouterr().err


@pytest.mark.slow
def test_a_damaged_part_of_a_sharded_checkpoint_is_named_and_the_one_before_is_used(shared, tmp_path):
    """By two processes and by one, in the end as from the intact checkpoint before; one that is named is refused."""
    file, environment = started(shared, tmp_path, 9, **FSDP), os.environ | ENVIRONMENT
    subprocess.run([*launched(str(file)), "--name", "whole"], env=environment, check=True)
    whole = load_file(tmp_path / "whole/final/model.safetensors")

    damages = {"missing": Path.unlink, "truncated": lambda part: part.write_bytes(part.read_bytes()[:-9])}
    alone = [sys.executable, "-m", "posttrain", "train"]
    for number, (problem, damage) in enumerate(damages.items()):
        folder = tmp_path / f"run-{number}"
        shutil.copytree(tmp_path / "whole", folder)
        for later in ("checkpoint-9", "final"):
            shutil.rmtree(folder / later)
        damage(folder / "checkpoint-6/optimizer-00002-of-00002.safetensors")
        start = launched() if number % 2 == 0 else alone
        named = [*start, "--resume", str(folder / "checkpoint-6")]
        refused = subprocess.run(named, env=environment, capture_output=True, text=True, timeout=60)
        assert refused.returncode == 1 and "checkpoint-6 is damaged" in refused.stderr and problem in refused.stderr
        assert (folder / "checkpoint-6").is_dir(), "nothing was touched"
        subprocess.run([*start, "--resume", str(folder)], env=environment, check=True, timeout=120)
        log = (folder / "training.log").read_text()
        assert "checkpoint-6 is damaged" in log and problem in log and "falling back to checkpoint-3" in log
        again = load_file(folder / "final/model.safetensors")
        largest = max(float((whole[key] - again[key]).abs().max()) for key in whole)
        assert largest == 0 if start is not alone else largest < 1e-5, problem


@pytest.mark.slow
@pytest.mark.parametrize("hung", [0, 1])
def test_a_machine_that_hangs_ends_the_other_in_time(shared, tmp_path, hung):
    """Two launchers as on two machines; one is stopped, with its rank. The first rank saves the finished steps."""
    file, environment = started(shared, tmp_path, 400), os.environ | ENVIRONMENT
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    base = [sys.executable, "-m", "posttrain", "launch", str(file), "--name", "run", "--nodes", "2"]
    machines = [
        subprocess.Popen(
            [*base, "--address", address, "--node-rank", str(node)], env=environment, stderr=subprocess.PIPE, text=True
        )
        for node in range(2)
    ]
    until(lambda: (tmp_path / "run/checkpoint-3").exists())
    other, stopped = machines[1 - hung], [machines[hung].pid, rank_of(machines[hung].pid, hung)]
    try:
        for process in stopped:
            os.kill(process, signal.SIGSTOP)
        said = other.communicate(timeout=60)[1]
    finally:
        for process in stopped:
            os.kill(process, signal.SIGKILL)
        machines[hung].communicate(timeout=30)
    assert other.returncode == 1 and "Traceback" not in said
    assert said.count(f"rank {hung} on {socket.gethostname()} is lost: its process has ended, or is stopped") == 1
    if hung:
        last = read_metrics(tmp_path / "run")[-1]["step"]
        assert (tmp_path / f"run/checkpoint-{last}").exists()


APART = """
import torch
from posttrain.parallel import heartbeats, ranks
heartbeats.SILENCE_S = 3.0
with ranks.joined() as here:
    here.gather("both are here")
    here.on_lost(lambda error: print(f"rank {here.index} saves", flush=True))
    here.gather(None) if here.is_first else here.sum_([torch.zeros(1)])
"""


@pytest.mark.slow
def test_ranks_that_wait_in_different_exchanges_are_ended(tmp_path):
    """Both live, and neither would ever get an answer."""
    (tmp_path / "apart.py").write_text(APART)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(tmp_path / "apart.py")]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    host = socket.gethostname()
    for first, kind, second, other in ((0, "objects", 1, "sums"), (1, "sums", 0, "objects")):
        said = (
            rf"rank {first} on {host} is at step 0, exchange (\d+) \({kind}\); rank {second} on {host} is at step 0, "
        )
        if re.search(rf"the ranks are out of step: {said}exchange \1 \({other}\)", done.stderr):
            break
    else:
        raise AssertionError(done.stderr)
    assert "rank 0 saves" in done.stdout or "rank 1 saves" in done.stdout


FAILS = """
import os, sys
from posttrain.cli import main
from posttrain.scoring import Scorer

passes, scored = [], Scorer.__call__

def fails(self, pack, *more):
    passes.append(pack)
    if os.environ["RANK"] == "1" and len(passes) > 8:
        raise RuntimeError("a bug in the middle of a pass")
    return scored(self, pack, *more)

Scorer.__call__ = fails
sys.exit(main(["train", sys.argv[1], "--name", "run"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("sections", [{}, FSDP], ids=["replicas", "sharded"])
def test_an_error_of_one_rank_in_a_pass_ends_all(shared, tmp_path, sections):
    """Replicas save the finished steps. A sharded model has no rank to save the other's part."""
    file = started(shared, tmp_path, 400, **sections)
    (tmp_path / "fails.py").write_text(FAILS)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(tmp_path / "fails.py")]
    done = subprocess.run(
        [*command, str(file)], env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert "rank 1 ended: RuntimeError: a bug in the middle of a pass" in done.stderr
    facts = json.loads((tmp_path / "run/run.json").read_text())
    assert facts["state"] == "failed" and "rank 1" in facts["reason"]
    last = [line["step"] for line in read_metrics(tmp_path / "run")][-1]
    saved = sorted(int(one.name.partition("-")[2]) for one in (tmp_path / "run").glob("checkpoint-*"))
    assert saved[-1] == (last - last % 3 if sections else last) > 0
