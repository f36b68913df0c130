"""`posttrain export`: the written model is the trained one, the card tells nothing private, nothing is overwritten."""

import errno
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import go_template
import pytest
import torch
import yaml
from hub_stand_in import TOKEN, Hub
from huggingface_hub import constants
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, GPT2Config

from benchmarks.families import CONFIGS, make
from posttrain import runner
from posttrain.base.errors import ModelError, RunError, VitalSignError
from posttrain.cli import main
from posttrain.config import DataConfig, DevicesConfig, ModelConfig, load
from posttrain.config.options import ExportOptions
from posttrain.data.templates import choose_template
from posttrain.evaluation.records import FORMAT
from posttrain.export import contents, merging, serving, targets
from posttrain.export import export as exporting
from posttrain.export.card import WrittenModel, card, license_of, public
from posttrain.export.export import export
from posttrain.export.serving import EngineFacts, InexpressibleError, turns_of
from posttrain.export.serving import go_template as write_go
from posttrain.export.source import Source
from posttrain.models.lora import routers
from posttrain.runs.inputs import content_of

CPU = DevicesConfig(type="cpu")
IDS = torch.arange(5, 60)[None]


def asked(model, output, **how) -> Path:
    lines: list[str] = []
    folder = export(str(model), ExportOptions(output=Path(output), **how), CPU, lines.append)
    print("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def adapters(scratch_model, tmp_path_factory) -> dict[str, Path]:
    """A LoRA adapter of a policy and one of a reward model, random ones that change the outputs."""
    found = {}
    for name, auto, task in (
        ("policy", AutoModelForCausalLM, TaskType.CAUSAL_LM),
        ("reward", AutoModelForSequenceClassification, TaskType.SEQ_CLS),
    ):
        torch.manual_seed(0)
        base = auto.from_pretrained(scratch_model, **({"num_labels": 1} if name == "reward" else {}))
        base.config._name_or_path = str(scratch_model)
        targets = ["q_proj", "v_proj", "down_proj"]
        model = get_peft_model(base, LoraConfig(task_type=task, r=4, lora_alpha=8, target_modules=targets))
        for key, value in model.named_parameters():
            if "lora_" in key:
                torch.nn.init.normal_(value, std=0.3)
        found[name] = tmp_path_factory.mktemp("adapters") / name
        model.save_pretrained(found[name])
        AutoTokenizer.from_pretrained(scratch_model).save_pretrained(found[name])
    return found


@pytest.fixture(scope="module")
def run(scratch_model, shared, tmp_path_factory) -> Path:
    """A short DPO run with LoRA, in a folder whose name would be private."""
    home = tmp_path_factory.mktemp("private-home")
    shutil.copy(shared / "data/preference-demo/dpo_en_demo.json", home / "secret-project.json")
    settings = {
        "name": "hh", "output_dir": str(home), "model": {"path": str(scratch_model), "lora": {"r": 2}},
        "method": "dpo", "data": {"source": str(home / "secret-project.json"), "format": "sharegpt", "max_rows": 8,
        "max_length": 128, "overlong": "truncate", "system_prompt": "Be brief."},
        "training": {"batch_size": 4, "max_steps": 2, "learning_rate": 1e-2, "warmup_steps": 0},
        "checkpoint": {"save_steps": 1},
    }  # fmt: skip
    (home / "hh.json").write_text(json.dumps(settings))
    config = load(home / "hh.json").config
    assert runner.train(config) == 0
    return home / "hh"


# --- the weights ------------------------------------------------------------------------------------------------------


def test_merged_is_the_adapter(adapters, scratch_model, tmp_path):
    """Plain transformers on the folder = PEFT on base and adapter, both loaded here; the base alone is far off."""
    folder = asked(adapters["policy"], tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    base = AutoModelForCausalLM.from_pretrained(scratch_model).eval()
    with torch.no_grad():
        alone = base(IDS).logits
        want = PeftModel.from_pretrained(base, adapters["policy"]).eval()(IDS).logits
        got = plain(IDS).logits
    error, effect = float((got - want).abs().max()), float((alone - want).abs().max())
    print(f"logits differ by {error:.2g}; without the adapter by {effect:.2g}")
    assert error < 1e-4 < 0.1 < effect
    assert not list(folder.glob("adapter*")) and (folder / "chat_template.jinja").is_file()
    assert AutoTokenizer.from_pretrained(folder).chat_template
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2
    assert {path.stat().st_mode & 0o777 for path in folder.glob("*.safetensors")} == {0o644}


def test_reward_models(adapters, scratch_model, tmp_path):
    folder = asked(adapters["reward"], tmp_path / "out", engines=("vllm",))
    plain = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    base = AutoModelForSequenceClassification.from_pretrained(scratch_model, num_labels=1)
    peft = PeftModel.from_pretrained(base, adapters["reward"]).eval()
    with torch.no_grad():
        pair = [float(model(IDS).logits.squeeze()) for model in (plain, peft.base_model.model)]
    assert pair[0] == pytest.approx(pair[1], abs=1e-4) and plain.config.pad_token_id is not None
    assert "--runner pooling" in (folder / "vllm.sh").read_text()
    assert "pipeline_tag: text-classification" in (folder / "README.md").read_text()


def test_dtype_and_shards(adapters, tmp_path):
    folder = asked(adapters["policy"], tmp_path / "out", dtype="bfloat16", max_shard_size="100KB")
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) == 2 and sorted(file.stat().st_size for file in files)[0] < 101_000  # the embedding is 614 kB
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert set(index) == set(tensors) and {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


def test_an_adapter_that_is_not_merged_stops_the_export(adapters, tmp_path, monkeypatch):
    monkeypatch.setattr(merging, "merged", lambda adapted: adapted.unload())
    with pytest.raises(VitalSignError, match=r"merged = adapter fails: .* differs by .*nothing is exported"):
        asked(adapters["policy"], tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fault", ["swapped", "scaled"])
def test_a_fault_in_the_written_files_stops_the_export(adapters, tmp_path, monkeypatch, fault):
    """One weight of another layer, one by a hundredth too large."""
    cast = merging.to_dtype

    def damaging(model, dtype):
        cast(model, dtype)
        save = model.save_pretrained

        def damaged(folder, **how):
            save(folder, **how)
            tensors = load_file(folder / "model.safetensors")
            name = "model.layers.{}.self_attn.q_proj.weight"
            tensors[name.format(0)] = (
                tensors[name.format(1)].clone() if fault == "swapped" else tensors[name.format(0)] * 1.01
            )
            save_file(tensors, folder / "model.safetensors", {"format": "pt"})

        model.save_pretrained = damaged

    monkeypatch.setattr(merging, "to_dtype", damaging)
    with pytest.raises(VitalSignError, match=r"layers.0.self_attn.q_proj.weight is not in the written files"):
        asked(adapters["policy"], tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_weights_too_large_for_float16(scratch_model, tmp_path):
    big = tmp_path / "big"
    shutil.copytree(scratch_model, big)
    tensors = load_file(big / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"][0, 0] = 1e6
    save_file(tensors, big / "model.safetensors", {"format": "pt"})
    with pytest.raises(VitalSignError, match=r"float16.*try --dtype float32"):
        asked(big, tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_is_merged_and_written(family, tmp_path):
    """Adapters on all linear layers; in each dtype the checks pass, and the adapter is what they are about."""
    model = make(family)
    model.save_pretrained(tmp_path / "base")
    adapted = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"),
        LoraConfig(
            task_type=TaskType.CAUSAL_LM,
            r=4,
            target_modules="all-linear",
            exclude_modules=routers(model) or None,
            fan_in_fan_out=family == "gpt2",
        ),
    )
    for name, value in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(value, std=0.3)
    adapted.save_pretrained(tmp_path / "adapter")
    source = Source(ModelConfig(path=str(tmp_path / "adapter")), family, adapter=True, reward=False)
    prompts = torch.randint(3, 61, (4, 20)).tolist()
    tokenizer = SimpleNamespace(vocab_size=61, bos_token_id=1, eos_token_id=2)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        whole = merging.merge(merging.load_base(source, torch.device("cpu")), source, prompts, tokenizer)
        folder = tmp_path / str(dtype)
        difference = merging.write_and_check(whole, folder, source, prompts, dtype, "5GB")
        print(f"{family} {dtype}: {whole.merging:.2g}, {difference:.2g}; without the adapter {whole.effect:.2g}")
        assert whole.merging < 1e-4 and difference < whole.effect / 2


# --- folders ----------------------------------------------------------------------------------------------------------


def test_nothing_is_overwritten_without_the_flag_and_nothing_foreign_with_it(scratch_model, tmp_path):
    out, mine = tmp_path / "out", tmp_path / "mine"
    asked(scratch_model, out)
    with pytest.raises(RunError, match=r"exists: replace it with --overwrite"):
        asked(scratch_model, out)
    (out / "old").touch()
    asked(scratch_model, out, overwrite=True)
    assert not (out / "old").exists() and (out / "model.safetensors").is_file()
    mine.mkdir()
    (mine / "thesis.txt").touch()
    with pytest.raises(RunError, match=r"has no export.json, so it is not replaced"):
        asked(scratch_model, mine, overwrite=True)
    assert [path.name for path in mine.iterdir()] == ["thesis.txt"]


def test_stages_of_the_same_name_are_not_exported_over_one_another(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("exports/dpo").mkdir(parents=True)
    Path("exports/dpo/export.json").write_text("that of runs/one/dpo")
    shutil.copytree(run, "runs/two/dpo")
    with pytest.raises(
        RunError, match=r"exports/dpo exists: replace it with --overwrite, or give another folder with --o"
    ):
        export("runs/two/dpo", ExportOptions(), CPU, print)
    assert Path("exports/dpo/export.json").read_text() == "that of runs/one/dpo"


def test_a_full_disk(scratch_model, tmp_path, monkeypatch):
    """At the start, and in the middle of writing."""
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(100, 90, 10))
        with pytest.raises(RunError, match=r"no space to write .*nothing was written"):
            asked(scratch_model, tmp_path / "out")

    def full(*arguments, **how):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(exporting, "save_json", full)
    with pytest.raises(RunError, match=r"no space to write .*free some space, or give --output on another disk"):
        asked(scratch_model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_base_and_a_damaged_checkpoint_are_named(adapters, run, tmp_path):
    lone = tmp_path / "lone"
    shutil.copytree(adapters["policy"], lone)
    config = json.loads((lone / "adapter_config.json").read_text())
    (lone / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "/no/such/base"}))
    (tmp_path / "rows.jsonl").write_text("{}")
    with pytest.raises(ModelError, match=r"rows.jsonl is a file: name the folder of a model"):
        asked(tmp_path / "rows.jsonl", tmp_path / "out")
    with pytest.raises(ModelError, match=r"lone is an adapter, and its base model cannot be read: .*/no/such/base"):
        asked(lone, tmp_path / "out")
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    with open(copy / "final/adapter_model.safetensors", "r+b") as file:
        file.seek(2000)
        file.write(b"\xff")
    with pytest.raises(RunError, match=r"final is damaged \(adapter_model.safetensors: SHA-256 differs"):
        asked(copy, tmp_path / "out")
    shutil.rmtree(copy / "final")
    assert exporting.find_source(str(copy)).name == "run-checkpoint-2"
    shutil.copytree(run / "final", copy / "best")
    assert exporting.find_source(str(copy)).name == "run-best"
    with pytest.raises(ModelError, match=r"--no-merge: the base of .* is the folder"):
        asked(run, tmp_path / "out", merge=False)
    assert not (tmp_path / "out").exists()


def test_an_adapter_as_it_is_names_its_base_on_the_hub(adapters, scratch_model, tmp_path, monkeypatch):
    monkeypatch.setattr(contents, "hub_id_of", lambda path: "me/base")
    folder = asked(adapters["policy"], tmp_path / "out", merge=False)
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == "me/base"
    assert "library_name: peft" in (folder / "README.md").read_text()
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(scratch_model), folder)
    stop = AutoTokenizer.from_pretrained(scratch_model).eos_token_id
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": [stop]}
    card = (folder / "README.md").read_text()
    assert f"`<|im_end|>` ({stop})" in card and "stop_token_ids" in card
    assert "stops = GenerationConfig.from_pretrained(" in card and "eos_token_id=stops)" in card
    for ignored in ({"dtype": "bfloat16"}, {"prompts": Path("x")}, {"max_shard_size": "1GB"}, {"engines": ("vllm",)}):
        with pytest.raises(ModelError, match=r"an adapter that is not merged is exported as it is: leave out --"):
            asked(adapters["policy"], tmp_path / "other", merge=False, **ignored)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dtype", "int8"], "--dtype int8: it must be one of auto"),
        (["--for", "olama"], "did you mean ollama"),
        (["--max-shard-size", "5"], "such as 5GB"),
        (["--private"], "give --push-to-hub ID as well"),
        (["--push-to-hub", "a/b/c"], "not a hub id such as me/my-model"),
        (["--push-to-hub", "me/x"], "needs a token with write access: set HF_TOKEN"),
        (["--evaluation", "nowhere"], "nowhere/summary.json is missing"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl cannot be read"),
    ],
)
def test_mistakes_on_the_command_line(words, message, scratch_model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    assert main(["export", str(scratch_model), *words]) != 0
    assert message in capsys.readouterr().err and list(tmp_path.iterdir()) == []


# --- the card ---------------------------------------------------------------------------------------------------------


def write_summary(folder: Path, suite: str, content: str = "", **facts) -> None:
    measured = {"metric": "accuracy", "value": 0.5, "low": 0.4, "high": 0.6, "confidence": 0.95, "items": 20}
    folder.mkdir(parents=True, exist_ok=True)
    whole = {"format": FORMAT, "model": {"name": "hh/final", "content": content}, "suites": {suite: measured | facts}}
    (folder / "summary.json").write_text(json.dumps(whole))


def test_the_card_tells_the_run_and_nothing_private(run, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "abcdef0123456789")
    write_summary(tmp_path, "gsm8k", partial="20 of 1,319 items of abcdef0123456789", ungraded={"too long": 3})
    folder = asked(run, tmp_path / "out", evaluations=(tmp_path,))
    text = (folder / "README.md").read_text()
    header = yaml.safe_load(text.split("---\n")[1])
    assert header == {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["posttrain", "dpo"]}
    facts = json.loads((run / "run.json").read_text())["provenance"]
    results = json.loads((run / "results.json").read_text())
    for part in (facts["dataset_fingerprint"], facts["git_commit"] or "", "| steps | 2 |", "secret-project.json"):
        assert part in text
    assert f"| loss | {results['start']['loss']:.4g} | {results['final']['loss']:.4g} |" in text
    assert "| gsm8k | accuracy | 0.5 | 0.4 to 0.6 (95%) | 20 |" in text and "3 answers are not graded" in text
    assert "Evaluated model: `hh/final`" in text, "the summary's hash is not that of these weights"
    assert "licence of the base model is unknown" in text
    written = "".join(path.read_text() for path in folder.iterdir() if path.suffix in (".md", ".json", ".sh"))
    for private in (str(run.parent), facts["host"], os.path.expanduser("~/"), "abcdef0123456789"):
        assert private not in written, private


def test_the_card_of_a_checkpoint_has_its_own_step_and_no_results_of_the_end(run):
    """And that of a model without a run says nothing about training."""
    facts = WrittenModel("float32", "", (), True), "x", "x"
    middle, end = (card(exporting.find_source(str(run / name)), *facts) for name in ("checkpoint-1", "final"))
    assert "| steps | 1 of 2 |" in middle and "| steps | 2 |" in end
    for part in ("## Results", "| loss |", "| trained tokens |"):
        assert part in end and part not in middle
    alone = card(exporting.find_source(load(run / "config.yaml").config.models[0].path), *facts)
    assert "trained from" not in alone and "A language model, `tiny-qwen3`, exported by posttrain" in alone


def test_evaluations_of_these_weights_are_on_the_card(run, tmp_path, caplog):
    here = tmp_path / "run"
    shutil.copytree(run, here)
    write_summary(here / "evaluation/final", "svamp", content_of(ModelConfig(path=str(here / "final"))))
    source = exporting.find_source(str(here))
    assert [list(found["suites"]) for found in exporting.own_evaluations(source)] == [["svamp"]]
    write_summary(here / "evaluation/final", "svamp", "sha256 of others")
    assert list(exporting.own_evaluations(source)) == []
    assert "evaluation/final was measured on other weights: it is omitted from the model card" in caplog.text


def test_paths_are_only_names():
    here = {
        "/home/ann/data/rows.jsonl": "rows.jsonl",
        "/home/ann b/rows.jsonl": "rows.jsonl",
        "~/rows.jsonl": "rows.jsonl",
        "see /srv/x/y.txt or C:\\Users\\ann\\z.txt": "see y.txt or z.txt",
        "Anthropic/hh-rlhf": "Anthropic/hh-rlhf",
        "data/rows.jsonl": "data/rows.jsonl",
        "https://host/a/b": "https://host/a/b",
        "<think></think> <answer>1/2/3</answer>": "<think></think> <answer>1/2/3</answer>",
    }
    assert public(list(here)) == list(here.values())


def test_the_licence_is_that_of_the_base_or_absent(tmp_path):
    model, own = ModelConfig(path=str(tmp_path)), {"license": "other", "license_name": "my-licence"}
    for text, want in (
        (None, {}),
        ("# No header", {}),
        ("---\nlicense: mit\nfoo: [\n---\n", {}),
        ("---\n- license\n---\n", {}),
        (f"---\n{yaml.safe_dump(own | {'tags': ['x']})}---\n# Base\n", own),
    ):
        if text is not None:
            (tmp_path / "README.md").write_text(text)
        assert license_of(model) == want


# --- chat templates for engines ---------------------------------------------------------------------------------------

TALK = (
    ("user", 'What is {{ 2 }} "plus" 2?\\n', "assistant", "4\n\nor four 🙂", "user", "Straße?\t"),
    ("user", "Hi"),
    ("system", "Be brief.", "user", "Hi", "assistant", "Hello", "user", "And?", "assistant", "So", "user", "Bye"),
    ("user", "Count", "assistant", "one, two,"),
)
BUILT_IN = ("chat", "tags", "r1_zero", "question_only", "alpaca", "chatml")
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
PUBLISHED = (
    "qwen2_5",
    "qwen3",
    "qwen3_instruct_2507",
    "phi3",
    "cohere2",
    "deepseekv3",
    "gemma",
    "gemma3",
    "llama3",
    "inst",
)


def talks() -> list[list[dict[str, str]]]:
    return [
        [{"role": role, "content": content} for role, content in zip(one[::2], one[1::2], strict=True)] for one in TALK
    ]


def tokenizer_with(template: str, shared: Path):
    """A tokenizer with a template of posttrain, or with one of TRL's collection of published ones."""
    tokenizer = AutoTokenizer.from_pretrained(shared / "tokenizers/minimind6400")
    if template in BUILT_IN:
        choose_template(DataConfig(source="x", template=template), tokenizer)
    elif template == "inst":
        tokenizer.chat_template = INST
    else:
        trl = pytest.importorskip("trl", reason="its collection of templates is compared: pip install trl")
        tokenizer.chat_template = (Path(trl.__file__).parent / f"chat_templates/{template}.jinja").read_text()
    return tokenizer


@pytest.mark.parametrize("name", [*BUILT_IN, *PUBLISHED])
def test_ollamas_text_is_trainings(name, shared):
    """For every conversation that the template takes; those that it refuses are errors there, too."""
    tokenizer = tokenizer_with(name, shared)
    written = write_go(turns_of(tokenizer))
    for messages in talks():
        continues = messages[-1]["role"] == "assistant"
        try:
            want = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=not continues, continue_final_message=continues
            )
        except Exception:
            with pytest.raises(go_template.GoError):
                go_template.render(written, messages)
            continue
        if name in ("gemma", "gemma3", "llama3"):  # they strip what is around a message
            messages = [{**one, "content": one["content"].strip()} for one in messages]
        assert go_template.render(written, messages) == want


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ strftime_now('%d') }}{% for m in messages %}{{ m.content }}{% endfor %}", "today's date"),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "does not write each message once"),
        ("{% for m in messages %}{{ loop.index }}: {{ m.content }}{% endfor %}", "depends on more than"),
        ("{% for m in messages %}[{{ m.content | replace('{', '(') }}]{% endfor %}", "changes some messages"),
        ("{{ raise_exception('no') }}", "refuses a conversation of user"),
    ],
)
def test_a_template_of_another_kind_is_refused(template, reason, shared):
    tokenizer = AutoTokenizer.from_pretrained(shared / "tokenizers/minimind6400")
    tokenizer.chat_template = template
    with pytest.raises(InexpressibleError, match=reason):
        turns_of(tokenizer)


