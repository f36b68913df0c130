"""What strangers write (rows, completions, names, models, archives): nothing of it reaches a terminal, a disk or
the memory as they meant it to."""

import ast
import gzip
import json
import os
import re
import shutil
import signal
import sys
import tarfile
import tracemalloc
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from rich.rule import Rule
from rich.table import Table
from rich.text import Text
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

import posttrain
from posttrain.base.console import PlainConsole, progress
from posttrain.base.errors import ConfigError, DataError, ModelError
from posttrain.base.terminal import UNSAFE
from posttrain.cli import main
from posttrain.config import ModelConfig, dump, load
from posttrain.data import streams
from posttrain.data.readers import read_files
from posttrain.models import files
from posttrain.models.load import load_model, load_tokenizer
from posttrain.runs.rollouts import GIB, RolloutStore, StoredPrompt, StoredRollout
from posttrain.runs.run import Run

# --- files that are there ---------------------------------------------------------------------------------------------

WRITERS = {
    "score": ["MODEL", "rows.jsonl", "--template", "none"],
    "generate": ["MODEL", "rows.jsonl", "--max-completion-length", "2"],
    "grade": ["rows.jsonl", "--reward", "math", "--workers", "1", "--deadline", "20"],
}


@pytest.mark.parametrize("verb", WRITERS)
def test_files_that_are_there_are_kept(verb, tmp_path, monkeypatch, shared, capsys):
    """Neither the input, by any path or link, nor an earlier output, is written over; the latter with --overwrite."""
    monkeypatch.chdir(tmp_path)
    row = {"prompt": "Once", "completion": r"\boxed{1}", "answer": "1"}
    Path("rows.jsonl").write_text(json.dumps(row))
    os.link("rows.jsonl", "link.jsonl")
    Path("there.jsonl").write_text("earlier")
    command = [verb, *(str(shared / "models/stories260K") if word == "MODEL" else word for word in WRITERS[verb])]
    for name, words in (("link.jsonl", "it is an input file"), ("there.jsonl", "there.jsonl exists: replace")):
        assert main([*command, "--output", name]) == 1
        assert words in capsys.readouterr().err
    assert main([*command, "--output", "link.jsonl", "--overwrite"]) == 1
    assert json.loads(Path("rows.jsonl").read_text()) == row and Path("there.jsonl").read_text() == "earlier"
    assert main([*command, "--output", "there.jsonl", "--overwrite"]) == 0
    assert json.loads(Path("there.jsonl").read_text()).items() >= row.items()


# --- names ------------------------------------------------------------------------------------------------------------

NAMES = [".", "..", "...", " ", "a/b", "a\\b", "a\x1b[2J", "a\rb", "a\x9b", "a\u202eb", "a\nb", "\0"]
NAMES += ["a" * 300, "é" * 101]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name)[:20])
def test_names_that_name_no_folder_are_refused_at_once(name, tmp_path, monkeypatch, capsys):
    """Of runs, models and projects, by what the schema says; before anything is loaded or written, dry run or not."""
    monkeypatch.chdir(tmp_path)
    settings = ["model.path=absent", "method=sft", "data.source=absent.jsonl", "tracking.report_to=wandb"]
    message = "it must be text of at most 200 bytes that can name a folder"
    for setting in ("model.name", "tracking.project"):
        with pytest.raises(ConfigError, match=f"{setting} is .*{message}"):
            load(None, [*settings, f"{setting}={json.dumps(name)}"])
    for option in ("--no-shuffle", "--dry-run"):
        assert main(["train", option, *settings, f"name={json.dumps(name)}"]) == 1
        error = capsys.readouterr().err
        assert "name is " in error and message in error
    assert list(tmp_path.iterdir()) == []


def test_the_last_part_of_a_model_s_path_names_a_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert ModelConfig(path=".").folder_name == tmp_path.name
    assert ModelConfig(path="a/../../").folder_name == tmp_path.parent.name
    for path in ("/", "models/a\x1b[2J", "a" * 300):
        given = f"model.path={json.dumps(path)}"
        assert main(["train", "method=sft", "data.source=absent.jsonl", "--dry-run", given]) == 1
        assert "whose last part cannot name a folder; give the model a name" in capsys.readouterr().err


# --- what reaches a terminal ------------------------------------------------------------------------------------------

