"""Settings of other systems become settings files: values, defaults, batches, data, and what is not carried."""

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain.base.errors import ConfigError
from posttrain.cli import main
from posttrain.config import load
from posttrain.config.foreign import parse, table
from posttrain.config.importing import convert, settle, written

TRL = "trl {} --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/ultrafeedback_binarized {}"
REWARDED = "--reward_funcs accuracy_reward"


def imported(text, name="x.txt", **told):
    draft = convert(parse(text, name, told.pop("system", None), name.endswith((".yaml", ".yml"))), **told)
    settle(draft)
    return draft


def loaded(draft, tmp_path) -> Any:
    file = tmp_path / "imported.yaml"
    file.write_text(written(draft))
    return load(file).config


def trl(method, flags="", **told):
    rewards = REWARDED if method in ("grpo", "rloo") else ""
    return imported(TRL.format(method, f"{rewards} {flags}"), **told)


def test_a_trl_command(tmp_path):
    text = """
    trl dpo --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/ultrafeedback_binarized --use_peft \\
        --lora_r 8 --beta 0.2 --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --learning_rate=5e-6 \\
        --warmup_ratio 0.1 --bf16 --output_dir saves/out --eval_strategy steps --eval_steps 50
    """
    draft = imported(text)
    config = loaded(draft, tmp_path)
    assert (config.name, config.output_dir, config.seed) == ("out", "saves", 42)
    assert (config.models[0].path, config.models[0].dtype, config.models[0].lora.r) == (
        "Qwen/Qwen3-0.6B",
        "bfloat16",
        8,
    )
    assert (config.method.type, config.method.beta) == ("dpo", 0.2)
    assert config.data.source == "trl-lib/ultrafeedback_binarized" == config.data.validation.source
    assert (config.data.overlong, config.evaluation.eval_steps, config.evaluation.at_start) == ("truncate", 50, False)
    training = config.training
    assert (training.batch_size, training.learning_rate, training.warmup_steps) == (16, 5e-6, 0.1)
    assert (training.num_train_epochs, training.lr_scheduler_type) == (3.0, "linear")
    text = written(draft)
    assert "batch_size: 16                      # 2 per device x 8 accumulated x 1 device" in text
    assert "num_train_epochs: 3.0               # default of TRL" in text
    assert not draft.left and not draft.lacks


def test_the_example_of_the_page():
    page = (Path(__file__).parent.parent / "docs/migrating.md").read_text(encoding="utf-8")
    example = page.partition("## An example")[2]
    command, settings = (example.partition(f"```{kind}\n")[2].partition("```")[0] for kind in ("text", "yaml"))
    assert written(imported(command, "train.sh")) == settings


def test_a_trl_file_and_flags_over_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("dpo.yaml").write_text("model_name_or_path: gpt2\ndataset_name: x/y\nbeta: 0.3\nlearning_rate: 1e-5\n")
    draft = imported("trl dpo --config dpo.yaml --learning_rate 2e-5")
    config = loaded(draft, tmp_path)
    assert (config.method.beta, config.training.learning_rate) == (0.3, 2e-5)
    assert imported(Path("dpo.yaml").read_text(), "dpo.yaml", method="dpo").settings["method.beta"] == 0.3


@pytest.mark.parametrize(
    ("launcher", "devices"),
    [
        ("python", 1),
        ("accelerate launch --config_file cfg.yaml --num_processes 4", 4),
        ("accelerate launch --num_processes 4 -m", 4),
        ("torchrun --nproc-per-node=2", 2),
        ("CUDA_VISIBLE_DEVICES=0,1,2 python", 3),
    ],
)
def test_scripts_and_launchers(launcher, devices):
    draft = imported(f"{launcher} examples/scripts/sft.py --model_name_or_path gpt2 --dataset_name x/y")
    assert draft.method == "sft" and draft.settings["training.batch_size"] == 8 * devices
    assert f"8 per device x 1 accumulated x {devices} device" in draft.comments["training.batch_size"]


def test_a_mixture_of_trl(tmp_path):
    text = """
    datasets: [{path: a/b, name: en, split: train}, {path: json, data_files: rows.jsonl, fraction: 0.5}]
    model_name_or_path: gpt2
    per_device_train_batch_size: 4
    eval_strategy: steps
    """
    draft = imported(text, "sft.yaml", method="sft")
    assert [entry.source for entry in loaded(draft, tmp_path).data.source] == ["a/b/en", "rows.jsonl"]
    assert "of a mixture" in draft.left["eval_strategy"] and "datasets: fraction" in draft.left