@pytest.mark.slow
def test_the_renderer_is_gos(shared, tmp_path):
    """Go's text/template gives the texts of tests/go_template.py. `make build/go` installs Go."""
    go = Path(__file__).parents[1] / "build/go/bin/go"
    if not go.exists():
        pytest.skip("needs Go: make build/go")
    (tmp_path / "main.go").write_text(go_template.GO)
    environment = {**os.environ, "GOTOOLCHAIN": "local", "GOCACHE": str(tmp_path / "cache"), "GO111MODULE": "off"}
    subprocess.run([go, "build", "-o", "render", "main.go"], cwd=tmp_path, env=environment, check=True)
    for name in (*BUILT_IN, *PUBLISHED):
        written = write_go(turns_of(tokenizer_with(name, shared)))
        question = go_template.asked_of_go(written, talks())
        out = subprocess.run([tmp_path / "render"], input=question, capture_output=True, text=True, check=True)
        for messages, answer in zip(talks(), json.loads(out.stdout), strict=True):
            if "error" in answer:
                assert "the chat template refuses this order of roles" in answer["error"]
                with pytest.raises(go_template.GoError):
                    go_template.render(written, messages)
            else:
                assert go_template.render(written, messages) == answer["text"], name


def test_what_engines_need(run, tmp_path):
    folder = asked(run, tmp_path / "out", engines=("ollama", "llama.cpp", "vllm"))
    text = (folder / "Modelfile").read_text()
    template = text.partition('TEMPLATE """')[2].partition('"""')[0]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    want = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert go_template.render(template, messages) == want
    for line in ("FROM ./out-f32.gguf", 'SYSTEM "Be brief."', 'PARAMETER stop "<|im_end|>"', "PARAMETER temperature 1"):
        assert line in text.splitlines()
    for name in ("llama.cpp.sh", "vllm.sh"):
        subprocess.run(["sh", "-n", folder / name], check=True)
        assert os.access(folder / name, os.X_OK) and "--chat-template" in (folder / name).read_text()
        assert '# Trained with a system message, which requests must send: "Be brief."' in (folder / name).read_text()


