"""Starts of LoRA (PiSSA, OLoRA, LoftQ): PEFT's values, the reference is the start, files are adapters of the base."""

import json
import math
import shutil
from pathlib import Path

import peft
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from test_adapters import losses, settings, train
from test_online import lines
from test_online import train as train_online
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from posttrain.base.errors import ConfigError, ModelError
from posttrain.batch import Example, Node, pack
from posttrain.config import ModelConfig, load
from posttrain.config.schema.model import LoraConfig
from posttrain.models.load import load_model
from posttrain.models.lora import add_lora, as_at_start, load_lora, save, set_start
from posttrain.planning.activations import empty_model
from posttrain.planning.estimate import count, estimate

CPU = torch.device("cpu")
IDS = torch.arange(5, 60)[None]
STARTS = ["pissa", "pissa_niter_4", "olora"]


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def tiny(kind: str, scratch_model: Path):
    if kind == "qwen3":
        return AutoModelForCausalLM.from_pretrained(scratch_model)
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=64)).eval()


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
@pytest.mark.parametrize("init", STARTS)
def test_the_start_is_pefts(init, kind, rslora, scratch_model):
    """A, B and the changed base are PEFT's own, except OLoRA of GPT-2's transposed weights, which PEFT mixes up. The
    start is the published model, and what is written, of twice the rank, changes nothing in it."""
    targets = ["c_attn"] if kind == "gpt2" else ["q_proj", "down_proj"]
    lora = LoraConfig(r=4, alpha=6, dropout=0, target_modules=targets, init=init, use_rslora=rslora)
    ours = add_lora(tiny(kind, scratch_model), lora, "lm").eval()
    torch.manual_seed(1)  # the randomised SVD samples
    set_start(ours, lora)
    want = logits(tiny(kind, scratch_model))
    assert torch.allclose(logits(ours), want, atol=1e-5)
    with as_at_start(ours):
        assert torch.equal(logits(ours), logits(ours)) and ours.active_adapter == "start"
        begun = logits(ours)
    assert torch.equal(begun, logits(ours))
    with ours.disable_adapter():
        assert not torch.allclose(logits(ours), want, atol=1e-3)
    if kind == "gpt2" and init == "olora":
        return
    same = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=targets, use_rslora=rslora, fan_in_fan_out=kind == "gpt2"
    )  # fmt: skip
    theirs = peft.get_peft_model(tiny(kind, scratch_model), same)
    torch.manual_seed(1)
    for layer in (module for module in theirs.modules() if isinstance(module, peft.tuners.lora.LoraLayer)):
        layer.olora_init("default") if init == "olora" else layer.pissa_init("default", init)
    state, compared = ours.state_dict(), 0
    for name, tensor in theirs.state_dict().items():
        if "lora_" in name or "base_layer.weight" in name:
            assert torch.allclose(state[name], tensor, atol=1e-5), name
            compared += 1
    assert compared >= 3


@pytest.mark.parametrize(("init", "rslora"), [("pissa", False), ("olora", True)])
def test_a_run_from_a_subtracted_start(init, rslora, tmp_path, shared, scratch_model):
    """Margins are exactly 0 before the first update; final/ and checkpoints are adapters of the published model, with
    the trained model's logits in plain PEFT, merged, and as the run itself resumes them; a resumed run is the same."""
    file = settings(shared, scratch_model, tmp_path)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"training": {
        "batch_size": 4, "max_steps": 3, "learning_rate": 1e-2, "warmup_steps": 0}}))  # fmt: skip
    starts = [f"model.lora.init={init}", f"model.lora.use_rslora={rslora}"]
    whole = train(file, "name=whole", *starts)
    check = json.loads((whole / "run.json").read_text())["checks"]["policy = reference"]
    print(check, losses(whole))
    assert check["value"] == 0.0 and losses(whole)[0] == pytest.approx(0.693147, abs=1e-6)
    saved = json.loads((whole / "final/adapter_config.json").read_text())
    alpha = pytest.approx(8 * math.sqrt(2) if rslora else 16)
    assert (saved["r"], saved["lora_alpha"], saved["init_lora_weights"]) == (8, alpha, True)
    published = AutoModelForCausalLM.from_pretrained(scratch_model)
    before = logits(published)
    loaded = logits(PeftModel.from_pretrained(published, whole / "final"))
    assert not torch.allclose(loaded, before, atol=1e-3)
    lora = load(file, starts).config.models[0].lora
    base = AutoModelForCausalLM.from_pretrained(scratch_model)
    policy = load_lora(base, whole / "checkpoint-3")
    set_start(policy, lora, resumed=True)
    trained = logits(policy.eval())
    merged = load_model(ModelConfig(path=str(whole / "final"), attention="sdpa"), "lm", torch.float32, CPU)
    for got in (loaded, logits(merged)):
        assert torch.allclose(got, trained, atol=2e-5), float((got - trained).abs().max())
    save(policy, tmp_path / "again")
    final = load_file(whole / "final/adapter_model.safetensors")
    again = load_file(tmp_path / "again/adapter_model.safetensors")
    assert all(torch.equal(again[name], tensor) for name, tensor in final.items())
    train(file, "name=broken", *starts, "checkpoint.save_total_limit=null")
    for later in ("checkpoint-2", "checkpoint-3", "final"):
        shutil.rmtree(tmp_path / "broken" / later)
    resumed = train(file, "name=broken", *starts, "checkpoint.save_total_limit=null", resume=True)
    assert losses(resumed) == losses(whole)
    again = load_file(resumed / "final/adapter_model.safetensors")
    assert all(torch.equal(again[name], tensor) for name, tensor in final.items())


