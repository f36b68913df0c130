"""`posttrain quantize`: plain transformers loads the files, the gate sees one wrong layer, nothing is overwritten."""

import copy
import errno
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import int8_is_wrong
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

from posttrain.base.errors import DataError, ModelError, RunError
from posttrain.base.imports import installing
from posttrain.batch import Example, Node
from posttrain.cli import main
from posttrain.config import DataConfig, DevicesConfig, ModelConfig, RunConfig
from posttrain.config.options import ExportOptions, QuantizeOptions
from posttrain.data import prepare
from posttrain.engines import Sampling, make_engine
from posttrain.evaluation.pairs import margins_of
from posttrain.evaluation.records import read_summary
from posttrain.export import quantize as quantising
from posttrain.export.export import export
from posttrain.export.gate import (
    LIMITS,
    Check,
    cells,
    check_divergence,
    check_margins,
    check_weights,
    diverge,
    drop,
    verdict,
)
from posttrain.export.quantize import quantize
from posttrain.export.rows import GateRows, completions_for
from posttrain.export.source import find_source
from posttrain.models.load import load_model
from posttrain.models.quantised import linear_layers, stored_bytes, weight_of
from posttrain.models.quantised import quantised as make_quantised

pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: the `quant` extra")
pytestmark = pytest.mark.skipif(int8_is_wrong(), reason="PyTorch multiplies 8-bit integers wrongly here")
CPU, DEVICES = torch.device("cpu"), DevicesConfig(type="cpu")
IDS = torch.arange(5, 60)[None]
LAYER = "model.layers.2.self_attn."
TOKENS, RIDGE = 32, 30.0
PRECISIONS = ("int8", "int4")


def loaded(folder: Path, head="lm", dtype=torch.float32, **settings):
    return load_model(ModelConfig(path=str(folder), **settings), head, dtype, CPU)


def written(model: Path, output: Path, to="int8", **how) -> quantising.Quantised:
    lines: list[str] = []
    made = quantize(str(model), QuantizeOptions(to=to, output=output, **how), (), DEVICES, lines.append)
    print("\n".join(lines))
    return made


def beginnings(shared: Path) -> list[str]:
    text = (shared / "data/tinystories/sample.txt").read_text().replace("\n", " ")
    return [sentence.strip() for sentence in text.split(".") if len(sentence.split()) > 4][:80]


@pytest.fixture(scope="module")
def stories(shared, tmp_path_factory) -> Path:
    """stories260K with a key head for each query head: the same function, and queries can take the place of keys."""
    folder = tmp_path_factory.mktemp("stories")
    source = shared / "models/stories260K"
    model = LlamaForCausalLM.from_pretrained(source)
    config, state = copy.deepcopy(model.config), model.state_dict()
    times, size = config.num_attention_heads // config.num_key_value_heads, config.head_dim
    config.num_key_value_heads = config.num_attention_heads
    for name, weight in state.items():
        if "k_proj" in name or "v_proj" in name:
            state[name] = weight.view(-1, size, weight.shape[1]).repeat_interleave(times, 0).flatten(0, 1)
    wide = LlamaForCausalLM.from_pretrained(None, config=config, state_dict=state)
    with torch.no_grad():
        torch.testing.assert_close(wide(IDS).logits, model(IDS).logits, rtol=0, atol=1e-4)
    wide.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def quantised(stories, tmp_path_factory) -> dict[str, quantising.Quantised]:
    """Both precisions of it, written with the gate on built-in prompts."""
    folder = tmp_path_factory.mktemp("quantised")
    return {to: written(stories, folder / to, to, max_completion_length=8) for to in PRECISIONS}


@pytest.fixture(scope="module")
def completions(stories, shared) -> list[Example]:
    """Sampled by the original, one of each prompt."""
    model, tokenizer = loaded(stories), AutoTokenizer.from_pretrained(stories)
    prompts = [tokenizer(text)["input_ids"] for text in beginnings(shared)]
    engine = make_engine("embedded", model, tokenizer)
    groups = engine.generate(prompts, Sampling(max_completion_length=TOKENS), seeds=list(range(len(prompts))))
    engine.close()
    return [
        Example((Node(prompt, children=(Node(group[0].tokens, trained=True),)),), row)
        for row, (prompt, group) in enumerate(zip(prompts, groups, strict=True))
    ]