@pytest.mark.parametrize(
    ("own", "sampled"), [({"temperature": 0.6, "top_p": 0.9}, True), ({"repetition_penalty": 1.1}, False)]
)
def test_sampling_is_that_of_the_model(own, sampled, scratch_model, tmp_path):
    """A temperature without do_sample is what transformers refuses to save; a penalty alone leaves decoding greedy."""
    model = tmp_path / "model"
    shutil.copytree(scratch_model, model)
    (model / "generation_config.json").write_text(json.dumps(own))
    folder = asked(model, tmp_path / "out", engines=("ollama",))
    saved = json.loads((folder / "generation_config.json").read_text())
    assert saved | own == saved and saved.get("do_sample", False) == sampled
    names = {"repetition_penalty": "repeat_penalty"}
    lines = (folder / "Modelfile").read_text().splitlines()
    assert all(f"PARAMETER {names.get(name, name)} {value:g}" in lines for name, value in own.items())


def served(tokenizer, **how) -> EngineFacts:
    facts = {
        "name": "m", "dtype": "bfloat16", "tokenizer": tokenizer, "positions": 40960, "stop_token_ids": (2,),
        "stop": (), "sampling": dict(serving.PLAIN), "sampling_from": "", "chat": True, "system_prompt": None,
        "reward": False,
    }  # fmt: skip
    return EngineFacts(**facts | how)


