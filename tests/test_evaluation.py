"""Evaluation by generation: completions of the validation prompts, sampled and rewarded, whatever the method."""

import json
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from data_tokenizer import byte_tokenizer, prepare
from pydantic import ValidationError
from test_online import EXACT, lines, train
from test_resume import assert_same_run

from posttrain.base.errors import DataError, PosttrainError
from posttrain.config import DataConfig, EvaluationConfig, EvaluationDataset, ModelConfig, RolloutConfig, load
from posttrain.data import prepare_run
from posttrain.engines import EmbeddedEngine
from posttrain.evaluation.records import read_summary
from posttrain.models.load import load_model, load_tokenizer
from posttrain.rewards.parts import CompletionReward, Rewarded
from posttrain.runs.checkpoint import saved_step
from posttrain.runs.stored_rollouts import StoredRun
from posttrain.sampler import Sampler
from posttrain.training.evaluation import reasoning


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
    assert seen[10]["eval_held_out_reward"] > seen[0]["eval_held_out_reward"] + 0.05
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


def own_settings(data):
    """Three sets: the held-out rows, one with columns, template, rewards and rows of its own, one without rewards."""
    source, (held_out,) = data
    asked = {"name": "asked", "source": str(Path(held_out["source"]).with_name("asked.jsonl")), "max_rows": 30}
    rows = [json.loads(line) for line in Path(held_out["source"]).read_text().splitlines()[:30]]
    lines = (json.dumps({"ask": row["prompt"], "tell": row["answer"]}) + "\n" for row in rows)
    Path(asked["source"]).write_text("".join(lines))
    asked |= {"format": "prompt_completion", "columns": {"prompt": "ask", "completion": "tell"}}
    asked |= {"template": "question_only", "num_batches": 1, "with_replacement": True}
    asked |= {"rewards": [{"type": "length", "target": 1, "scale": 1.0, "name": "short"}]}
    plain = {**held_out, "name": "plain", "rewards": [], "num_batches": 1}
    sampling = {"num_generations": 3, "temperature": 0.5, "max_completion_length": 2}
    evaluation = {"eval_steps": 2, "datasets": [asked, plain], **sampling}
    return {"data": source, "evaluation": evaluation, "training": {"max_steps": 5, "batch_size": 8}}


@pytest.mark.parametrize("method", [{"type": "sft"}, {"type": "grpo"}], ids=["sft", "grpo"])
def test_sets_with_settings_of_their_own(sums_home, data, tmp_path, power_cut, method):
    """Rows, texts, rewards and sampling are a set's own, the rows anew at every evaluation; resumed to the bit."""
    gsm8k = {"type": "gsm8k"}
    sections = {"checkpoint": {"save_steps": 2}, **own_settings(data), "rewards": [gsm8k]}
    whole = train(sums_home, tmp_path / "whole", method, **sections)
    with power_cut(step=3):
        train(sums_home, tmp_path / "broken", method, **sections)
    train(sums_home, tmp_path / "broken", method, resume=True, **sections)
    assert_same_run(whole, tmp_path / "broken/run")
    line = [line for line in lines(whole) if "eval_reward" in line][-1]
    assert {"eval_pass@1", "eval_pass@2", "eval_pass@3", "eval_asked_rewards/short/mean"} <= line.keys()
    assert "eval_asked_rewards/gsm8k/mean" not in line and "eval_plain_reward" not in line
    assert ("eval_plain_loss" in line) == (method["type"] == "sft")
    assert line["eval_pass@1"] == pytest.approx(line["eval_answer_accuracy"])
    assert line["eval_completions/max_length"] <= 2
    with StoredRun(whole) as one, StoredRun(tmp_path / "broken/run") as two:
        assert one.evaluations() == two.evaluations()
        every = one.evaluations()
    rows = {step: [e["row"] for e in every if (e["step"], e["dataset"]) == (step, "asked")] for step in (0, 2, 4, 5)}
    assert all(len(some) == 8 * 3 and some[::3] == some[1::3] == some[2::3] for some in rows.values())
    assert len({tuple(some) for some in rows.values()}) == 4 and any(len(set(some)) < 8 for some in rows.values())
    held_out = [e for e in every if (e["step"], e["dataset"]) == (4, "validation")]
    assert len(held_out) == 24 * 3 and {e["dataset"] for e in every} == {"validation", "asked"}
    best = [max(e["reward"] for e in held_out[at : at + 3]) for at in range(0, 72, 3)]
    (at_four,) = [line for line in lines(whole) if line["step"] == 4 and "eval_reward" in line]
    assert at_four["eval_pass@3"] == pytest.approx(sum(best) / 24)


