"""Several ranks on gloo: the gradients, completions and metrics of one process; packs; agreement about errors."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm_stand_in import Killable, killable

from posttrain.base.errors import ConfigError, DamagedError
from posttrain.batch import Example, Node, pack
from posttrain.config import load
from posttrain.runs.files import load_parts, part_file
from posttrain.runs.metrics import read_metrics
from posttrain.runs.stored_rollouts import StoredRun
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
    pissa = {"lora": {"r": 4, "dropout": 0.0, "init": "pissa"}}
    kinds = {
        "sft": {"model": story, "method": {"type": "sft"}, "data": hh, "training": {"ema_decay": 0.5}},
        "empty": {"model": story, "method": {"type": "sft"}, "data": hh, "training": {"batch_size": 1}},
        "dpo": {"model": story | pissa, "method": {"type": "dpo"}, "data": hh},
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
    sdpo = {"use_successful_as_teacher": True, "success_reward_threshold": -0.3, "teacher_model_kind": "live"}
    sdpo["teacher_prompt_template"] = "{prompt}{privileged_context}"
    kinds["sdpo"] = {**online, "method": {"type": "distill", "num_generations": 4, **sdpo}}
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


def write(made: dict[str, dict], root: Path, sums_home: Path) -> None:
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
    (root / "runs.json").write_text(json.dumps(files))


def launch(*folders: Path) -> None:
    """The runs of the first folder by one process, of the second by two."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(WORKER.parents[1])}
    done = subprocess.run(
        [sys.executable, WORKER, *folders], env=environment, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def one_of_each(shared, sums_home, made_once) -> tuple[Path, Path]:
    """The folders of the same runs by one process and by two: one objective of each kind of data."""

    def make(root: Path) -> None:
        one, two = root / "one", root / "two"
        for folder in (one, two):
            folder.mkdir(parents=True)
        made = configurations(shared, sums_home, one)
        write({name: made[name] for name in ONE_OF_EACH}, one, sums_home)
        made = configurations(shared, sums_home, two)
        made |= sharded(made) | {"refused": refused(made["sft"], two)}
        write({name: made[name] for name in (*ONE_OF_EACH, "fsdp-sft", "refused")}, two, sums_home)
        launch(one, two)

    root = made_once("some ranks", make)
    return root / "one", root / "two"


@pytest.fixture(scope="module")
def both(shared, sums_home, made_once) -> tuple[Path, Path]:
    """The folders of the same runs by one process and by two: all objectives."""

    def make(root: Path) -> None:
        one, two = root / "one", root / "two"
        for folder in (one, two):
            folder.mkdir(parents=True)
        write(configurations(shared, sums_home, one), one, sums_home)
        made = configurations(shared, sums_home, two)
        with killable() as (desk, server), killable() as (second, other):
            second.during = partial(dies_and_returns, other)
            urls = [server.url, other.url]
            apart = sharded(made) | served(made, urls) | {"refused": refused(made["sft"], two)}
            write(made | apart, two, sums_home)
            launch(one, two)
            asked = {"prompts": [desk.prompts, second.prompts], "loads": [desk.loads, second.loads]}
        (root / "asked.json").write_text(json.dumps(asked | {"starts": second.starts}))

    root = made_once("ranks", make)
    return root / "one", root / "two"


def dies_and_returns(server: Killable) -> None:
    """The first time, while a rank waits for it."""
    if server.kills == 0:
        server.kill()
        server.start()


@pytest.mark.slow
def test_two_ranks_with_two_servers_have_the_completions_of_one_process(both):
    """One server is killed in the first step. Each rank asks its own; weights are pushed once, and again to the one
    that died; every completion is stored once, and equals that of one process with the embedded engine."""
    for name in ("grpo", "empty-grpo"):
        found = []
        for folder in (both[0] / name, both[1] / f"served-{name}"):
            with StoredRun(folder) as stored:
                found.append([(one["tokens"].tolist(), one["reward"]) for n in (1, 2) for one in stored.rollouts(n)])
        assert found[0] == found[1] and len(found[0]) > 0, name
    asked = json.loads((both[0].parent / "asked.json").read_text())
    assert asked["starts"] == 2
    first, second = asked["loads"]
    assert len(first) == len({*first}) == 2 * 3 and {*first} == {*second} and len(second) == len(first) + 1
    assert [sum(prompts) for prompts in asked["prompts"]] == [2 * 3, 2 * 2 + 2]


SHARDED = ("sft", "empty", "dpo", "coupled", "kto", "orpo", "reward", "grpo", "empty-grpo", "ppo", "distill")
RUNS = [(name, strategy) for name in SHARDED for strategy in ("", "fsdp-")] + [("qlora", ""), ("sdpo", "")]
ONE_OF_EACH = ("sft", "dpo", "kto", "grpo")


@pytest.mark.parametrize(("name", "strategy"), [*((name, "") for name in ONE_OF_EACH), ("sft", "fsdp-")])
def test_two_ranks_have_the_gradients_of_one_process(one_of_each, name, strategy):
    same_gradients(one_of_each[0] / name, one_of_each[1] / f"{strategy}{name}")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "strategy"), RUNS)