def test_stop_tokens_and_the_begin_token(shared):
    """A begin token that the tokenizer writes too is not written twice; one that it alone writes is pointed out."""
    tokenizer = AutoTokenizer.from_pretrained(shared / "models/stories260K")
    assert tokenizer("a").input_ids[0] == tokenizer.bos_token_id
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    written, notes = serving.ollama_template(served(tokenizer))
    assert tokenizer.bos_token not in written and notes == []
    assert "add_bos_token" not in serving.llama_cpp(served(tokenizer))
    tokenizer.chat_template = tokenizer.chat_template.removeprefix("{{ bos_token }}")
    assert "set add_bos_token to false" in serving.modelfile(served(tokenizer))
    script = serving.llama_cpp(served(tokenizer, stop_token_ids=(tokenizer.eos_token_id, 1, 5), stop=("END",)))
    assert "--override-kv tokenizer.ggml.add_bos_token=bool:false" in script
    assert "--override-kv tokenizer.ggml.eot_token_id=int:1" in script and '"END"]' in script
    base = serving.modelfile(served(tokenizer, chat=False))
    assert 'TEMPLATE "{{ .Prompt }}"' in base and "num_ctx 8192" in base
    for script in (serving.llama_cpp, serving.vllm):
        assert "# Trained without a chat template: send prompts as in training to /v1/completions" in script(
            served(tokenizer, chat=False)
        )
    assert 'stop "END"' in serving.modelfile(served(tokenizer, stop=("END",)))


