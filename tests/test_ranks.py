"""Several ranks on gloo: the gradients, completions and metrics of one process; packs; agreement about errors."""

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
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm_stand_in import Killable, killable

from posttrain import launch as launching
from posttrain import rendezvous
from posttrain.batch import Example, Node, pack
from posttrain.cli import main
from posttrain.config import load
from posttrain.errors import ConfigError, DamagedError, RankError, RunError
from posttrain.launch import launch as start
from posttrain.store.metrics import read_metrics
from posttrain.store.parts import load_parts, part_file
from posttrain.store.stored_rollouts import StoredRun
from posttrain.training.job import refuse_sharded

WORKER = Path(__file__).with_name("ranks_worker.py")
HH = {"template": "none", "max_length": 200, "max_rows": 40, "validation": {"rows": 5}}
TRAINING = {"batch_size": 5, "max_steps": 2, "tokens_per_pack": 4096, "learning_rate": 1e-3, "warmup_steps": 0}


def configurations(shared: Path, sums_home: Path, root: Path) -> dict[str, dict]:
    """A small run of every kind of objective. Batches are uneven; `empty` has less examples than ranks."""
    story, hh = {"path": str(shared / "models/stories260K")}, {"source": str(shared / "data/hh-harmless"), **HH}
    sums = {"source": str(sums_home / "train.jsonl"), "template": "none", "max_length": 24}
    online = {"model": {"path": str(sums_home / "model")}, "data": sums, "rollout": {"max_completion_length": 6}}
    online["rewards"] = [{"type": "python", "function": "ranks_worker_rewards:close", "name": "close"}]
    labelled = {"source": "builtin:arithmetic-kto", "template": "none", "max_rows": 40, "max_length": 400}
    coupled = {"type": "dpo", "loss_type": ["kto_pair"], "precompute_ref_log_probs": True}
    lora, one_prompt = {"lora": {"r": 4, "dropout": 0.0}}, {"training": {"batch_size": 1}}
    kinds = {
        "sft": {"model": story, "method": {"type": "sft"}, "data": hh},
        "empty": {"model": story, "method": {"type": "sft"}, "data": hh, "training": {"batch_size": 1}},
        "dpo": {"model": story | lora, "method": {"type": "dpo"}, "data": hh},
        "qlora": {"model": story | lora | {"load_in_4bit": True}, "method": {"type": "sft"}, "data": hh},
        "coupled": {"model": story, "method": coupled, "data": hh},
        "kto": {"model": story, "method": {"type": "kto"}, "data": labelled},
        "orpo": {"model": story, "method": {"type": "orpo"}, "data": hh},
        "reward": {"model": story, "method": {"type": "reward"}, "data": hh},
        "grpo": {**online, "method": {"type": "grpo", "num_generations": 3, "num_minibatches": 2, "beta": 0.02}},
        "empty-grpo": {**online, "method": {"type": "grpo", "num_generations": 3, "beta": 0.02}, **one_prompt},
        "ppo": {**online, "method": {"type": "ppo", "num_generations": 2, "num_minibatches": 2, "num_ppo_epochs": 2}},
        "distill": {**online, "method": {"type": "distill", "teacher": str(root / "teacher"), "num_generations": 2}},
    }
    kinds["distill"].pop("rewards")
    exact = {"importance_sampling_cap": None}  # of the engine, whose rounding depends on the rows beside
    kinds["double-coupled"] = kinds["coupled"]
    kinds["double-grpo"] = kinds["grpo"] | {"method": kinds["grpo"]["method"] | exact}
    made = {}
    for name, kind in kinds.items():
        settings = kind | {"output_dir": str(root), "name": name, "tracking": {"logging_steps": 1}}
        made[name] = settings | {"training": TRAINING | kind.get("training", {}), "devices": {"type": "cpu"}}
    return made


def served(made: dict[str, dict], urls: list[str]) -> dict[str, dict]:
    """Two of the runs, with completions from two servers; one of them with sharded weights."""
    vllm = {"engine": "vllm", "vllm": {"mode": "server", "base_url": urls, "timeout": 30.0}}
    return {
        f"served-{name}": made[name]
        | {"name": f"served-{name}", "rollout": made[name]["rollout"] | vllm, "devices": {"type": "cpu", **devices}}
        for name, devices in {"grpo": {}, "empty-grpo": {"strategy": "fsdp"}}.items()
    }


