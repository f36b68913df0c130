"""The checks in the order of the table, what they return, and the checks of libraries: the version, and one call that
posttrain relies on."""

import difflib
import importlib.util
import io
import platform
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from posttrain.base.errors import ConfigError
from posttrain.base.files import default_cache, table_beside
from posttrain.base.imports import installing

# Packages that no other check calls.
NOT_CALLED = ("accelerate", "pydantic", "typer", "rich", "psutil")
# Largest relative error of a quantised layer's outputs. Measured: 0.4 % and 9 % on a CPU.
INT8_ERROR, NF4_ERROR = 0.02, 0.15
State = Literal["ok", "limited", "absent", "broken"]


@dataclass(frozen=True, slots=True)
class Found:
    """What a check returns. `fix` is a command or an instruction that improves the state."""

    detail: str
    state: State = "ok"
    fix: str = ""


class Broken(Exception):
    """Raised by a check if something does not work. Any other exception has the same meaning. Another `state` than
    broken: the check found nothing to call."""

    def __init__(self, detail: str, fix: str = "", state: State = "broken"):
        super().__init__(detail)
        self.found = Found(detail, state, fix)


@dataclass(frozen=True, slots=True)
class Check:
    """One call that shows whether a part works.

    `target` is the `module:function` that a helper process calls with `arguments`, and that returns a Found. Checks in
    the same `lane` run one after another in one process, as long as it lives; lanes run in parallel.
    """

    name: str
    target: str
    lane: str
    required: bool = False
    arguments: tuple[str, ...] = ()
    deadline: float = 30.0  # seconds
    fix: str = ""  # fix to show for an error that names none


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of a check. If a required check is broken, the exit status is 1."""

    name: str
    state: State
    required: bool
    detail: str
    fix: str
    seconds: float

    @property
    def is_fatal(self) -> bool:
        return self.required and self.state == "broken"


def all_checks(output_dir: Path) -> list[Check]:
    """Every check in `checks.yaml`; `output_dir` is where runs are written."""
    folders = {"output_dir": str(output_dir), "data_cache": str(default_cache())}
    rows = table_beside(__file__, "checks.yaml")
    for row in rows:
        row["target"] = f"posttrain.doctor.{row['target']}"
        row["arguments"] = tuple(folders[name] for name in row.get("arguments", ()))
    return [Check(**row) for row in rows]


def chosen(checks: Sequence[Check], names: Iterable[str]) -> list[Check]:
    """The named checks, in the table's order; without names, all checks. Raises ConfigError for an unknown name."""
    known = {check.name.lower(): check for check in checks}
    wanted = [name.lower() for name in names]
    for name in wanted:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.5)
            hint = f"did you mean {known[near[0]].name!r}? " if near else ""
            raise ConfigError(f"there is no check {name!r}: {hint}the checks are {', '.join(c.name for c in checks)}")
    return [check for check in checks if not wanted or check.name.lower() in wanted]


def version_of(package: str, purpose: str = "", extra: str = "") -> str:
    """The version of a package. Raises Broken, with a fix, if it is missing or outside the declared range; with the
    state absent if the package of an `extra`, which is for `purpose`, cannot be imported."""
    if extra and importlib.util.find_spec(package.replace("-", "_")) is None:
        raise Broken(f"not installed; for {purpose}", installing(extra), "absent")
    from packaging.requirements import Requirement  # a package that transformers and datasets also need

    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        version = ""
    ranges = {requirement.name: requirement.specifier for requirement in map(Requirement, reversed(_declared()))}
    if version and (package not in ranges or ranges[package].contains(version, prereleases=True)):
        return version
    needs = f"{package}{ranges.get(package, '')}"
    raise Broken(f"{version}, needs {needs}" if version else "not installed", f"pip install '{needs}'")


def _declared() -> list[str]:
    try:
        return metadata.requires("posttrain") or []
    except metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return []


def python() -> Found:
    """The versions of Python and posttrain."""
    from packaging.specifiers import SpecifierSet

    try:
        facts = metadata.metadata("posttrain")
    except metadata.PackageNotFoundError:
        raise Broken("posttrain is not installed, so versions cannot be checked", "pip install -e .") from None
    version, needed = platform.python_version(), facts["Requires-Python"] or ""
    if not SpecifierSet(needed).contains(version, prereleases=True):
        raise Broken(f"{version}, needs {needed}", f"install Python {needed} and make a new environment")
    return Found(f"{version}, posttrain {facts['Version']}, {platform.platform(terse=True)}")


def packages() -> Found:
    """The required packages that no other check calls."""
    return Found(", ".join(f"{name} {version_of(name)}" for name in NOT_CALLED))


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
    small = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
    return LlamaForCausalLM(small).eval()


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