@pytest.mark.parametrize(
    "method",
    [{"type": "sft"}, {"type": "grpo"}, pytest.param({"type": "ppo"}, marks=pytest.mark.slow)],
    ids=["sft", "grpo", "ppo"],
)
def test_suites_during_training(sums_home, data, tmp_path, power_cut, method):
    """Asked at every evaluation, best/ by their score; resumed to the bit; training is not changed."""
    source, (held_out,) = data
    suite = {"name": "sums", "source": held_out["source"], "prompt": "{prompt}", "template": "none", "rule": "gsm8k"}
    suite |= {"temperature": 1.0, "num_generations": 2, "max_completion_length": 6}
    (tmp_path / "sums.json").write_text(json.dumps(suite))
    training = {"max_steps": 5, "batch_size": 16, "learning_rate": 2e-3}
    rewards = [] if method["type"] == "sft" else [EXACT]
    evaluation = {"eval_steps": 2, "suites": [{"suite": str(tmp_path / "sums.json"), "max_rows": 20}]}
    checkpoint = {"save_steps": 2, "best_metric": "eval_sums"}
    plain = {"training": training, "data": {**source, "validation": None}, "rewards": rewards}
    sections = plain | {"evaluation": evaluation, "checkpoint": checkpoint}
    whole = train(sums_home, tmp_path / "whole", method, **sections)
    with power_cut(step=3):
        train(sums_home, tmp_path / "broken", method, **sections)
    train(sums_home, tmp_path / "broken", method, resume=True, **sections)
    assert_same_run(whole, tmp_path / "broken/run")
    seen = {line["step"]: line for line in lines(whole) if "eval_sums" in line}
    assert list(seen) == [0, 2, 4, 5]
    for step, line in seen.items():
        summary = read_summary(whole / f"evaluation/step-{step}")["suites"]["sums"]
        assert (line["eval_sums"], line["eval_sums_low"]) == (summary["value"], summary["low"])
        assert (summary["answers"], summary["items"]) == (40, 20) and set(summary["pass@k"]) == {"1", "2"}
    best = max(seen, key=lambda step: (seen[step]["eval_sums"], -step))
    assert saved_step(whole / "best") == best
    blind = train(sums_home, tmp_path / "blind", method, **plain, evaluation={"eval_steps": -1})
    losses = [[line["loss"] for line in lines(folder) if "loss" in line] for folder in (whole, blind)]
    assert losses[0] == losses[1] and len(losses[0]) == 5


@pytest.mark.parametrize(
    ("method", "suites", "said"),
    [
        ({"type": "sft"}, ["gsm"], "did you mean gsm8k"),
        ({"type": "sft"}, ["mmlu_logprob"], "is a suite of the kind choices"),
    ],
)
def test_wrong_suites(sums_home, data, tmp_path, method, suites, said):
    with pytest.raises(PosttrainError, match="trains one that scores"):
        load(None, ["method.type=reward", "evaluation.suites=[gsm8k]", "data.source=x", "model.path=x"])
    with pytest.raises(PosttrainError, match=said):
        train(sums_home, tmp_path, method, rewards=[], data=data[0], evaluation={"suites": suites})


