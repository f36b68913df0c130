"""Runs that were moved, and models that changed under a run."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file, save_file
from test_stages import crash_at

from posttrain import runner
from posttrain.base.errors import RunError
from posttrain.cli import main
from posttrain.config import ModelConfig, Stage, load
from posttrain.runs.files import load_json
from posttrain.runs.inputs import content_of
from posttrain.runs.summary import read_run


@pytest.fixture(scope="module")
def pairs(sums_home, tmp_path_factory) -> Path:
    rows = [json.loads(line) for line in (sums_home / "train.jsonl").read_text().splitlines()[:16]]
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    found = [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": "99"} for row in rows]
    file.write_text("".join(json.dumps(pair) + "\n" for pair in found))
    return file


def chain(folder: Path, sums_home: Path, pairs: Path) -> tuple[Stage, ...]:
    """SFT of all weights; a reward model and GRPO as adapters on its final model, the one rewarding the other."""
    lora = {"lora": {"r": 2}}
    settings = {
        "name": "chain",
        "output_dir": str(folder),
        "model": str(sums_home / "model"),
        "data": {"source": str(sums_home / "train.jsonl"), "template": "none", "max_length": 24, "max_rows": 16},
        "training": {"batch_size": 4, "max_steps": 2, "learning_rate": 1e-3, "warmup_steps": 0},
        "checkpoint": {"save_steps": 1},
        "devices": {"type": "cpu"},
        "stages": {
            "sft": {"method": "sft", "data": {"source": str(pairs)}},
            "reward": {"init_from": "sft", "method": "reward", "model": lora, "data": {"source": str(pairs)}},
            "grpo": {
                "init_from": "sft",
                "method": {"type": "grpo", "num_generations": 4},
                "model": lora,
                "rewards": [{"type": "model", "from": "reward"}],
                "rollout": {"max_completion_length": 6},
            },
        },
    }
    file = folder / "chain.json"
    file.write_text(json.dumps(settings))
    return load(file).stages


@pytest.fixture(scope="module")
def whole(sums_home, pairs, tmp_path_factory) -> Path:
    """A chain that was never interrupted nor moved."""
    folder = tmp_path_factory.mktemp("whole")
    runner.train(chain(folder, sums_home, pairs))
    return folder / "chain"


def scores(model: Path, rows: Path, output: Path) -> list[dict]:
    assert main(["score", str(model), str(rows), "-o", str(output), "--max-length", "24", "--template", "none"]) == 0
    return [json.loads(line) for line in output.read_text().splitlines()]


@pytest.mark.slow
def test_a_moved_chain_goes_on_and_serves(tmp_path, sums_home, pairs, whole, monkeypatch):
    stages = chain(tmp_path, sums_home, pairs)
    with monkeypatch.context() as broken:
        crash_at(broken, "grpo", 1)
        with pytest.raises(KeyboardInterrupt):
            runner.train(stages)
    moved = tmp_path / "elsewhere" / "renamed"
    moved.parent.mkdir()
    (tmp_path / "chain").rename(moved)

    assert main(["train", "--resume", str(moved)]) == 0
    assert "resumed from checkpoint-1 at step 1" in (moved / "grpo/training.log").read_text()
    for stage, name in (("sft", "model"), ("reward", "adapter_model"), ("grpo", "adapter_model")):
        one, two = (load_file(run / stage / "final" / f"{name}.safetensors") for run in (whole, moved))
        assert all(torch.equal(one[key], two[key]) for key in one), stage
        assert stage == "sft" or os.readlink(moved / stage / "base") == "../sft/final"
    named = load_json(moved / "grpo/final/adapter_config.json")["base_model_name_or_path"]
    assert named == str(moved / "grpo/base")
    AutoPeftModelForCausalLM.from_pretrained(moved / "grpo/final")

    again = tmp_path / "third"
    moved.rename(again)
    for stage in ("sft", "reward", "grpo"):
        before = scores(whole / stage / "final", pairs, tmp_path / f"{stage}-before.jsonl")
        assert scores(again / stage / "final", pairs, tmp_path / f"{stage}.jsonl") == before
    out = str(tmp_path / "completions.jsonl")
    assert main(["generate", str(again / "grpo/final"), str(pairs), "-o", out, "--max-completion-length", "4"]) == 0
    assert main(["sample", str(again / "grpo/final"), "--prompts", "1", "-n", "2"]) == 0
    # One stage alone, whose own settings still name the folders of before the move.
    assert main(["train", "--resume", str(again / "grpo"), "--max-steps", "3"]) == 0
    assert load_json(again / "grpo/results.json")["steps"] == 3
    assert load(again / "grpo/config.yaml").config.models[0].path == str(again / "sft/final")


@pytest.mark.parametrize(
    ("setting", "changed"), [("rewards.0.path", "reward/final/adapter_model"), ("models.0.path", "sft/final/model")]
)
def test_a_model_that_changed_under_a_run_is_refused(tmp_path, whole, setting, changed):
    """With its old manifest beside the new weights, and with the old time of writing, as copying can leave it, too."""
    run = tmp_path / "chain"
    shutil.copytree(whole, run, symlinks=True)
    assert runner.train(load(run / "config.yaml").stages, resume=run) == 0  # nothing to do
    facts = read_run(run / "grpo").provenance["models"]
    assert facts["rewards.0.path"]["from_here"] == "../reward/final" and facts[setting]["content"].startswith("sha256")
    file = run / f"{changed}.safetensors"
    weights = load_file(file)
    weights[max(weights)] += 1
    written = file.stat()
    save_file(weights, file, {"format": "pt"})
    os.utime(file, ns=(written.st_atime_ns, written.st_mtime_ns))
    before = {path: path.read_bytes() for path in (run / "grpo").rglob("*") if path.is_file()}
    message = rf"is no longer the model that .*grpo was trained with \({setting}\).* Restore the former model"
    with pytest.raises(RunError, match=message):
        runner.train(load(run / "grpo/config.yaml").config, resume=run / "grpo")
    assert {path: path.read_bytes() for path in before} == before


def test_a_model_that_is_gone_is_named_and_may_be_given_anew(tmp_path, whole, sums_home):
    run, model = tmp_path / "sft", tmp_path / "model"
    shutil.copytree(whole / "sft", run)
    shutil.copytree(sums_home / "model", model)
    gone = load(run / "config.yaml", ["training.max_steps=3", f"model.path={tmp_path / 'gone/model'}"]).config
    with pytest.raises(RunError, match=r"sft cannot be resumed: .*gone/model: no such folder.*models\.0\.path=\.\.\."):
        runner.train(gone, resume=run)
    moved = load(run / "config.yaml", ["training.max_steps=3", f"model.path={model}"]).config
    assert runner.train(moved, resume=run) == 0  # the same model at another place


def test_what_a_model_is(tmp_path, sums_home, monkeypatch):
    """Its files, by name and content, wherever it lies; of the hub, the commit."""
    folder = tmp_path / "model"
    shutil.copytree(sums_home / "model", folder)
    model = ModelConfig(path=str(folder))
    content = content_of(model)
    assert content == content_of(ModelConfig(path=str(sums_home / "model")))
    (folder / "README.md").write_text("read me")
    assert content_of(model) == content
    config = folder / "config.json"
    config.write_text(config.read_text() + "\n")
    assert content_of(model) != content

    commit = "0123456789abcdef0123456789abcdef01234567"
    cached = tmp_path / "hub/models--some--model"
    shutil.copytree(sums_home / "model", cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert content_of(ModelConfig(path="some/model")) == f"commit {commit}"
