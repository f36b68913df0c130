"""What a run takes, what `plan` says it takes, and what it gives back."""

import itertools
import json
import mmap
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from statistics import median

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from benchmarks.families import CONFIGS, IDS, forest
from benchmarks.models import write_model
from posttrain.base.memory import available_memory, memory_in_use, peak_memory, release_memory, reset_peak_memory
from posttrain.batch import Example, Node, pack
from posttrain.cli import main
from posttrain.config import load
from posttrain.data import prepare_run
from posttrain.models.attention import PackedMask, width_step
from posttrain.models.load import load_tokenizer
from posttrain.models.matmul import multiplies_bfloat16
from posttrain.planning.activations import _simulate, activations, empty_model
from posttrain.planning.estimate import _between_steps, _reference, estimate
from posttrain.planning.largest import FirstEpoch, Step, largest_that_fits, probe

CPU = torch.device("cpu")
MIB = 2**20
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def middling_model(shared, tmp_path_factory) -> Path:
    """A Qwen3 of 12 million parameters: large enough that what a run takes is not the program's own doing."""
    folder = tmp_path_factory.mktemp("models") / "middling"
    write_model(
        folder, shared / "tokenizers/minimind6400", hidden_size=384, num_hidden_layers=6, intermediate_size=1024,
        num_attention_heads=6, num_key_value_heads=2, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    return folder


@pytest.fixture
def settings(shared, middling_model, tmp_path):
    """Write a config of two steps, one or two packs each; returns its path."""
    pairs = {"source": str(shared / "data/hh-harmless"), "format": "hh", "template": "none"}
    single = {"source": str(shared / "data/sft-demo/alpaca_en_demo.json")}

    def write(name: str, method: str, training=None, **model) -> Path:
        data = {**(single if method == "sft" else pairs), "max_rows": 24, "max_length": 384}
        training = {"batch_size": 12 if method == "sft" else 6, "max_steps": 2, "tokens_per_pack": 1536} | (
            training or {}
        )
        sections = {"name": name, "output_dir": str(tmp_path / "runs"), "method": method, "data": data}
        sections |= {"model": {"path": str(middling_model), **model}, "training": training}
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(sections))
        return file

    return write


def estimated(file: Path):
    config = load(file).config
    data = prepare_run(config, load_tokenizer(config.models[0]))
    size = config.training.tokens_per_pack
    packs = FirstEpoch(config, data).largest(size, width_step(CPU, size))
    return estimate(config, config.models[0], empty_model(config, config.models[0]), packs, CPU)


LORA = {"r": 8, "alpha": 16}
CHECKPOINTING = {"gradient_checkpointing": True}
LONG = {"max_steps": 12}  # the heap has its holes by then, and the fullest pack has met the optimizer's moments
MEASURED = {  # method, training, model
    "SFT": ("sft", LONG, {}),
    "SFT, recomputed": ("sft", LONG | CHECKPOINTING, {}),
    "DPO": ("dpo", LONG, {}),
    "DPO of adapters": ("dpo", LONG, {"lora": LORA}),
    "reward model, 8-bit AdamW": ("reward", LONG | {"optimizer": "adamw_8bit"}, {}),
}


@pytest.mark.slow  # and alone: beside other work peaks vary by a fifth
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="a run's own peak is measured on Linux only")
def test_the_estimate_is_within_a_quarter_of_the_measured_peak(settings):
    """Each training run is a process of its own; its peak is counted from what imports alone take."""
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: the `quant` extra")
    files = [settings(name, method, training, **model) for name, (method, training, model) in MEASURED.items()]
    off = {}
    for file, peak in zip(files, measured(files), strict=True):
        expected = estimated(file)
        off[file.stem] = expected.peak / peak - 1
        parts = ", ".join(f"{part} {size / MIB:.0f}" for part, size in expected.parts.items())
        print(f"{file.stem}: measured {peak / MIB:.0f} MiB, expected {expected.peak / MIB:.0f} ({parts})")
    assert all(abs(difference) <= 0.25 for difference in off.values()), off


