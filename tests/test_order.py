"""The rows of each step: sources interleaved by weight, and prompts that rest; and the losses of the sources."""

import json
import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_data_prepare import run as prepared
from test_online import lines, train
from test_resume import assert_same_run, numbers, start
from transformers import AutoModelForCausalLM

from posttrain.base.errors import ConfigError, DataError
from posttrain.batch import sequences
from posttrain.cli import main
from posttrain.config import RunConfig, load
from posttrain.config.schema.rollout import Curriculum
from posttrain.models.load import load_tokenizer
from posttrain.runs.stored_rollouts import StoredRun
from posttrain.training.job import data_of
from posttrain.training.order import Resting, batch_of, epoch_order
from posttrain.training.state import State

SIZES, WEIGHTS = {"small": 5, "large": 40, "rare": 30}, (0.6, 1.2, 0.2)


@pytest.fixture
def sources(tmp_path):
    """Three files, and the entries of data.source with their weights."""
    for name, size in SIZES.items():
        rows = [{"prompt": f"{name} {n}", "completion": f" {n} is the reply"} for n in range(size)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pairs = zip(SIZES, WEIGHTS, strict=True)
    return [{"source": str(tmp_path / f"{name}.jsonl"), "weight": weight} for name, weight in pairs]


def config_of(sources, steps: int, **data) -> RunConfig:
    return RunConfig.model_validate(
        {
            "models": [{"path": "m"}], "method": {"type": "sft"}, "seed": 3,
            "data": {"source": sources, "mixing": "interleave", **data},
            "training": {"batch_size": 8, "max_steps": steps},
        }
    )  # fmt: skip


def test_interleaved_sources_have_their_weights(tmp_path, sources):
    """Shares of the rows as the weights are, within four standard errors; every pass over a source has each of its rows
    once, in an order of its own."""
    data, count = prepared(tmp_path, source=sources, mixing="interleave").train, 8 * 400
    order = epoch_order(config_of(sources, 400), data, 0)
    assert len(data) == 75 and len(order) == count
    shares = np.bincount(data.sources[order]) / count
    want = np.array(WEIGHTS) / sum(WEIGHTS)
    print(shares, want)
    assert (np.abs(shares - want) < 4 * np.sqrt(want * (1 - want) / count)).all()
    for number, size in enumerate(SIZES.values()):
        own = order[data.sources[order] == number]
        passes = [own[at : at + size].tolist() for at in range(0, len(own) - size + 1, size)]
        assert all(set(each) == set(np.flatnonzero(data.sources == number).tolist()) for each in passes)
        assert len({tuple(each) for each in passes}) > 1


def test_an_interleaved_run_begins_like_a_longer_one(tmp_path, sources):
    data = prepared(tmp_path, source=sources, mixing="interleave").train
    short, long = (epoch_order(config_of(sources, steps), data, 0) for steps in (3, 300))
    assert short.tolist() == long[:24].tolist()
    assert [batch_of(config_of(sources, 300), 75, step) for step in (1, 40)] == [(0, slice(0, 8)), (0, slice(312, 320))]
    in_order = epoch_order(config_of(sources, 30, shuffle=False), data, 0)
    assert in_order[data.sources[in_order] == 0][:7].tolist() == [0, 1, 2, 3, 4, 0, 1]


def test_what_interleaving_refuses(tmp_path, sources):
    with pytest.raises(ValueError, match="mixing: needs several sources"):
        config_of(sources[0]["source"], 3)
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "p" * 50, "completion": "c" * 50}))
    with pytest.raises(DataError, match=r"long.jsonl has no row to train on, so it cannot be interleaved"):
        prepared(
            tmp_path, source=[*sources, {"source": str(tmp_path / "long.jsonl")}], mixing="interleave", max_length=40
        )


def mixed(sources, scratch_model, **sections):
    return {
        "name": "run",
        "model": {"path": str(scratch_model)},
        "method": "sft",
        "data": {"source": sources, "mixing": "interleave", "template": "none", "validation": {"rows": 12}},
        "training": {"batch_size": 8, "max_steps": 6, "learning_rate": 1e-3},
        "evaluation": {"eval_steps": 3},
        "checkpoint": {"save_steps": 2, "save_total_limit": None, "best_metric": "eval_loss/large"},
        "tracking": {"logging_steps": 1},
    } | sections


