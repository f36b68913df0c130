"""Checks of required and optional libraries: the version, and one call that posttrain relies on."""

import importlib
import io
import tempfile
from collections.abc import Callable
from pathlib import Path

from posttrain.doctor.checks import Broken, Found, version_of

# Largest relative error of a quantised layer's outputs. Measured: 0.4 % and 9 % on a CPU.
INT8_ERROR, NF4_ERROR = 0.02, 0.15


def transformers() -> Found:
    """Check that a small Llama with random weights gives the same logits after it is saved and loaded."""
    version = version_of("transformers")
    import torch
    from transformers import AutoModelForCausalLM

    model, tokens = _small_model(), torch.arange(8)[None]
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model.save_pretrained(folder)
        again = AutoModelForCausalLM.from_pretrained(folder).eval()
        same = torch.equal(model(tokens).logits, again(tokens).logits)
        del again  # Windows cannot remove a file that is mapped
    if not same:
        raise Broken(f"{version}: a model that was saved and loaded has different logits")
    return Found(f"{version}: a model is saved and loads with the same logits")


def _small_model():
    import torch
    from transformers.models.llama import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    return LlamaForCausalLM(config).eval()


def peft() -> Found:
    """Check LoRA on a small model: only the adapter has gradients, and merged weights give the adapter's logits."""
    version = version_of("peft")
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model

    tokens = torch.arange(8)[None]
    model = get_peft_model(_small_model(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    assert isinstance(model, PeftModel)
    logits = model(tokens).logits
    logits.logsumexp(-1).sum().backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    merged = model.merge_and_unload()(tokens).logits
    if not trained or any("lora_" not in name for name in trained) or not torch.allclose(logits, merged, atol=1e-5):
        raise Broken(f"{version}: LoRA's gradients or its merge are wrong")
    return Found(f"{version}: LoRA has gradients and merges")


def datasets() -> Found:
    """Check that the splits of a folder are found, as for the data of a run."""
    version = version_of("datasets")
    from posttrain.data.sources import splits_of

    with tempfile.TemporaryDirectory() as folder:
        for split in ("train", "test"):
            Path(folder, f"{split}.jsonl").write_text('{"text": "a"}\n')
        splits = splits_of(folder)
    if sorted(splits) != ["test", "train"]:
        raise Broken(f"{version}: the splits of a folder are not found")
    return Found(f"{version}: the splits of a folder are found")


def safetensors() -> Found:
    """Check that weights are read as they were written."""
    version = version_of("safetensors")
    import numpy as np
    from safetensors.numpy import load, save

    if not np.array_equal(load(save({"a": np.arange(6.0)}))["a"], np.arange(6.0)):
        raise Broken(f"{version}: weights are not read as they were written")
    return Found(f"{version}: weights are written and read")


def matplotlib() -> Found:
    """Check that a plot is rendered in memory."""
    version = version_of("matplotlib")
    from matplotlib.figure import Figure

    figure, picture = Figure(figsize=(1, 1)), io.BytesIO()
    figure.subplots().plot([0, 1])
    figure.savefig(picture, format="png")
    if not picture.getvalue().startswith(b"\x89PNG"):
        raise Broken(f"{version}: a rendered plot is not a PNG")
    return Found(f"{version}: renders a PNG")


def bitsandbytes() -> Found:
    """Check a linear layer in int8 and in NF4 with double quantisation, and the gradient of the NF4 layer's input."""
    version = version_of("bitsandbytes", "model.load_in_4bit, quantised exports", "quant")
    import bitsandbytes as bnb
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    plain, x = torch.nn.Linear(128, 64), torch.randn(8, 128, requires_grad=True)
    want = plain(x).detach()
    int8 = bnb.nn.Linear8bitLt(128, 64, has_fp16_weights=False, threshold=6.0)
    nf4 = bnb.nn.Linear4bit(128, 64, compute_dtype=torch.float32, quant_type="nf4", compress_statistics=True)
    errors = {}
    for name, layer, most in (("int8", int8, INT8_ERROR), ("NF4", nf4, NF4_ERROR)):
        layer.load_state_dict(plain.state_dict())
        dtype = torch.float16 if name == "int8" and device == "cuda" else torch.float32
        got = layer.to(device)(x.to(device, dtype)).detach().float().cpu()
        errors[name] = float((got - want).norm() / want.norm())
        if not errors[name] < most:
            raise Broken(f"{version}: {name} is off by {errors[name]:.0%}", "pip install -U bitsandbytes")
    gradient = torch.autograd.grad(nf4(x.to(device)).sum(), x)[0]
    if not (gradient - plain.weight.sum(0)).norm() < NF4_ERROR * 8**0.5 * plain.weight.sum(0).norm():
        raise Broken(f"{version}: the gradient of an NF4 layer is wrong", "pip install -U bitsandbytes")
    shown = ", ".join(f"{name} off by {error:.1%}" for name, error in errors.items())
    return Found(f"{version} on {device}: a layer in {shown}")


def vllm() -> Found:
    """Check that vLLM can be imported with the classes that the engine uses."""
    version = version_of("vllm", "rollout.engine: vllm", "vllm")
    loaded = importlib.import_module("vllm")
    return Found(f"{version}: {loaded.LLM.__name__} and {loaded.SamplingParams.__name__} load")


def flash_attn() -> Found:
    """Compare flash-attn's attention on a GPU with PyTorch's."""
    version = version_of("flash-attn", "model.attention: flash_attention_2", "flash-attn")
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    if not torch.cuda.is_available():
        return Found(f"{version}, which needs a GPU", "limited")
    function = importlib.import_module("flash_attn").flash_attn_func
    query, key, value = torch.randn(3, 1, 64, 2, 64, device="cuda").bfloat16().unbind()
    heads_first = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    want = scaled_dot_product_attention(*heads_first, is_causal=True)
    return _same(version, function(query, key, value, causal=True), want.transpose(1, 2))


def liger() -> Found:
    """Compare Liger's norm on a GPU with PyTorch's."""
    version = version_of("liger-kernel", "model.use_liger_kernel", "liger")
    import torch

    from posttrain.config.schema.model import ModelConfig
    from posttrain.models.lean import TORCH
    from posttrain.models.load import chains_for

    if not torch.cuda.is_available():
        return Found(f"{version}, which needs a GPU", "limited")
    norm: Callable = chains_for(ModelConfig(path="none", use_liger_kernel=True), torch.device("cuda")).norm
    x, weight = torch.randn(8, 256, device="cuda"), torch.rand(256, device="cuda")
    return _same(version, norm(x, weight, 1e-6), TORCH.norm(x, weight, 1e-6))


def _same(version: str, got, want) -> Found:
    error = float((got - want).abs().max())
    if not error < 0.05:
        raise Broken(f"{version}: differs from PyTorch by {error:.1e}")
    return Found(f"{version}: agrees with PyTorch")