def measured(files: list[Path]) -> list[int]:
    """The peak of each run, in bytes above what imports alone take."""
    command = [sys.executable, str(HERE / "measure_memory.py"), *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(HERE.parent)})
    peaks = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("peak ")]
    assert len(peaks) == len(files), done.stderr
    return peaks


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="a run's own peak is measured on Linux only")
@pytest.mark.parametrize("divergence", ["reverse_kl", "jsd"])
def test_distillation_takes_the_memory_of_grpo(middling_model, tmp_path, divergence):
    """Beside the weights of both models at most a tenth more than GRPO with a reference; no tensor is [N, V].

    The median of three runs: peaks vary by 7 %. Both train on 16 completions of 96 tokens. All logits of a pack would
    be 39 MiB for each of the two models.
    """
    others = {"grpo": "ref_model", "distill": "teacher"}
    methods = {kind: {"type": kind, "num_generations": 4, name: str(middling_model)} for kind, name in others.items()}
    methods["distill"]["divergence"] = divergence
    rows = "".join(json.dumps({"prompt": f"What is {number} and {number}? " * 6}) + "\n" for number in range(16))
    (tmp_path / "rows.jsonl").write_text(rows)
    files = []
    for name, number in itertools.product(methods, range(3)):
        files.append(tmp_path / f"{name}-{number}.json")
        settings = {
            "name": f"{name}-{number}",
            "output_dir": str(tmp_path / "runs"),
            "model": {"path": str(middling_model)},
            "method": methods[name],
            "rewards": [{"type": "length", "target": 50}],
            "data": {"source": str(tmp_path / "rows.jsonl"), "template": "none", "max_length": 384},
            "rollout": {"max_completion_length": 96},
            "training": {"batch_size": 4, "max_steps": 6, "tokens_per_pack": 1024},
        }
        files[-1].write_text(json.dumps(settings))
    weights = 2 * sum(file.stat().st_size for file in middling_model.glob("*.safetensors"))
    peaks = measured(files)
    grpo, distill = (median(peaks[start : start + 3]) - weights for start in (0, 3))
    print(f"{divergence}: {distill / MIB:.0f} MiB beside the weights, {distill / grpo:.2f} of GRPO's {grpo / MIB:.0f}")
    assert distill <= 1.1 * grpo


DEEP = [("llama", False), ("gemma2", False), ("gpt2", False), ("opt", False), ("qwen3", True), ("mixtral", False)]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "checkpointing"), DEEP)
def test_further_layers_keep_what_the_first_ones_do(tmp_path, family, checkpointing):
    """What is said of a deep model from three or four layers = what all its layers keep."""
    settings = CONFIGS[family] | IDS | {"num_hidden_layers": 5}
    settings.pop("n_layer", None)
    if "layer_types" in settings:
        settings["layer_types"] = ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
    CONFIG_MAPPING[family](**settings).save_pretrained(tmp_path)
    file = tmp_path / "config.yaml"
    file.write_text(f"model: {tmp_path}\nmethod: sft\ndata: {{source: none.jsonl}}\n")
    config = load(file).config
    [packed] = pack(forest(), 4096)
    kept, working = activations(config, config.models[0], packed, torch.float32, checkpointing, on_gpu=False)
    whole, mask = empty_model(config, config.models[0], layers=5), PackedMask(packed, packed.read_U)
    whole.train(config.method.dropout)
    mask.masks(None, torch.float32)
    all_kept, all_working, _ = _simulate(whole, packed, mask, checkpointing)
    print(f"{family}: {kept} kept, {working} more for a moment")
    assert kept == all_kept and working == pytest.approx(all_working, rel=0.1)
    assert kept > packed.num_tokens * 32 * 4 * 5


