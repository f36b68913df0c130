"""Training on episodes: a model that seldom calls the calculator learns to, by every method, and resumes exactly."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from posttrain import runner
from posttrain.base.errors import ConfigError, RewardError
from posttrain.batch import Example, Node
from posttrain.cli import main
from posttrain.config import load
from posttrain.environments.calculator import value_of
from posttrain.environments.trajectory import Part, Trajectory
from posttrain.grading.verdict import Grade
from posttrain.rewards.compose import Rewards
from posttrain.rewards.parts import CompletionReward, Outcome, RewardInput
from posttrain.rollout import SampledCompletion
from posttrain.runs.metrics import read_metrics
from posttrain.runs.stored_rollouts import StoredRun, trained_tokens
from posttrain.sampler import of_episodes

CALCULATOR = {"name": "calculator", "class": "calculator"}


def train(home, folder, method=None, *overrides, resume=False, **sections):
    settings = {
        "name": "run", "output_dir": str(folder), "model": str(home / "model"), "devices": {"type": "cpu"},
        "method": method if isinstance(method, str) else {"type": "grpo", "num_generations": 8} | (method or {}),
        "environments": [CALCULATOR], "rewards": [{"type": "gsm8k"}],
        "data": {"source": str(home / "train.jsonl"), "max_length": 96}, "rollout": {"max_completion_length": 48},
        "tracking": {"logging_steps": 1}, "evaluation": {"eval_steps": -1},
        "training": {
            "batch_size": 8, "max_steps": 2, "learning_rate": 1e-3, "lr_scheduler_type": "constant", "warmup_steps": 0,
        },
    } | sections  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps(settings))
    assert runner.train(load(folder / "run.json", overrides).config, resume=resume) == 0
    return folder / "run"


def test_a_model_learns_to_call_the_tool(calculator_home, tmp_path):
    """It can repeat what the calculator says, and cannot add. At the start it calls for one question in twenty."""
    folder = train(
        calculator_home, tmp_path, None, "training.max_steps=6", "training.batch_size=12", "data.validation={rows: 24}",
        "evaluation.eval_steps=6",
    )  # fmt: skip
    lines = read_metrics(folder)
    print([(line["reward"], line["tools/call_frequency"]) for line in lines if "reward" in line])
    start, *_, end = [line["eval_reward"] for line in lines if "eval_reward" in line]
    assert start < 0.15 and end > 0.6
    sampled = [line for line in lines if "turns" in line]
    assert sampled[0]["turns"] == pytest.approx(1 + sampled[0]["tools/call_frequency"]) and sampled[-1]["turns"] > 1.5
    assert all(line["sampling/sampling_logp_difference/max"] < 1e-4 for line in sampled)
    assert all(line["episodes/env_error"] == line["episodes/tool_timeout"] == 0 for line in sampled)


def whole_and_resumed(home, folder, method, overrides, power_cut):
    """A run, and one that was cut off after its first step and resumed: their weights are equal to the bit."""
    whole = train(home, folder / "whole", method, *overrides)
    with power_cut(step=1):
        train(home, folder / "cut", method, *overrides)
    cut = train(home, folder / "cut", method, *overrides, resume=True)
    one, other = (load_file(run / "final/model.safetensors") for run in (whole, cut))
    assert all(torch.equal(one[name], other[name]) for name in one)
    return whole, cut


@pytest.mark.parametrize("method", ["grpo", "ppo", "rloo", "reinforce_plus_plus"])
def test_a_resumed_run_samples_the_same_episodes(calculator_home, tmp_path, power_cut, capsys, method):
    settings = {"type": method} | ({"num_generations": 2} if method == "ppo" else {})
    overrides = ("training.max_steps=3", "checkpoint.save_steps=1", "training.batch_size=4")
    whole, cut = whole_and_resumed(calculator_home, tmp_path, settings, overrides, power_cut)
    capsys.readouterr()
    assert main(["regrade", str(cut), "--reward", '{"type": "gsm8k"}']) == 0
    count = 24 if method == "ppo" else 96
    assert f"0 of {count} advantages change sign" in capsys.readouterr().out
    stored = [[row["completion"] for row in StoredRun(folder).rollouts(3)] for folder in (whole, cut)]
    assert stored[0] == stored[1]
    if method == "ppo":
        return  # too few completions for a call among them
    rows = [row for step in (1, 2, 3) for row in StoredRun(cut).rollouts(step)]
    row = next(row for row in rows if len(row["turns"]["turns"]) == 3)
    said, told, answer = row["turns"]["turns"]
    assert [part["author"] for part in (said, told, answer)] == ["model", "tool", "model"]
    [[name, arguments, failed]] = told["calls"]
    assert name == "calculate" and not failed and value_of(arguments["expression"]) in row["completion"]
    trained = trained_tokens(row)
    for part in row["turns"]["turns"]:
        assert set(trained[part["start"] : part["stop"]]) == {part["author"] == "model"}
    assert row["turns"]["stop_reason"] == "completed"


def answers(folder):
    return [int(prompt["facts"]["answer"]) for prompt in StoredRun(folder).prompts(1)]


FAILS = '''
class Moody:
    """Fails for some rows: in reset, in a tool, by leaving."""

    def reset(self, answer, **row):
        self.answer = int(answer)
        if self.answer % 3 == 0:
            raise OSError("no such table")

    def calculate(self, expression: str) -> str:
        """
        Compute.

        Args:
            expression: what
        """
        return str(self.answer)

    def get_reward(self):
        if self.answer % 3 == 1:
            return None
        return 0.25
'''


def test_tools_of_rows_are_not_read_which_is_said(calculator_home, tmp_path, caplog):
    """An episode has the tools of its environment: nothing would carry out the calls of others."""
    rows = [json.loads(line) for line in (calculator_home / "train.jsonl").read_text().splitlines()[:40]]
    own = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
    lines = [json.dumps(row | ({"tools": own} if number % 2 else {})) for number, row in enumerate(rows)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    data = {"source": str(tmp_path / "rows.jsonl"), "max_length": 96}
    folder = train(calculator_home, tmp_path / "runs", None, "training.max_steps=1", data=data)
    assert "not read: `tools` in 20 of 40 rows" in caplog.text
    tools = [prompt["facts"]["tools"] for prompt in StoredRun(folder).prompts(1)]
    assert {tool["function"]["name"] for each in tools for tool in each} == {"calculate"}


def test_what_fails_is_counted_and_dropped(calculator_home, tmp_path, monkeypatch):
    (tmp_path / "moody_env.py").write_text(FAILS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    environment = {"name": "m", "class": "moody_env.py:Moody"}
    folder = train(
        calculator_home,
        tmp_path / "runs",
        None,
        environments=[environment],
        rewards=[],
        seed=1,
        training={"batch_size": 16, "max_steps": 1},
    )
    failed = 8 * sum(answer % 3 == 0 for answer in answers(folder))
    assert f"{failed} episodes of 128 dropped without a verdict: env_error: " in (folder / "training.log").read_text()
    first = read_metrics(folder)[0]
    rows = StoredRun(folder).rollouts(1)
    facts = {p["prompt_index"]: int(p["facts"]["answer"]) % 3 for p in StoredRun(folder).prompts(1)}
    assert len(rows) == 128 and {*facts.values()} == {0, 1, 2}
    for row in rows:
        kind = facts[row["prompt_index"]]
        assert row["reward"] == {0: None, 1: None, 2: 0.25}[kind]
        assert (row["turns"]["stop_reason"] == "env_error") == (kind == 0)
        assert ("no such table" in row["turns"]["reason"]) == (kind == 0)
    assert first["rewards/Moody/crashed"] == failed and first["episodes/env_error"] == failed / 128
    assert first["rewards/Moody/not_applicable"] == sum(kind == 1 for kind in facts.values()) * 8
    assert first["rewards/no_verdict_ratio"] == failed / 128


@pytest.mark.parametrize(
    ("sections", "error", "message"),
    [
        ({"rewards": []}, RewardError, "nothing rewards the episodes"),
        ({"environments": [CALCULATOR, CALCULATOR]}, ConfigError, "has two called 'calculator'"),
        ({"environments": []}, ConfigError, "rollout.max_turns has no effect without environments or tools"),
        ({"method": "dpo"}, ConfigError, "are for methods that sample completions, which dpo does not"),
        ({"data": {"source": "x", "template": "none"}}, ConfigError, "need a chat template"),
        ({"environments": [CALCULATOR | {"class": "shutil:rmtree"}]}, RewardError, "belongs to Python"),
        ({"environments": [CALCULATOR | {"class": "calculater"}]}, RewardError, "nor a built-in environment"),
        ({"environments": [{"name": "c", "klass": "calculator"}]}, ConfigError, r"did you mean environments\.0\.class"),
    ],
)
def test_settings_that_are_refused(calculator_home, tmp_path, sections, error, message):
    with pytest.raises(error, match=message):
        train(calculator_home, tmp_path, sections.pop("method", None), "rollout.max_turns=3", **sections)


def episode(prompt, tokens=(7, 8), trained=(True, True), **more):
    parts = [Part("model", 0, len(tokens))] if tokens else []
    return Trajectory(list(prompt), [], list(tokens), list(trained), [-0.5] * sum(trained), parts, **more)


def test_prompts_that_differ_within_a_group_share_their_beginning():
    """What follows the shared part is context of the completion; an episode without a prompt changes nothing."""
    prompts = [Example((Node([1]),), row=5), Example((Node([2]),), row=6)]
    made = [
        (0, episode([1, 2, 3])), (0, episode([1, 2, 4, 5], [7, 9, 8], [True, False, True])), (0, episode([], (), ())),
        (1, episode([], (), ())),
    ]  # fmt: skip
    completions = [
        SampledCompletion(group, e.tokens, e.logprobs, "", "stop", 0, CompletionReward(), e.trained, e)
        for group, e in made
    ]
    rollout = of_episodes(prompts, completions)
    assert [list(prompt.trees[0].tokens) for prompt in rollout.prompts] == [[1, 2], [2]]
    assert [list(c.tokens) for c in rollout.completions] == [[3, 7, 8], [4, 5, 7, 9, 8], [], []]
    assert rollout.completions[1].trained == [False, False, True, False, True]
    assert rollout.length_S.tolist() == [2, 2, 0, 0]
    assert [(part.start, part.stop) for c in rollout.completions[:2] for part in c.episode.parts] == [(1, 3), (2, 5)]


def test_rewards_see_the_environment_and_skip_episodes_without_a_verdict(monkeypatch):
    seen = []

    def score(completions, environments, trajectories, answer):
        seen.append((completions, environments, answer))
        return [0.5] * len(completions)

    monkeypatch.setattr("posttrain.rewards.python.find_function", lambda name: score)
    talk = [{"role": "assistant", "content": "4"}]
    environment = SimpleNamespace(calls=1)
    given = [
        Outcome("Env", Grade("scored", 2.0), environment, replace(episode([1]), messages=talk)),
        Outcome("Env", Grade("crashed", reason="gone"), None, episode([1])),
        Outcome("Env", Grade("not_applicable"), environment, replace(episode([1]), messages=talk)),
        Outcome("Other", Grade("scored", 1.0), environment, replace(episode([1]), messages=talk)),
    ]
    config = load_rewards([{"type": "python", "function": "mine:score", "weight": 2}])
    with Rewards(config, environments=["Env", "Other"]) as rewards:
        rewarded = rewards([RewardInput("4", answer="4", episode=outcome) for outcome in given])
    assert rewarded.totals == (3.0, None, 1.0, 2.0)
    assert rewarded[1].lacks_verdict and not rewarded[2].lacks_verdict
    assert seen == [([talk] * 3, [environment] * 3, ["4"] * 3)]
    metrics = rewarded.metrics()
    assert (metrics["rewards/Env/crashed"], metrics["rewards/Env/mean"], metrics["rewards/left_out"]) == (1, 2.0, 1)


def load_rewards(terms):
    from pydantic import TypeAdapter

    from posttrain.config.schema.rewards import Reward

    return TypeAdapter(tuple[Reward, ...]).validate_python(terms)


@pytest.mark.parametrize(
    ("expression", "value"),
    [("472+518", "990"), (" (3 + 4) * -12", "-84"), ("7/2", "3.5"), ("8/2", "4"), ("7//2%2", "1")],
)  # fmt: skip
def test_the_calculator_computes(expression, value):
    assert value_of(expression) == value


@pytest.mark.parametrize(
    "expression", ["", "a", "1;2", "__import__('os')", "9**9**9", "2**1000", "1/0", "'a'*9", "1" * 300, "(-8)**0.5"]
)  # fmt: skip
def test_what_the_calculator_refuses(expression):
    with pytest.raises(ValueError):
        value_of(expression)
