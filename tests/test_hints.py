"""Names of other systems: each is answered with what to write here, and docs/migrating.md says the same."""

import re
from pathlib import Path

import pytest
from settings_reference import SYSTEMS, with_reference

from posttrain.base.errors import ConfigError, UsageError
from posttrain.cli import main
from posttrain.cli.flags import plain, short_names
from posttrain.config import load
from posttrain.config.reading.fields import all_settings, known_paths
from posttrain.config.reading.hints import hint, hints
from posttrain.config.reading.layers import ALIASES

PAGE = Path(__file__).parent.parent / "docs/migrating.md"
HINTS = hints()
GOOD = ["model=gpt2", "method=sft", "data.source=x"]
PATHS = {setting.path for setting in all_settings()}


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(None, [*GOOD, *overrides])
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("post_training={method: dpo}", "post_training is not a setting; write method.type: sft, reward, dpo"),
        ("sft_training={}", "write stages, e.g. {sft: {method: sft}, grpo: {method: grpo, init_from: sft}}"),
        ("gpu.device_ids=[0]", "gpu is not a setting; write devices.ids"),
        ("finetuning={}", "write checkpoint, e.g. {best_metric: eval_loss"),
        ("vllm_sampling.min_p=0.1", "write rollout: temperature, top_p"),
        ("training.train_validation_split=0.9", "write data.validation, e.g. {ratio: 0.05}"),
        ("training.per_device_train_batch_size=2", "write training.batch_size"),
        ("stage=sft", "write method.type: sft"),
        ("finetuning_type=lora", "write model.lora: true"),
        ("cutoff_len=512", "write data.max_length"),
        ("method={type: dpo, pref_beta: 0.1}", "method.pref_beta is not a setting of dpo; write method.beta"),
        ("training.group_size=4", "write method.num_generations"),
        ("model.huggingface_id=gpt2", "write model.path"),
    ],
)
def test_a_wrong_key_gets_its_hint(override, message):
    assert message in refused(override)


@pytest.mark.parametrize("name", ["use_ref_model", "reference_free"])
def test_both_names_of_a_missing_reference_are_mapped(name):
    """Wherever they stand in the settings that someone brings, and on the page."""
    for where in ("", "training.", "model."):
        assert f"did you mean method.{name}?" in refused(f"{where}{name}=true")
    assert f"method.{name} is not a setting of orpo, but of dpo" in refused(f"method={{type: orpo, {name}: true}}")
    assert f"`method.{name}`" in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--config", "there is no flag --config; give the file without a flag: posttrain train FILE"),
        ("--skip-sft", "write --skip sft"),
        ("--group_size", "there is no flag --group_size; write method.num_generations"),
        ("--dpo_beta", "write method.beta"),
        ("--subset_size", "write data.max_rows"),
        ("--clip-ratio", "write method.epsilon (ppo: method.cliprange)"),
        ("--model_name", "--model_name is a flag of another system: write model.path; --model-name is model.name"),
        ("--model_name=gpt2", "write model.path"),
        ("--validation_split", "write data.validation, e.g. {ratio: 0.05}"),
        ("--training.group-size", "there is no flag --training.group-size; write method.num_generations"),
        ("--training.per_device_train_batch_size", "write training.batch_size"),
        ("--no_use_peft", "there is no flag --no_use_peft; write model.lora"),
    ],
)
def test_a_wrong_flag_gets_its_hint(flag, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        plain([flag, "old.yaml"], {"skip"})


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--lr", "write --learning-rate"),
        ("--bf16", "write --dtype bfloat16"),
        ("--lora_rank", "write --lora-r"),
        ("--model_name", "--model_name is a flag of another system: write --model; --model-name is model.name"),
        ("--model.lora.rank", "write --lora-r"),
        ("--per_device_train_batch_size", "write --batch-size: the examples (pairs, prompts) of a step"),
        ("--test_problems", "write --validation {source: problems.jsonl}"),
        ("--packing", "--tokens-per-pack is the size of a pack"),
        ("--clip-ratio", "write --epsilon (ppo: --cliprange)"),
        ("--reward_funcs", "write --rewards, e.g. [{type: math}"),
        ("--datas", "did you mean --data?"),
    ],
)
def test_the_hint_for_a_flag_names_flags(flag, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        plain([flag, "old.yaml"], set(short_names().values()))


def test_the_name_of_an_argument_is_no_flag(capsys):
    assert main(["train", "--config", "old.yaml"]) == 2
    assert "there is no flag --config; give the file without a flag: posttrain train FILE" in capsys.readouterr().err


def test_every_name_is_answered_as_key_and_as_flag():
    for name in [*HINTS, *(alias for aliases in ALIASES.values() for alias in aliases)]:
        advice = hint(name)
        assert advice is not None and f"{name} is not a setting; {advice}" in refused(f"{name}=1")
        flag = name.replace("_", "-")
        if flag not in short_names().values():  # `--kl-coef` is one of ours
            with pytest.raises(UsageError, match=re.escape(advice)):
                plain([f"--{flag}"], set())


def test_hints_name_settings_that_exist():
    sections = r"model|method|data|training|evaluation|checkpoint|tracking|devices|rollout"
    for name, advice in HINTS.items():
        for path in re.findall(rf"\b((?:{sections})\.[a-z_.0-9]*[a-z_0-9])", advice):
            assert path in PATHS, f"{name}: {path}"


def test_every_name_is_of_a_system_and_none_is_a_setting_of_ours():
    named = {name for names in SYSTEMS.values() for name in names.split()}
    assert set(HINTS) - named == {"init_from"}  # that of a stage, written outside it
    assert named <= set(known_paths()) | {name for name in named if hint(name)}
    assert not set(HINTS) & set(known_paths())
    for names in SYSTEMS.values():
        assert len(names.split()) == len(set(names.split()))


def test_the_page_says_the_same():
    """Else: python tests/settings_reference.py docs/migrating.md"""
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_reference(page)
    for name in HINTS:
        assert f"`{name}`" in page or name == "init_from"


def test_all_unknown_flags_are_told_at_once(capsys):
    """A command line of another system has several."""
    line = [
        "--model_name_or_path",
        "gpt2",
        "--dataset_name=x",
        "--group_size",
        "4",
        "--max-steps",
        "1",
        "--max-step",
        "2",
    ]
    assert main(["train", *line]) == 2
    told = capsys.readouterr().err
    for flag, what in {
        "--model_name_or_path": "write --model",
        "--dataset_name": "write --source",
        "--group_size": "write --num-generations",
        "--max-step": "did you mean --max-steps?",
    }.items():
        assert f"there is no flag {flag}; {what}" in " ".join(told.split())
    assert told.count("there is no flag") == 4