# Colours, a hyperlink (OSC 8), the clipboard (OSC 52), a bell, what overwrites (CR, BS), C1's own CSI, a turned text.
STEERS = "\x1b[31mred\x1b]8;;http://a\x1b\\b\x1b]52;c;aGk=\x07!\rover\x08\x9b2J\u202etfel"
SHOWN = r"\x1b[31mred\x1b]8;;http://a\x1b\b\x1b]52;c;aGk=\x07!\rover\x08\x9b2J\u202etfel"
MARKUP = "[red]x[/red] [link=http://a]y[/link] :smile:"  # rich's own
BAD_NAME = "\x1b[2Jrows\x9b\u202e"  # of a file, whose name may hold anything but / and NUL


@pytest.fixture(scope="module")
def hostile(tmp_path_factory, shared) -> Path:
    """A folder with rows, a checkpoint and a run, whose texts and file names are to steer a terminal."""
    folder = tmp_path_factory.mktemp("hostile")
    text = MARKUP + STEERS  # tables show the first 60 characters
    rows = [{"prompt": f"{n} {text}", "completion": text, "answer": text} for n in range(120)]
    lines = [json.dumps(row) for row in rows]
    (folder / f"{BAD_NAME}.jsonl").write_text("\n".join(["{" + text, *lines]))
    (folder / f"{BAD_NAME}.bad.jsonl").write_text("\n".join(["{" + text, *lines[:9]]))
    (folder / f"{BAD_NAME}.columns.jsonl").write_text(json.dumps({text: 1}))
    settings = ["data.source=rows.jsonl", "data.template=none", f"model.path={shared / 'models/stories260K'}"]
    config = load(None, [*settings, "method=grpo", "rewards=[{type: length, target: 3}]"]).config
    (folder / "checkpoint").mkdir()
    for file in (shared / "models/stories260K").iterdir():
        (folder / "checkpoint" / file.name).symlink_to(file)
    data = config.data.model_copy(update={"source": str(folder / f"{BAD_NAME}.jsonl")})
    (folder / "checkpoint/config.yaml").write_text(dump(config.model_copy(update={"data": data})))
    with Run.create(folder / f"runs/{BAD_NAME}", dump(config), {"command": text}) as run:
        run.log(1, {"loss": 0.5, text: 1.0})
        run.set_state("failed", text)
        store = RolloutStore(run.folder, GIB, after=-1)
        parts = {text: {"value": 1.0, "weight": 1.0, "verdict": "correct", "extracted": text}}
        arrays = {"tokens": np.arange(3), "sampler_logprobs": np.zeros(3)}
        facts = {"prompt": text, "answer": text, "columns": {}}
        pair = [StoredRollout(0, n, text, n / 1.0, n - 0.5, text, 0, parts, arrays) for n in range(2)]
        store.add(1, 0.0, [StoredPrompt(0, text, [1], facts)], pair)
        store.close()
    return folder


RUN, ROWS = f"runs/{BAD_NAME}", f"{BAD_NAME}.jsonl"
TRAINING = ["model.path=MODEL", "method=sft", "data.template=none", "training.batch_size=2"]
COMMANDS = {
    "rollouts": ["rollouts", RUN],
    "rollouts of a step": ["rollouts", RUN, "--step", "1"],
    "why": ["why", RUN, "--step", "1"],
    "why a prompt": ["why", RUN, "--step", "1", "--prompt", "0"],
    "why a rollout": ["why", RUN, "--step", "1", "--prompt", "0", "--rollout", "0"],
    "regrade": ["regrade", RUN, "--reward", "{type: length, target: 3}"],
    "runs list": ["runs", "list"],
    "runs show": ["runs", "show", RUN],
    "sample": ["sample", "checkpoint", "--config", "checkpoint/config.yaml", "-n", "2", "--max-completion-length", "3"],
    "explore": ["explore", *TRAINING, f"data.source={ROWS}", "--rows", "1"],
    "plan": ["plan", *TRAINING, f"data.source={ROWS}"],
    "train": ["train", *TRAINING, f"data.source={ROWS}", "--max-steps", "1", "name=run"],
    "config show": ["config", "show", *TRAINING, f"data.source={ROWS}"],
    "data save": ["data", "save", ROWS, f"saved{BAD_NAME}"],
    "score": ["score", "MODEL", ROWS, "--template", "none", "--overwrite"],
    "generate": ["generate", "MODEL", ROWS, "--max-completion-length", "1", "--overwrite"],
    "grade": ["grade", ROWS, "--reward", "math", "--workers", "1", "--overwrite"],
    "grade too many": ["grade", f"{BAD_NAME}.bad.jsonl", "--reward", "math"],
    "unknown columns": ["plan", *TRAINING, f"data.source={BAD_NAME}.columns.jsonl"],
    "no such file": ["score", "MODEL", f"absent{STEERS}"],
    "no such run": ["runs", "rm", f"absent{STEERS}"],
    "no such verb": [f"train{STEERS}"],
    "no such flag": ["train", f"--{STEERS}"],
    "debug": ["--debug", "plan", *TRAINING, f"data.source={BAD_NAME}.bad.jsonl"],
}
SHOWING_NONE = ("rollouts", "why", "why a rollout")  # numbers alone


