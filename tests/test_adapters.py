"""Adapters: QLoRA, DoRA and rsLoRA through the settings a user writes; what is asked for and not installed.

Those that PEFT wrote: read as PEFT reads them, or refused by name.
"""

import json
import math
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)

from posttrain import runner
from posttrain.base.errors import ConfigError, DamagedError, ModelError, WeightsError
from posttrain.batch import Example, Node, pack
from posttrain.cli import main
from posttrain.config import ModelConfig, load
from posttrain.config.schema.model import LoraConfig
from posttrain.engines import EmbeddedEngine, Sampling
from posttrain.models.adapters import base_settings, with_adapter
from posttrain.models.families import head_layer
from posttrain.models.files import ADAPTERS
from posttrain.models.load import keep_storage, load_model, load_tokenizer, new_token_ids
from posttrain.models.lora import add_lora, load_lora, target_modules
from posttrain.planning.activations import empty_model
from posttrain.planning.estimate import count, estimate
from posttrain.runs.inputs import reference_settings
from posttrain.scoring import Scorer

CPU = torch.device("cpu")
LORA = {"r": 4, "alpha": 8, "dropout": 0.0, "target_modules": "all-linear"}


def settings(shared, scratch_model, tmp_path, method="dpo", **model) -> Path:
    file = tmp_path / "config.json"
    sections = {
        "name": "run",
        "output_dir": str(tmp_path),
        "model": {"path": str(scratch_model), "lora": LORA, **model},
        "method": method,
        "data": {"source": str(shared / "data/hh-harmless"), "format": "hh", "template": "none", "max_rows": 12},
        "training": {"batch_size": 4, "max_steps": 3, "learning_rate": 1e-3, "warmup_steps": 0},
        "checkpoint": {"save_steps": 1},
        "tracking": {"logging_steps": 1},
    }
    file.write_text(json.dumps(sections))
    return file


def train(file: Path, *overrides: str, **options) -> Path:
    config = load(file, overrides).config
    assert runner.train(config, **options) == 0
    return Path(config.output_dir) / str(config.name)


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.parametrize(
    ("method", "dtype"),
    [
        ("dpo", "float32"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [("reward", "float32"), ("reward", "bfloat16"), ("dpo", "bfloat16")]
        ),
    ],
)
def test_qlora(tmp_path, shared, scratch_model, method, dtype):
    """Frozen weights stay unchanged (a vital check), a resumed run equals the whole one, and PEFT loads the adapter."""
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: the `quant` extra")
    file = settings(shared, scratch_model, tmp_path, method, load_in_4bit=True, dtype=dtype)
    whole = train(file, "name=whole")
    first = losses(whole)
    print(method, dtype, first)
    assert first[0] == pytest.approx(math.log(2), abs=1e-3 if method == "dpo" else 0.2)
    state = load_file(whole / "final/adapter_model.safetensors")
    assert all("lora_" in name or "score" in name for name in state)
    if method == "dpo":
        base = AutoModelForCausalLM.from_pretrained(scratch_model)
        PeftModel.from_pretrained(base, whole / "final")
    train(file, "name=broken", "training.max_steps=3", "checkpoint.save_total_limit=null")
    for later in ("checkpoint-2", "checkpoint-3"):
        (tmp_path / "broken" / later).rename(tmp_path / later)
    resumed = train(file, "name=broken", "checkpoint.save_total_limit=null", resume=True)
    assert losses(resumed) == first
    again = load_file(resumed / "final/adapter_model.safetensors")
    assert all(torch.equal(again[name], state[name]) for name in state)


def test_4bit_weights_are_near_the_model_and_an_eighth_of_its_size(scratch_model):
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: the `quant` extra")
    whole = load_model(ModelConfig(path=str(scratch_model)), "lm", torch.float32, CPU)
    small = load_model(ModelConfig(path=str(scratch_model), load_in_4bit=True), "lm", torch.float32, CPU)
    layers = {name: m for name, m in small.named_modules() if type(m).__name__ == "Linear4bit"}
    assert len(layers) == 14 and not any("lm_head" in name for name in layers)
    ids = torch.arange(5, 60)[None]
    for model in (whole, small):
        model.set_attn_implementation("sdpa")
    with torch.no_grad():
        want, got = whole(ids).logits, small(ids).logits
        for name, layer in layers.items():
            assert layer.weight.dtype == torch.uint8
            assert 8 * layer.weight.nbytes == whole.get_submodule(name).weight.nbytes
    error = float((want - got).norm() / want.norm())
    print(f"logits differ by {error:.1%}")
    assert 0.001 < error < 0.3