def test_a_template_that_cannot_be_written_leaves_a_complete_export(scratch_model, tmp_path):
    odd = tmp_path / "odd"
    shutil.copytree(scratch_model, odd)
    (odd / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content | upper }}{% endfor %}")
    with pytest.raises(ModelError, match=r"out is complete, but without Modelfile for ollama: .*each message once"):
        asked(odd, tmp_path / "out", engines=("ollama", "vllm"))
    assert (tmp_path / "out/chat_template.jinja").is_file() and (tmp_path / "out/vllm.sh").is_file()
    assert not (tmp_path / "out/Modelfile").exists()


# --- the hub ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def there(monkeypatch, tmp_path):
    """A hub, a token for it, and a small exported folder."""
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "README.md").write_text("---\ntags: [posttrain]\n---\n# x\n")
    (folder / "model.safetensors").write_bytes(os.urandom(5000))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between tries
    with Hub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        yield server, folder


def push(folder, overwrite=False, private=False) -> str:
    return targets.push(folder, "me/x", targets.token_for("me/x"), private, overwrite, "from posttrain")


def test_an_upload_is_one_commit_with_every_byte(there, scratch_model, tmp_path, capsys, monkeypatch):
    server, _ = there
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(scratch_model), "--push-to-hub", "me/x", "--private"]) == 0
    repo, folder = server.repos["me/x"], next((tmp_path / "exports").iterdir())
    assert repo.private and len(repo.commits) == 1
    assert {name: data for name, data in repo.files.items() if name != ".gitattributes"} == {
        path.name: path.read_bytes() for path in folder.iterdir()
    }
    assert f"{server.url}/me/x/commit/" in capsys.readouterr().out
    assert 'from_pretrained("me/x")' in (folder / "README.md").read_text()
    assert all(TOKEN.encode() not in data for data in repo.files.values())