def damaged(folder: Path, target: Path, how: str) -> Path:
    """The files with one wrong layer: its queries and keys swapped, or its scales one place on."""
    shutil.copytree(folder, target)
    file = target / "model.safetensors"
    state = load_file(file)
    if how == "swapped":
        for name in [name for name in state if name.startswith(f"{LAYER}q_proj.")]:
            other = name.replace("q_proj", "k_proj")
            state[name], state[other] = state[other], state[name]
    else:
        scales = f"{LAYER}q_proj.SCB" if f"{LAYER}q_proj.SCB" in state else f"{LAYER}q_proj.weight.absmax"
        state[scales] = state[scales].roll(1)
    save_file(state, file, metadata={"format": "pt"})
    return target


# --- the files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("to", "most"), [("int8", 0.55), ("int4", 0.35)])
def test_sizes_and_plain_transformers(tmp_path, shared, to, most):
    """At a real model's width: the size of the linear layers, the head and norms as they were, the same outputs."""
    config = LlamaConfig(
        vocab_size=512, hidden_size=512, intermediate_size=1408, num_hidden_layers=1, num_attention_heads=8,
        num_key_value_heads=4, tie_word_embeddings=False, dtype="bfloat16", bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    whole = LlamaForCausalLM(config).to(torch.bfloat16)
    whole.save_pretrained(tmp_path / "wide")
    AutoTokenizer.from_pretrained(shared / "models/stories260K").save_pretrained(tmp_path / "wide")
    made = written(tmp_path / "wide", tmp_path / "made", to, max_completion_length=4)
    layers = linear_layers(whole)
    ours = loaded(made.folder, dtype=torch.bfloat16, attention="sdpa")
    saved, wide = sum(stored_bytes(ours).values()), 2 * sum(layer.weight.numel() for layer in layers.values())
    print(f"{to}: {saved:,} of {wide:,} bytes = {saved / wide:.4f}")
    assert len(stored_bytes(ours)) == len(layers) == 7
    assert saved / wide <= most and saved == made.sizes["linear"] and wide == made.sizes["linear_bfloat16"]
    state = load_file(made.folder / "model.safetensors")
    assert sum(t.nbytes for name, t in state.items() if name.rpartition(".")[0] and "_proj" in name) == saved
    plain = AutoModelForCausalLM.from_pretrained(made.folder)
    for name in ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"):
        assert torch.equal(plain.state_dict()[name], whole.state_dict()[name])
    with torch.no_grad():
        torch.testing.assert_close(plain(IDS).logits, ours(IDS).logits, rtol=0, atol=0.05)
    assert plain.generation_config.eos_token_id == whole.generation_config.eos_token_id


def test_products_that_are_wrong_here_are_refused(stories, quantised, monkeypatch):
    """As those of oneDNN are where it may use AVX2 alone, and PyTorch AVX-512: sums of 16 bits stop at their limit."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: torch.full((len(a), b.shape[1]), 2**15 - 1, dtype=torch.int32))
    original = loaded(stories)
    with pytest.raises(ModelError, match="unset ONEDNN_MAX_CPU_ISA"):
        make_quantised(original, "int8", torch.float32)
    with pytest.raises(ModelError, match="unset ONEDNN_MAX_CPU_ISA"):
        loaded(quantised["int8"].folder)
    loaded(quantised["int4"].folder)


def test_gpt2_sorts_in_8_bits(shared, tmp_path):
    """Its linear layers have their weights transposed. All greedy answers stay right."""
    source = shared / "models/gpt-nano-sort"
    other = tmp_path / "sort"
    model = loaded(source)
    make_quantised(model, "int8", torch.float32).save_pretrained(other)
    plain = AutoModelForCausalLM.from_pretrained(other)
    assert check_weights(model, loaded(other), LIMITS["int8"].weights).verdict == "passed"
    letters = torch.cartesian_prod(*[torch.arange(3)] * 6)[::9]
    ids = torch.cat([letters, letters.sort(dim=1).values], 1)
    with torch.no_grad():
        answers = plain(ids[:, :-1]).logits[:, 5:].argmax(-1)
    assert torch.equal(answers, ids[:, 6:])
    made = written(source, tmp_path / "whole")
    assert "8 prompts" in made.checks[1].of, "the built-in ones, cut to the 11 positions of the model"


@pytest.mark.parametrize("head", ["lm", "reward"])
def test_adapters_are_merged_and_heads_keep_their_precision(scratch_model, tmp_path, head):
    from peft import LoraConfig, TaskType, get_peft_model

    auto, task = (
        (AutoModelForCausalLM, TaskType.CAUSAL_LM)
        if head == "lm"
        else (AutoModelForSequenceClassification, TaskType.SEQ_CLS)
    )
    torch.manual_seed(0)
    base = auto.from_pretrained(scratch_model, **({} if head == "lm" else {"num_labels": 1, "pad_token_id": 0}))
    base.config._name_or_path = str(scratch_model)
    model = get_peft_model(base, LoraConfig(task_type=task, r=4, target_modules=["q_proj", "down_proj"]))
    for name, value in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(value, std=0.1)
    model.save_pretrained(tmp_path / "adapter")
    AutoTokenizer.from_pretrained(scratch_model).save_pretrained(tmp_path / "adapter")
    made = written(tmp_path / "adapter", tmp_path / "made", max_completion_length=4)
    assert not (made.folder / "adapter_config.json").exists() and (made.folder / "tokenizer.json").exists()
    plain, whole = auto.from_pretrained(made.folder), model.merge_and_unload()
    layers = linear_layers(whole)
    for name, layer in linear_layers(plain).items():
        error = (weight_of(layer) - weight_of(layers[name])).norm() / weight_of(layers[name]).norm()
        assert error < 0.02, name
    if head == "reward":
        assert type(plain.score) is nn.Linear and torch.equal(plain.score.weight, whole.score.weight)
        assert [check.name for check in made.checks] == ["weight error"] and "--gate FILE" in made.measured_on


# --- the gate -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", PRECISIONS)
def test_the_gate_passes_a_good_policy_and_fails_one_wrong_layer(stories, quantised, completions, tmp_path, to):
    """By its behaviour alone, and by its weights alone."""
    original = loaded(stories)

    def gate(folder: Path) -> tuple[Check, list[Check]]:
        other = loaded(folder)
        weights = check_weights(original, other, LIMITS[to].weights)
        behaviour = check_divergence(diverge(original, other, completions), LIMITS[to])
        for check in (weights, *behaviour):
            print(to, folder.name, check.name, f"{check.value:.4f}", check.low, check.high, check.verdict)
        return weights, behaviour

    weights, behaviour = gate(quantised[to].folder)
    assert {check.verdict for check in (weights, *behaviour)} == {"passed"}
    for how in ("swapped", "scales"):
        weights, behaviour = gate(damaged(quantised[to].folder, tmp_path / how, how))
        assert weights.verdict == "failed" and LAYER in weights.of
        assert all(check.verdict != "passed" for check in behaviour)


def test_the_divergence_is_that_of_full_logits(stories, quantised, completions):
    """KL and flips of each token = those of plain transformers, one completion at a time."""
    kls, flips = diverge(loaded(stories), loaded(quantised["int4"].folder), completions[:3])
    one, two = (AutoModelForCausalLM.from_pretrained(stories), loaded(quantised["int4"].folder, attention="sdpa"))
    for index, example in enumerate(completions[:3]):
        [root] = example.trees
        prompt, tokens = list(root.tokens), list(root.children[0].tokens)
        ids = torch.tensor([prompt + tokens])
        with torch.no_grad():
            p, q = (model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1) for model in (one, two))
        torch.testing.assert_close(torch.tensor(kls[index]), (p.exp() * (p - q)).sum(-1), rtol=0, atol=1e-4)
        assert flips[index] == (p.argmax(-1) != q.argmax(-1)).float().tolist()


@pytest.fixture(scope="module")
def reward_model(shared, stories, tmp_path_factory) -> tuple[Path, list[dict[str, str]]]:
    """A reward model that tells sentences from shuffled ones: a linear probe on the stories' backbone; and pairs."""
    folder = tmp_path_factory.mktemp("reward")
    random, rows = torch.Generator().manual_seed(0), []
    for sentence in beginnings(shared) * 10:
        words = sentence.split()
        tail = words[2:]
        mixed = [tail[place] for place in torch.randperm(len(tail), generator=random)]
        if mixed != tail:
            rows.append(
                {"prompt": " ".join(words[:2]), "chosen": " " + " ".join(tail), "rejected": " " + " ".join(mixed)}
            )
    tokenizer = AutoTokenizer.from_pretrained(stories)
    model = AutoModelForSequenceClassification.from_pretrained(stories, num_labels=1)
    texts = [row["prompt"] + row[name] for row in rows[:200] for name in ("chosen", "rejected")]
    ids = [torch.tensor([*tokenizer(text)["input_ids"], tokenizer.eos_token_id]) for text in texts]
    last = torch.tensor([len(one) - 1 for one in ids])
    with torch.no_grad():
        states = model.model(nn.utils.rnn.pad_sequence(ids, batch_first=True))[0][torch.arange(len(ids)), last]
        wide = states[0::2] - states[1::2]
        model.score.weight[:] = torch.linalg.solve(wide.T @ wide + RIDGE * torch.eye(64), wide.sum(0))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, rows


@pytest.mark.slow
@pytest.mark.parametrize("to", ["int8", "int4"])
def test_the_gate_of_a_reward_model(reward_model, shared, tmp_path, to, capsys):
    """Passed by a good one, through the command; failed by one wrong layer, on the same pairs."""
    folder, rows = reward_model
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    command = ["quantize", str(folder), "--to", to, "--gate", str(file), "-o", str(tmp_path / "made")]
    assert main(command) == 0
    out = capsys.readouterr().out
    print(out)
    assert "The gate is passed." in out and max(map(len, out.splitlines())) <= 120
    facts = json.loads((tmp_path / "made/quantization.json").read_text())
    assert facts["gate"]["passed"] and facts["gate"]["checks"][1]["before"] > 0.8
    questions = str(shared / "data/gsm8k/test.jsonl")
    assert main(["quantize", str(folder), "--to", to, "--suite", "gsm8k", "--data", questions]) == 1
    assert "is a reward model" in capsys.readouterr().err
    pairs = prepare(DataConfig(source=str(file), template="none"), AutoTokenizer.from_pretrained(folder), "pair").train
    examples = [pairs[index] for index in range(len(pairs))]
    before = margins_of(loaded(folder, "reward"), examples, len(examples), "original")
    for how in ("swapped", "scales")[: 1 if to == "int8" else 2]:
        other = loaded(damaged(tmp_path / "made", tmp_path / how, how), "reward")
        checks = check_margins(before, margins_of(other, examples, len(examples), how), LIMITS[to])
        for check in checks:
            print(to, how, check)
        assert any(check.verdict != "passed" for check in checks)


def test_verdicts():
    """A check passes by the end of its interval; the value alone within the limit is not enough."""
    assert [verdict(0.1, high, 0.2) for high in (0.2, 0.21, None)] == ["passed", "unsure", "unsure"]
    assert verdict(0.3, 0.4, 0.2) == verdict(float("nan"), None, 0.2) == "failed"
    right = [1.0] * 50 + [0.0] * 50
    same, few = drop("x", right, right, 0.03, ""), drop("x", right[40:60], right[40:60], 0.03, "")
    assert (same.value, same.verdict, few.verdict) == (0.0, "passed", "unsure")
    worse = drop("x", right, [0.0] * 10 + right[10:], 0.03, "")
    assert worse.value == pytest.approx(0.1) and worse.verdict == "failed" and (worse.before, worse.after) == (0.5, 0.4)
    assert drop("x", right, [1.0] * 60 + [0.0] * 40, 0.03, "").verdict == "passed"  # better is not worse


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def run(shared, stories, tmp_path, monkeypatch) -> list[str]:
    """A run folder with a best model, and the command that quantises it with a gate of four prompts."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(stories, "run/best")
    shutil.copy(Path(__file__).parent / "saved_run/run/run.json", "run/run.json")
    Path("prompts.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in beginnings(shared)[:4]))
    return ["quantize", "run", "--to", "nf4", "--gate", "prompts.jsonl", "--max-completion-length", "8"]


def test_a_model_of_a_run_and_the_exit_status(run, capsys):
    """Its place in the run; status 3 with the reason; it is replaced only with --overwrite; leftovers are named."""
    Path("run/quantized_int4/best.tmp-1234567").mkdir(parents=True)
    assert main(run) == 3
    shown = capsys.readouterr()
    print(shown.out)
    assert "best.tmp-1234567 was left unfinished by a killed process" in shown.err
    assert "cannot be read" in shown.err and "too few rows" in shown.out  # its settings; the gate
    made = Path("run/quantized_int4/best")
    facts = json.loads((made / "quantization.json").read_text())
    assert not facts["gate"]["passed"] and facts["to"] == "int4" and facts["gate"]["rows"] == "prompts.jsonl"
    before = (made / "quantization.json").read_bytes()
    assert main(run) == 1 and "replace it with --overwrite" in capsys.readouterr().err
    assert (made / "quantization.json").read_bytes() == before
    assert main([*run, "--max-kl", "0", "--overwrite"]) == 3
    assert "more than the limits" in capsys.readouterr().out
    assert main(["score", str(made), "prompts.jsonl", "--format", "text"]) == 1  # no text in them
    assert "text" in capsys.readouterr().err


def test_gates_of_another_format_than_the_runs(stories, tmp_path):
    """Prompts for a run on pairs, pairs under the names of its columns, and rows that are neither."""
    columns = {"prompt": "ask", "chosen": "good", "rejected": "bad"}
    data = {"source": "gone.jsonl", "format": "preference", "columns": columns, "template": "none"}
    config = RunConfig.model_validate({"models": [{"path": str(stories)}], "method": {"type": "dpo"}, "data": data})
    model, tokenizer = loaded(stories), AutoTokenizer.from_pretrained(stories)

    def gate(**row: str) -> GateRows:
        (tmp_path / "gate.jsonl").write_text(json.dumps(row))
        source = replace(find_source(str(stories)), config=config)
        options = QuantizeOptions(to="int8", gate=(tmp_path / "gate.jsonl",), max_completion_length=2)
        return completions_for(options, source, model, tokenizer)

    asked = tokenizer("Once upon a time")["input_ids"]
    for row in ({"prompt": "Once upon a time"}, {"ask": "Once upon a time", "good": " x", "bad": " y"}):
        examples, origin = gate(**row)
        assert [one.trees[0].tokens for one in examples] == [asked] and origin == "gate.jsonl"
    with pytest.raises(DataError, match=r"no column 'ask' .for prompt.; it has foo"):
        gate(foo="1")


@pytest.mark.slow
def test_a_suite_before_and_after(run, shared, capsys):
    """Its records are beside the model, under the model's final path."""
    questions = (shared / "data/gsm8k/test.jsonl").read_text().splitlines()[:2]
    Path("gsm8k.jsonl").write_text("\n".join(questions))
    assert main([*run, "--suite", "gsm8k", "--data", "gsm8k.jsonl"]) == 3
    made = Path("run/quantized_int4/best")
    checks = json.loads((made / "quantization.json").read_text())["gate"]["checks"]
    assert checks[-1]["name"] == "gsm8k lost" and checks[-1]["of"] == "2 items"
    paths = [read_summary(made / "evaluation" / side)["model"]["path"] for side in ("original", "quantized")]
    assert [Path(path).name for path in paths] == ["best", "best"] and paths[1] == str(made)


@pytest.mark.parametrize(
    ("arguments", "message", "status"),
    [
        (["MODEL", "--to", "int7"], "did you mean int8", 2),
        (["nowhere/at/all", "--to", "int8"], "no such folder", 1),
        ([".", "--to", "int8"], "no model", 1),
        (["MADE", "--to", "int4"], "is already quantised (bitsandbytes)", 1),
        (["MODEL", "--to", "int8", "--gate", "absent.jsonl"], "absent.jsonl", 1),
        (["MODEL", "--to", "int8", "--gate", "broken.jsonl"], "broken.jsonl", 1),
        (["MODEL", "--to", "int8", "--data", "x.jsonl"], "--suite", 2),
        (["MODEL", "--to", "int8", "-o", "mine"], "so it is not replaced", 1),
        (["MODEL", "--to", "int8", "--dtype", "float64"], "--dtype", 2),
    ],
)
def test_mistakes_are_named_and_write_nothing(
    stories, quantised, tmp_path, monkeypatch, capsys, arguments, message, status
):
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("all of it")
    Path("broken.jsonl").write_text('{"prompt": \nnot json\n')
    names = {"MODEL": str(stories), "MADE": str(quantised["int8"].folder)}
    assert main(["quantize", *(names.get(word, word) for word in arguments)]) == status
    error = capsys.readouterr().err
    print(error)
    assert message in error and "Traceback" not in error
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["broken.jsonl", "mine", "thesis.txt"]


def test_without_bitsandbytes(stories, quantised, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    assert main(["quantize", str(stories), "--to", "int8"]) == 1
    assert installing("quant") in capsys.readouterr().err
    with pytest.raises(Exception, match=r"its weights are quantised.*\[quant\]"):
        loaded(quantised["int8"].folder)


@pytest.mark.parametrize(
    ("fault", "message"),
    [(OSError(errno.ENOSPC, "No space left on device"), "no space"), (KeyboardInterrupt(), "nothing was written")],
)
def test_a_fault_in_the_middle_leaves_nothing(stories, tmp_path, monkeypatch, capsys, fault, message):
    """After the weights are on the disk, in the gate."""

    def fail(*arguments):
        assert list(tmp_path.glob("models/*.tmp-*/model.safetensors"))
        raise fault

    monkeypatch.setattr("posttrain.export.gate.check_weights", fail)
    command = ["quantize", str(stories), "--to", "int8", "-o", str(tmp_path / "models/made"), "--max-rows", "1"]
    assert main([*command, "--max-completion-length", "2"]) in (1, 130)
    assert message in capsys.readouterr().err and list(tmp_path.glob("models/*")) == []


def test_quantised_weights_are_not_trained(quantised, tmp_path, capsys, monkeypatch):
    """By full fine-tuning or in 8 bits; LoRA on 4 bits is."""
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"prompt": "Once", "completion": " upon"}\n' * 4)
    settings = ["method=sft", "data.source=rows.jsonl", "data.template=none", "training.max_steps=1", "name=x"]
    assert main(["train", f"model={quantised['int4'].folder}", *settings]) == 1
    assert "its weights are quantised" in capsys.readouterr().err
    assert main(["train", f"model={quantised['int8'].folder}", "model.lora={r: 2}", *settings]) == 1
    assert "its weights are quantised" in capsys.readouterr().err
    assert main(["train", f"model={quantised['int4'].folder}", "model.lora={r: 2}", *settings]) == 0


def test_an_export_is_a_copy_with_the_gate_on_the_card(quantised, tmp_path):
    """Of a run's model, whose training is on the card, too. Nothing of it is private, damage is an error."""
    made = quantised["int8"]
    place = tmp_path / "run/quantized_int8/final"
    shutil.copytree(made.folder, place)
    shutil.copy(Path(__file__).parent / "saved_run/run/run.json", tmp_path / "run/run.json")
    facts = json.loads((place / "quantization.json").read_text())
    facts["model"]["path"] = str(tmp_path / "private/stories")
    (place / "quantization.json").write_text(json.dumps(facts))
    (place / "optimizer.bin").touch()
    out = export(str(place.parent), ExportOptions(output=tmp_path / "out"), DEVICES, print)
    names = {path.name for path in out.iterdir()}
    assert names == {path.name for path in made.folder.iterdir()} | {"README.md", "export.json"}
    assert (out / "model.safetensors").read_bytes() == (made.folder / "model.safetensors").read_bytes()
    with torch.no_grad():
        logits = [AutoModelForCausalLM.from_pretrained(folder)(IDS).logits for folder in (out, made.folder)]
    assert torch.equal(*logits)
    text = (out / "README.md").read_text()
    assert f"its gate (posttrain quantize, {made.measured_on}) is {'' if made.passed else 'not '}passed:" in text
    for check in made.checks:
        assert f"| {' | '.join(cells(check))} | {check.of} |" in text
    assert "Weights: LLM.int8 (bitsandbytes) in linear layers, float32 elsewhere." in text and "## Training" in text
    assert str(tmp_path) not in text + (out / "quantization.json").read_text()
    with pytest.raises(ModelError, match=r"--for: a quantised model is exported as it is: leave out --for"):
        export(str(place), ExportOptions(output=tmp_path / "other", engines=("ollama",)), DEVICES, print)
    for damage in ({"gate": {}}, {"gate": None}, {"model": {}}, {"dtype": "float8"}):
        (place / "quantization.json").write_text(json.dumps(facts | damage))
        with pytest.raises(RunError, match=r"quantization.json is damaged.*: quantise the model again"):
            export(str(place), ExportOptions(output=tmp_path / "other"), DEVICES, print)
    (place / "quantization.json").write_text(json.dumps(facts | {"model": {"name": "../../elsewhere"}}))
    assert find_source(str(place)).name == "elsewhere-int8", "a name is no path out of exports/"
    (place / "quantization.json").unlink()
    with pytest.raises(ModelError, match=r"is quantised, and not by posttrain quantize"):
        export(str(place), ExportOptions(output=tmp_path / "other"), DEVICES, print)
    assert not (tmp_path / "other").exists()
