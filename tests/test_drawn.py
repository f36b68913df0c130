"""Evaluation by generation: completions of the validation prompts, drawn and rewarded, whatever the method."""

import json
from contextlib import closing

import pytest
import torch
from test_online import EXACT, lines, train
from test_resume import assert_same_run

from posttrain.config import DataConfig, ModelConfig, RolloutConfig, load
from posttrain.data import prepare, prepare_run, validation_prompts
from posttrain.engines import EmbeddedEngine
from posttrain.models.load import load_model, load_tokenizer
from posttrain.rewards.compose import Rewarded
from posttrain.rollout import Sampler
from posttrain.store.rollouts import StoredRun


@pytest.fixture(scope="module")
def data(sums_home, tmp_path_factory):
    """The sums as completions, with answers beside them: settings of two validation sets."""
    folder = tmp_path_factory.mktemp("taught")
    for name in ("train", "test"):
        rows = [json.loads(line) for line in (sums_home / f"{name}.jsonl").read_text().splitlines()]
        taught = [{**row, "completion": row["answer"]} for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in taught))
    source = {"source": str(folder / "train.jsonl"), "template": "none", "max_length": 24, "validation": {"rows": 24}}
    return source, [{"name": "held_out", "source": str(folder / "test.jsonl"), "max_rows": 30}]


def settings(data, **evaluation):
    source, datasets = data
    return {"data": source, "evaluation": {"eval_steps": 4, "datasets": datasets} | evaluation}


def test_sft_is_evaluated_by_what_it_writes(sums_home, data, tmp_path):
    """At step 0, every fourth step and the end, on both sets; and training is not changed by it, to the bit."""
    training = {"max_steps": 10, "batch_size": 32, "learning_rate": 2e-3}
    watched = train(sums_home, tmp_path / "a", {"type": "sft"}, training=training, **settings(data))
    plain = train(sums_home, tmp_path / "b", {"type": "sft"}, training=training, rewards=[], **{
        "data": data[0], "evaluation": {"eval_steps": 4},
    })  # fmt: skip
    seen = {line["step"]: line for line in lines(watched) if "eval_reward" in line}
    assert list(seen) == [0, 4, 8, 10]
    for line in seen.values():
        assert line["eval_loss"] > 0 and line["eval_held_out_loss"] > 0
        assert 0 <= line["eval_held_out_reward"] <= 1 and line["eval_completions/mean_length"] >= 1
    assert seen[10]["eval_held_out_reward"] > seen[0]["eval_held_out_reward"] + 0.2
    losses = [[line["loss"] for line in lines(folder) if "loss" in line] for folder in (watched, plain)]
    assert losses[0] == losses[1] and len(losses[0]) == 10
    assert (watched / "final/model.safetensors").read_bytes() == (plain / "final/model.safetensors").read_bytes()
    with StoredRun(watched) as stored:
        assert {(e["step"], e["dataset"]) for e in stored.evaluations()} == {
            (step, name) for step in seen for name in ("validation", "held_out")
        }
        last = [e for e in stored.evaluations() if (e["step"], e["dataset"]) == (10, "held_out")]
    assert len(last) == 30
    assert sum(e["reward"] for e in last) / 30 == pytest.approx(seen[10]["eval_held_out_reward"])


def test_resumed_equals_uninterrupted(sums_home, data, tmp_path, power_cut):
    sections = {"training": {"max_steps": 7, "batch_size": 16}, "checkpoint": {"save_steps": 2}, **settings(data)}
    train(sums_home, tmp_path / "whole", {"type": "sft"}, **sections)
    with power_cut(step=5):
        train(sums_home, tmp_path / "broken", {"type": "sft"}, **sections)
    train(sums_home, tmp_path / "broken", {"type": "sft"}, resume=True, **sections)
    assert_same_run(tmp_path / "whole/run", tmp_path / "broken/run")
    with StoredRun(tmp_path / "whole/run") as one, StoredRun(tmp_path / "broken/run") as two:
        assert one.evaluations() == two.evaluations()