def test_what_is_on_the_hub_is_replaced_only_if_asked_and_then_whole(there):
    server, folder = there
    push(folder)
    for name in ("model-00001-of-00002.safetensors", "chat_template.jinja"):
        server.repos["me/x"].files[name] = b"of an earlier model"
    with pytest.raises(ModelError, match=r"me/x already has files .*Replace them with --overwrite"):
        push(folder)
    push(folder, overwrite=True)
    assert set(server.repos["me/x"].files) == {".gitattributes", "README.md", "model.safetensors"}
    server.repos["me/x"].private = False
    with pytest.raises(ModelError, match=r"me/x exists and is public, and --private was given"):
        push(folder, overwrite=True, private=True)


def test_refusals_and_broken_lines(there, monkeypatch):
    """Each says what happened and how to go on; the folder stays, and the hub has no half of it."""
    server, folder = there
    later = r"The export in .*out is complete; upload it later with: hf upload me/x "
    for status, reason in (
        (403, r"refused the upload to me/x \(403\)"),
        (413, "413"),
        (0, "the hub cannot be reached"),
    ):
        server.on_upload = lambda status=status: status
        with pytest.raises(ModelError, match=f"{reason}.*{later}"):
            push(folder)
    server.can_write, server.repos = False, {}
    with pytest.raises(ModelError, match=rf"{later}.* --private"):
        push(folder, private=True)  # else the command would make a public repository
    with pytest.raises(ModelError, match=rf"refused the upload to me/x \(403\): the token in HF_TOKEN .*{later}"):
        push(folder)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ModelError, match=rf"\(401\): the token in HF_TOKEN is invalid.*{later}"):
        push(folder)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match=f"the hub cannot be reached.*{later}"):
        push(folder)
    assert len(list(folder.iterdir())) == 2 and not any(repo.commits for repo in server.repos.values())