def test_two_ranks_have_the_gradients_of_one_process_for_every_objective(both, name, strategy):
    same_gradients(both[0] / name, both[1] / f"{strategy}{name}")


def same_gradients(*places: Path) -> None:
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


def test_two_ranks_sample_the_completions_of_one_process(one_of_each):
    """And store the same numbers for every token."""
    same_rollouts(*(folder / "grpo" for folder in one_of_each))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "ppo", "distill"])
def test_two_ranks_sample_the_completions_of_one_process_with_every_method(both, name):
    same_rollouts(*(folder / name for folder in both))


def same_rollouts(*runs: Path) -> None:
    found = []
    for run in runs:
        with StoredRun(run) as stored:
            found.append(stored.rollouts(1))
    assert len(found[0]) == len(found[1]) > 0
    for a, b in zip(*found, strict=True):
        assert a["tokens"].tolist() == b["tokens"].tolist() and a["reward"] == b["reward"]
        for column in ("old_logprobs", "new_logprobs", "advantages", "entropies", "ref_logprobs"):
            if a[column] is not None:
                assert b[column] == pytest.approx(a[column], abs=1e-3), column


@pytest.mark.slow
@pytest.mark.parametrize("name", ["double-coupled", "double-grpo", "fsdp-double-coupled"])
def test_the_sum_over_ranks_is_that_of_one_process_to_rounding(both, name):
    """In float64, with the same packs: only the order of the terms differs."""
    places = both[0] / name.removeprefix("fsdp-"), both[1] / name
    one, two = (load_file(place / "gradients.safetensors") for place in places)
    for key in (key for key in one if key.startswith("0|")):
        assert one[key].dtype == torch.float64
        assert float((one[key] - two[key]).abs().max()) <= 1e-10 * float(one[key].abs().max() + 1e-30), key


def test_ranks_that_were_started_otherwise_or_read_other_data_are_refused(one_of_each):
    """On every rank; with other settings before there is a run folder, with other data before a model is loaded."""
    said = [json.loads((one_of_each[1] / f"refused-{rank}.json").read_text()) for rank in range(2)]
    host = socket.gethostname()
    assert said[0]["settings"] == (
        "the ranks were not started alike:\n"
        f"  training.learning_rate: rank 1 on {host} has 0.002; rank 0 on {host} has 0.001\n"
        "Start every machine with the same command and settings, and install the same versions on each"
    )
    assert said[1]["settings"] == "1", "the first rank of a machine has said it"
    assert not (one_of_each[1] / "settings").exists()
    assert re.fullmatch(
        "the ranks read different data:\n"
        rf"  train rows.jsonl: rank 1 on {host} has rows \w{{12}}; rank 0 on {host} has rows \w{{12}}\n"
        "Copy the same files and tokenizer to every machine, or read them from a shared folder",
        said[0]["data"],
    )
    assert said[1]["data"] == "1"
    assert json.loads((one_of_each[1] / "data/run.json").read_text())["reason"] == said[0]["data"]
    assert not list((one_of_each[1] / "data").glob("*.safetensors"))


def test_a_rank_that_is_a_step_ahead_is_named_on_all(one_of_each):
    said = {json.loads((one_of_each[1] / f"refused-{rank}.json").read_text())["step"] for rank in range(2)}
    first, second = (rf"rank {rank} is at step {7 + rank}, exchange" for rank in range(2))
    assert len(said) == 1
    assert re.match(rf"the ranks are out of step: {first} (\d+) \(objects\); {second} \1 \(objects\)", said.pop())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "sft", "training": {"optimizer": "adamw_8bit"}}, "training.optimizer: adamw_8bit needs whole"),
        ({"method": {"type": "distill", "teacher_system_prompt": "Add."}}, "the teacher has prompts of its own, ranks"),
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


def labelled(prompts: int, completions: int) -> list[Example]:
    """Completions of 20 tokens, as many of each prompt of 100."""
    return [
        Example((Node(np.full(100, prompt), children=(Node(np.full(21, row), True),)),), row)
        for prompt in range(prompts)
        for row in range(prompt * completions, (prompt + 1) * completions)
    ]


def test_rows_of_a_prompt_share_it_on_one_rank():
    """Unless one rank would have it all."""
    packs = pack(labelled(4, 2), 600, ranks=2)
    assert [one.num_tokens for one in packs] == [280, 280], "two prompts each, and their four completions"
    packs = pack(labelled(1, 8), 600, ranks=2)
    assert [one.num_tokens for one in packs] == [180, 180], "the prompt twice, and half of its completions"


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