def sharded(made: dict[str, dict]) -> dict[str, dict]:
    """The same runs with sharded weights."""
    return {
        f"fsdp-{name}": made[name] | {"name": f"fsdp-{name}", "devices": {"type": "cpu", "strategy": "fsdp"}}
        for name in (*SHARDED, "double-coupled")
    }


def refused(settings: dict, root: Path) -> dict:
    """A run whose data is in the current folder, where the second rank has one row more."""
    for rank in range(2):
        (root / f"rank-{rank}").mkdir(parents=True)
        rows = [{"prompt": f"{n} and", "completion": " more."} for n in range(4 + rank)]
        (root / f"rank-{rank}/rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return settings | {"data": {"source": "rows.jsonl", "template": "none", "max_length": 50}}


def write(made: dict[str, dict], root: Path, sums_home: Path) -> list[str]:
    shutil.copytree(sums_home / "model", root / "teacher")
    tensors = load_file(root / "teacher/model.safetensors")
    save_file({name: 1.1 * tensor for name, tensor in tensors.items()}, root / "teacher/model.safetensors")
    (root / "ranks_worker_rewards.py").write_text(
        "def close(completions, **columns):\n    return [-abs(len(one) - 4) / 4 for one in completions]\n"
    )
    files = []
    for name, settings in made.items():
        files.append(str(root / f"{name}.json"))
        Path(files[-1]).write_text(json.dumps(settings))
    return files


def launch(files: list[str], ranks: int, **variables: str) -> None:
    start = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{Path(files[0]).parent}:{WORKER.parents[1]}"}
    done = subprocess.run(
        [sys.executable, *start, str(WORKER), *files], env=environment | variables, capture_output=True, text=True,
        timeout=300, cwd=Path(files[0]).parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def both(shared, sums_home, tmp_path_factory) -> tuple[Path, Path]:
    """The folders of the same runs by one process and by two."""
    root = tmp_path_factory.mktemp("ranks")
    folders = root / "one", root / "two"
    for number, folder in enumerate(folders, 1):
        made = configurations(shared, sums_home, folder)
        if number == 1:
            launch(write(made, folder, sums_home), number)
            continue
        with killable() as (desk, server), killable() as (second, other):
            second.during = partial(dies_and_returns, other)
            urls = [server.url, other.url]
            apart = sharded(made) | served(made, urls) | {"refused": refused(made["sft"], folder)}
            launch(write(made | apart, folder, sums_home), number)
            asked.update(prompts=[desk.prompts, second.prompts], loads=[desk.loads, second.loads], starts=second.starts)
    return folders


def dies_and_returns(server: Killable) -> None:
    """The first time, while a rank waits for it."""
    if server.kills == 0:
        server.kill()
        server.start()


asked: dict[str, Any] = {}  # what the two servers were asked by two ranks


def test_two_ranks_with_two_servers_have_the_completions_of_one_process(both):
    """One server is killed in the first step. Each rank asks its own; weights are pushed once, and again to the one
    that died; every completion is stored once, and equals that of one process with the embedded engine."""
    for name in ("grpo", "empty-grpo"):
        found = []
        for folder in (both[0] / name, both[1] / f"served-{name}"):
            with StoredRun(folder) as stored:
                found.append([(one["tokens"].tolist(), one["reward"]) for n in (1, 2) for one in stored.rollouts(n)])
        assert found[0] == found[1] and len(found[0]) > 0, name
    assert asked["starts"] == 2
    first, second = asked["loads"]
    assert len(first) == len({*first}) == 2 * 3 and {*first} == {*second} and len(second) == len(first) + 1
    assert [sum(prompts) for prompts in asked["prompts"]] == [2 * 3, 2 * 2 + 2]


SHARDED = ("sft", "empty", "dpo", "coupled", "kto", "orpo", "reward", "grpo", "empty-grpo", "ppo", "distill")
RUNS = [(name, strategy) for name in SHARDED for strategy in ("", "fsdp-")] + [("qlora", "")]


@pytest.mark.parametrize(("name", "strategy"), RUNS)
def test_two_ranks_have_the_gradients_of_one_process(both, name, strategy):
    places = both[0] / name, both[1] / f"{strategy}{name}"
    one, two = (load_file(place / "gradients.safetensors") for place in places)
    assert one.keys() == two.keys()
    first = [key for key in one if key.startswith("0|")]
    largest = max(float(one[key].abs().max()) for key in first)
    assert largest > 0
    for key in first:
        assert float((one[key] - two[key]).abs().max()) <= 1e-5 * largest, key
    lines = [read_metrics(place) for place in places]
    assert len(lines[0]) == len(lines[1]) >= 2
    for a, b in zip(*lines, strict=True):
        assert a.keys() == b.keys()
        for metric in a.keys() - {"time"}:
            assert b[metric] == pytest.approx(a[metric], rel=2e-3, abs=2e-4), (a["step"], metric)


@pytest.mark.parametrize("name", ["grpo", "ppo", "distill"])
def test_two_ranks_sample_the_completions_of_one_process(both, name):
    """And store the same numbers for every token."""
    found = []
    for folder in both:
        with StoredRun(folder / name) as stored:
            found.append(stored.rollouts(1))
    assert len(found[0]) == len(found[1]) > 0
    for a, b in zip(*found, strict=True):
        assert a["tokens"].tolist() == b["tokens"].tolist() and a["reward"] == b["reward"]
        for column in ("old_logprobs", "new_logprobs", "advantages", "entropies", "ref_logprobs"):
            if a[column] is not None:
                assert b[column] == pytest.approx(a[column], abs=1e-3), column


@pytest.mark.parametrize("name", ["double-coupled", "double-grpo", "fsdp-double-coupled"])
def test_the_sum_over_ranks_is_that_of_one_process_to_rounding(both, name):
    """In float64, with the same packs: only the order of the terms differs."""
    places = both[0] / name.removeprefix("fsdp-"), both[1] / name
    one, two = (load_file(place / "gradients.safetensors") for place in places)
    for key in (key for key in one if key.startswith("0|")):
        assert one[key].dtype == torch.float64
        assert float((one[key] - two[key]).abs().max()) <= 1e-10 * float(one[key].abs().max() + 1e-30), key


def test_ranks_that_were_started_otherwise_or_read_other_data_are_refused(both):
    """On every rank; with other settings before there is a run folder, with other data before a model is loaded."""
    said = [json.loads((both[1] / f"refused-{rank}.json").read_text()) for rank in range(2)]
    host = socket.gethostname()
    assert said[0]["settings"] == (
        "the ranks were not started alike:\n"
        f"  training.learning_rate: rank 1 on {host} has 0.002; rank 0 on {host} has 0.001\n"
        "Start every machine with the same command and settings, and install the same versions on each"
    )
    assert said[1]["settings"] == "1", "the first rank of a machine has said it"
    assert not (both[1] / "settings").exists()
    assert re.fullmatch(
        "the ranks read different data:\n"
        rf"  train rows.jsonl: rank 1 on {host} has rows \w{{12}}; rank 0 on {host} has rows \w{{12}}\n"
        "Copy the same files and tokenizer to every machine, or read them from a folder that all have",
        said[0]["data"],
    )
    assert said[1]["data"] == "1"
    assert json.loads((both[1] / "data/run.json").read_text())["reason"] == said[0]["data"]
    assert not list((both[1] / "data").glob("*.safetensors"))


def test_a_rank_that_is_a_step_ahead_is_named_on_all(both):
    said = {json.loads((both[1] / f"refused-{rank}.json").read_text())["step"] for rank in range(2)}
    first, second = (rf"rank {rank} is at step {7 + rank}, exchange" for rank in range(2))
    assert len(said) == 1
    assert re.match(rf"the ranks are out of step: {first} (\d+) \(objects\); {second} \1 \(objects\)", said.pop())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "sft", "training": {"optimizer": "adamw_8bit"}}, "training.optimizer: adamw_8bit needs whole"),
        ({"method": {"type": "distill", "teacher_system_prompt": "Add."}}, "method.teacher_system_prompt gives"),
    ],
)
def test_what_needs_the_whole_model_is_refused_with_sharded_weights(settings, message):
    config = load({"model": "m", "data": {"source": "none.jsonl", "template": "none"}, **settings}).config
    with pytest.raises(ConfigError, match=message):
        refuse_sharded(config)