def test_a_shell_script_with_variables():
    start = '#!/bin/bash\nset -x\nMODEL=gpt2\nDATA="x/y"\n\n'
    text = start + "trl kto --model_name_or_path ${MODEL} \\\n  --dataset_name $DATA\n"
    draft = imported(text, "run.sh")
    assert draft.settings["model.path"] == "gpt2" and draft.settings["data.source"] == "x/y"
    assert draft.settings["data.shuffle"] is False  # KTO of TRL reads rows in their order


# --- TRL's defaults -------------------------------------------------------------------------------------------------


def trl_classes():
    trl = pytest.importorskip("trl", reason="needs TRL as the oracle (the `bench` extra)")
    from trl.experimental.cpo import CPOConfig
    from trl.experimental.gkd import GKDConfig
    from trl.experimental.orpo import ORPOConfig

    return {
        "sft": trl.SFTConfig, "dpo": trl.DPOConfig, "kto": trl.KTOConfig, "reward": trl.RewardConfig,
        "grpo": trl.GRPOConfig, "rloo": trl.RLOOConfig, "cpo": CPOConfig, "orpo": ORPOConfig, "distill": GKDConfig,
    }  # fmt: skip


def trl_defaults(method):
    fields = [*dataclasses.fields(trl_classes()[method])]
    return {
        field.name: field.default_factory() if field.default is dataclasses.MISSING else field.default
        for field in fields
        if field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
    }


# Names without a counterpart in TRL's class for the method: TRL truncates there without a setting for it.
IMPLIED = {"truncation_mode"}


@pytest.mark.parametrize("method", ["sft", "dpo", "kto", "reward", "grpo", "rloo", "cpo", "orpo", "distill"])
def test_the_table_of_defaults_is_trls(method):
    theirs = trl_defaults(method)
    for name, value in (table("trl")["defaults"] | table("trl")["by_method"][method]).items():
        assert name in IMPLIED - theirs.keys() or theirs[name] == value, (
            f"{method}: {name} is {theirs.get(name)} in TRL"
        )


@pytest.mark.parametrize("method", ["sft", "dpo", "kto", "reward", "grpo", "rloo", "cpo", "orpo"])
def test_every_default_of_trl_that_differs_here_is_written(method):
    """Giving a default explicitly changes nothing: what is not said stands in the table, or is the default here."""
    implied = trl(method, system="trl").settings
    for name, value in trl_defaults(method).items():
        if isinstance(value, str | int | float | list) and name not in ("output_dir", "bf16"):
            source = parse(TRL.format(method, REWARDED if method in ("grpo", "rloo") else ""), "x.txt", "trl")
            source.values[name] = value
            draft = convert(source)
            settle(draft)
            if draft.settings == implied:
                continue
            both = [load(None, flags=settings).config for settings in (implied, draft.settings)]
            assert both[0] == both[1], f"{method}: {name}={value!r}"


@pytest.mark.parametrize(
    ("flags", "prompts", "minibatches", "said"),
    [
        ("", 1, 1, "8 completions (8 per device x 1 accumulated x 1 device) / 8 of each prompt"),
        ("--num_generations 4 --per_device_train_batch_size 16 --gradient_accumulation_steps 2", 8, 1, "/ 4 of each"),
        ("--num_generations 16 --per_device_train_batch_size 24", 2, 1, "/ 16 of each prompt, rounded up"),
        ("--gradient_accumulation_steps 4 --steps_per_generation 8", 8, 2, "64 completions"),
        ("--generation_batch_size 64 --gradient_accumulation_steps 2", 8, 4, "64 completions"),
    ],
)
def test_grpo_counts_prompts(flags, prompts, minibatches, said, tmp_path):
    draft = trl("grpo", flags)
    assert said in draft.comments["training.batch_size"]
    config = loaded(draft, tmp_path)
    assert (config.training.batch_size, config.method.num_minibatches) == (prompts, minibatches)
    assert (config.method.beta, config.method.loss_type, config.training.learning_rate) == (0.0, "dapo", 1e-6)


def test_rewards_of_trl(tmp_path):
    flags = "--reward_model_name_or_path rm --reward_weights 1 2 0.5 0.1"
    functions = "--reward_funcs accuracy_reward my.rewards.brevity get_soft_overlong_punishment"
    draft = imported(TRL.format("grpo", f"{functions} {flags} --max_completion_length 2048 --beta 0.04"))
    rewards = loaded(draft, tmp_path).rewards
    assert [(reward.type, reward.weight) for reward in rewards] == [
        *(("model", 1.0), ("math", 2.0), ("python", 0.5), ("overlong", 0.1))
    ]
    assert rewards[2].function == "my.rewards:brevity" and draft.settings["data.max_length"] == 4096
    assert loaded(draft, tmp_path).method.use_bias_correction_kl  # TRL's default, which counts where beta is above 0
    lacking = imported(TRL.format("grpo", "--reward_funcs think_format_reward"))
    assert lacking.lacks == ["rewards is empty; give at least one, e.g. rewards: [{type: math}]"]
    assert "no reward here has this name" in lacking.left["think_format_reward"]
    assert "# Still missing:\n# - rewards is empty" in written(lacking)