def test_dora_and_rslora(tmp_path, shared, scratch_model):
    """PEFT's own names; DoRA trains a magnitude for each weight, rsLoRA divides alpha by the root of r."""
    file = settings(shared, scratch_model, tmp_path)
    plain = losses(train(file, "name=plain"))
    folder = train(file, "name=dora", "model.lora.use_dora=true", "model.lora.use_rslora=true")
    assert losses(folder)[0] == pytest.approx(plain[0], abs=1e-6) and losses(folder)[1:] != plain[1:]
    saved = json.loads((folder / "final/adapter_config.json").read_text())
    assert saved["use_dora"] and saved["use_rslora"]
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(scratch_model), folder / "final")
    layer = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    assert layer.scaling["default"] == pytest.approx(8 / math.sqrt(4))
    start = AutoModelForCausalLM.from_pretrained(scratch_model).model.layers[0].self_attn.q_proj.weight.norm(dim=1)
    magnitude = layer.lora_magnitude_vector["default"].weight
    assert magnitude.shape == start.shape and 0 < float((magnitude - start).detach().abs().max()) < 0.01


def test_adapters_name_their_base_at_its_revision(tmp_path, shared, scratch_model):
    """A folder has none, so only what is asked for can be seen here; a reference of another name has its own."""
    folder = train(settings(shared, scratch_model, tmp_path, revision="0123abc"), "training.max_steps=1")
    saved = json.loads((folder / "final/adapter_config.json").read_text())
    assert (saved["base_model_name_or_path"], saved["revision"]) == (str(scratch_model), "0123abc")
    base = base_settings(ModelConfig(path=str(folder / "final")))
    assert (base.path, base.revision) == (str(scratch_model), "0123abc")
    (folder / "final/adapter_config.json").write_text(json.dumps(saved | {"revision": None}))
    assert base_settings(ModelConfig(path=str(folder / "final"), revision="v1")).revision == "v1"
    model = ModelConfig(path="a", revision="b")
    assert reference_settings(model, None) == model and reference_settings(model, "c").revision is None