def test_a_start_in_bfloat16_is_the_reference(shared, scratch_model, tmp_path):
    """The residual is rounded once; policy and reference are the same numbers all the same."""
    file = settings(shared, scratch_model, tmp_path, dtype="bfloat16")
    folder = train(file, "model.lora.init=pissa", "training.max_steps=1")
    assert json.loads((folder / "run.json").read_text())["checks"]["policy = reference"]["value"] == 0.0


def test_rows_and_modules_that_are_trained_too(shared, scratch_model, tmp_path):
    """They are saved as without a start; a second stage with the same settings merges, and starts anew."""
    file = settings(shared, scratch_model, tmp_path, "sft", new_tokens=["<a>"])
    folder = train(file, "model.lora.init=pissa", "training.max_steps=2", "model.lora.modules_to_save=[norm]")
    tensors = load_file(folder / "final/adapter_model.safetensors")
    assert any("token_adapter" in name or "trainable_tokens" in name for name in tensors)
    assert any(name.endswith("model.norm.weight") for name in tensors)
    merged = load_model(ModelConfig(path=str(folder / "final"), attention="sdpa"), "lm", torch.float32, CPU)
    again = train(file, "name=second", f"model.path={folder}", "model.lora.init=pissa", "training.max_steps=1")
    assert (again / "base").is_dir()
    base = load_model(ModelConfig(path=str(again / "base"), attention="sdpa"), "lm", torch.float32, CPU)
    assert torch.allclose(logits(base), logits(merged), atol=1e-5)


REFUSED = {
    "4 bits": ({"load_in_4bit": True}, {"init": "pissa"}, "init is pissa, which changes weights that load_in_4bit"),
    "16 bits": ({}, {"init": "loftq"}, "init is loftq, which corrects the rounding of load_in_4bit"),
    "DoRA": ({}, {"init": "olora", "use_dora": True}, "init is olora, which cannot be combined with use_dora"),
    "a name": ({}, {"init": "pisa"}, "init"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_start_cannot_be_combined_with(what, shared, scratch_model, tmp_path):
    model, lora, message = REFUSED[what]
    file = settings(shared, scratch_model, tmp_path, **model, lora=lora)
    with pytest.raises(ConfigError, match=message):
        load(file)


def test_layers_that_cannot_start_so(scratch_model):
    for lora, message in (
        (LoraConfig(r=25, init="pissa", target_modules=["k_proj"]), "lora.r of at most 24"),
        (LoraConfig(r=2, init="olora", target_modules=["wte"]), "wte is an embedding layer"),
    ):
        model = tiny("qwen3" if lora.r == 25 else "gpt2", scratch_model)
        model.config.tie_word_embeddings = False
        with pytest.raises(ModelError, match=message):
            set_start(add_lora(model, lora, "lm"), lora)


def test_loftq_approximates_what_4_bits_lost(shared, scratch_model, tmp_path):
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: the `quant` extra")
    whole = AutoModelForCausalLM.from_pretrained(scratch_model)
    lora = LoraConfig(r=16, alpha=32, dropout=0, target_modules="all-linear", init="loftq")
    small = load_model(ModelConfig(path=str(scratch_model), load_in_4bit=True), "lm", torch.float32, CPU)
    small.set_attn_implementation("sdpa")
    want, rounded = logits(whole), logits(small)
    adapted = add_lora(small, lora, "lm").eval()
    set_start(adapted, lora, whole)
    error, before = float((logits(adapted) - want).norm()), float((rounded - want).norm())
    print(f"error of the logits {before:.3f} -> {error:.3f}")
    assert error < 0.8 * before
    file = settings(shared, scratch_model, tmp_path, load_in_4bit=True)
    folder = train(file, "model.lora.init=loftq", "checkpoint.save_total_limit=null")
    assert json.loads((folder / "run.json").read_text())["checks"]["policy = reference"]["value"] == 0.0
    assert json.loads((folder / "final/adapter_config.json").read_text())["r"] == 4
    first, final = losses(folder), load_file(folder / "final/adapter_model.safetensors")
    for later in ("checkpoint-2", "checkpoint-3", "final"):
        shutil.rmtree(folder / later)
    train(file, "model.lora.init=loftq", "checkpoint.save_total_limit=null", resume=True)
    again = load_file(folder / "final/adapter_model.safetensors")
    assert losses(folder) == first and all(torch.equal(again[name], tensor) for name, tensor in final.items())


def test_kl_to_the_start_is_0_and_the_engine_samples_from_it(sums_home, tmp_path):
    """GRPO: in the first of two updates; the engine's own check compares it with the trainer's log-probabilities."""
    lora = {"r": 4, "dropout": 0.0, "init": "olora"}
    model = {"path": str(sums_home / "model"), "lora": lora}
    run = train_online(sums_home, tmp_path, {"beta": 0.1}, model=model)
    steps = [line for line in lines(run) if "loss" in line]
    print([(line["kl"], line["grad_norm"]) for line in steps])
    assert steps[0]["kl"] == 0.0 and steps[1]["kl"] > 0 and steps[0]["grad_norm"] > 0


def test_the_plan_counts_the_start_and_the_average(shared, scratch_model, tmp_path):
    file = settings(shared, scratch_model, tmp_path)
    batch = pack([Example((Node(range(20), trained=True),), row=0)], 64)
    found = []
    for overrides in ([], ["model.lora.init=pissa"], ["training.ema_decay=0.9"]):
        config = load(file, overrides).config
        empty = empty_model(config, config.models[0])
        found.append((estimate(config, config.models[0], empty, batch, CPU), count(empty)[1]))
    (plain, trained), (started, _), (averaged, _) = found
    assert started.resting - plain.resting == started.parts["adapter's start"] == 4 * trained
    assert averaged.parts["optimizer"] - plain.parts["optimizer"] == 4 * trained