def test_other_values_of_trl(tmp_path):
    draft = trl("grpo", "--scale_rewards false --optim adamw_bnb_8bit --max_steps -1 --report_to none --top_k -1")
    config = loaded(draft, tmp_path)
    assert (config.method.scale_rewards, config.training.optimizer, config.rollout.top_k) == ("none", "adamw_8bit", 0)
    assert config.training.max_steps is None and config.tracking.report_to == ()
    assert trl("sft", "--bf16 false").settings["model.dtype"] == "float32"
    assert trl("sft", "--dtype bfloat16").settings["model.dtype"] == "bfloat16"
    assert "model.dtype" not in trl("sft").settings  # bfloat16 where the device can: `auto` here
    assert trl("dpo", "--rpo_alpha 0.5").settings["method.loss_type"] == ["sigmoid", "sft"]
    assert trl("dpo", "--max_length 8192").settings["training.tokens_per_pack"] == 16384
    assert trl("sft", "--lora_r 8").left == {"lora_r": "no effect there, because no adapter is trained"}
    assert (
        trl("dpo", "--load_best_model_at_end --eval_strategy steps").settings["checkpoint.best_metric"] == "eval_loss"
    )


def test_references_that_follow_and_aggregated_rewards_of_trl(tmp_path):
    flags = "--beta 0.1 --sync_ref_model --ref_model_sync_steps 64 --multi_objective_aggregation normalize_then_sum"
    method = loaded(trl("grpo", flags), tmp_path).method
    assert (method.sync_ref_model, method.ref_model_mixup_alpha, method.ref_model_sync_steps) == (True, 0.6, 64)
    assert method.multi_objective_aggregation == "normalize_then_sum"
    assert loaded(trl("dpo", "--sync_ref_model"), tmp_path).method.sync_ref_model
    for other in ("--use_peft --beta 0.1", ""):  # TRL refuses both, too
        draft = trl("grpo", f"--sync_ref_model {other}")
        assert not loaded(draft, tmp_path).method.sync_ref_model and "sync_ref_model" in draft.left


def test_completions_of_validation_prompts_are_as_many_as_in_trl(tmp_path):
    """By default as many as in training; without validation none are sampled."""
    for flags, number in (
        ("--eval_strategy steps", 8),
        ("--eval_strategy steps --num_generations 4", 4),
        ("--eval_strategy steps --num_generations_eval 2", 2),
        ("", 1),
    ):
        assert loaded(trl("grpo", flags), tmp_path).evaluation.num_generations == number
    left = trl("grpo", "--num_generations_eval 2").left
    assert "needs completions of validation prompts" in left["num_generations_eval"]


def test_nothing_is_dropped_silently():
    draft = trl("dpo", "--packing --foo 3 --lr_scheduler_type greedy --ld_alpha 0.5 --streaming false")
    assert draft.left["foo"] == "unknown to posttrain"
    assert "examples are always packed" in draft.left["packing"] and "not supported" in draft.left["ld_alpha"]
    assert "is 'greedy'; it must be one of cosine" in draft.left["lr_scheduler_type"]
    assert draft.left["streaming"] == "off, as here"
    end = written(draft).partition("# Not carried:\n")[2]
    assert all(end.count(name) >= 1 for name in draft.left)


# --- LLaMA-Factory --------------------------------------------------------------------------------------------------

