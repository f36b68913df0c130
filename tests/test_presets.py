"""Every preset trains two real steps on real data: only the hub's names and the sizes are replaced."""

import json

import pytest
import yaml

from benchmarks.models import write_model
from posttrain.cli import main
from posttrain.config import load, preset_names

PAIRS = "data/preference-demo/dpo_en_demo.json"  # 300 rows, ShareGPT style
GSM8K = "data/gsm8k/train.jsonl"
HH = "data/hh-harmless/train.jsonl.gz"
LABELLED = "data/preference-demo/kto_en_demo.json"  # 300 rows, messages and a label
# preset -> the model, the file that stands in for its data set, and the settings in which that file differs from it
LOCAL = {
    "cpo-ultrafeedback": ("chat", PAIRS, ["data.format=sharegpt"]),
    "dpo-hh": ("stories260K", HH, []),
    "dpo-many-models": ("chat", PAIRS, ["data.format=sharegpt", "data.validation.rows=2"]),
    "dpo-ultrafeedback": ("chat", PAIRS, ["data.format=sharegpt"]),
    "dpo-ultrafeedback-lora": ("chat", PAIRS, ["data.format=sharegpt"]),
    "distill-gsm8k": ("chat", GSM8K, ["rollout.max_completion_length=16", "method.teacher={model}"]),
    "grpo-gsm8k-calculator": ("tools", GSM8K, ["rollout.max_completion_length=24"]),
    "grpo-gsm8k": ("chat", GSM8K, ["rollout.max_completion_length=16"]),
    "ppo-gsm8k": ("chat", GSM8K, ["rollout.max_completion_length=16"]),
    "ipo-ultrafeedback": ("chat", PAIRS, ["data.format=sharegpt"]),
    "kto": ("chat", LABELLED, []),
    "kto-lora": ("chat", LABELLED, []),
    "orpo-ultrafeedback": ("chat", PAIRS, ["data.format=sharegpt"]),
    "simpo-ultrafeedback": ("chat", PAIRS, ["data.format=sharegpt"]),
    "reward-hh": ("stories260K", HH, []),
    "reward-ultrafeedback-lora": ("chat", PAIRS, ["data.format=sharegpt"]),
    "sft": ("chat", "data/sft-demo/reason_tool_use_demo_50.jsonl", []),
    "sft-gsm8k": ("chat", GSM8K, []),
    "sft-lora": ("chat", "data/sft-demo/alpaca_en_demo.json", []),
}
SIZES = {"data.max_rows": 12, "training.batch_size": 2, "training.max_steps": 2}
SIZES |= {"tracking.logging_steps": 1, "data.validation": "{rows: 4}"}


# preset of several stages -> the model, stage -> the file for it, and the settings in which it differs
STAGED = {
    "maths-tagged": ("chat", {"sft": GSM8K, "grpo": GSM8K}, ["rollout.max_completion_length=24"]),
    "hh-ppo": (
        "stories260K",
        dict.fromkeys(("reward", "ppo"), HH),
        ["rollout.max_completion_length=16", "data.skip_rows=12"],
    ),
    "hh-grpo": (
        "stories260K",
        dict.fromkeys(("reward", "grpo"), HH),
        ["rollout.max_completion_length=16", "data.skip_rows=12"],
    ),
    "qwen-math": (
        "chat",
        dict.fromkeys(("sft", "grpo"), "data/math/math_train.json"),
        ["rollout.max_completion_length=16", "evaluation.datasets.0.source=MATH500", "evaluation.num_batches=1"],
    ),
}


@pytest.mark.parametrize("preset", ["hh-ppo", "hh-grpo"])
def test_reward_model_and_policy_see_other_rows(preset):
    reward, policy = (stage.config.data for stage in load(preset).stages)
    assert reward.source == policy.source and reward.max_rows == policy.skip_rows > 0 == reward.skip_rows


def test_every_preset_is_here():
    assert sorted([*LOCAL, *STAGED]) == sorted(preset_names())


@pytest.mark.parametrize("preset", STAGED)
def test_two_steps_of_every_stage(preset, shared, scratch_model, tmp_path, capsys):
    kind, data, differs = STAGED[preset]
    model = scratch_model if kind == "chat" else shared / "models" / kind
    overrides = {"name": "run", "output_dir": tmp_path, "model.path": model} | SIZES
    overrides |= {f"stages.{stage}.data.source": shared / file for stage, file in data.items()}
    math500 = str(shared / "data/math/math500.jsonl")
    differs = [f"stages.{list(data)[-1]}.{setting}".replace("MATH500", math500) for setting in differs]
    assert main(["train", preset, *(f"{k}={v}" for k, v in overrides.items()), *differs]) == 0, capsys.readouterr().err
    for stage in data:
        run = tmp_path / "run" / stage
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if "loss" in line] == [1, 2]
        assert any((run / "final").glob("*model.safetensors"))
    rewarded = [line["eval_reward"] for line in lines if "eval_reward" in line]
    print(preset, rewarded)
    assert len(rewarded) >= 2 and all(isinstance(value, float) for value in rewarded)


@pytest.mark.parametrize("preset", LOCAL)
def test_two_steps(preset, shared, scratch_model, tmp_path, capsys):
    kind, data, differs = LOCAL[preset]
    model = scratch_model if kind == "chat" else shared / "models" / kind
    if kind == "tools":  # Qwen3's template has them
        model, sizes = tmp_path / "model", {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
        write_model(
            model, shared / "tokenizers/qwen3", head_dim=8, num_attention_heads=2, num_key_value_heads=2, **sizes
        )
    overrides = {"name": "run", "output_dir": tmp_path, "data.source": shared / data} | SIZES
    models = load(preset).config.models
    for index in range(len(models)):  # names, because here all models are one folder
        overrides |= {f"models.{index}.path": model, f"models.{index}.name": f"model-{index}"}
    differs = [setting.replace("{model}", str(model)) for setting in differs]
    arguments = ["train", preset, *(f"{key}={value}" for key, value in overrides.items()), *differs]
    status = main(arguments)
    assert status == 0, capsys.readouterr().err

    for index in range(len(models)):
        run = tmp_path / "run" / f"model-{index}" if len(models) > 1 else tmp_path / "run"
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        losses = [(line["step"], line["loss"]) for line in lines if "loss" in line]
        print(preset, index, losses)
        assert [step for step, _ in losses] == [1, 2]
        assert any((run / "final").glob("*model.safetensors"))
        assert json.loads((run / "run.json").read_text())["state"] == "finished"
        settings = yaml.safe_load((run / "config.yaml").read_text())
        assert settings["models"][0]["path"] == str(model) and (run / "best").is_dir()