def test_packs_of_several_ranks_are_equal_shares():
    rng = np.random.default_rng(0)
    examples = [
        Example((Node(np.arange(1, 2 + int(length)), True),), row) for row, length in enumerate(rng.integers(5, 90, 61))
    ]
    whole = pack(examples, 300)
    for ranks in (2, 3, 4):
        packs = pack(examples, 300, ranks=ranks)
        assert len(packs) % ranks == 0 and len(packs) - len(whole) < ranks
        shares = [sum(one.num_tokens for one in packs[rank::ranks]) for rank in range(ranks)]
        assert max(shares) - min(shares) <= 0.02 * sum(shares) and sum(shares) == sum(one.num_tokens for one in whole)
        assert sorted(group for one in packs for group in one.groups) == list(range(61))
    assert [len(pack(examples[:count], 300, ranks=4)) for count in (1, 3, 4)] == [1, 3, 4], "a rank may have none"


def test_parts_of_a_state_are_read_by_any_number_of_ranks(tmp_path):
    """As rows of the whole, split as torch.chunk does; numbers and whole tensors are the first rank's."""
    state = {"weight": torch.arange(14.0).view(7, 2), "bias": torch.arange(3.0), "step": torch.tensor(4.0)}
    for rank in range(2):
        rows = {name: value.chunk(2)[rank] for name, value in state.items() if value.ndim}
        save_file(rows | {"step": state["step"]}, part_file(tmp_path, "state", rank, 2))
    whole = load_parts(tmp_path, "state", lambda name, rows: slice(0, rows))
    assert all(torch.equal(whole[name], state[name]) for name in state) and whole.keys() == state.keys()
    for rank in range(3):
        found = load_parts(
            tmp_path, "state", lambda name, rows, r=rank: slice(r * -(-rows // 3), (r + 1) * -(-rows // 3))
        )
        for name in ("weight", "bias"):
            assert torch.equal(found[name], state[name].chunk(3)[rank]), (rank, name)
    part_file(tmp_path, "state", 1, 2).unlink()
    with pytest.raises(DamagedError, match=r"state-00002-of-00002.safetensors is missing: 2 ranks"):
        load_parts(tmp_path, "state", lambda name, rows: slice(0, rows))


SETTINGS = {"tracking": {"logging_steps": 1}, "devices": {"type": "cpu"}}


def launched(folder: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "posttrain", "launch", *arguments, "--nproc", "2"]


def started(shared: Path, folder: Path, steps: int, **sections) -> Path:
    hh = {"source": str(shared / "data/hh-harmless"), "template": "none", "max_length": 200, "max_rows": 40}
    file = folder / "run.json"
    settings = {"model": str(shared / "models/stories260K"), "method": "dpo", "data": hh, "output_dir": str(folder)}
    settings |= {"training": {"batch_size": 4, "max_steps": steps, "learning_rate": 1e-3}, **SETTINGS}
    settings |= {"checkpoint": {"save_steps": 3, "save_total_limit": None}, **sections}
    file.write_text(json.dumps(settings))
    return file


ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(WORKER.parents[1])}


DROPOUT = {"method": "sft", "model": {"lora": {"r": 4, "dropout": 0.3}}}


FSDP = {"devices": {"type": "cpu", "strategy": "fsdp"}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "numbers", "sections"),
    [(2, (2, 1), {}), (2, (2,), DROPOUT), (2, (2, 1), FSDP), (2, (2,), FSDP | DROPOUT), (1, (2,), FSDP)],
    ids=["dpo", "sft with dropout", "fsdp", "fsdp with dropout", "fsdp from one process"],
)
def test_resumed_on_as_many_ranks_to_the_bit_and_on_others_to_rounding(shared, tmp_path, first, numbers, sections):
    lora = "model" in sections
    if lora:
        sections = sections | {"model": {"path": str(shared / "models/stories260K"), **sections["model"]}}
    file, environment = started(shared, tmp_path, 6, **sections), os.environ | ENVIRONMENT
    name = "adapter_model.safetensors" if lora else "model.safetensors"
    alone = [sys.executable, "-m", "posttrain", "train"]
    start = [*alone, str(file)] if first == 1 else launched(tmp_path, str(file))
    subprocess.run([*start, "--name", "whole"], env=environment, check=True)
    whole = load_file(tmp_path / "whole/final" / name)
    for ranks in numbers:
        folder = tmp_path / f"resumed-{ranks}"
        shutil.copytree(tmp_path / "whole", folder)
        for later in ("checkpoint-6", "final"):
            shutil.rmtree(folder / later)
        command = [*launched(tmp_path, "--resume", str(folder))]
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
        launched(tmp_path, str(file), "--name", "run"), env=os.environ | ENVIRONMENT, stderr=subprocess.PIPE, text=True
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