@pytest.mark.parametrize("name", COMMANDS)
def test_what_strangers_write_is_shown_and_steers_no_terminal(name, hostile, monkeypatch, shared, capsys):
    monkeypatch.chdir(hostile)
    monkeypatch.setenv("COLUMNS", "1000")
    model = str(shared / "models/stories260K")
    main([word.replace("MODEL", model) for word in COMMANDS[name]])
    out, error = capsys.readouterr()
    print(ascii(out + error))
    logged = Path("runs/run/training.log").read_text() if name == "train" else ""
    assert not UNSAFE.search(out + error + logged)
    assert name in SHOWING_NONE or r"\x1b[" in out + error + logged or r"\e[" in out  # \e: YAML's own
    if name in ("rollouts of a step", "why a prompt", "regrade", "sample"):
        assert MARKUP in out


def test_text_of_any_way_into_a_console_is_shown_as_it_is(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "300")
    console, table = PlainConsole(), Table(STEERS, title=MARKUP)
    table.add_row(STEERS + MARKUP)
    table.add_row(Text(STEERS))
    for thing in (STEERS + MARKUP, Text(STEERS), table, Rule(STEERS)):
        console.print(thing)
    console.rule(STEERS + MARKUP)
    for _ in progress(range(1), STEERS, console=console):
        pass
    out = capsys.readouterr().out
    assert not UNSAFE.search(out) and out.count(SHOWN) >= 4 and out.count(MARKUP) >= 3


SPEAK = ("base/terminal.py", "data/render_worker.py", "engines/vllm/server.py")


def test_one_place_writes_to_the_terminal():
    """No module prints or makes a console of rich by itself; two helper processes talk to their parent on stdout."""
    root = Path(posttrain.__file__).parent
    for path in root.rglob("*.py"):
        name = str(path.relative_to(root))
        calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        called = {func.id for func in calls if isinstance(func, ast.Name)}
        assert "Console" not in called, name
        assert "print" not in called or name in SPEAK, name


# --- models -----------------------------------------------------------------------------------------------------------