def test_a_gpu_keeps_no_weights_of_attention(tmp_path):
    """FlexAttention's memory grows with a pair's tokens, not with their square, whatever its mask."""
    CONFIG_MAPPING["qwen3"](**CONFIGS["qwen3"] | IDS | {"max_position_embeddings": 4096}).save_pretrained(tmp_path)
    (tmp_path / "config.yaml").write_text(
        f"{{model: {tmp_path}, method: dpo, data: {{source: none.jsonl}}, training: {{gradient_checkpointing: true}}}}"
    )
    config = load(tmp_path / "config.yaml").config
    empty, found = empty_model(config, config.models[0]), []
    for size in (512, 1024):
        leaves = tuple(Node([5] * (size // 4), True) for _ in range(2))
        packs = pack([Example((Node([5] * (size // 2), children=leaves),), 0)], size)
        found.append(
            estimate(config, config.models[0], empty, packs, torch.device("cuda", 0), card=80 << 30).parts[
                "activations"
            ]
        )
    assert 1.8 < found[1] / found[0] < 2.2


@pytest.mark.slow
def test_memory_comes_back_between_models(settings, tmp_path):
    """Models of one config: when the third begins, the process holds what it held when the second began."""
    file = settings("two", "sft")
    sections = json.loads(file.read_text())
    path = sections.pop("model")["path"]
    sections["models"] = [{"name": name, "path": path} for name in ("first", "second", "third")]
    sections["training"] |= {"max_steps": 1, "batch_size": 4}
    file.write_text(json.dumps(sections))
    script = """
import os, sys
from posttrain import runner
from posttrain.config import load
from posttrain.base.memory import memory_in_use
from posttrain.training.job import Job
os.fsync = lambda descriptor: None  # and no pictures, as in tests/conftest.py
sys.modules["posttrain.runner.one"].write_curves = lambda lines, path, title: path.write_bytes(b"")
start, held = Job.start, []
def noted(*arguments):
    held.append(memory_in_use())
    if len(held) == 3:
        print(*held, flush=True)
        os._exit(0)
    return start(*arguments)
Job.start = noted
runner.train(load(sys.argv[1]).config)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(file)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(HERE.parent)},
    )
    assert done.returncode == 0, done.stderr
    held = [int(size) for size in done.stdout.splitlines()[-1].split()]
    print("MiB when a model begins:", [round(size / MIB) for size in held])
    taken = estimated(settings("one", "sft")).peak
    assert held[2] - held[1] < 0.05 * taken


def test_released_memory_leaves_the_process():
    release_memory()
    before = memory_in_use()
    blocks = [torch.ones(16_000) for _ in range(4000)]  # each too small for a mapping of its own
    assert memory_in_use() - before > 200 * MIB
    del blocks
    release_memory()
    assert memory_in_use() - before < 20 * MIB


def test_a_peak_is_counted_from_its_reset():
    block = torch.ones(100 * MIB // 4)
    assert peak_memory(CPU) >= memory_in_use() - MIB  # the kernel counts pages in batches
    del block
    reset_peak_memory(CPU)
    before = peak_memory(CPU)
    with mmap.mmap(-1, 50 * MIB) as block:  # not from malloc, which may still hold what earlier tests freed
        for _ in range(50):
            block.write(b"x" * MIB)
    assert 45 * MIB < peak_memory(CPU) - before < 60 * MIB
    assert (available_memory(CPU) or 0) > 0


@pytest.mark.parametrize("limit", [64, 100, 1023, 1024, 3000, 5000, 10**6])
def test_the_largest_size_is_found_to_a_sixteenth(limit):
    tried = []

    def fits(size):
        tried.append(size)
        return size <= limit

    good, bad = largest_that_fits(fits, 64, 5000)
    print(limit, good, bad, tried)
    assert good is not None and good <= limit and len(tried) < 14
    if bad is None:
        assert good == 5000
    else:
        assert limit < bad and bad - good <= max(good // 16, 64) + 64
    assert largest_that_fits(lambda size: False, 64, 5000) == (None, 64)
    assert largest_that_fits(lambda size: True, 64, 64) == (64, None)


@pytest.mark.slow
def test_probe_finds_what_fits_a_limit(settings, capsys):
    """On a CPU: real steps, measured; the size found stays within the limit, and the next one tried does not."""
    file = settings("probed", "sft", {"tokens_per_pack": 8192})
    config = load(file).config
    data = prepare_run(config, load_tokenizer(config.models[0]))
    release_memory()  # what earlier tests left would make room beyond the limit; a little of it stays
    limit = memory_in_use() + 380 * MIB
    found = probe(config, config.models[0], data, limit)
    print(found, capsys.readouterr().err)
    assert 384 <= found.tokens_per_pack < (found.too_large or 0)
    assert found.too_large - found.tokens_per_pack <= max(64, found.tokens_per_pack // 16) + 64
    assert 0.8 * limit < found.peak <= limit == found.limit


@pytest.mark.slow
def test_probe_on_a_device_that_runs_out_of_memory(settings, monkeypatch, capsys):
    """Where too large a size ends in torch's error, as on a GPU, that is an answer, and the next size is tried."""
    file = settings("probed", "reward", {"tokens_per_pack": 8192})
    config = load(file).config
    data = prepare_run(config, load_tokenizer(config.models[0]))
    take = Step.take

    def limited(self, packs):
        take(self, [pack for pack in packs[:1] if pack.num_tokens < 500])
        if packs[0].num_tokens > 1100:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(Step, "take", limited)
    found = probe(config, config.models[0], data, 64 * 2**30)
    print(found, capsys.readouterr().err)
    assert 1000 < found.tokens_per_pack <= 1280 and found.too_large is not None
    monkeypatch.setattr(Step, "take", lambda self, packs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        probe(config, config.models[0], data, 64 * 2**30)


def test_probe_says_when_nothing_fits(settings, capsys):
    file = str(settings("probed", "dpo"))
    assert main(["plan", file, "--probe", "--memory-limit", "0.01"]) == 1
    error = capsys.readouterr().err
    assert "even tokens_per_pack 768, the smallest for data.max_length 384, does not fit in 0.01 GiB" in error
    assert main(["plan", file, "--memory-limit", "8"]) == 2
    assert "--memory-limit needs --probe" in capsys.readouterr().err


def test_plan_names_the_parts(settings, capsys):
    assert main(["plan", str(settings("planned", "dpo"))]) == 0
    out = capsys.readouterr().out
    for part in ("weights", "gradients", "optimizer", "reference", "activations", "logits"):
        assert part in out


@pytest.mark.parametrize(
    ("dtype", "able", "hint"),
    [
        ("float32", True, "multiplies faster in bfloat16"), ("bfloat16", False, "no bfloat16 instructions"),
        ("float32", False, None), ("bfloat16", True, None), ("float32", None, None), ("bfloat16", None, None),
    ],
)  # fmt: skip
def test_plan_says_which_dtype_the_processor_is_for(settings, monkeypatch, capsys, dtype, able, hint):
    monkeypatch.setattr(import_module("posttrain.planning.plan"), "multiplies_bfloat16", lambda: able)
    assert main(["plan", str(settings("planned", "dpo")), f"model.dtype={dtype}"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert ("this processor" in out) == (hint is not None) and (hint or "") in out


def test_what_processors_say_of_bfloat16():
    assert multiplies_bfloat16({"avx512_bf16": True, "amx_bf16": False}) is True
    assert multiplies_bfloat16({"avx512_bf16": False, "amx_bf16": False}) is False
    assert multiplies_bfloat16({"arm_neon": True}) is None


def test_a_reference_of_another_name_has_its_own_size(settings, shared):
    config = load(settings("other", "dpo"), [f"method.ref_model={shared / 'models/stories260K'}"]).config
    model = config.models[0]
    other = AutoModelForCausalLM.from_pretrained(shared / "models/stories260K")
    assert _reference(config, model, empty_model(config, model), 4) == 4 * sum(p.numel() for p in other.parameters())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_reference_that_follows_has_float32_weights_in_cpu_memory(settings, device):
    def between_steps(*more):
        config = load(settings("follows", "dpo"), ["model.dtype=bfloat16", *more]).config
        model = config.models[0]
        return _between_steps(config, model, empty_model(config, model), torch.device(device), 1, None)

    (fixed, host), (follows, more) = between_steps(), between_steps("method.sync_ref_model=true")
    exact = 2 * fixed["reference"]  # 4 bytes a weight instead of 2
    assert follows["reference"] == fixed["reference"] + (exact if device == "cpu" else 0)
    assert more == host + (exact if device == "cuda" else 0)


@pytest.mark.slow
def test_products_of_ever_new_sizes_do_not_grow_the_process():
    """oneDNN keeps 0.3 MB of code for every shape it has met, here for 2 x 150 of them, if it is given them all."""
    script = """
import torch
from posttrain.base.memory import memory_in_use
from posttrain.models import matmul
from posttrain.models.matmul import linear
matmul.ONEDNN = matmul.PACKS  # on Intel's processors too
layer, x = torch.nn.Linear(256, 512, bias=False), torch.randn(1024, 256, requires_grad=True)
for rows in (512, 1024):
    linear(layer, x[:rows]).sum().backward()
before = memory_in_use()
for rows in range(401, 701, 2):
    linear(layer, x[:rows]).sum().backward()
print(memory_in_use() - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=os.environ)
    assert int(done.stdout) < 30 * MIB, f"{done.stdout} {done.stderr}"
