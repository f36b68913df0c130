"""`posttrain sample` of any model: its settings, a sweep, the text and rewards of training, faults of tokenisation."""

import json
import re

import pytest
import yaml
from data_tokenizer import CHATML, byte_tokenizer
from transformers import AutoTokenizer

from posttrain.cli import main
from posttrain.data.prompts import Prompt, completion_faults, stop_faults
from posttrain.engines import Completion, text_of
from posttrain.runs.stored_rollouts import StoredRun

LENGTH = "{type: length, target: 6, scale: 1.0}"


@pytest.fixture
def stories(shared, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "140")
    rows = [{"prompt": "Once upon a time"}, {"prompt": 3}, {"prompt": "Lily and Tom", "more": 1}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(shared / "models" / "stories260K")


def test_any_folder_with_prompts_of_a_file_and_a_sweep(stories, capsys):
    arguments = ["sample", stories, "p.jsonl", "--reward", LENGTH, "-n", "3", "--max-completion-length", "8"]
    assert main([*arguments, "--temperature", "0.5,1.5,0.5", "--prompts", "2"]) == 0
    out = capsys.readouterr().out
    rows = re.findall(r"^ *(\S+) +8 +8 to 8 +100% +(\d+)% +- +-2 +0 +100% *$", out, re.MULTILINE)
    assert [row[0] for row in rows] == ["0.5", "1.5"], out
    assert "row 0, temperature 0.5, reward -2 = 1 x -2 (length)" in out and "At temperature 0.5" in out
    assert "not used: p.jsonl line 2: prompt must be a string" in out and "row 2, prompt of" in out
    assert main([*arguments, "--temperature", "1.5", "--top-k", "1", "--stop", "e"]) == 0
    [(lengths, truncated, distinct)] = set(
        re.findall(r"^ *\d +(\d+) +\d+ to \d+ +(\d+)% +(\d+)% ", capsys.readouterr().out, re.MULTILINE)[:1]
    )
    assert (truncated, distinct) == ("0", "33") and int(lengths) < 8, "the likeliest token each time, to the first e"


def test_a_percentile_of_the_training_prompts_is_not_applied_and_said(stories, tmp_path, capsys):
    """Of a file's few prompts it would be another length, so all are sampled."""
    settings = {"model": stories, "method": "grpo", "rewards": [{"type": "length", "target": 6}]}
    settings |= {"rollout": {"max_completion_length": 4}}
    for most in ("p50", None):
        settings["data"] = {"source": "p.jsonl", "template": "none", "max_prompt_length": most}
        (tmp_path / "a.yaml").write_text(yaml.safe_dump(settings))
        assert main(["sample", stories, "p.jsonl", "--config", "a.yaml", "-n", "2"]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert ("data.max_prompt_length: p50 is not applied" in out) == (most == "p50"), out
        assert "row 0, prompt of" in out and "row 2, prompt of" in out


def test_what_sample_is_not_given_is_asked_for(stories, tmp_path, capsys):
    for arguments, message in (
        ([stories], "is not part of a run, so there are no prompts: give a FILE"),
        (["owner/name"], "is not a folder, and a hub model has no run"),
        ([stories, "p.jsonl", "--temperature", "1,hot"], "--temperature is 'hot'; it must be a number of 0 or more"),
        ([stories, "p.jsonl", "--top-p", "2"], "--top-p is 2.0; it must be"),
        ([stories, "p.jsonl", "--reward", "nope"], "--reward nope: rewards.0 is 'nope'; it must be one of match"),
        ([stories, "p.jsonl", "--reward", "mathh"], "did you mean math?"),
        ([stories, "p.jsonl", "--stage", "grpo"], "has no stage of that name"),
    ):
        assert main(["sample", *arguments]) == 2
        assert message in capsys.readouterr().err
    assert main(["sample", str(tmp_path), "p.jsonl"]) == 1
    assert "contains no model (config.json), and is not a run; it has " in capsys.readouterr().err


def test_the_text_and_the_rewards_are_those_of_training(scratch_model, tmp_path, monkeypatch, capsys):
    """A run of one step that takes the likeliest token each time, and the same prompts by its file and stage."""
    monkeypatch.chdir(tmp_path)
    settings = {
        "name": "r",
        "model": {"path": str(scratch_model)},
        "data": {"source": "builtin:arithmetic", "template": "tags", "skip_rows": 1, "max_rows": 4, "shuffle": False},
        "training": {"max_steps": 1, "batch_size": 2},
        "stages": {"one": {"method": {"type": "grpo", "num_generations": 2}}, "two": {"method": "sft"}},
    }
    rewards = [{"type": "length", "target": 6, "weight": 2.0}, {"type": "match_format_approximately"}]
    settings["stages"]["one"] |= {"rewards": rewards, "rollout": {"top_k": 1, "max_completion_length": 12}}
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(settings))
    assert main(["train", "a.yaml", "--skip", "two"]) == 0
    with StoredRun(tmp_path / "runs/r/one") as stored:
        prompts = {one["prompt_index"]: one["row"] for one in stored.prompts(1)}
        trained = {prompts[one["prompt_index"]]: (one["completion"], one["reward"]) for one in stored.rollouts(1)}
    shown = []
    monkeypatch.setattr(
        "posttrain.inspection.sample.show_completions", lambda sampled, show, console: shown.append(sampled)
    )
    asked = [str(scratch_model), "--config", "a.yaml", "--prompts", "2", "-n", "2"]
    assert main(["sample", *asked, "--stage", "one"]) == 0
    [sampled] = shown[0].values()
    assert {one.prompt.row: (one.texts[0], pytest.approx(one.rewards[0])) for one in sampled} == trained
    assert main(["sample", *asked]) == 2 and main(["sample", "runs/r", "--stage", "one", "--prompts", "1"]) == 0
    assert main(["sample", "runs/r"]) == 1
    assert "runs/r contains no model, but 1 run: name one, such as runs/r/one" in capsys.readouterr().err


def test_one_text_for_rewards_and_readers():
    """Without the stop token, whether it is a special one or not, and without special tokens in the middle."""
    tokenizer = byte_tokenizer(CHATML)
    [special] = tokenizer(tokenizer.eos_token, add_special_tokens=False).input_ids
    plain = tokenizer("ab", add_special_tokens=False).input_ids
    for tokens, stops, text in (
        ([*plain, special], (special,), "ab"),
        (plain, (plain[-1],), "a"),
        (plain, (special,), "ab"),
        ([plain[0], special, plain[1]], (), "ab"),
    ):
        assert text_of(Completion(tokens, [0.0] * len(tokens), "stop", 0), stops, tokenizer) == text


def test_faults_of_stop_tokens(shared):
    tokenizer = AutoTokenizer.from_pretrained(shared / "tokenizers" / "minimind6400")
    stop = tokenizer.eos_token_id
    assert stop_faults(tokenizer, (stop,), (), True) == []
    [other] = stop_faults(tokenizer, (0,), (), True)
    assert (
        "ends a turn with '<|im_end|>', which is not a stop token" in other and f"Add {stop} to eos_token_id" in other
    )
    assert stop_faults(tokenizer, (0,), ("<|im_end|>",), True) == stop_faults(tokenizer, (0,), (), False) == []
    [none] = stop_faults(tokenizer, (), (), False)
    assert none.startswith("There is no stop token")
    [outside] = stop_faults(tokenizer, (stop, 6_400), (), False)
    assert "The stop token 6,400 of generation_config.json is not in the tokenizer's vocabulary of 6,400" in outside
    tokenizer.eos_token = "<nope>"
    assert "stop token '<nope>' is not in its vocabulary" in stop_faults(tokenizer, (stop,), (), False)[0]


def prompt(tokenizer, text):
    return Prompt(0, text, tokenizer(text).input_ids, {})


@pytest.mark.parametrize("name", ["models/stories260K", "tokenizers/gpt2", "tokenizers/qwen3"])
def test_tags_and_borders_that_are_split_differently(shared, name):
    tokenizer = AutoTokenizer.from_pretrained(shared / name)
    asked, reply = prompt(tokenizer, "2 + 3 is"), " five</answer> 你好\n"
    whole = tokenizer(asked.text + reply).input_ids[len(asked.tokens) :]
    assert completion_faults([(asked, whole)], ["</answer>"], tokenizer) == []
    letters = tokenizer.convert_tokens_to_ids(list("</answer>"))
    [odd] = completion_faults([(asked, [*whole[:1], *letters])] * 2 + [(asked, whole)], ["</answer>"], tokenizer)
    assert odd.startswith("2 of 3 completions write '</answer>' as '<' '/' 'a' 'n'"), odd
    half, me = prompt(tokenizer, "2 + 3 is the ti"), tokenizer.convert_tokens_to_ids(["m", "e"])
    [border] = completion_faults([(half, me)], [], tokenizer)
    assert border.startswith("1 of 1 prompts end in different tokens when their completion follows"), border