CPU = torch.device("cpu")
DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000
HOSTILE_MODELS = {
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads: 0; it must be a whole number from 1 to 4,096"),
    "less than no layer": ({"num_hidden_layers": -1}, "num_hidden_layers: -1; it must be a whole number from 1"),
    "ten million layers": ({"num_hidden_layers": 10**7}, "num_hidden_layers: 10000000; it must be"),
    "layers by another name": ({"model_type": "gpt2", "n_layer": 10**9}, "n_layer: 1000000000; it must be"),
    "layers of a part": ({"model_type": "gemma3", "text_config": {"num_hidden_layers": 10**9}}, "num_hidden_layers: 1"),
    "half a head": ({"num_attention_heads": 0.5}, "num_attention_heads: 0.5; it must be"),
    "many, in words": ({"num_hidden_layers": "many"}, 'num_hidden_layers: "many"; it must be'),
    "all the memory": ({"hidden_size": 10**12}, "hidden_size: 1000000000000; it must be"),
    "all the words": ({"vocab_size": 10**12}, "vocab_size: 1000000000000; it must be"),
    "a list of positions": ({"max_position_embeddings": [5]}, "it must be a whole number above 0"),
    "rotations of nothing": ({"rope_parameters": {"rope_type": "yarn", "factor": "x"}}, "cannot be loaded: "),
}
HOSTILE_FILES = {
    "a deep config": ("config.json", DEEP, "nested too deeply"),
    "a list for a config": ("config.json", "[]", "config.json contains a list, not a model's settings"),
    "a deep index": ("model.safetensors.index.json", DEEP, "nested too deeply"),
    "an index of nothing": ("model.safetensors.index.json", "[]", "has no weight_map"),
    "an index of numbers": ("model.safetensors.index.json", '{"weight_map": {"a": 1}}', "has no weight_map"),
    "a path above": (
        "model.safetensors.index.json",
        '{"weight_map": {"a": "../x.safetensors"}}',
        "outside the model's",
    ),
    "a path from the root": (
        "pytorch_model.bin.index.json",
        '{"weight_map": {"a": "/etc/passwd"}}',
        "outside the mode",
    ),
    "a deep adapter": ("adapter_config.json", DEEP, "nested too deeply"),
    "an adapter of nothing": ("adapter_config.json", '{"r": 4}', "names no base model"),
    "a rank beyond memory": (
        "adapter_config.json",
        '{"base_model_name_or_path": "x", "r": 1000000000}',
        "says r: 1000000000; it must be a whole number up to 16,384",
    ),
    "a deep tokenizer": ("tokenizer.json", DEEP, "tokenizer.json is nested too deeply"),
    "a tokenizer of nothing": ("tokenizer.json", "[]", "has no tokenizer that transformers can load"),
    "a deep tokenizer's config": ("tokenizer_config.json", DEEP, "nested too deeply"),
}
NESTED, DOUBLED = "([a-z0-9_.]+)+X", {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
for _field, _value in {
    "target_modules": NESTED,
    "exclude_modules": "(a|a)*b",
    "layers_pattern": ["h", "(.*)*x"],
    "target_parameters": ".*.*.*.*.*.*X",
    "rank_pattern": {NESTED: 4},
    "alpha_pattern": {"a?" * 30 + "a" * 30: 4},
}.items():
    _adapter = {"base_model_name_or_path": "x", "peft_type": "LORA", "r": 4, _field: _value}
    _said = f"adapter_config.json: {_field} has "
    HOSTILE_FILES[f"a slow {_field}"] = ("adapter_config.json", json.dumps(_adapter), _said)
for _field, _part, _said in (
    ("normalizer", {"type": "Sequence", "normalizers": [DOUBLED] * 36}, "make a text up to 6.87e+10 times as long"),
    ("decoder", {"type": "Sequence", "decoders": [DOUBLED] * 36}, "the replacements of its decoder make a text"),
    ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": r"(\p{L}+)+$"}}, "pre_tokenizer has "),
    ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": r"(a+)+|((?:a+)+b|c)*"}}, "pre_tokenizer has "),
    ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": r"(a+){2,}"}}, "pre_tokenizer has "),
    ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "a{1000}{1000}{1000}"}}, "pre_tokenizer has "),
    ("normalizer", {"type": "Replace", "pattern": {"Regex": "((((a{99}){99}){99}){99})"}}, "normalizer has "),
):
    HOSTILE_FILES[f"a slow {_field} {len(HOSTILE_FILES)}"] = ("tokenizer.json", json.dumps({_field: _part}), _said)

# Of published tokenizers and adapters.
FAST = [
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+",
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{M}]*[\p{Ll}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}",
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))",
    r"(?:.*?(?:vision|image|visual|language|text).*?(?:self_attn|attention|attn|mlp|ffn|dense).*?(?:k_proj|v_proj).*?)"
    r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mlp)\.(?:(?:q_proj|k_proj|o_proj)))",
    r"^(?!.*patch_embed).*(?:linear|attn).*",
    r"(.*\.)?layers\.(\d+)\.self_attn\.(q_proj|k_proj)",
    r".*decoder.*(SelfAttention|EncDecAttention).*(q|v)$",
]


@pytest.mark.parametrize("pattern", FAST)
def test_patterns_of_published_models_are_accepted(pattern):
    files._check_patterns([pattern], "target_modules", "m", "adapter_config.json")


# At the end of what a text is searched for, a repetition within another has nothing to try again.
SEARCHED = [
    r"'s|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?(?:\p{L}|\p{M})+|\p{N}|(?:\r?\n)+|\s+",
    r"(?:[^\s]|\s{2,})+",
]