@pytest.mark.parametrize("method", ["sft", "reward"])
def test_the_readme_of_an_adapter_is_ours(method, tmp_path, shared, scratch_model):
    """Not PEFT's form of empty headings; its code loads the adapter, and it names no folder of this machine."""
    folder = train(settings(shared, scratch_model, tmp_path, method), "training.max_steps=1", "name=a: [b]")
    for saved in ("final", "checkpoint-1"):
        card = (folder / saved / "README.md").read_text()
        assert f"trained from `{scratch_model.name}` with {method} by posttrain" in card and "# a: [b]" in card
        assert str(scratch_model.parent) not in card and "More Information Needed" not in card
        header = yaml.safe_load(card.split("---")[1])
        assert header == {"library_name": "peft", "tags": ["posttrain", "lora", method]}
    names = {}
    exec(re.search("```python\n(.*?)```", card, re.DOTALL)[1].replace("THIS FOLDER", str(folder / "final")), names)
    assert names["model"].peft_config["default"].r == 4 and names["tokenizer"]("a").input_ids
    assert method == "sft" or names["model"].config.num_labels == 1


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_has_no_adapters_nor_have_embeddings_that_are_tied_to_it(tied):
    config = Qwen3Config(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, head_dim=16,
        num_key_value_heads=1, tie_word_embeddings=tied,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    for names, refused in ((["q_proj", "lm_head"], True), (["q_proj", "embed_tokens"], tied)):
        lora = LoraConfig(target_modules=names)
        if refused:
            with pytest.raises(ModelError, match=f"{names[1]} cannot have adapters here"):
                target_modules(model, lora)
        else:
            assert target_modules(model, lora) == names
    classifier = Qwen3ForSequenceClassification(config)
    assert target_modules(classifier, LoraConfig(target_modules=["embed_tokens"])) == ["embed_tokens"]


def test_4bit_needs_something_to_train(shared, scratch_model, tmp_path):
    file = settings(shared, scratch_model, tmp_path, load_in_4bit=True, lora=None)
    with pytest.raises(ConfigError, match=r"load_in_4bit freezes the weights.*model.lora"):
        load(file)


MISSING = {
    "bitsandbytes": ({"load_in_4bit": True}, ConfigError, r"load_in_4bit needs bitsandbytes.*\[quant\]"),
    "flash_attn": ({"attention": "flash_attention_2"}, ConfigError, r"needs flash_attn.*\[flash-attn\]"),
    "liger_kernel": ({"use_liger_kernel": True}, ConfigError, r"needs liger_kernel.*\[liger\]"),
}


@pytest.mark.parametrize("package", MISSING)
def test_what_is_not_installed_names_its_extra(scratch_model, monkeypatch, package):
    setting, error, message = MISSING[package]
    monkeypatch.setitem(sys.modules, package, None)
    device = torch.device("cuda") if package == "liger_kernel" else CPU
    with pytest.raises(error, match=message):
        load_model(ModelConfig(path=str(scratch_model), **setting), "lm", torch.float32, device)


def test_kernels_for_gpus_are_refused_on_a_cpu(scratch_model):
    with pytest.raises(ModelError, match="use_liger_kernel: its kernels are for GPUs, but this run computes on cpu"):
        load_model(ModelConfig(path=str(scratch_model), use_liger_kernel=True), "lm", torch.float32, CPU)


# --- adapters that others made ----------------------------------------------------------------------------------------

IDS = torch.arange(5, 45)[None]
TARGETS = ["q_proj", "v_proj", "down_proj"]


def made_by_peft(
    base: Path, folder: Path, config: peft.PeftConfig, tokenizer: bool = True, added: tuple[str, ...] = ()
) -> torch.Tensor:
    """An adapter with random weights of a base folder, written by PEFT, with some tokens added to the vocabulary.

    Returns its logits (or rewards) of IDS and the added tokens.
    """
    torch.manual_seed(0)
    reward = config.task_type == "SEQ_CLS"
    auto = AutoModelForSequenceClassification if reward else AutoModelForCausalLM
    model = auto.from_pretrained(base, **({"num_labels": 1, "pad_token_id": 0} if reward else {}))
    words = AutoTokenizer.from_pretrained(base)
    if added:
        words.add_tokens([*added])
        model.resize_token_embeddings(len(words), mean_resizing=False)
    ids = torch.cat([IDS, torch.tensor([words.convert_tokens_to_ids([*added])], dtype=torch.long)], 1)
    adapted = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad and "original_module" not in name:
                parameter += 0.1 * torch.randn_like(parameter)
        adapted.save_pretrained(folder)
        if tokenizer:
            words.save_pretrained(folder)
        return adapted(ids).logits


def lora(**settings) -> peft.LoraConfig:
    return peft.LoraConfig(**{"r": 4, "target_modules": TARGETS, "task_type": "CAUSAL_LM", **settings})


@pytest.fixture(scope="module")
def untied_model(scratch_model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("untied")
    model = AutoModelForCausalLM.from_pretrained(scratch_model)
    torch.manual_seed(1)
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.02)
    model.config.tie_word_embeddings = False
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(scratch_model).save_pretrained(folder)
    return folder


def renamed(tensors):
    return {key.replace("q_proj", "query"): tensor for key, tensor in tensors.items()}


MISMATCHES = {
    "renamed": (renamed, r"lacks base_model\.model\.model\.layers\.0\.self_attn\.q_proj\.lora_A\.weight, .* and 1 more"
                r".* and the adapter has base_model\.model\.model\.layers\.0\.self_attn\.query\.lora_A\.weight"),
    "half of the layers": (lambda of: {k: t for k, t in of.items() if ".1." not in k}, r"lacks .*layers\.1\..* more"),
    "another layer": (lambda of: of | {k.replace(".1.", ".7."): t + 0 for k, t in of.items()}, r"has .*layers\.7\."),
    "another prefix": (lambda of: {k.removeprefix("base_model."): t for k, t in of.items()}, r"lacks .*has model\.mod"),
    "one tensor": (lambda of: dict([*of.items()][1:]), r"lacks base_model\S*, which its adapter_config.json describes"),
    "other shapes": (lambda of: {k: t[:, :3].contiguous() for k, t in of.items()}, "have other shapes than its base"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISMATCHES)
def test_an_adapter_whose_tensors_do_not_match_is_refused(name, scratch_model, tmp_path, capsys):
    """In every command: they load it here. A damaged checkpoint makes the run fall back to the one before."""
    change, message = MISMATCHES[name]
    made_by_peft(scratch_model, tmp_path / "adapter", lora())
    file = tmp_path / "adapter/adapter_model.safetensors"
    save_file(change(load_file(file)), file)
    model = ModelConfig(path=str(tmp_path / "adapter"))
    with pytest.raises(WeightsError, match=message) as error:
        load_model(model, "lm", torch.float32, CPU)
    assert "\n" not in str(error.value)
    base = load_model(ModelConfig(path=str(scratch_model)), "lm", torch.float32, CPU)
    with pytest.raises(WeightsError, match=message):  # of a server, under a name
        with_adapter(base, model, "other")
    base = load_model(ModelConfig(path=str(scratch_model)), "lm", torch.float32, CPU)
    with pytest.raises(DamagedError, match=r"lacks|has|shapes differ"):
        load_lora(base, tmp_path / "adapter")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "chosen": " b", "rejected": " c"}\n')
    for command in (["score", str(tmp_path / "adapter"), str(rows)], ["export", str(tmp_path / "adapter")]):
        assert main(command) == 1
        assert "error: model " in capsys.readouterr().err.splitlines()[-1]


def test_the_head_of_the_other_kind_is_not_read(scratch_model, tmp_path):
    """A score head where a language model is loaded, a language model's head where a reward model is."""
    made_by_peft(scratch_model, tmp_path / "lm", lora())
    file = tmp_path / "lm/adapter_model.safetensors"
    whole = load_model(ModelConfig(path=str(tmp_path / "lm")), "lm", torch.float32, CPU).state_dict()
    save_file(load_file(file) | {"base_model.model.score.weight": torch.ones(1, 48)}, file)
    again = load_model(ModelConfig(path=str(tmp_path / "lm")), "lm", torch.float32, CPU).state_dict()
    assert all(torch.equal(again[name], whole[name]) for name in whole)
    made_by_peft(scratch_model, tmp_path / "head", lora(modules_to_save=["lm_head"]))
    reward = load_model(ModelConfig(path=str(tmp_path / "head")), "reward", torch.float32, CPU).state_dict()
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(reward[name], whole[name])
    made_by_peft(scratch_model, tmp_path / "reward", lora(task_type="SEQ_CLS"))
    base = load_model(ModelConfig(path=str(scratch_model)), "lm", torch.float32, CPU)
    served = with_adapter(base, ModelConfig(path=str(tmp_path / "reward")), "other")
    tensors = load_file(tmp_path / "reward/adapter_model.safetensors")
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A"
    assert torch.equal(served.get_parameter(f"{key}.other.weight"), tensors[f"{key}.weight"])


def test_an_adapter_without_a_tokenizer_takes_its_bases(scratch_model, tmp_path):
    made_by_peft(scratch_model, tmp_path / "adapter", lora(), tokenizer=False)
    model = ModelConfig(path=str(tmp_path / "adapter"))
    base = load_tokenizer(ModelConfig(path=str(scratch_model)))
    assert load_tokenizer(model).get_vocab() == base.get_vocab()
    assert load_tokenizer(model).chat_template == base.chat_template
    (tmp_path / "adapter/chat_template.jinja").write_text("{{ messages[0].content }}")
    assert load_tokenizer(model).chat_template == "{{ messages[0].content }}"
    (tmp_path / "adapter/chat_template.jinja").unlink()
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "chosen": " b", "rejected": " c"}\n')
    assert main(["score", str(tmp_path / "adapter"), str(rows)]) == 0
    base.add_special_tokens({"eos_token": "<|im_start|>"})
    base.save_pretrained(tmp_path / "adapter")
    assert load_tokenizer(model).eos_token == "<|im_start|>"


