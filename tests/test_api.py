"""The interface for programs: what it returns, and its errors (docs/api.md is executed by tests/test_docs.py)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import Dataset

import posttrain
from posttrain import runner
from posttrain.base.errors import ConfigError, DataError, PosttrainError, RunError
from posttrain.cli import main
from posttrain.config import load
from posttrain.evaluation.items import load_items
from posttrain.evaluation.suite import find_suite, with_settings
from posttrain.runs.folder import Notes, write_notes

ROWS = [{"prompt": f"Once there were {n} cats.", "completion": " They slept."} for n in range(6)]


@pytest.fixture
def settings(shared, tmp_path) -> dict:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return {
        "model": {"path": shared / "models/stories260K", "lora": {"r": 2}},
        "method": "sft",
        "output_dir": tmp_path / "runs",
        "data": {"source": tmp_path / "rows.jsonl", "template": "none"},
        "training": {"max_steps": 2, "batch_size": 2},
        "devices": {"type": "cpu"},
    }


def test_a_mapping_a_file_and_checked_settings_are_the_same(settings, tmp_path):
    plain = json.loads(json.dumps(settings, default=str))
    (tmp_path / "a.json").write_text(json.dumps(plain))
    assert load(settings).config == load(tmp_path / "a.json").config
    first = posttrain.train(settings, overrides=["name=first"])
    second = posttrain.train(load(settings, ["name=second"]).config)
    assert first.folder.name == "first" and first.metrics[-1]["loss"] == second.metrics[-1]["loss"]
    assert first.state == "finished" and first.results["steps"] == 2 and first.model_path.name == "final"
    model, tokenizer = first.load()
    assert not any("lora" in name for name, _ in model.named_parameters()) and tokenizer.eos_token
    again = posttrain.load_run(str(first.folder))
    write_notes(first.folder, Notes(("keep",), "of the docs"))
    summary = again.summary
    assert (summary.state, summary.tags, summary.note) == ("finished", ("keep",), "of the docs")
    assert summary.headline and {check.outcome for check in summary.checks} <= {"passed", "does not apply"}
    assert again == first and again.config.training.max_steps == 2 and again.metric("no such") == ([], [])
    with pytest.raises(RunError, match="has logged no los; did you mean loss"):
        again.metric("los")
    further = posttrain.train(settings, overrides=["name=further", f"model={first.folder}"])
    assert further.config.models[0].path == str(first.folder / "final")
    started = json.loads((further.folder / "run.json").read_text())["provenance"]["models"]["models.0.path"]
    assert started["path"] == str(first.folder / "final")
    longer = posttrain.train(settings, overrides=["name=further", f"model={first.folder}"], resume=True)
    assert longer == further
    longer = posttrain.train(settings, overrides=["name=first", "training.max_steps=3"], resume=True)
    assert longer.results["steps"] == 3 and [path.name for path in longer.checkpoints][-1] == "checkpoint-3"


def test_a_run_without_a_name_gets_one(settings):
    run = posttrain.train(settings)
    assert run.folder.name.startswith("sft-stories260K-") and run.state == "finished"


def test_several_runs(settings):
    stages = {"one": {"method": "sft"}, "two": {"method": "sft", "init_from": "one"}}
    with pytest.raises(ConfigError, match="2 stages and 1 models: use train_all"):
        posttrain.train(settings | {"stages": stages})
    runs = posttrain.train_all(settings | {"stages": stages, "name": "both"})
    assert [run.folder.name for run in runs] == ["one", "two"] and {run.state for run in runs} == {"finished"}


def test_runs_are_resumed_by_folder_and_by_name(settings):
    with pytest.raises(RunError, match="needs the run's folder: set name in the config"):
        posttrain.train(settings, resume=True)
    run = posttrain.train(settings, overrides=["name=a"])
    longer = load(settings, ["name=b", "training.max_steps=4"]).config
    again = posttrain.train(longer, resume=str(run.folder))
    assert again == run and run.results["steps"] == 4
    stages = {"one": {"method": "sft"}, "two": {"method": "sft", "init_from": "one"}}
    both = settings | {"stages": stages, "name": "both", "models": [settings["model"]]}
    del both["model"]
    first, second = posttrain.train_all(both, model_index=0)
    assert posttrain.train_all(load(both).stages, skip=["one"], overwrite=True) == [second]
    assert posttrain.train_all(both, resume=second.folder / "checkpoint-2") == [second]
    assert posttrain.train_all(both, resume=first.folder.parent) == [first, second]


def test_the_command_line_trains_by_the_interface(settings, tmp_path, monkeypatch):
    """What `posttrain train` gives the runner is what `train_all` gives it."""
    given: list[dict] = []
    monkeypatch.setattr(runner, "train", lambda stages, **rest: given.append({"stages": stages, **rest}) or 3)
    (tmp_path / "a.json").write_text(json.dumps(settings | {"name": "a"}, default=str))
    with pytest.raises(SystemExit) as status:  # a rank that could not follow
        main(["train", str(tmp_path / "a.json"), "--overwrite", "--model-index", "0", "training.max_steps=7"])
    with pytest.raises(SystemExit):
        posttrain.train_all(tmp_path / "a.json", overrides=["training.max_steps=7"], overwrite=True, model_index=0)
    assert given[0] == given[1] and given[0]["stages"][0].config.training.max_steps == 7
    assert status.value.code == 3 and given[0]["overwrite"] and given[0]["model_index"] == 0


QUESTIONS = [{"question": f"What is {n} + {n}?", "answer": f"#### {2 * n}"} for n in range(4)]


@pytest.fixture
def questions(tmp_path) -> Path:
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    return file


def test_an_evaluation_of_the_command_line_is_the_same(shared, questions, tmp_path, monkeypatch, capsys):
    """What the command has answered is finished for the function with the same options, and nothing is loaded."""
    model, folder = str(shared / "models/stories260K"), tmp_path / "out"
    flags = ["--temperature", "0.5,1.0", "-n", "2", "--top-k", "5", "--seed", "3", "--max-completion-length", "4"]
    command = ["eval", model, "--suite", "gsm8k", "--data", str(questions), "--output", str(folder), *flags]
    assert main([*command, "--prompt", "{question}", "--workers", "1", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    monkeypatch.setattr("posttrain.evaluation.evaluate.load_model", None)
    options = {"temperature": (0.5, 1.0), "num_generations": 2, "top_k": 5, "seed": 3, "max_completion_length": 4}
    options |= {"output": folder, "settings": {"prompt": "{question}"}}
    found = posttrain.evaluate(model, ["gsm8k"], data={"gsm8k": questions}, **options)
    assert list(found.summary) == ["gsm8k temperature=0.5", "gsm8k temperature=1"]
    assert [f"{one['value']:.1%}" in shown for one in found.summary.values()] == [True, True]
    assert len(found.answers) == 16 and {answer.prompt for answer in found.answers} >= {"What is 3 + 3?"}
    loaded = load_items(with_settings(find_suite("gsm8k"), {"source": str(questions), "prompt": "{question}"}))
    del options["settings"]
    assert posttrain.evaluate(model, [loaded], **options).summary == found.summary
    with pytest.raises(RunError, match="differs in sampling"):
        posttrain.evaluate(model, [loaded], **options | {"seed": 4})


def test_recorded_completions_are_graded(questions, tmp_path):
    rows = [row | {"completions": [f"#### {2 * n}", "#### 1"]} for n, row in enumerate(QUESTIONS)]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"data": {"gsm8k": questions}, "output": tmp_path / "out", "workers": 1}
    found = posttrain.evaluate(tmp_path / "answers.jsonl", ["gsm8k"], **given)
    assert found.summary["gsm8k"]["value"] == 0.5
    assert [answer.verdict for answer in found.answers] == ["correct", "wrong"] * 4
    with pytest.raises(ConfigError, match="which lm-eval's tasks cannot grade"):
        posttrain.evaluate(tmp_path / "answers.jsonl", ["lm-eval:hellaswag"])


def test_wrong_options_of_an_evaluation(shared, questions):
    model = shared / "models/stories260K"
    for wrong, message in (
        ({"suites": [], "data": {}}, "no suite is named"),
        ({"suites": ["gsm8k", "gsm8k"], "data": {"gsm8k": questions}}, "gsm8k is named twice"),
        (
            {"data": {"gsm8k": questions, "mth": questions}},
            "has rows for mth, but none of these suites uses them: gsm8k",
        ),
        ({"temperature": (0.5, -1.0)}, "temperature is -1"),
        ({"top_p": 2.0}, "top_p is 2"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"settings": {"promt": "{question}"}}, "did you mean prompt"),
        ({"dtype": "float8"}, "dtype is 'float8'"),
    ):
        with pytest.raises(ConfigError, match=message):
            posttrain.evaluate(model, **{"suites": ["gsm8k"], "data": {"gsm8k": questions}} | wrong)


def test_errors_are_those_of_the_command_line(settings, tmp_path):
    with pytest.raises(ConfigError, match=r"method.beta is not a setting of sft"):
        posttrain.train(settings | {"method": {"type": "sft", "beta": 1}})
    with pytest.raises(ConfigError, match="overrides apply only to a file or a mapping"):
        posttrain.train(load(settings).config, overrides=["name=x"])
    with pytest.raises(RunError, match="not a run folder"):
        posttrain.load_run(tmp_path)
    posttrain.train(settings, overrides=["name=taken"])
    with pytest.raises(RunError, match="taken"):
        posttrain.train(settings, overrides=["name=taken"])
    (tmp_path / "runs/taken/results.json").unlink()
    with pytest.raises(RunError, match="has no results yet: it is finished"):
        _ = posttrain.load_run(tmp_path / "runs/taken").results


def test_importing_the_package_loads_no_torch():
    code = "import posttrain, sys; assert 'torch' not in sys.modules and 'train' in posttrain.__all__"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (Path(posttrain.__file__).parent / "py.typed").is_file()
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = posttrain.trian  # pyright: ignore[reportAttributeAccessIssue]


def test_rows_and_functions_in_memory(scratch_model, tmp_path, monkeypatch, capsys):
    """As a file with the same rows and a module with the same function; a resumed run needs the same rows again."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"What is {n}?", "answer": str(n)} for n in range(8)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("of_file.py").write_text("def short(completions, **more):\n    return [-len(c) / 9 for c in completions]\n")
    limit = 9

    def short(completions, **more):
        return [-len(c) / limit for c in completions]

    settings = {
        "model": str(scratch_model), "method": {"type": "grpo", "num_generations": 2}, "data": {"template": "none"},
        "training": {"max_steps": 2, "batch_size": 2}, "rollout": {"max_completion_length": 4},
        "checkpoint": {"save_steps": 1}, "tracking": {"logging_steps": 1},
    }  # fmt: skip
    named = {**settings, "rewards": [{"type": "python", "function": "of_file:short"}], "name": "named"}
    of_file = posttrain.train(named | {"data": {"template": "none", "source": "rows.jsonl"}})
    seen = posttrain.explore(settings, data=Dataset.from_list(rows), rewards=[short], rows=2)
    printed = capsys.readouterr().out
    assert "What is 0?" in printed and "What is 1?" in printed and "What is 2?" not in printed
    same = posttrain.explore(named | {"data": {"template": "none", "source": "rows.jsonl"}}, rows=2, json=True)
    assert not capsys.readouterr().out and seen["sets"] == same["sets"] and len(seen["rows"]) == 2
    assert seen["findings"]["rows"] == same["findings"]["rows"]
    given = posttrain.train(settings | {"name": "given"}, data=Dataset.from_list(rows), rewards=[short])
    assert given.metric("rewards/short/mean")[1] == of_file.metric("rewards/short/mean")[1]
    assert given.metric("loss")[1] == of_file.metric("loss")[1]
    saved = given.config
    assert (saved.data.source, saved.rewards[0].model_dump()["function"]) == ("given:train", "given:short")
    resumed = settings | {"name": "given"}
    posttrain.train(resumed, data=rows, rewards=[short], overrides=["training.max_steps=3"], resume=True)
    assert given.metric("loss")[0] == [1, 2, 3]
    with pytest.raises(PosttrainError, match="data"):
        posttrain.train(resumed, data=rows[1:], rewards=[short], overrides=["training.max_steps=4"], resume=True)
    monkeypatch.setattr("posttrain.data.given._given", {})
    monkeypatch.setattr("posttrain.base.functions._given", {})
    capsys.readouterr()
    assert main(["train", "--resume", "runs/given", "training.max_steps=4"]) == 1
    assert "was given to the Python API in memory: give the function again" in capsys.readouterr().err
    with pytest.raises(DataError, match="the rows given as train are empty"):
        posttrain.train(settings, data=[], rewards=[short])
    with pytest.raises(ConfigError, match="data has the sets test: give train"):
        posttrain.train(settings, data={"test": rows}, rewards=[short])
    lambdas = [lambda completions: [1.0] * len(completions), lambda completions: [2.0] * len(completions)]
    both = posttrain.train(settings | {"name": "lambdas"}, data=rows, rewards=lambdas)
    assert both.metric("rewards/function/mean")[1] == [1.0, 1.0] and both.metric("reward")[1] == [3.0, 3.0]
    assert both.metric("rewards/function_1/mean")[1] == [2.0, 2.0]