@pytest.mark.parametrize("pattern", FAST[:4] + SEARCHED)
def test_patterns_of_published_tokenizers_are_accepted_and_fast(pattern, copied):
    tokenizer = json.loads((copied / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    tokenizer["pre_tokenizer"] = split
    (copied / "tokenizer.json").unlink()
    (copied / "tokenizer.json").write_text(json.dumps(tokenizer))
    files.check_file(str(copied), None, "tokenizer.json")
    split = Tokenizer.from_file(str(copied / "tokenizer.json")).pre_tokenizer
    for text in ("a" * 2000 + "!", "a a" * 500 + "$", "\n" * 2000 + "x"):  # exponential ones would never end
        assert "".join(part for part, _ in split.pre_tokenize_str(text)) == text


@pytest.fixture
def copied(tmp_path, shared) -> Path:
    """A model's folder whose files are links, to put others in their place."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in (shared / "models/stories260K").iterdir():
        (folder / file.name).symlink_to(file)
    return folder


def load_all(folder: Path) -> None:
    model = ModelConfig(path=str(folder))
    load_model(model, "lm", torch.float32, CPU)
    load_tokenizer(model)


@pytest.mark.parametrize("name", HOSTILE_MODELS)
def test_a_model_s_sizes_are_believed_within_reason(name, copied, capfd):
    """Before a layer is made: no division by zero, no hours, no memory that runs out; one sentence."""
    keys, message = HOSTILE_MODELS[name]
    config = json.loads((copied / "config.json").read_text()) | keys
    (copied / "config.json").unlink()
    (copied / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=re.escape(message)) as raised:
        load_all(copied)
    assert "\n" not in str(raised.value)
    main(["score", str(copied), "absent.jsonl"])
    assert capfd.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("name", HOSTILE_FILES)
def test_a_model_s_files_are_read_with_care(name, copied):
    file, text, message = HOSTILE_FILES[name]
    (copied / file).unlink(missing_ok=True)
    (copied / file).write_text(text)
    with pytest.raises(ModelError, match=re.escape(message)) as raised:
        load_all(copied)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 400


class Trap:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def test_pickled_adapters_need_leave(tmp_path, shared):
    """As pickled weights do, with the same setting; an honest one then loads as its safetensors would."""
    base = AutoModelForCausalLM.from_pretrained(shared / "models/stories260K")
    adapter = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    folder = tmp_path / "adapter"
    adapter.save_pretrained(str(folder), save_embedding_layers=False)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(shared / "models/stories260K")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    model = ModelConfig(path=str(folder))
    plain = load_model(model, "lm", torch.float32, CPU).state_dict()
    tensors = load_file(folder / "adapter_model.safetensors")
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors, are missing"):
        load_model(model, "lm", torch.float32, CPU)
    torch.save({"a": Trap(tmp_path / "ran")}, folder / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"pickled ones can run code: .* set model\.allow_pickle: true"):
        load_model(model, "lm", torch.float32, CPU)
    assert not (tmp_path / "ran").exists()
    torch.save(tensors, folder / "adapter_model.bin")
    allowed = load_model(model.model_copy(update={"allow_pickle": True}), "lm", torch.float32, CPU).state_dict()
    assert all(torch.equal(plain[name], allowed[name]) for name in plain)


def test_a_pickled_adapter_in_a_model_of_the_hub_needs_leave(tmp_path, shared, monkeypatch):
    """transformers loads it with the weights beside it; this one lies in the hub's cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--owner--name"
    snapshot = cached / "snapshots/abc"
    shutil.copytree(shared / "models/stories260K", snapshot)
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("abc")
    model = ModelConfig(path="owner/name")
    load_model(model, "lm", torch.float32, CPU)
    (snapshot / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "owner/name", "r": 2}))
    torch.save({"a": Trap(tmp_path / "ran")}, snapshot / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"model owner/name: .* pickled ones .*model\.allow_pickle: true"):
        load_model(model, "lm", torch.float32, CPU)
    assert not (tmp_path / "ran").exists()


# --- bombs ------------------------------------------------------------------------------------------------------------