def test_a_template_of_its_own_leaves_the_runs_alone(data, sums_home):
    source, (held_out,) = data
    tokenizer = load_tokenizer(ModelConfig(path=str(sums_home / "model")))
    sets = [
        EvaluationDataset(**held_out),
        EvaluationDataset(**{**held_out, "name": "own", "template": "question_only"}),
    ]
    before = tokenizer.chat_template
    prepared = prepare(DataConfig(**{**source, "validation": None}), tokenizer, "prompt", datasets=sets)
    assert tokenizer.chat_template == before
    texts = [tokenizer.decode(prepared.validation[name][0].trees[0].tokens) for name in ("held_out", "own")]
    assert texts[1].replace(" ", "") != texts[0].replace(" ", "")
    assert len(prepared.validation["own"]) == len(prepared.validation["held_out"])


def test_evaluation_has_stop_texts_of_its_own(sums_home, data, tmp_path):
    """In place of the rollout's; an empty list has none; one text needs no list. Every completion ends in the text."""
    rollout = RolloutConfig(stop="\n")  # pyright: ignore[reportArgumentType]
    for given, stop in ((None, ("\n",)), ("7", ("7",)), (["1", "2"], ("1", "2")), ([], ())):
        assert EvaluationConfig(stop=given).sampling(rollout).stop == stop  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValidationError):
        EvaluationConfig(stop=("",))
    digits = [str(digit) for digit in range(10)]
    sections = {"training": {"max_steps": 1}, **settings(data, stop=digits, temperature=1.0)}
    folder = train(sums_home, tmp_path, {"type": "sft"}, **sections)
    with StoredRun(folder) as stored:
        ended = [e["completion"] for e in stored.evaluations() if e["finish_reason"] == "stop"]
    assert ended and all(sum(map(text.count, digits)) <= 1 for text in ended)
    assert any(text[-1:] in digits for text in ended)


def test_the_prompts_are_those_that_were_held_out(sums_home, data, tmp_path, caplog):
    """The same rows as the set that the loss is measured on; rows that leave no room are dropped with a warning."""
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
    prompts = prepared.prompts
    assert list(prompts) == ["validation", "held_out"]
    for name, dataset in prompts.items():
        assert sorted(dataset.rows.tolist()) == sorted(prepared.validation[name].rows.tolist())
    assert not set(prompts["validation"].rows.tolist()) & set(prepared.train.rows.tolist())
    sections["rollout"]["max_completion_length"] = 19  # prompts of 5 tokens fit, of 6 do not
    file.write_text(json.dumps(sections))
    tight = load(file).config
    fewer = prepare_run(tight, tokenizer).prompts
    assert 0 < len(fewer["validation"]) < 24 and "prompts leave room for a completion" in caplog.text


def test_prompts_are_read_before_the_first_step(sums_home, data, tmp_path):
    """Whatever is wrong with them is said then, though the first evaluation would be at step 4."""
    late = settings(data, at_start=False, max_completion_length=23)
    with pytest.raises(DataError, match=r"validation: no prompt leaves room .* 23 tokens .evaluation.max_completion_"):
        train(sums_home, tmp_path, {"type": "sft"}, **late)
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_sets_without_rewards_need_no_prompts(sums_home, data, tmp_path):
    source, (held_out,) = data
    sets = [held_out | {"rewards": [EXACT]}, held_out | {"name": "plain"}]
    sections = {"model": str(sums_home / "model"), "method": "sft", "rollout": {"max_completion_length": 6}}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**sections, "data": source, "evaluation": {"datasets": sets}}))
    config = load(file).config
    prepared = prepare_run(config, load_tokenizer(config.models[0]))
    assert list(prepared.validation) == ["validation", "held_out", "plain"] and list(prepared.prompts) == ["held_out"]