def test_the_prompts_are_those_that_were_held_out(sums_home, data, tmp_path, caplog):
    """The same rows as the set that the loss is measured on; what leaves no room is left out, and said."""
    file = tmp_path / "config.json"
    sections = {
        "model": str(sums_home / "model"),
        "method": "sft",
        "rewards": [EXACT],
        "rollout": {"max_completion_length": 6},
        **settings(data),
    }
    file.write_text(json.dumps(sections))
    config = load(file).config
    tokenizer = load_tokenizer(config.models[0])
    prepared = prepare_run(config, tokenizer)
    prompts = validation_prompts(config, tokenizer, prepared)
    assert list(prompts) == ["validation", "held_out"]
    for name, dataset in prompts.items():
        assert sorted(dataset.rows.tolist()) == sorted(prepared.validation[name].rows.tolist())
    assert not set(prompts["validation"].rows.tolist()) & set(prepared.train.rows.tolist())
    sections["rollout"]["max_completion_length"] = 19  # prompts of 5 tokens fit, of 6 do not
    file.write_text(json.dumps(sections))
    tight = load(file).config
    fewer = validation_prompts(tight, tokenizer, prepared)
    assert 0 < len(fewer["validation"]) < 24 and "prompts leave room for a completion" in caplog.text


def test_rewards_are_told_what_was_cut_off_and_what_the_prompt_opened(scratch_model, tmp_path):
    """A completion at the limit of its length, and a template that begins the reply with `<think>`."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "2 + 2?"}))
    model = ModelConfig(path=str(scratch_model))
    tokenizer, seen = load_tokenizer(model), []

    def reward(completions):
        seen.extend(completions)
        return Rewarded((1.0,) * len(completions), ())

    policy = load_model(model, "lm", torch.float32, torch.device("cpu"))
    with closing(EmbeddedEngine(policy, tokenizer)) as engine:
        for template, length in (("r1_zero", 3), ("question_only", 1)):
            data = DataConfig(source=str(tmp_path / "rows.jsonl"), template=template)
            prompts = prepare(data, tokenizer, "prompt", cache_dir=tmp_path).train
            rollout = RolloutConfig(max_completion_length=length)
            every = tuple(range(0 if length > 1 else len(tokenizer)))  # every token ends a completion, or none does
            sample = Sampler(engine, reward, tokenizer, rollout, stop_token_ids=every, seed=0)
            sample(1, [prompts[0]], 2)
    assert [(one.thinking, one.truncated) for one in seen] == [(True, True)] * 2 + [(False, False)] * 2


def test_tagged_replies_are_read(sums_home, tmp_path):
    """Format, answer and reasoning of replies: what the first rule that looks at each says, and what stands before the
    end of the reasoning."""
    from posttrain.config import TagsConfig
    from posttrain.config.rewards import RuleReward
    from posttrain.rewards.compose import Completion, Rewards

    tags = TagsConfig()
    end, opened, closed = tags.reasoning_end, tags.solution_start, tags.solution_end
    texts = [f"1 + 1{end}{opened}2{closed}", f"{end}{opened}3{closed}", "2", f"so{end}{opened}2"]
    rules = [RuleReward(type=name) for name in ("match_format_exactly", "check_answer", "check_numbers")]
    with Rewards(rules, tags=tags, workers=1, deadline=20.0) as rewards:
        rewarded = rewards([Completion(text, [1], answer="2") for text in texts])
        assert rewards.accuracies(rewarded) == {"format_accuracy": 0.5, "answer_accuracy": 0.25}
    with Rewards([RuleReward(type="r1_zero")], workers=1, deadline=20.0) as rewards:
        replies = ["so </think> <answer>2</answer>", "so </think> <answer>3</answer>", "2"]
        rewarded = rewards([Completion(text, [1], answer="2") for text in replies])
        assert rewards.accuracies(rewarded) == pytest.approx({"format_accuracy": 2 / 3, "answer_accuracy": 2 / 3})