def bomb(path: Path, content: bytes, megabytes: int) -> Path:
    """A gzip file of few bytes that unpacks to many."""
    with gzip.open(path, "wb") as stream:
        for _ in range(megabytes):
            stream.write(content * (1_000_000 // len(content)))
    return path


BOMBED = {
    "rows.json.gz": b"[" * 1000,
    "rows.jsonl.gz": b'{"text": "' + b"a" * 99_980 + b'"}\n',
    "rows.csv.gz": b"a" * 99_999 + b"\n",
    "rows.txt.gz": b"a" * 99_999 + b"\n",
    "rows.parquet.gz": b"PAR1",
}


@pytest.mark.parametrize("name", BOMBED)
def test_a_gzip_bomb_is_refused_early(name, tmp_path, monkeypatch):
    """In every format, at the limit and not at the end, with the limit's name."""
    monkeypatch.setattr(streams, "FREE_BYTES", 4_000_000)
    path = bomb(tmp_path / name, BOMBED[name], 20)
    count = 0
    with pytest.raises(DataError, match="unpacks to more than 200 times its size, the limit for gzip"):
        for _ in read_files((path,)):
            count += 1
    assert count <= 42  # rows of 100,000 bytes


def test_a_real_bomb_takes_neither_memory_nor_time(tmp_path):
    """A file that unpacks to 1 GB is given up after 64 MB."""
    path = tmp_path / "rows.json.gz"
    path.write_bytes(gzip.compress(b"[" * 25_000_000) * 40)  # members of one gzip file
    assert path.stat().st_size < 1_200_000
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="unpacks to more than 200 times its size, the limit for gzip"):
            list(read_files((path,)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 200_000_000


def test_data_that_repeat_themselves_are_no_bomb(tmp_path):
    path = bomb(tmp_path / "rows.jsonl.gz", b'{"text": "' + b"a" * 10_000 + b'"}\n', 5)
    assert sum(1 for record in read_files((path,)) if record.value) == 5 * 99


def test_one_document_is_no_longer_than_memory_allows(tmp_path, monkeypatch):
    """Plain text that never ends a document; JSON and zipped Parquet, which are read whole."""
    monkeypatch.setattr(streams, "LINE_BYTES", 1000)
    monkeypatch.setattr(streams, "DOCUMENT_BYTES", 5000)
    text = "a line of text\n" * 400
    (tmp_path / "rows.txt").write_text(f"first<|endoftext|>{text}<|endoftext|>last\n")
    rows = [(record.value, record.problem) for record in read_files((tmp_path / "rows.txt",))]
    assert rows[0][0] == {"text": "first"} and rows[2][0] == {"text": "last"}
    assert rows[1] == (None, "a document of more than 1,000 characters")
    (tmp_path / "rows.json").write_text(json.dumps([text]))
    (tmp_path / "rows.parquet.gz").write_bytes(gzip.compress(np.random.default_rng(0).bytes(6000)))
    for name in ("rows.json", "rows.parquet.gz"):
        with pytest.raises(DataError, match="more than 5,000 bytes and must be read whole: convert it to JSONL"):
            list(read_files((tmp_path / name,)))


COLUMN = "    c{0}: ${{data.columns.c{1}}}${{data.columns.c{1}}}\n"
MAPPING = "    c{0}: {{a: '${{data.columns.c{1}}}', b: '${{data.columns.c{1}}}'}}\n"
DOUBLING, MAPPINGS = ("".join(line.format(n, n - 1) for n in range(1, 60)) for line in (COLUMN, MAPPING))
ALIASES = "".join(f"    c{n}: &c{n} [*c{n - 1}, *c{n - 1}]\n" for n in range(1, 60))
BOMBS = {
    "texts that double": ("  columns:\n    c0: xx\n" + DOUBLING, "expand to more than 1,000,000 characters"),
    "empty texts that double": (
        "  columns:\n    c0: ''\n" + DOUBLING,
        "data.columns.c0 is ''",
    ),  # linear: refused later
    "mappings that double": ("  columns:\n    c0: {a: x, b: y}\n" + MAPPINGS, "expand to more than 1,000,000"),
    "a long row of names": (
        "  columns:\n    c0: x\n" + "".join(f"    c{n}: '${{data.columns.c{n + 1}}}'\n" for n in range(1, 3000)),
        "chain of references is too long",
    ),
    "a circle": ("  columns: {a: '${data.columns.b}', b: 'x${data.columns.a}'}\n", "refer to one another in a cycle"),
    "aliases": ("  columns:\n    c0: &c0 [x, x]\n" + ALIASES, "aliases expand too far: more than 100,000 values"),
    "long aliases": (
        "  columns:\n    c0: &c " + "x" * 10_000 + "\n" + "".join(f"    c{n}: *c\n" for n in range(1, 999)),
        "or 2,000,000 characters",
    ),
    "a large file": ("#" * 1_000_000, "it has more than 1,000,000 bytes"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_settings_that_grow_without_bound_are_refused(name, tmp_path):
    text, message = BOMBS[name]
    (tmp_path / "a.yaml").write_text("model: gpt2\nmethod: sft\ndata:\n  source: x\n" + text)
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        load(tmp_path / "a.yaml")
    assert len(str(raised.value)) < 10_000


def test_files_that_extend_more_and_more_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[load.__module__], "MOST_FILES", 10)
    for n in range(30):
        (tmp_path / f"{n}.yaml").write_text(f"extends: [{n + 1}.yaml, {n + 1}.yaml]\n")
    (tmp_path / "30.yaml").write_text("method: sft\n")
    with pytest.raises(ConfigError, match="extends more than 10 files"):
        load(tmp_path / "0.yaml")
    with pytest.raises(ConfigError, match="nested too deeply"):
        load(None, ["model=" + "[" * 500])


# Runs of strangers ----------------------------------------------------------------------------------------------------

SECRET = "the-secret-of-another-user"
IN_RUNS = (
    ".lock", "config.yaml", "run.json", "metrics.jsonl", "training.log", "rollouts.sqlite", "rollouts.sqlite-wal",
    "results.json", "report.html", "notes.json", "checkpoint-2", "checkpoint-2/manifest.json",
    "checkpoint-2/state.json", "tokenizer.json",
    "evaluation/final/summary.json", "evaluation/final/answers.jsonl", "evaluation/final/evaluation.sqlite",
)  # fmt: skip


@contextmanager
def within(seconds: int):
    """TimeoutError after as many seconds, also where a pipe is opened."""

    def late(*_: object) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", ["pipe", "link", "folder link"])
@pytest.mark.parametrize("name", IN_RUNS)
def test_links_and_pipes_in_run_folders_are_not_opened(name, kind, tmp_path, monkeypatch, capsys):
    """By lists, reports, pages and archives: they end, and show nothing from outside."""
    from posttrain.ui.evaluations_page import evaluations_page
    from posttrain.ui.rollouts_page import rollouts_page
    from posttrain.ui.run_page import run_page
    from posttrain.ui.runs_page import runs_page
    from posttrain.ui.viewer import Viewer, attempt

    monkeypatch.chdir(tmp_path)
    shutil.copytree(Path(__file__).parent / "saved_run/run", "runs/saved")
    outside, inside = tmp_path / "outside", Path("runs/saved", name)
    outside.mkdir()
    (outside / "file").write_text(f'{{"step": 1, "loss": 1.0, "{SECRET}": 2.0}}\n')
    inside.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(inside) if inside.is_dir() else inside.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(inside)
    else:
        inside.symlink_to("/" if kind == "folder link" else outside / "file")
    with within(60):
        for words in (
            ["runs", "list"], ["runs", "show", "saved"], ["report", "runs/saved", "--output", "report.html"],
            ["why", "runs/saved", "--step", "2"], ["runs", "export", "saved", "-o", "saved.tar"],
            ["runs", "snapshot", "saved"],
        ):  # fmt: skip
            assert main(words) in (0, 1, 2)
        viewer = Viewer(Path("runs").resolve())
        pages = [
            attempt(page, viewer, "?run=saved&step=2&prompt=0&rollout=0")
            for page in (runs_page, run_page, rollouts_page, evaluations_page)
        ]
    said = capsys.readouterr()
    shown = "".join(map(str, pages)) + said.out + said.err
    written = [file.read_text(errors="replace") for file in Path().glob("report*.html") if file.is_file()]
    assert SECRET not in shown + "".join(written) and "Traceback" not in shown
    if Path("saved.tar").is_file():
        with tarfile.open("saved.tar") as archive:
            assert all(member.isfile() or member.isdir() or member.issym() for member in archive)
            assert not any(
                member.isfile() and SECRET.encode() in archive.extractfile(member).read() for member in archive
            )


def test_only_a_models_folder_beside_the_run_is_archived_as_its_base(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets/key").write_text(SECRET)
    (tmp_path / "secrets/config.json").write_text("{}")
    for target in ("../../secrets", "../other", "/"):
        shutil.rmtree("runs", ignore_errors=True)
        shutil.copytree(Path(__file__).parent / "saved_run/run", "runs/saved")
        Path("runs/other").mkdir()
        Path("runs/saved/base").symlink_to(target)
        with within(60):
            assert main(["runs", "export", "saved", "-o", "saved.tar", "--overwrite"]) == 0
            assert main(["runs", "list"]) == 0
        with tarfile.open("saved.tar") as archive:
            assert archive.getmember("saved/base").issym()
