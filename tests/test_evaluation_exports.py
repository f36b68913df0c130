"""Exports of an evaluation, and lm-eval's interface to a model, without those packages.

tests/exports has files that Inspect and lm-eval have written (`by-*`), and ours, which they read: tests/
test_interoperability.py, run by `make test-eval`, proves both with the packages themselves.
"""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from evaluation_samples import write_evaluation
from transformers import AutoModelForCausalLM

from posttrain import scoring
from posttrain.base.errors import ConfigError, DataError, RunError
from posttrain.batch import pack
from posttrain.config import ModelConfig
from posttrain.config.schema.rollout import RolloutConfig
from posttrain.evaluation.exports import export_evaluation
from posttrain.evaluation.lm_eval_requests import Requests
from posttrain.evaluation.rules import GSM8K_STRICT, gsm8k_flexible, gsm8k_strict
from posttrain.grading.verdict import BadGold
from posttrain.models.load import load_model, load_tokenizer

STORED = Path(__file__).parent / "exports"
FREE = {
    "metadata", "model_args", "options", "doc", "generation_kwargs", "results", "configs", "groups", "group_subtasks",
    "versions", "n-shot", "higher_is_better", "n-samples", "task_hashes", "model_usage",
}  # fmt: skip
# Fields that the packages write where there is something to write: groups of tasks, reasons of a score.
OPTIONAL = {"posttrain", "posttrain_version", "groups", "model", "metadata", "reason", "answer", "explanation"}


@pytest.fixture
def evaluation(tmp_path):
    return write_evaluation(tmp_path / "evaluation")


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["inspect", "lm-eval"])
def test_files_are_those_that_the_packages_read(to, evaluation):
    files = export_evaluation(evaluation, to)
    stored = {path.name: path.read_text(encoding="utf-8") for path in (STORED / to).iterdir()}
    assert {file.name: file.read_text(encoding="utf-8") for file in files} == stored
    assert {file.parent for file in files} == {evaluation / to / ("stories260K" if to == "lm-eval" else "")}
    assert export_evaluation(evaluation, to) == files  # again, over the first


def unlike(ours, real, where: str) -> list[str]:
    """Where a value is not of the kind that the package writes there."""
    if isinstance(ours, dict) and isinstance(real, dict):
        inner = [name for name in ours if name in real and name not in FREE]
        extra = [f"{where}.{name} is not written" for name in ours if name not in real and name not in OPTIONAL]
        return extra + [line for name in inner for line in unlike(ours[name], real[name], f"{where}.{name}")]
    if isinstance(ours, list) and isinstance(real, list):
        return [line for one in ours for line in unlike(one, real[0], f"{where}[]")] if real else []
    kinds = {int: float, bool: bool}
    same = None in (ours, real) or kinds.get(type(ours), type(ours)) is kinds.get(type(real), type(real))
    return [] if same else [f"{where} is {ours!r}, there {real!r}"]


def test_files_have_the_fields_of_those_that_the_packages_write():
    def stored(name):
        return [json.loads(path.read_text(encoding="utf-8")) for path in STORED.glob(name)]

    [log], [results], [row] = stored("by-inspect.json"), stored("by-lm-eval-results.json"), stored("by-lm-eval-sa*")
    logs = stored("inspect/*.json")
    for one in (log, *logs):
        for sample in one["samples"]:
            [score] = sample["scores"].values()
            score["value"] = "C"  # or a number, or NaN
            sample["scores"], sample["events"] = score, {event["event"]: event for event in sample["events"]}
            sample["events"]["score"]["score"] = score
    for ours in logs:
        assert unlike(ours, log, "log") == []
    [ours] = stored("lm-eval/results_*")
    assert unlike(ours, results, "results") == [] and results.keys() <= ours.keys()
    for name in results["results"]["gsm8k"]:
        assert (
            name.replace("strict-match", "none").replace("flexible-extract", "none")
            in ours["results"]["gsm8k_temperature_0.6"]
        )
    for path in STORED.glob("lm-eval/samples_*"):
        for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
            ours = json.loads(line)
            assert row.keys() - {"exact_match"} <= ours.keys()
            # Arguments and answers are by kind of task: one generated completion in the file of lm-eval.
            assert unlike(ours | {"arguments": {}, "filtered_resps": []}, ours | row, "sample") == []
            assert set(ours) - set(row) <= set(ours["metrics"])