KINDS = {
    "LORA": lora(use_dora=True),
    "ADALORA": peft.AdaLoraConfig(init_r=4, total_step=10, target_modules=TARGETS, task_type="CAUSAL_LM"),
    "LOHA": peft.LoHaConfig(r=4, target_modules=TARGETS, task_type="CAUSAL_LM"),
    "LOKR": peft.LoKrConfig(r=4, target_modules=TARGETS, task_type="CAUSAL_LM"),
    "IA3": peft.IA3Config(target_modules=TARGETS, feedforward_modules=["down_proj"], task_type="CAUSAL_LM"),
    "OFT": peft.OFTConfig(oft_block_size=4, target_modules=TARGETS, task_type="CAUSAL_LM"),
    "VERA": peft.VeraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    "TRAINABLE_TOKENS": peft.TrainableTokensConfig(token_indices=[7, 9], task_type="CAUSAL_LM"),
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_kinds_of_adapters_are_read_as_peft_reads_them(kind, scratch_model, tmp_path):
    want = made_by_peft(scratch_model, tmp_path / "adapter", KINDS[kind])
    model = load_model(ModelConfig(path=str(tmp_path / "adapter")), "lm", torch.float32, CPU)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        got = model(IDS).logits
        alone = AutoModelForCausalLM.from_pretrained(scratch_model)(IDS).logits
    error, effect = float((got - want).abs().max()), float((alone - want).abs().max())
    print(f"{kind}: logits differ by {error:.2g}; without the adapter by {effect:.2g}")
    assert error < 1e-4 < 1e-2 < effect


ODD = {
    "peft_type": ["PROMPT_TUNING", "PREFIX_TUNING", "XLORA", "POLY", "CPT", "evil", None, 3],
    "bias": ["evil", 1],
    "lora_alpha": [float("nan"), float("inf"), "16", [16]],
    "lora_dropout": [float("nan"), 2, "0.1"],
    "r": [-1, 1.5, True, "8", 10**9],
    "rank_pattern": [{"q_proj": 10**9}, 3],
    "alpha_pattern": [{"q_proj": "x"}, {"q_proj": float("nan")}, [1]],
    "target_modules": [3, [1], {"a": 1}],
    "modules_to_save": [3, [None]],
    "layers_to_transform": ["x", [1.5]],
    "use_rslora": ["yes"],
    "trainable_token_indices": [["x"], {"embed_tokens": ["x"]}, [-7], 10**12],
    "layer_replication": [[[0, 10**9]]],
    "revision": [3],
}


@pytest.mark.parametrize("field", ODD)
def test_odd_fields_of_an_adapter_are_one_sentence(field, scratch_model, tmp_path, capsys):
    folder = tmp_path / "adapter"
    made_by_peft(scratch_model, folder, lora())
    config = json.loads((folder / "adapter_config.json").read_text())
    for value in ODD[field]:
        (folder / "adapter_config.json").write_text(json.dumps(config | {field: value}))
        with pytest.raises(ModelError, match=f"adapter_config.json (says|has) {field}"):
            load_model(ModelConfig(path=str(folder)), "lm", torch.float32, CPU)
    assert main(["score", str(folder), "absent.jsonl"]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


ODD_OF_MODELS = [
    ("tokenizer_config.json", "model_max_length", ["1e30", -5, [1], True, float("nan")], "a number above 0"),
    *(
        (file, "eos_token_id", [[[1]], "2", True, 10**9], "a token id or a list of them")
        for file in ("config.json", "generation_config.json")
    ),
]


@pytest.mark.parametrize(("file", "field", "values", "rule"), ODD_OF_MODELS)
def test_odd_fields_of_a_model_are_one_sentence(file, field, values, rule, scratch_model, tmp_path, capsys):
    """In the model's own files, by the commands that read it; the large number that transformers writes is none."""
    folder = tmp_path / "model"
    shutil.copytree(scratch_model, folder)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    settings = [
        f"model.path={folder}",
        f"data.source={tmp_path / 'rows.jsonl'}",
        f"output_dir={tmp_path}",
        "method=sft",
    ]
    commands = [[command, str(folder), str(tmp_path / "rows.jsonl")] for command in ("score", "generate")]
    config = json.loads((folder / file).read_text())
    for value in values:
        (folder / file).write_text(json.dumps(config | {field: value}))
        shown = f'"{value}"' if isinstance(value, str) else value
        for command in (*commands, ["train", *settings]):
            assert main(command) == 1
            [said] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
            assert said.endswith(f"{file} says {field}: {shown}; it must be {rule}")
    (folder / file).write_text(json.dumps(config | {"model_max_length": 10**30} if "tok" in file else config))
    assert main(commands[0]) == 0


ENDS = {
    "the head": {"target_modules": ["q_proj", "lm_head"]},
    "the embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
    "both": {"target_modules": ["q_proj", "lm_head", "embed_tokens"]},
    "both, tied": {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
    "DoRA on the head": {"target_modules": ["lm_head"], "use_dora": True},
    "the head, saved": {"modules_to_save": ["lm_head"]},
    "the embeddings, saved": {"modules_to_save": ["embed_tokens"]},
    "both saved": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "both saved, tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "tokens": {"trainable_token_indices": [5, 9, 30]},
    "tokens of the embeddings": {"trainable_token_indices": {"embed_tokens": [5, 9, 30]}},
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("ends", ENDS)
def test_adapters_of_the_ends_are_merged_as_peft_applies_them(ends, tied, scratch_model, untied_model, tmp_path):
    """Of tied embeddings merging changed both; the merged model is untied, or stays tied if PEFT ties the adapters."""
    base = scratch_model if tied else untied_model
    want = made_by_peft(base, tmp_path / "adapter", lora(**ENDS[ends]))
    loaded = load_model(ModelConfig(path=str(tmp_path / "adapter")), "lm", torch.float32, CPU)
    loaded.set_attn_implementation("sdpa")
    assert main(["export", str(tmp_path / "adapter"), "-o", str(tmp_path / "out")]) == 0
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        alone = AutoModelForCausalLM.from_pretrained(base)(IDS).logits
        for model in (loaded, written):
            error, effect = float((model(IDS).logits - want).abs().max()), float((alone - want).abs().max())
            assert error < 1e-4 < 1e-2 < effect
    if tied:
        stays = "tied" in ends or "tokens" in ends
        assert written.config.tie_word_embeddings is stays


NEW = ("<plan>", "</plan>", "<answer>")
RESIZED = {
    "layers": {},
    "the ends, saved": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "the embeddings, saved": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "the ends": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "tokens": {"trainable_token_indices": [6400, 6401, 6402]},
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", RESIZED)
def test_adapters_of_a_resized_vocabulary(kind, tied, scratch_model, untied_model, tmp_path):
    """Loaded, merged and exported with the added tokens; the base has fewer embeddings."""
    base = scratch_model if tied else untied_model
    want = made_by_peft(base, tmp_path / "adapter", lora(**RESIZED[kind]), added=NEW)
    model = ModelConfig(path=str(tmp_path / "adapter"))
    loaded, words = load_model(model, "lm", torch.float32, CPU), load_tokenizer(model)
    loaded.set_attn_implementation("sdpa")
    ids = torch.cat([IDS, torch.tensor([words.convert_tokens_to_ids([*NEW])])], 1)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "chosen": " <plan> b", "rejected": " c"}\n')
    assert main(["score", str(tmp_path / "adapter"), str(rows)]) == 0
    assert main(["export", str(tmp_path / "adapter"), "-o", str(tmp_path / "out")]) == 0
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        for found in (loaded, written):
            assert found.config.vocab_size == len(words) == 6403
            assert float((found(ids).logits - want).abs().max()) < 1e-4


@pytest.mark.slow
def test_adapters_of_a_base_in_4_bits(shared, scratch_model, tmp_path):
    """A base whose files are in 4 bits: trained on, read unmerged, trained further, merged into it dequantised."""
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: the `quant` extra")
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    small = AutoModelForCausalLM.from_pretrained(scratch_model, quantization_config=how, dtype=torch.float32)
    small.save_pretrained(tmp_path / "small")
    AutoTokenizer.from_pretrained(scratch_model).save_pretrained(tmp_path / "small")
    first = train(settings(shared, tmp_path / "small", tmp_path), "name=first")
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "small", dtype=torch.float32)
        keep_storage(base)
        alone = base(IDS).logits
        want = PeftModel.from_pretrained(base, first / "final").eval()(IDS).logits
        model = load_model(ModelConfig(path=str(first / "final")), "lm", torch.float32, CPU)
        model.set_attn_implementation("sdpa")
        assert float((model(IDS).logits - want).abs().max()) < 1e-4 < float((alone - want).abs().max())
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "chosen": " b", "rejected": " c"}\n')
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    assert main(["score", str(first / "final"), str(rows)]) == 0
    assert main(["generate", str(first / "final"), str(prompts), "--max-completion-length", "4"]) == 0
    again = train(settings(shared, first / "final", tmp_path), "name=again")  # the same adapter
    other = train(settings(shared, first / "final", tmp_path), "name=other", "model.lora.r=2")
    for folder, named in ((again, tmp_path / "small"), (other, other / "base")):
        assert losses(folder)[0] == pytest.approx(math.log(2), abs=1e-5)
        assert json.loads((folder / "final/adapter_config.json").read_text())["base_model_name_or_path"] == str(named)
    for name, flags in (("dequantised", []), ("full", ["--base", str(scratch_model)])):
        assert main(["export", str(first), "-o", str(tmp_path / name), *flags]) == 0
    full = AutoModelForCausalLM.from_pretrained(scratch_model)
    expected = PeftModel.from_pretrained(full, first / "final").merge_and_unload().state_dict()
    written = load_file(tmp_path / "full/model.safetensors")
    for key, tensor in written.items():
        torch.testing.assert_close(tensor, expected[key])
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "dequantised")
        assert float((model(IDS).logits - want).abs().max()) < 1e-3
    assert main(["export", str(scratch_model), "-o", str(tmp_path / "x"), "--base", str(scratch_model)]) == 1


def with_tokens(shared, base: Path, tmp_path: Path, lora: bool, method: str = "sft", **sections) -> Path:
    """Settings of a run whose rows have new tokens."""
    rows = tmp_path / "rows.jsonl"
    row = {"prompt": "Why? <plan>", "completion": " So <answer> b </plan>"}
    if method in ("dpo", "reward"):
        row = {"prompt": row["prompt"], "chosen": row["completion"], "rejected": " no </plan>"}
    rows.write_text(f"{json.dumps(row)}\n" * 8)
    file = settings(shared, base, tmp_path, method, new_tokens=NEW)
    values = json.loads(file.read_text())
    values["data"] = {"source": str(rows), "template": "none"}
    values["training"]["max_steps"] = 2
    if not lora:
        del values["model"]["lora"]
    file.write_text(json.dumps(values | sections))
    return file


def grown(base: Path):
    """The model with NEW by transformers alone: each new row is the mean of the others."""
    model, words = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    words.add_tokens([*NEW])
    old = len(model.get_input_embeddings().weight)
    model.resize_token_embeddings(len(words), mean_resizing=False)
    with torch.no_grad():
        for end in (model.get_input_embeddings(), model.get_output_embeddings()):
            end.weight[old:] = end.weight[:old].mean(0)
    return model.eval(), words


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("lora", [True, False])
def test_new_tokens_are_trained(lora, tied, shared, scratch_model, untied_model, tmp_path):
    """They start at the mean of the others; PEFT and transformers read what is saved; LoRA changes their rows alone."""
    base = scratch_model if tied else untied_model
    start, words = grown(base)
    ids = torch.cat([IDS, torch.tensor([words.convert_tokens_to_ids([*NEW])])], 1)
    file = with_tokens(shared, base, tmp_path, lora)
    model = ModelConfig(path=str(base), new_tokens=NEW)
    begun = load_model(model, "lm", torch.float32, CPU)
    begun.set_attn_implementation("sdpa")
    folder = train(file)
    assert main(["export", str(folder), "-o", str(tmp_path / "out")]) == 0
    with torch.no_grad():
        before = start(ids).logits
        assert float((begun(ids).logits - before).abs().max()) < 1e-5
        if lora:
            trained = PeftModel.from_pretrained(start, folder / "final").eval()
            tensors = load_file(folder / "final/adapter_model.safetensors")
            assert sum("trainable_tokens" in name for name in tensors) == (1 if tied else 2)
        else:
            trained = AutoModelForCausalLM.from_pretrained(folder / "final").eval()
        want = trained(ids).logits
        effect = (trained.get_input_embeddings().weight - begun.get_input_embeddings().weight).abs().amax(1)
        assert float(effect[-3:].min()) > 1e-4 and (not lora or float(effect[:-3].max()) == 0)
        out = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        ours = load_model(ModelConfig(path=str(folder / "final")), "lm", torch.float32, CPU)
        ours.set_attn_implementation("sdpa")
        for found in (out, ours):
            assert float((found(ids).logits - want).abs().max()) < 1e-4 < float((before - want).abs().max())
    saved = load_tokenizer(ModelConfig(path=str(folder / "final")))
    assert saved.get_vocab() == words.get_vocab() and saved.tokenize("a<plan>b")[1] == "<plan>"
    assert main(["score", str(folder / "final"), str(tmp_path / "rows.jsonl")]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sft", "dpo", "reward"])
def test_new_tokens_of_a_resumed_run_and_of_one_that_goes_on(method, shared, scratch_model, tmp_path):
    """Resumed to the bit. A run from the adapter with the same settings trains it further, another one its own."""
    file = with_tokens(shared, scratch_model, tmp_path, True, method)
    whole = train(file, "name=whole")
    shutil.copytree(whole, tmp_path / "broken")
    for gone in ("final", "checkpoint-2"):
        shutil.rmtree(tmp_path / "broken" / gone)
    resumed = train(file, "name=broken", resume=True)
    first, again = (load_file(folder / "final/adapter_model.safetensors") for folder in (whole, resumed))
    assert first.keys() == again.keys() and all(torch.equal(first[key], again[key]) for key in first)
    final = f"model.path={whole / 'final'}"
    further, other = train(file, "name=further", final), train(file, "name=other", final, "model.lora.r=2")
    last = train(file, "name=last", f"model.path={other / 'final'}", "model.lora.r=2")
    for folder in (further, other, last):
        saved = json.loads((folder / "final/adapter_config.json").read_text())
        assert saved["trainable_token_indices"] == {"embed_tokens": [6400, 6401, 6402]}
        assert (folder / "base").is_dir() is (folder is other)  # the others train the adapter that they start from
        head = "reward" if method == "reward" else "lm"
        assert load_model(ModelConfig(path=str(folder / "final")), head, torch.float32, CPU).config.vocab_size == 6403
    if method == "dpo":
        for folder in (whole, further, other, last):
            assert losses(folder)[0] == pytest.approx(math.log(2), abs=1e-5)


@pytest.mark.parametrize("saved", [(), ("embed_tokens",), ("lm_head", "norm"), ("embed_tokens", "lm_head")])
@pytest.mark.parametrize("tied", [True, False])
def test_scores_samples_and_gradients_of_trained_rows(tied, saved, scratch_model, untied_model):
    """Those of PEFT's own forward: the chunked LM head and the engine apply the trained rows and saved modules."""
    base = ModelConfig(path=str(scratch_model if tied else untied_model), new_tokens=NEW)
    model, ids = load_model(base, "lm", torch.float32, CPU), new_token_ids(base)
    policy = add_lora(model, LoraConfig(r=4, dropout=0.0, modules_to_save=saved), "lm", tokens=ids).eval()
    torch.manual_seed(3)
    rows = {name: p for name, p in policy.named_parameters() if p.requires_grad and "lora_" not in name}
    ends = {*saved} - {"norm"}
    assert sum("trainable_tokens" in name for name in rows) == ((not ends) if tied else 2 - len(ends))
    with torch.no_grad():
        for parameter in rows.values():
            parameter.add_(0.2 * torch.randn_like(parameter))
    stops = Sampling(num_generations=2, max_completion_length=6, stop_token_ids=())
    [completions] = EmbeddedEngine(policy).generate([[5, ids[0], 9]], stops, seeds=[1])
    tokens = [5, ids[0], 9, *completions[0].tokens, *ids]
    [whole] = pack([Example((Node(np.array(tokens), trained=True),), row=0)], 64)
    ours = Scorer(policy)(whole).logprob_N
    ours.sum().backward()
    gradients = {name: p.grad.clone() for name, p in rows.items()}
    policy.zero_grad()
    model.set_attn_implementation("sdpa")
    logits = policy(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    want = logits.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    torch.testing.assert_close(ours, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.tensor(completions[0].logprobs), want[2 : 2 + 6], atol=1e-5, rtol=1e-5)
    want.sum().backward()
    for name, parameter in rows.items():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-4, rtol=1e-4)
    with policy.disable_adapter():
        assert head_layer(policy).weight is model.get_input_embeddings().weight or not tied


SAVED = {
    "the embeddings": (["embed_tokens"], ()),
    "the head": (["lm_head"], ()),
    "both": (["embed_tokens", "lm_head"], ()),
    "both, resized": (["embed_tokens", "lm_head"], NEW),
    "the head, resized": (["lm_head"], NEW),
    "a norm and a layer": (["norm", "layers.1.mlp.up_proj"], ()),
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", SAVED)
def test_modules_to_save_are_trained(kind, tied, shared, scratch_model, untied_model, tmp_path):
    """PEFT alone and the export give our logits; a resumed run is equal to the bit; a later run goes on with them."""
    (names, new), base = SAVED[kind], scratch_model if tied else untied_model
    file = with_tokens(shared, base, tmp_path, True)
    values = json.loads(file.read_text())
    values["model"] |= {"new_tokens": new, "lora": LORA | {"modules_to_save": names, "target_modules": ["q_proj"]}}
    file.write_text(json.dumps(values))
    whole = train(file, "name=whole")
    shutil.copytree(whole, tmp_path / "broken")
    for gone in ("final", "checkpoint-2"):
        shutil.rmtree(tmp_path / "broken" / gone)
    first, again = (
        load_file(folder / "final/adapter_model.safetensors")
        for folder in (whole, train(file, "name=broken", resume=True))
    )
    assert first.keys() == again.keys() and all(torch.equal(first[key], again[key]) for key in first)
    assert main(["export", str(whole), "-o", str(tmp_path / "out")]) == 0
    start = grown(base)[0] if new else AutoModelForCausalLM.from_pretrained(base)
    ids = torch.cat([IDS, torch.tensor([[6400, 6401, 6402]])], 1) if new else IDS
    with torch.no_grad():
        before = start(ids).logits
        want = PeftModel.from_pretrained(start, whole / "final").eval()(ids).logits
        out = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        ours = load_model(ModelConfig(path=str(whole / "final")), "lm", torch.float32, CPU)
        ours.set_attn_implementation("sdpa")
        for found in (out, ours):
            assert float((found(ids).logits - want).abs().max()) < 1e-4 < float((before - want).abs().max())
    further = train(file, "name=further", f"model.path={whole / 'final'}")
    assert not (further / "base").exists() and losses(further)[0] < losses(whole)[1]


def test_modules_to_save_that_cannot_be(scratch_model):
    model = load_model(ModelConfig(path=str(scratch_model)), "lm", torch.float32, CPU)
    with pytest.raises(ModelError, match=r"lora.modules_to_save: absent match no module of qwen3"):
        add_lora(model, LoraConfig(modules_to_save=("absent",)), "lm")
    with pytest.raises(ModelError, match=r"lora.modules_to_save: "):
        add_lora(model, LoraConfig(modules_to_save=("q_proj",), target_modules=("q_proj",)), "lm")


REFUSED = {
    "4 bits": ({"load_in_4bit": True}, {}, r"new_tokens cannot be combined with model.load_in_4bit"),
    "shards": ({}, {"devices": {"strategy": "fsdp"}}, r"new_tokens cannot be combined with devices.strategy: fsdp and"),
    "modules": (
        {"new_tokens": [], "lora": {"modules_to_save": ["lm_head"]}},
        {"devices": {"strategy": "fsdp"}},
        r"lora.modules_to_save cannot be combined with devices.strategy: fsdp",
    ),
    "twice": ({"new_tokens": ["<a>", "<a>"]}, {}, r"new_tokens repeats a token or contains a blank one"),
    "blank": ({"new_tokens": [" "]}, {}, r"new_tokens repeats a token or contains a blank one"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_new_tokens_cannot_be_combined_with(what, shared, scratch_model, tmp_path):
    model, sections, message = REFUSED[what]
    file = settings(shared, scratch_model, tmp_path, **{"new_tokens": NEW} | model)
    file.write_text(json.dumps(json.loads(file.read_text()) | sections))
    with pytest.raises(ConfigError, match=message):
        load(file)


def test_new_tokens_of_a_head_with_a_bias_need_full_fine_tuning():
    config = AutoConfig.for_model("phi", vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                  num_attention_heads=2)  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ModelError, match=r"LM head of phi has a bias, .* use full fine-tuning"):
        add_lora(model, LoraConfig(target_modules=("q_proj",)), "lm", tokens=[49])


def test_the_plan_counts_new_tokens(shared, scratch_model, tmp_path):
    """Their trained rows; the embeddings and the head's gradient are of the larger vocabulary."""
    config = load(with_tokens(shared, scratch_model, tmp_path, True)).config
    empty = empty_model(config, config.models[0])
    plain = empty_model(config, config.models[0].model_copy(update={"new_tokens": ()}))
    width = empty.config.hidden_size
    assert count(empty)[1] - count(plain)[1] == 3 * width and count(empty)[0] - count(plain)[0] == 6 * width
    [whole] = pack([Example((Node(np.zeros(32, np.int64), trained=True),), row=0)], 64)
    parts = [estimate(config, config.models[0], model, [whole], CPU).parts for model in (empty, plain)]
    assert parts[0]["logits"] - parts[1]["logits"] >= 3 * 4 * 6400 * width
