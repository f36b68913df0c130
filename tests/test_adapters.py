"""QLoRA, DoRA and rsLoRA through the settings a user writes; what is asked for and not installed."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification

from posttrain import runner
from posttrain.config import ModelConfig, load
from posttrain.config.schema.model import LoraConfig
from posttrain.errors import ConfigError, ModelError
from posttrain.models.load import base_settings, load_model
from posttrain.models.lora import target_modules
from posttrain.models.optional import is_4bit
from posttrain.training.inputs import reference_settings

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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", ["dpo", "reward"])
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
    layers = {name: m for name, m in small.named_modules() if is_4bit(m)}
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
    "bitsandbytes": (
        {"load_in_4bit": True},
        ConfigError,
        r"load_in_4bit needs bitsandbytes.*posttrain\[quant\]",
    ),
    "flash_attn": ({"attention": "flash_attention_2"}, ConfigError, r"needs flash_attn.*posttrain\[flash-attn\]"),
    "liger_kernel": ({"use_liger_kernel": True}, ConfigError, r"needs liger_kernel.*posttrain\[liger\]"),
}


@pytest.mark.parametrize("package", MISSING)
def test_what_is_not_installed_names_its_extra(scratch_model, monkeypatch, package):
    setting, error, message = MISSING[package]
    monkeypatch.setitem(sys.modules, package, None)
    device = torch.device("cuda") if package == "liger_kernel" else CPU
    with pytest.raises(error, match=message):
        load_model(ModelConfig(path=str(scratch_model), **setting), "lm", torch.float32, device)


def test_kernels_for_gpus_are_refused_on_a_cpu(scratch_model):
    with pytest.raises(ModelError, match="use_liger_kernel: its kernels are for GPUs, and this run computes on cpu"):
        load_model(ModelConfig(path=str(scratch_model), use_liger_kernel=True), "lm", torch.float32, CPU)