def test_what_is_not_graded_has_no_score(evaluation):
    [results, *samples] = export_evaluation(evaluation, "lm-eval")
    lines = {file.name.split("_2026")[0]: file.read_text(encoding="utf-8").split("\n")[:-1] for file in samples}
    gsm8k = [json.loads(line) for line in lines["samples_gsm8k_temperature_0.6"]]
    assert [row.get("exact_match") for row in gsm8k] == [0.5, 0.0, 1.0, 1.0, None]
    assert [row["metrics"] for row in gsm8k][-2:] == [["exact_match"], []]
    shown = json.loads(results.read_text(encoding="utf-8"))
    assert shown["n-samples"]["gsm8k_temperature_0.6"] == {"original": 100, "effective": 4}
    assert shown["results"]["refusals"] == {"name": "refusals", "alias": "refusals", "sample_len": 0}
    logs = {log["eval"]["task"]: log for file in export_evaluation(evaluation, "inspect")
            for log in [json.loads(file.read_text(encoding="utf-8"))]}  # fmt: skip
    last = logs["gsm8k"]["samples"][-1]["scores"]["graded"]
    assert math.isnan(last["value"]) and (last["reason"], last["explanation"]) == (
        "timeout",
        "the deadline of 2 s passed",
    )
    [score] = logs["refusals"]["results"]["scores"]
    assert math.isnan(score["metrics"]["accuracy"]["value"]) and score["unscored_samples"] == 1