LLAMA_DPO = """
### model
model_name_or_path: Qwen/Qwen3-4B-Instruct-2507
trust_remote_code: true

### method
stage: dpo
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
pref_beta: 0.1
pref_loss: sigmoid  # choices: [sigmoid (dpo), orpo, simpo]

### dataset
dataset: dpo_en_demo
template: qwen3_nothink
cutoff_len: 2048
max_samples: 1000
preprocessing_num_workers: 16
dataloader_num_workers: 4

### output
output_dir: saves/qwen3-4b/lora/dpo
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
save_only_model: false
report_to: none  # choices: [none, wandb, tensorboard, swanlab, mlflow]

### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 5.0e-6
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null

### eval
# eval_dataset: dpo_en_demo
val_size: 0.1
# per_device_eval_batch_size: 1
# eval_strategy: steps
# eval_steps: 500
"""
INFO = {
    "dpo_en_demo": {
        "file_name": "dpo_en_demo.json", "ranking": True, "formatting": "sharegpt",
        "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
    },
    "kto_en_demo": {
        "file_name": "kto_en_demo.json", "formatting": "sharegpt",
        "columns": {"messages": "messages", "kto_tag": "label"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
    "alpaca_en_demo": {"file_name": "alpaca_en_demo.json"},
    "identity": {"file_name": "identity.json"},
    "wiki_demo": {"file_name": "wiki_demo.txt", "columns": {"prompt": "text"}},
    "ultrachat": {
        "hf_hub_url": "HuggingFaceH4/ultrachat_200k", "split": "train_sft", "formatting": "sharegpt",
        "columns": {"messages": "messages"}, "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "me"},
    },
    "ultrafeedback": {
        "hf_hub_url": "llamafactory/ultrafeedback_binarized", "ranking": True, "num_samples": 500,
        "columns": {"prompt": "question", "chosen": "chosen", "rejected": "rejected"},
    },
    "mix": {"hf_hub_url": "a/b", "subset": "en", "columns": {"prompt": "q", "query": "context", "response": "a"}},
}  # fmt: skip


@pytest.fixture
def infos(tmp_path, monkeypatch, shared):
    """A folder `data` with dataset_info.json and the files of real rows."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(INFO))
    for file in (
        "preference-demo/dpo_en_demo.json",
        "preference-demo/kto_en_demo.json",
        "sft-demo/alpaca_en_demo.json",
    ):
        (tmp_path / "data" / Path(file).name).write_bytes((shared / "data" / file).read_bytes())


def llama(text=LLAMA_DPO, **changes):
    return imported(yaml.safe_dump(yaml.safe_load(text) | changes), "llama.yaml")


def test_the_example_of_llama_factory(infos, tmp_path):
    draft = imported(LLAMA_DPO, "llama.yaml")
    config = loaded(draft, tmp_path)
    model, data, training = config.models[0], config.data, config.training
    assert (config.name, config.output_dir, config.method.type) == ("dpo", "saves/qwen3-4b/lora", "dpo")
    assert (model.lora.r, model.lora.alpha, model.lora.dropout, model.lora.target_modules) == (8, 16, 0.0, "all-linear")
    assert (model.dtype, model.trust_remote_code) == ("bfloat16", True)
    assert (data.source, data.format, data.columns) == ("data/dpo_en_demo.json", "sharegpt", {})
    assert (data.template, data.max_length, data.max_rows, data.overlong) == ("chat", 2048, 1000, "truncate")
    assert data.validation.ratio == 0.1
    assert (training.batch_size, training.learning_rate, training.warmup_steps) == (8, 5e-6, 0.1)
    text = written(draft)
    assert "template: chat                      # qwen3_nothink there; chat is the tokenizer's own" in text
    assert "alpha: 16                         # default of LLaMA-Factory" in text
    carried = {"do_train", "preprocessing_num_workers", "dataloader_num_workers", "plot_loss", "overwrite_output_dir"}
    assert set(draft.left) == carried | {"save_only_model", "ddp_timeout"}


@pytest.mark.parametrize(
    ("stage", "dataset", "expected"),
    [
        ("sft", "alpaca_en_demo", {"format": "alpaca"}),
        ("sft", "ultrachat", {"source": "HuggingFaceH4/ultrachat_200k", "format": "sharegpt", "split": "train_sft",
                              "columns": {"conversations": "messages"}}),
        ("sft", "mix", {"source": "a/b/en", "format": "alpaca",
                        "columns": {"instruction": "q", "input": "context", "output": "a"}}),
        ("pt", "wiki_demo", {"format": "text"}),
        ("kto", "kto_en_demo", {"format": "kto"}),
        ("rm", "ultrafeedback", {"format": "preference", "columns": {"prompt": "question"}, "max_rows": 500}),
        ("sft", "identity, alpaca_en_demo", {"source": [{"source": "data/identity.json", "max_rows": 1000},
                                                       {"source": "data/alpaca_en_demo.json", "max_rows": 1000}]}),
    ],
)  # fmt: skip
def test_data_sets_of_llama_factory(infos, tmp_path, stage, dataset, expected):
    draft = llama(stage=stage, dataset=dataset, pref_loss=None, val_size=0)
    loaded(draft, tmp_path)
    found = {path.removeprefix("data."): value for path, value in draft.settings.items() if path.startswith("data.")}
    assert found | expected == found
    assert draft.method == {"rm": "reward", "pt": "sft"}.get(stage, stage)
    assert (draft.settings.get("method.assistant_only_loss") is True) == (dataset == "ultrachat")
    assert ("tags of ultrachat" in draft.left) == (dataset == "ultrachat")  # its user is called `me`


def test_more_of_llama_factory(infos, tmp_path):
    simpo = loaded(llama(pref_loss="simpo"), tmp_path).method
    assert (simpo.type, simpo.beta, simpo.simpo_gamma) == ("simpo", 0.1, 0.5)
    assert loaded(llama(pref_loss="orpo"), tmp_path).method.type == "orpo"
    assert loaded(llama(pref_ftx=0.2), tmp_path).method.loss_weights == (1.0, 0.2)
    full = llama(finetuning_type="full", bf16=None)
    assert full.settings["model.dtype"] == "float32" and "model.lora.r" not in full.settings
    assert "no adapter" in full.left["lora_rank"] and full.settings["data.overlong"] == "truncate"
    assert llama(finetuning_type="freeze").left["freeze"].startswith("not supported")
    assert llama(lora_target="q_proj, v_proj").settings["model.lora.target_modules"] == ["q_proj", "v_proj"]
    assert llama(quantization_bit=4).settings["model.load_in_4bit"] is True
    for pissa, init in (({}, "pissa_niter_16"), ({"pissa_iter": 4}, "pissa_niter_4"), ({"pissa_iter": -1}, "pissa")):
        started = loaded(llama(pissa_init=True, loraplus_lr_ratio=16.0, **pissa), tmp_path)
        assert (started.models[0].lora.init, started.training.loraplus_lr_ratio) == (init, 16.0)
    assert "model.lora.init" not in llama(pissa_init=False, pissa_iter=4).settings
    assert "8 bits" in llama(quantization_bit=8).left["quantization_bit"]
    ppo = llama(stage="ppo", reward_model="saves/rm", dataset="alpaca_en_demo", max_new_tokens=512, pref_beta=None,
                pref_loss=None, val_size=0)  # fmt: skip
    method = loaded(ppo, tmp_path).method
    assert (method.kl_coef, method.target_kl, method.vf_coef, method.num_minibatches) == (0.2, 6.0, 0.1, 1)
    assert ppo.settings["data.max_length"] == 2048 + 512 and ppo.settings["rollout.top_p"] == 0.7
    text = "llamafactory-cli train --stage sft --model_name_or_path gpt2 --dataset alpaca_en_demo --template default"
    assert imported(text).settings["model.lora.r"] == 8
    assert imported("llamafactory-cli train llama.yaml --seed 7", "run.sh", **_saved()).settings["seed"] == 7


def test_a_data_set_of_llama_factory_that_is_not_described(infos, tmp_path):
    """The other settings are imported; a folder that is named is the only one that is searched."""
    Path("dataset_info.json").write_text('{"mine": {"file_name": "mine.json"}}')
    elsewhere = llama(dataset_dir="elsewhere")
    assert f"no dataset_info.json in {tmp_path / 'elsewhere'} says" in elsewhere.left["dataset dpo_en_demo"]
    assert "data.format" not in elsewhere.settings and elsewhere.settings["data.source"] == "dpo_en_demo"
    misspelled = llama(dataset="dpo_en_dmo")
    said = misspelled.left["dataset dpo_en_dmo"]
    assert said.startswith(f"{tmp_path / 'data/dataset_info.json'} has no data set dpo_en_dmo; it has dpo_en_demo, ")
    assert misspelled.settings["data.max_length"] == 2048
    Path("data/dataset_info.json").unlink()
    assert llama(dataset="mine").settings["data.source"] == "mine.json"  # without dataset_dir, beside the file too


@pytest.mark.parametrize(
    ("datasets", "alike", "rename"),
    [
        ("alpaca_en_demo, ultrachat", {}, []),  # `messages` is recognised
        ("alpaca_en_demo, mix", {"format": "alpaca"}, ["in a/b/en, rename q to instruction, context to input, a to"]),
        ("mix, mix", {"format": "alpaca", "columns": {"instruction": "q", "input": "context", "output": "a"}}, []),
    ],
)
def test_data_sets_of_llama_factory_with_several_layouts(infos, tmp_path, datasets, alike, rename):
    draft = llama(stage="sft", dataset=datasets, pref_loss=None, val_size=0)
    data = loaded(draft, tmp_path).data
    assert (data.format, data.columns) == (alike.get("format", "auto"), alike.get("columns", {}))
    assert len(draft.lacks) == len(rename)
    for said, expected in zip(draft.lacks, rename, strict=True):
        assert said.startswith("data.columns is for all data sets") and expected in said


def test_mixtures_and_losses_of_llama_factory(infos, tmp_path):
    sets = {"stage": "sft", "dataset": "alpaca_en_demo, identity", "pref_loss": None, "val_size": 0}
    draft = llama(**sets, use_eaft_loss=True, eaft_alpha=2, mix_strategy="interleave_under", interleave_probs="0.7,0.3")
    config = loaded(draft, tmp_path)
    assert (config.data.mixing, config.method.loss_type, config.method.eaft_alpha) == ("interleave", "eaft", 2)
    assert draft.left["interleave_probs"].startswith("give each entry of data.source its weight")
    assert not draft.left.keys() & {"use_eaft_loss", "mix_strategy"}
    alone = llama(**sets | {"dataset": "identity"}, mix_strategy="interleave_over", use_dft_loss=True)
    assert alone.settings["method.loss_type"] == "dft" and "needs several sources" in alone.left["mix_strategy"]
    assert llama(**sets, mix_strategy="concat").settings["data.mixing"] == "repeat"


def test_pairs_of_llama_factory_in_several_layouts(infos, tmp_path):
    """Conversations under `messages` with chosen and rejected would be read without their prompt."""
    described = INFO | {"own": INFO["dpo_en_demo"] | {"columns": {"messages": "messages"}, "file_name": "own.json"}}
    Path("data/dataset_info.json").write_text(json.dumps(described))
    draft = llama(dataset="dpo_en_demo, own")
    assert draft.settings["data.format"] == "sharegpt"
    assert [lack.partition(": ")[2] for lack in draft.lacks] == [
        "in data/own.json, rename messages to conversations"
    ] and "rename messages" in written(draft)


def _saved():
    Path("llama.yaml").write_text(LLAMA_DPO)
    return {}


# --- axolotl --------------------------------------------------------------------------------------------------------

AXOLOTL = """
base_model: NousResearch/Llama-3.2-1B
load_in_8bit: false
load_in_4bit: true
strict: false

datasets:
  - path: teknium/GPT4-LLM-Cleaned
    type: alpaca
dataset_prepared_path: last_run_prepared
val_set_size: 0.1
output_dir: ./outputs/lora-out

adapter: qlora
lora_model_dir:

sequence_len: 2048
sample_packing: true
eval_sample_packing: true
pad_to_sequence_len: true

lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true

wandb_project: mine
wandb_name:

gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 1
optimizer: paged_adamw_8bit
lr_scheduler: cosine
learning_rate: 0.0002

train_on_inputs: false
bf16: auto
tf32: false

gradient_checkpointing: true
logging_steps: 1
flash_attention: true
loss_watchdog_threshold: 5.0
warmup_steps: 10
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.0
special_tokens:
  pad_token: "<|end_of_text|>"
"""


def axolotl(**changes):
    return imported(yaml.safe_dump(yaml.safe_load(AXOLOTL) | changes), "axolotl.yml")


def test_the_example_of_axolotl(tmp_path):
    draft = imported(AXOLOTL, "axolotl.yml")
    config = loaded(draft, tmp_path)
    model, data, training = config.models[0], config.data, config.training
    assert (config.method.type, config.name, config.seed) == ("sft", "lora-out", 42)
    assert (model.load_in_4bit, model.lora.r, model.lora.target_modules) == (True, 32, "all-linear")
    assert (data.source, data.format, data.template) == ("teknium/GPT4-LLM-Cleaned", "alpaca", "alpaca")
    assert (data.max_length, data.overlong, data.validation.ratio) == (2048, "drop", 0.1)
    assert (training.batch_size, training.optimizer, training.warmup_steps) == (8, "adamw_8bit", 10)
    assert (config.tracking.project, config.tracking.report_to) == ("mine", ("wandb",))
    assert "not supported" in draft.left["evals_per_epoch"] and draft.left["strict"] == "off, as here"


DPO_ROWS = {
    "path": "fozziethebeat/alpaca_messages_2k_dpo_test", "type": "chat_template.default",
    "field_messages": "conversation", "field_chosen": "chosen", "field_rejected": "rejected",
    "message_property_mappings": {"role": "role", "content": "content"}, "roles": {"user": ["user"]},
}  # fmt: skip


@pytest.mark.parametrize(
    ("rl", "entry", "expected"),
    [
        ("dpo", DPO_ROWS, {"format": "preference", "columns": {"prompt": "conversation"}}),
        ("dpo", {"path": "Intel/orca_dpo_pairs", "type": "chatml.intel"},
         {"format": "preference", "columns": {"prompt": "question"}, "template": "chatml"}),
        ("orpo", {"path": "a/b", "type": {"field_prompt": "q", "field_chosen": "good", "field_rejected": "bad"}},
         {"format": "auto", "columns": {"prompt": "q", "chosen": "good", "rejected": "bad"}}),
        ("kto", {"path": "a/b", "type": "llama3.ultra", "split": "train"}, {"template": "llama3", "split": "train"}),
        (None, {"path": "json", "data_files": "rows.jsonl", "type": "chat_template", "field_messages": "turns"},
         {"source": "rows.jsonl", "format": "messages", "columns": {"messages": "turns"}}),
        (None, {"path": "a/b", "type": "completion", "field": "body"}, {"format": "text", "columns": {"text": "body"}}),
    ],
)  # fmt: skip
def test_data_sets_of_axolotl(tmp_path, rl, entry, expected):
    draft = axolotl(rl=rl, datasets=[entry], sequence_len=None)
    found = {path.removeprefix("data."): value for path, value in draft.settings.items() if path.startswith("data.")}
    assert found | {k: v for k, v in expected.items() if v != "auto"} == found and found["max_length"] == 512
    assert draft.method == (rl or "sft")
    assert draft.settings.get("method.assistant_only_loss") is (True if entry["type"] == "chat_template" else None)
    loaded(draft, tmp_path)


def test_data_sets_of_axolotl_with_several_layouts(tmp_path):
    """What they share is carried; the template, which is for all, is left to the model."""
    turns = {"path": "c/d", "type": "chat_template", "field_messages": "conversations"}
    draft = axolotl(datasets=[{"path": "a/b", "type": "alpaca"}, turns])
    data = loaded(draft, tmp_path).data
    assert (data.format, data.columns, data.template) == ("auto", {}, "chat") and not draft.lacks
    assert draft.left["template of each data set"] == "they differ, and data.template is for all"


def test_more_of_axolotl(tmp_path):
    with_section = axolotl(
        rl="grpo", trl={"beta": 0.001, "num_generations": 2, "reward_funcs": ["rwd.right"], "use_vllm": False},
        datasets=[{"path": "openai/gsm8k", "name": "main", "type": "rwd.gsm8k_transform"}], val_set_size=0,
    )  # fmt: skip
    config = loaded(with_section, tmp_path)
    assert (config.method.beta, config.method.num_generations, config.training.batch_size) == (0.001, 2, 4)
    assert config.data.source == "openai/gsm8k/main" and config.rewards[0].function == "rwd:right"
    assert "no format here has this name" in with_section.left["type rwd.gsm8k_transform"]
    for theirs, init in (("olora", "olora"), (True, "default"), ("pissa_niter_4", "pissa_niter_4")):
        started = axolotl(peft_init_lora_weights=theirs, loraplus_lr_ratio=4, load_in_4bit=False).settings
        assert (started["model.lora.init"], started["training.loraplus_lr_ratio"]) == (init, 4)
    simpo = axolotl(rl="simpo", adapter=None, load_in_4bit=False)
    assert simpo.settings["method.beta"] == 0.1 and simpo.settings["method.cpo_alpha"] == 1.0
    assert axolotl(rl="kto", rl_beta=0.5, kto_desirable_weight=0.2).settings["method.desirable_weight"] == 0.2
    reward = axolotl(reward_model=True)
    assert reward.method == "reward" and "rewards" not in reward.settings
    assert axolotl(train_on_inputs=True).settings["method.completion_only_loss"] is False


# --- other systems, and mistakes ------------------------------------------------------------------------------------


def test_names_of_other_systems(tmp_path):
    text = """
    model: {huggingface_id: gpt2}
    dataset: {dataset: Anthropic/hh-rlhf, max_samples: 100}
    dpo: {beta: 0.2}
    training: {num_epochs: 2, per_device_train_batch_size: 2, gradient_accumulation_steps: 4, lora_alpha: 8, fp16: true}
    """
    draft = imported(text, "old.yaml", method="dpo")
    config = loaded(draft, tmp_path)
    assert (config.method.beta, config.training.batch_size, config.data.max_rows) == (0.2, 8, 100)
    assert config.models[0].lora.alpha == 8 and config.models[0].dtype == "float16"
    assert "on a GPU without bfloat16" in written(draft) and "default of" not in written(draft)
    with pytest.raises(
        ConfigError, match=r"old.yaml does not say its method; give one with --method: sft, reward, dpo"
    ):
        imported("group_size: 4\n", "old.yaml")


def test_text_of_the_source_stays_text(tmp_path):
    """Neither a reference to another setting nor a further line of YAML."""
    odd = {"model_name_or_path": "a${b}", "foo\u2028model: evil\nname": 1, "template": "x\ny: 2", "lora_alpha": 3}
    draft = imported(yaml.safe_dump({"stage": "sft", "dataset": "d"} | odd), "odd.yaml")
    config = loaded(draft, tmp_path)
    assert config.models[0].path == "a${b}" and config.models[0].lora.alpha == 3
    assert "x y: 2 there" in written(draft)


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("- a\n- b\n", "x.yaml", "x.yaml contains a list, but must be a mapping"),
        ("a: [\n", "x.yaml", "x.yaml:2: not valid YAML"),
        ("stage: dpo\nstage: sft\n", "x.yaml", "x.yaml:2: stage is given twice, first on line 1"),
        (
            "hello: 1\n",
            "x.yaml",
            "x.yaml has no name of a known system; say which it is with --from llama-factory|axolotl|trl",
        ),
        (
            "model: gpt2\nmethod: sft\n",
            "x.yaml",
            "x.yaml is a settings file of posttrain already; see it with: posttrain config",
        ),
        (
            "dataset_name: x\nmodel_name_or_path: y\n",
            "x.yaml",
            "x.yaml does not say its method; give one with --method",
        ),
        ("stage: pretty\n", "x.yaml", "x.yaml says 'pretty', which is no method here"),
        (
            "stage: sft\nmodel_name_or_path: a\n\nlearning_rate: fast\n",
            "x.yaml",
            "x.yaml:4: learning_rate is 'fast'; it must be a number",
        ),
        (
            "stage: sft\nper_device_train_batch_size: 1.5\n",
            "x.yaml",
            "x.yaml:2: per_device_train_batch_size is 1.5; it must be a whole",
        ),
        (
            "base_model: x\nmicro_batch_size: 1\ndatasets: [a]\n",
            "x.yml",
            "x.yml:3: each entry of datasets must be a mapping",
        ),
        ("\ntrl dpo --beta 0.1 --beta 0.2\n", "x.sh", "x.sh:2: --beta is given twice; keep one"),
        ("trl dpo --beta '0.1\n", "x.sh", "x.sh:1: not a command line"),
        (
            "trl dpo --beta 1\ntrl sft --seed 1\n",
            "x.sh",
            "x.sh has several commands (lines 1, 2) of a known system; give a file with one",
        ),
        ("trl dpo --model_name_or_path $1\n", "x.sh", "x.sh:1: $1 has no value in the file; write it out"),
        ("python -c 'print(1)'\n", "x.sh", "x.sh has no command of a known system"),
        (
            "trl dpo --beta true --model_name_or_path a --dataset_name b",
            "x.sh",
            "x.sh:1: beta is true; it must be a number above 0",
        ),
    ],
)
def test_mistakes_are_told_with_their_line(text, name, message):
    with pytest.raises(ConfigError) as caught:
        imported(text, name)
    assert str(caught.value).startswith(message)


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO(TRL.format("dpo", "--packing --foo 1")))
    assert main(["config", "import", "-", "-o", "dpo.yaml"]) == 0
    out, error = capsys.readouterr()
    assert "wrote dpo.yaml; start with: posttrain train dpo.yaml" in out
    assert "not carried: 2 names; the end of the file says why" in error
    assert load("dpo.yaml").config.method.type == "dpo"
    Path("run.sh").write_text(TRL.format("sft", ""))
    assert main(["config", "import", "run.sh", "-o", "dpo.yaml"]) == 1
    assert "dpo.yaml exists" in capsys.readouterr().err
    assert main(["config", "import", "run.sh", "-o", "dpo.yaml", "--overwrite", "--devices", "2"]) == 0
    assert load("dpo.yaml").config.training.batch_size == 16
    assert main(["config", "import", "run.sh", "--from", "tlr"]) == 1
    assert "--from is 'tlr'; did you mean trl?" in capsys.readouterr().err
    assert main(["config", "import", "missing.yaml"]) == 1
    assert "missing.yaml cannot be read: No such file" in capsys.readouterr().err
    assert main(["config", "import", "run.sh"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["method"] == {"type": "sft"}
    Path("grpo.sh").write_text(TRL.format("grpo", ""))
    assert main(["config", "import", "grpo.sh", "-o", "grpo.yaml"]) == 0
    out, error = capsys.readouterr()
    assert "start with" not in out and "still missing: rewards is empty" in error
    assert main(["config", "import", "--help"]) == 0
    assert "posttrain config import train.sh -o dpo.yaml" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("stage", "dataset"), [("dpo", "dpo_en_demo"), ("kto", "kto_en_demo"), ("sft", "alpaca_en_demo")]
)
def test_an_imported_file_is_planned_on_real_rows(infos, scratch_model, stage, dataset, capsys):
    changes = {
        "stage": stage,
        "dataset": dataset,
        "model_name_or_path": str(scratch_model),
        "pref_loss": None,
        "cutoff_len": 400,
    }
    text = yaml.safe_dump(yaml.safe_load(LLAMA_DPO) | changes | {"template": "qwen"})
    Path("llama.yaml").write_text(text)
    assert main(["config", "import", "llama.yaml", "-o", "new.yaml"]) == 0
    assert main(["plan", "new.yaml"]) == 0, capsys.readouterr().err
    assert "examples" in capsys.readouterr().out