def test_machines_that_do_not_join_or_answer_are_named(occupied, monkeypatch):
    monkeypatch.setattr(launching, "NODE_PATIENCE_S", 1)
    monkeypatch.setattr(rendezvous, "ANSWER_S", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(RankError, match=rf"was not reached at {address} within 1 sec.*--node-rank 0` there"):
        start(["sft.yaml"], 2, 2, 1, address)
    with pytest.raises(RunError, match=r"not all of 2 machines joined within 1 seconds: .* --node-rank 0 to 1"):
        start(["sft.yaml"], 2, 2, 0, address)
    ended = []
    monkeypatch.setattr(rendezvous.os, "_exit", ended.append)  # what would end this process
    monkeypatch.setattr(rendezvous, "say", lambda text, error: ended.append(text))
    monkeypatch.setattr(rendezvous, "TCPStore", lambda *given, **named: until(lambda: ended, 10))
    rendezvous.reach("127.0.0.1", int(occupied.rpartition(":")[2]), 1)
    assert f"no answer from a launcher at {occupied} within 2 seconds" in ended[0] and ended[1] == 1


@pytest.mark.parametrize("address", ["10.0.0.1", ":29500", "10.0.0.1:x", "10.0.0.1:70000"])
def test_an_address_without_a_port_is_refused(address, capsys):
    assert main(["launch", "sft", "--address", address]) == 2
    assert "it is HOST:PORT with a port from 1 to 65535" in capsys.readouterr().err


@pytest.mark.slow
def test_a_damaged_part_of_a_sharded_checkpoint_is_named_and_the_one_before_is_used(shared, tmp_path):
    """By two processes and by one, in the end as from the intact checkpoint before; one that is named is refused."""
    file, environment = started(shared, tmp_path, 9, **FSDP), os.environ | ENVIRONMENT
    subprocess.run([*launched(tmp_path, str(file)), "--name", "whole"], env=environment, check=True)
    whole = load_file(tmp_path / "whole/final/model.safetensors")

    damages = {
        "missing": Path.unlink,
        "truncated": lambda part: part.write_bytes(part.read_bytes()[:-9]),
    }
    alone = [sys.executable, "-m", "posttrain", "train"]
    for number, (problem, damage) in enumerate(damages.items()):
        folder = tmp_path / f"run-{number}"
        shutil.copytree(tmp_path / "whole", folder)
        for later in ("checkpoint-9", "final"):
            shutil.rmtree(folder / later)
        damage(folder / "checkpoint-6/optimizer-00002-of-00002.safetensors")
        start = launched(tmp_path) if number % 2 == 0 else alone
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
def test_a_machine_that_hangs_ends_the_other_in_time(shared, tmp_path):
    """Two launchers as on two machines; the second is stopped. The first rank saves the finished steps."""
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
    other, hung = machines[0], [machines[1].pid, rank_of(machines[1].pid, 1)]
    try:
        for process in hung:
            os.kill(process, signal.SIGSTOP)
        said = other.communicate(timeout=60)[1]
    finally:
        for process in hung:
            os.kill(process, signal.SIGKILL)
        machines[1].communicate(timeout=30)
    assert other.returncode == 1 and "Traceback" not in said
    assert f"rank 1 on {socket.gethostname()} is lost: its process has ended, or is stopped" in said
    last = read_metrics(tmp_path / "run")[-1]["step"]
    assert (tmp_path / f"run/checkpoint-{last}").exists()