def test_messages(evaluation, tmp_path):
    with pytest.raises(ConfigError, match="there is no export 'wandb': give inspect or lm-eval"):
        export_evaluation(evaluation, "wandb")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot write .*file"):
        export_evaluation(evaluation, "inspect", tmp_path / "file" / "logs")
    lines = (evaluation / "answers.jsonl").read_text().splitlines(keepends=True)
    (evaluation / "answers.jsonl").write_text("".join(lines[:-1]))
    with pytest.raises(RunError, match="has no answers of refusals: evaluate again"):
        export_evaluation(evaluation, "lm-eval")
    (evaluation / "answers.jsonl").write_text(lines[0].replace("0.6", "0.7"))
    with pytest.raises(RunError, match=r"answers of gsm8k temperature=0\.7, which summary.json lacks"):
        export_evaluation(evaluation, "lm-eval")
    (evaluation / "answers.jsonl").write_text("".join(lines))
    summary = json.loads((evaluation / "summary.json").read_text())
    del summary["created"]
    (evaluation / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(RunError, match=r"summary\.json is damaged: it lacks 'created'"):
        export_evaluation(evaluation, "inspect")
    (evaluation / "summary.json").unlink()
    with pytest.raises(RunError, match=r"summary\.json is missing"):
        export_evaluation(evaluation, "inspect")
    assert not (evaluation / "inspect").exists() and not (evaluation / "lm-eval").exists()


# --- lm-eval's model interface --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stories(shared):
    config = ModelConfig(path=str(shared / "models/stories260K"))
    policy = load_model(config, "lm", torch.float32, torch.device("cpu"))
    with Requests(policy, load_tokenizer(config), RolloutConfig(), 0) as requests:
        yield requests


@pytest.fixture(scope="module")
def by_itself(shared):
    """What plain transformers gives for a continuation, from all logits of one sequence."""
    plain = AutoModelForCausalLM.from_pretrained(shared / "models/stories260K", dtype=torch.float32).eval()

    def score(context: list[int], continuation: list[int]) -> tuple[float, bool]:
        tokens = torch.tensor([*context, *continuation])
        with torch.no_grad():
            row_N = plain(input_ids=tokens[None, :-1]).logits[0].log_softmax(-1)[len(context) - 1 :]
        target_N = tokens[len(context) :]
        return float(row_N.gather(1, target_N[:, None]).sum()), bool((row_N.argmax(-1) == target_N).all())

    return score


def test_continuations_are_scored_as_one_by_one_and_share_their_context(stories, by_itself, monkeypatch):
    fed: list[int] = []

    def counting(*arguments, **settings):
        packs = pack(*arguments, **settings)
        fed.extend(one.num_tokens for one in packs)
        return packs

    monkeypatch.setattr(scoring, "pack", counting)
    encode = stories.tokenizer.encode
    first, second = encode("Once upon a time"), encode("The dog")
    likely = encode("Once upon a time, there was a little")[len(first) :]
    continuations = [likely, *(encode(text, add_special_tokens=False) for text in (" was", "l", " a b c"))]
    pairs = [(context, continuation) for continuation in continuations for context in (first, second)]
    found = stories.logprobs([*pairs, (first, [])])
    assert found[-1] == (0.0, True)
    for (logprob, greedy), pair in zip(found, pairs, strict=False):
        expected = by_itself(*pair)
        assert logprob == pytest.approx(expected[0], abs=1e-4) and greedy == expected[1]
    assert any(greedy for _, greedy in found[:-1])
    assert sum(fed) == len(first) + len(second) + 2 * sum(len(one) - 1 for one in continuations)


def test_contexts_and_prompts_that_are_too_long_lose_their_beginning(stories, by_itself, caplog):
    encode = stories.tokenizer.encode
    long, end = encode("One day, she saw a big, red ball. " * 60), encode(" the end", add_special_tokens=False)
    kept = long[-(512 + 1 - len(end)) :]
    [(logprob, _)] = stories.logprobs([(long, end)])
    assert logprob == pytest.approx(by_itself(kept, end)[0], abs=1e-4)
    sampling = stories.sampling({"do_sample": False, "until": [". "], "max_gen_toks": 12}, 1)
    [[whole]], [[cut]] = (stories.complete([prompt], sampling) for prompt in (long, long[-500:]))
    assert whole.text == cut.text and 0 < whole.tokens <= 12
    assert "1 prompt truncated on the left to 500 tokens" in caplog.text
    with pytest.raises(DataError, match="has 600 tokens, but the model 512 positions"):
        stories.logprobs([([1], [5] * 600)])
    with pytest.raises(DataError, match="has no context"):
        stories.logprobs([([], [5])])
    with pytest.raises(ConfigError, match=r"512 tokens leave no room .* lower the task's max_gen_toks"):
        stories.complete([[1, 2]], stories.sampling({"do_sample": False, "until": [], "max_gen_toks": 512}, 1))


def test_generation_settings_of_tasks(stories):
    known = {"until": ["\n", ""], "max_gen_toks": 9}
    greedy = stories.sampling({**known, "do_sample": False, "temperature": 0.0, "top_p": 0.9}, 1)
    assert greedy.greedy and greedy.stop == ("\n",) and greedy.max_completion_length == 9
    assert stories.sampling({**known, "do_sample": True}, 3).temperature == 1.0
    sampled = stories.sampling({**known, "do_sample": True, "temperature": 1.5, "top_k": 50}, 3)
    assert (sampled.temperature, sampled.top_k, sampled.num_generations) == (1.5, 50, 3)
    [group] = stories.complete([stories.tokenizer.encode("Once upon a time")], sampled)
    assert len({done.text for done in group}) == 3 and all(done.tokens <= 9 for done in group)
    with pytest.raises(ConfigError, match="have num_beams, which engines do not support"):
        stories.sampling({**known, "do_sample": False, "num_beams": 4}, 1)


def test_without_lm_eval_the_message_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "posttrain.evaluation.lm_eval_model", raising=False)
    with pytest.raises(ConfigError, match=r"suite lm-eval:TASK needs lm_eval.*pip install .*\[lm-eval\]'"):
        import posttrain.evaluation.lm_eval_model  # noqa: F401


def test_lm_evals_verdicts_on_gsm8k():
    for text, strict, flexible in (
        ("3 + 4 = 7\n#### 7", True, True),
        ("#### 1,007.", True, True),
        ("#### $7", False, True),
        ("the answer is 7", False, True),
        ("7 of 12", False, False),
        ("#### 7\nThen 8", True, False),
        ("#### 7.0", False, False),
        ("", False, False),
    ):
        gold = "3 + 4 = <<3+4=7>>7\n#### 7" if "1,0" not in text else "#### 1,007"
        assert (gsm8k_strict(text, gold).correct, gsm8k_flexible(text, gold).correct) == (strict, flexible), text
    assert gsm8k_flexible("so 1,200 eggs", "#### 1200").extracted == "1,200"
    with pytest.raises(BadGold):
        GSM8K_STRICT.check_gold(None)