def test_an_interleaved_run_resumes_to_the_bit(tmp_path, sources, scratch_model, power_cut, capsys):
    sections = mixed(sources, scratch_model)
    start(tmp_path / "whole", sections)
    with power_cut(step=5):
        start(tmp_path / "broken", sections)
    assert start(tmp_path / "broken", sections, resume=True) == 0
    assert_same_run(tmp_path / "whole/run", tmp_path / "broken/run")
    assert main(["plan", str(tmp_path / "whole/config.json")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "small: " in said and "epochs of" in said


@pytest.mark.parametrize("mixing", ["repeat", "interleave"])
def test_losses_by_source_are_those_of_its_rows(tmp_path, sources, scratch_model, mixing):
    """Against the dense cross-entropy of each source's validation rows; the training loss is the mean of its parts."""
    sections = mixed(sources, scratch_model)
    sections["data"]["mixing"] = mixing
    start(tmp_path / "whole", sections)
    made = numbers(tmp_path / "whole/run")
    config = load(tmp_path / "whole/config.json").config
    data = data_of(config, config.models[0], load_tokenizer(config.models[0]))
    model, found = AutoModelForCausalLM.from_pretrained(scratch_model), {}
    for example in data.validation["validation"]:
        [(ids, trained)] = sequences(example.trees[0])
        logits, ids = model(torch.tensor(ids)[None]).logits[0, :-1], torch.tensor(ids)
        losses = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")[torch.tensor(trained[1:])]
        found.setdefault(list(SIZES)[example.source], []).append(losses.detach())
    assert len(found) > 1
    for name, losses in found.items():
        assert made[0][f"eval_loss/{name}"] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)
    steps = [
        (line["loss"], [v for name, v in line.items() if name.startswith("loss/")]) for line in made if "loss" in line
    ]
    assert all(min(parts) - 1e-5 <= loss <= max(parts) + 1e-5 for loss, parts in steps)
    assert max(len(parts) for _, parts in steps) > 1
    assert not any(
        name.startswith(("loss/", "eval_loss/")) and name.split("/")[1] not in SIZES for line in made for name in line
    )


def test_names_of_sources():
    entries = [
        "data/chat.jsonl.gz", "other/chat.jsonl", {"source": "owner/Set-2.5", "split": "test"}, "my_rows.py:load",
        {"source": "x.csv", "name": "tables"}, {"source": "y.csv", "name": "tables"}, "builtin:arithmetic",
    ]  # fmt: skip
    names = config_of(entries, 3).data.source_names
    assert names == ("chat", "chat-2", "Set-2.5", "load", "tables", "tables", "arithmetic")
    assert config_of("x.jsonl", 3, mixing="repeat").data.source_names == ()


# Prompts that rest

EASY, HARD, MEDIUM = (0, 1), (2, 3), (4, 5, 6, 7)
REWARD = dict.fromkeys(EASY, 1.0) | dict.fromkeys(HARD, 0.0) | dict.fromkeys(MEDIUM, 0.5)


class Prompts:
    """As many rows as there are, without content."""

    def __len__(self) -> int:
        return len(REWARD)


def rollout_of(means) -> SimpleNamespace:
    return SimpleNamespace(prompts=means, rewards_of=lambda group: torch.tensor([means[group]]))


def sampled(settings: Curriculum, batch_size: int, steps: int, reward=None) -> tuple[list[list[int]], list[dict]]:
    """The prompts of each step, and the metrics. Each step starts from the state as a checkpoint would have it."""
    config = config_of("x.jsonl", steps, mixing="repeat")
    config = config.model_copy(update={"training": config.training.model_copy(update={"batch_size": batch_size})})
    state, batches, metrics = State(), [], []
    for _ in range(steps):
        state = State.from_json(json.loads(json.dumps(state.as_json())))
        resting = Resting(config, settings, Prompts(), state)
        batch = resting.batch().tolist()
        assert resting.batch().tolist() == batch  # a step that failed is repeated
        batches.append(batch)
        metrics.append(resting.learn(rollout_of([(reward or REWARD)[prompt] for prompt in batch])))
    return batches, metrics


@pytest.mark.parametrize("rest", [1, 2, 5])
def test_medium_prompts_are_sampled_in_every_epoch_and_others_after_a_rest(rest):
    """In rest + 1 epochs, medium prompts are sampled rest + 1 times as often as easy and hard ones: exactly."""
    cycle = 2 + rest  # steps: two of the first epoch, with all eight prompts, then one for each other epoch
    batches, metrics = sampled(Curriculum(rest_epochs=rest), 4, 2 * cycle)
    for half in (batches[:cycle], batches[cycle:]):
        counts = Counter(prompt for batch in half for prompt in batch)
        assert counts == dict.fromkeys((*EASY, *HARD), 1) | dict.fromkeys(MEDIUM, rest + 1)
        assert [sorted(batch) for batch in half[2:]] == [list(MEDIUM)] * rest
    assert batches[:cycle] != batches[cycle:]  # another order
    assert metrics[1]["curriculum/resting"] == 4 and metrics[cycle - 1]["curriculum/resting"] == 0
    assert (
        sum(each["curriculum/easy"] for each in metrics[:2])
        == sum(each["curriculum/hard"] for each in metrics[:2])
        == 0.5
    )


def test_where_all_rest_those_that_rested_longest_come_back():
    """No step is empty or short: the last batch of an epoch is filled with prompts that would return soonest."""
    batches, metrics = sampled(Curriculum(rest_epochs=3), 2, 12, dict.fromkeys(range(8), 1.0))
    assert [len(batch) for batch in batches] == [2] * 12
    assert Counter(prompt for batch in batches[:8] for prompt in batch).total() == 16
    assert sorted(prompt for batch in batches[:4] for prompt in batch) == list(range(8))
    assert max(Counter(prompt for batch in batches for prompt in batch).values()) == 3
    assert metrics[3]["curriculum/resting"] == 8
    batches, _ = sampled(Curriculum(rest_epochs=9), 3, 6)  # four medium prompts: two batches of three
    assert all(len(set(batch)) == 3 for batch in batches[:2] + batches[3:]) and len(batches[2]) == 2
    assert set(MEDIUM) < set(batches[3] + batches[4])


def test_a_prompt_without_rewards_does_not_rest():
    batches, metrics = sampled(Curriculum(), 8, 3, dict.fromkeys(range(8), math.nan))
    assert [sorted(batch) for batch in batches] == [list(range(8))] * 3 and metrics[2]["curriculum/resting"] == 0


def by_difficulty(prompts, **_columns):
    """Always 1, always 0, or 1 for every other completion, by the prompt."""
    kinds = [sum(map(ord, str(prompt))) % 4 for prompt in prompts]
    return [{0: 1.0, 1: 0.0}.get(kind, float(index % 2)) for index, kind in enumerate(kinds)]


@pytest.mark.parametrize("method", [{"beta": 0.0}, {"type": "rloo", "beta": 0.0}, {"type": "ppo"}], ids=str)
def test_a_run_with_a_curriculum_samples_medium_prompts_more_and_resumes_to_the_bit(
    sums_home, tmp_path, power_cut, method
):
    rewards = [{"type": "python", "function": "test_order:by_difficulty"}]
    sections = {
        "rewards": rewards, "training": {"max_steps": 8, "batch_size": 4},
        "data": {"source": str(sums_home / "train.jsonl"), "template": "none", "max_length": 24, "max_rows": 12},
        "checkpoint": {"save_steps": 2, "save_total_limit": None},
    }  # fmt: skip
    method = {"num_generations": 4, "curriculum": {"rest_epochs": 2}} | method
    train(sums_home, tmp_path / "whole", method, **sections)
    with power_cut(step=5):
        train(sums_home, tmp_path / "broken", method, **sections)
    train(sums_home, tmp_path / "broken", method, resume=True, **sections)
    assert_same_run(tmp_path / "whole/run", tmp_path / "broken/run")
    states = [
        json.loads((tmp_path / name / "run/checkpoint-8/state.json").read_text())["loop"]
        for name in ("whole", "broken")
    ]
    assert all(states[0][key] == states[1][key] for key in ("order", "epoch", "queue", "awake_from"))
    with StoredRun(tmp_path / "whole/run") as stored:
        seen = Counter(prompt["prompt"] for step in stored.steps() for prompt in stored.prompts(step))
    kinds = {prompt: sum(map(ord, prompt)) % 4 for prompt in seen}
    print(seen, kinds)
    assert all(line["curriculum/resting"] >= 0 for line in lines(tmp_path / "whole/run") if "reward" in line)
    medium = [count for prompt, count in seen.items() if kinds[prompt] > 1]
    others = [count for prompt, count in seen.items() if kinds[prompt] < 2]
    assert sum(medium) / len(medium) > sum(others) / len(others)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": {"curriculum": {"hard_threshold": 1.0}}}, "hard_threshold is 1.0, not below easy_threshold, 1.0"),
        ({"method": {"curriculum": {"rest_epochs": 0}}}, "rest_epochs is 0"),
        (
            {"method": {"curriculum": {}}, "data": {"source": ["a.jsonl", "b.jsonl"], "mixing": "interleave"}},
            "curriculum cannot be combined with data.mixing: interleave",
        ),
    ],
)
def test_what_a_curriculum_refuses(sums_home, tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        train(sums_home, tmp_path, settings["method"], **{"data": settings["data"]} if "data" in settings else {})
