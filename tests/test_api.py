"""The interface for programs: what it returns, and its errors (docs/api.md is executed by tests/test_docs.py)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import posttrain
from posttrain.config import load
from posttrain.errors import ConfigError, RunError

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
    assert again == first and again.config.training.max_steps == 2 and again.metric("no such") == ([], [])
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


def test_errors_are_those_of_the_command_line(settings, tmp_path):
    with pytest.raises(ConfigError, match=r"method.beta is not a setting of sft"):
        posttrain.train(settings | {"method": {"type": "sft", "beta": 1}})
    with pytest.raises(ConfigError, match="overrides go with a file or a mapping"):
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