def test_ctrl_c_in_an_upload(there, scratch_model, tmp_path, monkeypatch, capsys):
    server, _ = there
    monkeypatch.chdir(tmp_path)
    server.on_upload = lambda: os.kill(os.getpid(), signal.SIGINT)
    assert main(["export", str(scratch_model), "-o", "mine", "--push-to-hub", "me/x"]) == 130
    error = capsys.readouterr().err
    assert "the upload to me/x was interrupted, and nothing was committed there" in error
    assert "hf upload me/x mine" in error and (tmp_path / "mine/model.safetensors").is_file()
    assert server.repos["me/x"].commits == []


# --- several adapters as one ------------------------------------------------------------------------------------------


def adapter_on(base: Path, folder: Path, auto=AutoModelForCausalLM, **how) -> Path:
    """A random adapter of the model in `base`, as PEFT saves it."""
    reward = auto is not AutoModelForCausalLM
    how = {"task_type": TaskType.SEQ_CLS if reward else TaskType.CAUSAL_LM, "r": 4, "lora_alpha": 8} | how
    torch.manual_seed(how["r"])
    model = get_peft_model(auto.from_pretrained(base, **({"num_labels": 1} if reward else {})), LoraConfig(**how))
    for key, value in model.named_parameters():
        if "lora_" in key:
            torch.nn.init.normal_(value, std=0.2)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


def merge_into(base: Path, adapter: Path, folder: Path) -> Path:
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).merge_and_unload().save_pretrained(
        folder
    )
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


@torch.no_grad()
def outputs(model) -> torch.Tensor:
    return model.eval()(IDS).logits