def test_rewards_are_told_what_was_cut_off_and_what_the_prompt_opened(scratch_model, tmp_path):
    """A completion at the limit of its length, and a template that begins the reply with `<think>`."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "2 + 2?"}))
    model = ModelConfig(path=str(scratch_model))
    tokenizer, seen = load_tokenizer(model), []

    def reward(completions, state):
        seen.extend(completions)
        return Rewarded(CompletionReward(1.0) for _ in completions)

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


def test_rewards_read_what_was_sampled(shared, tmp_path):
    """With a SentencePiece tokenizer: the text with its leading space; in a run of an earlier version without it."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "Once upon a time, there"}))
    model = ModelConfig(path=str(shared / "models/stories260K"))
    tokenizer, seen = load_tokenizer(model), []

    def reward(completions, state):
        seen.extend(one.text for one in completions)
        return Rewarded(CompletionReward(1.0) for _ in completions)

    policy = load_model(model, "lm", torch.float32, torch.device("cpu"))
    data = DataConfig(source=str(tmp_path / "rows.jsonl"), template="none")
    prompts = prepare(data, tokenizer, "prompt", cache_dir=tmp_path).train
    rollout = RolloutConfig(max_completion_length=5, temperature=0.01)
    with closing(EmbeddedEngine(policy, tokenizer)) as engine:
        for continues in (True, False):
            sample = Sampler(engine, reward, tokenizer, rollout, stop_token_ids=(2,), seed=0, continues=continues)
            made = sample(1, [prompts[0]], 2)
            assert [one.text for one in made.completions] == seen[-2:]
    assert seen == [" was a little gir"] * 2 + ["was a little gir"] * 2


def test_tagged_replies_are_read(sums_home, tmp_path):
    """Format, answer and reasoning of replies: what the first rule that looks at each says, and what stands before the
    end of the reasoning."""
    from posttrain.config import TagsConfig
    from posttrain.config.schema.rewards import RuleReward
    from posttrain.rewards.compose import RewardInput, Rewards

    tags = TagsConfig()
    end, opened, closed = tags.reasoning_end, tags.solution_start, tags.solution_end
    texts = [f"1 + 1{end}{opened}2{closed}", f"{end}{opened}3{closed}", "2", f"so{end}{opened}2"]
    rules = [RuleReward(type=name) for name in ("match_format_exactly", "check_answer", "check_numbers")]
    with Rewards(rules, tags=tags, workers=1, deadline=20.0) as rewards:
        rewarded = rewards([RewardInput(text, [1], answer="2") for text in texts])
        assert rewards.accuracies(rewarded) == {"format_accuracy": 0.5, "answer_accuracy": 0.25}
    with Rewards([RuleReward(type="r1_zero")], workers=1, deadline=20.0) as rewards:
        replies = ["so </think> <answer>2</answer>", "so </think> <answer>3</answer>", "2"]
        rewarded = rewards([RewardInput(text, [1], answer="2") for text in replies])
        assert rewards.accuracies(rewarded) == pytest.approx({"format_accuracy": 2 / 3, "answer_accuracy": 2 / 3})


def rollout_of(*texts: str) -> SimpleNamespace:
    return SimpleNamespace(completions=[SimpleNamespace(text=text) for text in texts])


@pytest.mark.parametrize(
    ("version", "expected"), [(2, {"reasoning_length": 3.5, "reasoning_tokens": 5.0}), (1, {"reasoning_length": 5.0})]
)
def test_the_length_of_reasoning_in_characters_and_in_tokens(version, expected):
    """Of the completions that have some: `ab 🦙` has 4 characters and 7 bytes, which are tokens here, `abc` 3 and 3."""
    settings = {"model": "m", "method": "grpo", "data": {"source": "x"}, "rewards": [{"type": "r1_zero"}]}
    config = load(settings | {"behavior_version": version}).config
    sample = SimpleNamespace(rewards=SimpleNamespace(settings=config.rewards), tokenizer=byte_tokenizer())
    rollout = rollout_of("ab 🦙</think> x", "no end", "</think> y", "abc</think>")
    assert reasoning(config, sample, "validation", rollout) == {"reasoning_share": 0.5} | expected
    assert reasoning(config, sample, "validation", rollout_of("no end")) == {"reasoning_share": 0.0}