FOLDED = {  # the base, the adapter that was merged into it, the one that was trained then, the rank of both as one
    "other modules": ("qwen3", {"target_modules": ["q_proj", "v_proj"]}, {"target_modules": ["v_proj", "up_proj"]}, 7),
    "scalings": (
        "qwen3",
        {"target_modules": "all-linear", "use_rslora": True, "rank_pattern": {"q_proj": 6}},
        {"target_modules": r".*layers\.1.*(q|o)_proj", "alpha_pattern": {"o_proj": 5}},
        9,
    ),
    "Conv1D": (
        "gpt2",
        {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True},
        {"target_modules": ["c_fc"], "fan_in_fan_out": True},
        7,
    ),
    "reward": (
        "qwen3",
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": ["q_proj"], "auto": AutoModelForSequenceClassification},
        7,
    ),
}


@pytest.mark.parametrize("case", FOLDED)
def test_adapters_are_folded_into_one_of_the_original_base(case, scratch_model, tmp_path):
    """PEFT's original base with the one adapter = the merged base with the other; `--base` names the merged one."""
    family, one, two, rank = FOLDED[case]
    base = scratch_model
    if family == "gpt2":
        base, tokenizer = tmp_path / "model", AutoTokenizer.from_pretrained(scratch_model)
        gpt2 = GPT2Config(vocab_size=len(tokenizer), n_embd=48, n_layer=2, n_head=4, n_positions=512)
        AutoModelForCausalLM.from_config(gpt2).save_pretrained(base)
        tokenizer.save_pretrained(base)
    first = adapter_on(base, tmp_path / "first", **one)
    merged = merge_into(base, first, tmp_path / "merged")
    second = adapter_on(merged, tmp_path / "second", r=3, **two)
    folder = asked(second, tmp_path / "out", fold=True, base=str(first))
    auto = two.get("auto", AutoModelForCausalLM)
    labels = {} if auto is AutoModelForCausalLM else {"num_labels": 1, "pad_token_id": 0}
    want = outputs(PeftModel.from_pretrained(auto.from_pretrained(merged, **labels), second))
    alone = outputs(PeftModel.from_pretrained(auto.from_pretrained(base, **labels), second))
    got = outputs(PeftModel.from_pretrained(auto.from_pretrained(base, **labels), folder))
    error, effect = float((got - want).abs().max()), float((alone - want).abs().max())
    print(f"outputs differ by {error:.2g}; without the first adapter by {effect:.2g}")
    assert error < 1e-4 and error < effect / 20
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (rank, rank, str(base))
    assert {min(t.shape) for n, t in load_file(folder / "adapter_model.safetensors").items() if "lora" in n} == {rank}
    assert "2 adapters folded into one" in (folder / "README.md").read_text()


def test_what_cannot_be_folded_is_refused(scratch_model, tmp_path):
    first = adapter_on(scratch_model, tmp_path / "first", target_modules=["q_proj", "v_proj"])
    merged = merge_into(scratch_model, first, tmp_path / "merged")
    plain = {"target_modules": ["q_proj"], "r": 3}
    second = adapter_on(merged, tmp_path / "second", **plain)
    other = adapter_on(scratch_model, tmp_path / "other", **plain)
    out = {"output": tmp_path / "out", "fold": True}
    with pytest.raises(VitalSignError, match=r"folded = trained fails: .* give the last of them with --base ADAPTER"):
        asked(second, base=str(other), **out)
    with pytest.raises(ModelError, match=r"no adapter is known to be merged into .*merged.*--base ADAPTER"):
        asked(second, **out)
    with pytest.raises(ModelError, match=r"--fold: .* is not an adapter: leave out --fold"):
        asked(merged, **out)
    with pytest.raises(ModelError, match=r"--dtype: .*leave out --dtype"):
        asked(second, base=str(first), dtype="float16", **out)
    for name, more in {
        "lora_magnitude_vector": {"use_dora": True},
        "mlp.up_proj.weight": {"modules_to_save": ["up_proj"]},
        "lora_B.bias": {"lora_bias": True},
        "embed_tokens": {"target_modules": ["embed_tokens"]},
    }.items():
        third = adapter_on(merged, tmp_path / name, **plain | more)
        with pytest.raises(ModelError, match=f"has more than LoRA's two matrices .*{name}.*; leave out --fold"):
            asked(third, base=str(first), **out)
        with pytest.raises(ModelError, match=f"has more than LoRA's two matrices .*{name}"):
            asked(second, base=str(third), **out)
    assert not (tmp_path / "out").exists()
