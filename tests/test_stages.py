"""Stages: settings laid over the common ones, a model handed from one to the next, going on where it stopped."""

import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from data_tokenizer import byte_tokenizer
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from posttrain import runner
from posttrain.base.errors import ConfigError, PosttrainError, RunError, WeightsError
from posttrain.batch import Example, Node, pack, sequences
from posttrain.cli import main
from posttrain.config import ModelConfig, Stage, dump, held_out_together, load
from posttrain.data import prepare_run
from posttrain.models.load import load_model
from posttrain.planning.activations import empty_model
from posttrain.planning.estimate import count, estimate
from posttrain.runner.pipeline import Pipeline
from posttrain.training.loop import Loop

COMMON = """name: chain
model: gpt2
data: {source: rows.jsonl}
training: {learning_rate: 1e-5, max_steps: 7}
"""
TWO = """stages:
  dpo:
    init_from: sft
    method: {type: dpo, beta: 0.2}
    model: {lora: {r: 4}}
  sft:
    method: sft
    data: {format: messages}
    training: {learning_rate: 2e-5}
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def _write(text: str, name: str = "a.yaml") -> str:
        Path(name).write_text(text, encoding="utf-8")
        return name

    return _write


# --- settings -------------------------------------------------------------------------------------------------------


def test_a_stage_overrides_what_stands_above_it(write):
    sft, dpo = load(write(COMMON + TWO)).stages
    assert (sft.name, sft.init_from, dpo.name, dpo.init_from) == ("sft", None, "dpo", "sft")
    assert (sft.config.data.source, sft.config.data.format) == ("rows.jsonl", "messages")
    assert (dpo.config.data.source, dpo.config.data.format) == ("rows.jsonl", "auto")
    assert (sft.config.training.learning_rate, dpo.config.training.learning_rate) == (2e-5, 1e-5)
    assert sft.config.training.max_steps == dpo.config.training.max_steps == 7
    assert sft.config.models[0].lora is None and dpo.config.models[0].lora is not None
    assert {stage.config.name for stage in (sft, dpo)} == {"chain"}


def test_rewards_of_an_evaluation_set_may_come_from_a_stage(write, tmp_path):
    text = (
        COMMON
        + """stages:
  judge: {method: reward, data: {format: hh, template: none}}
  sft:
    method: sft
    evaluation:
      datasets: [{name: held_out, source: rows.jsonl, rewards: [{type: model, from: judge}]}, {name: b, source: c}]
"""
    )
    sft = Pipeline(load(write(text)).stages, tmp_path / "run").tasks[1].config
    assert sft.evaluation.datasets[0].rewards[0].path == str(tmp_path / "run/judge/final")
    assert sft.evaluation.datasets[1].rewards is None
    with pytest.raises(ConfigError, match="nobody is not an earlier stage that trains a reward model; known: judge"):
        Pipeline(load(write(text.replace("from: judge", "from: nobody"))).stages, tmp_path / "run")


def test_precedence_and_one_stage_by_its_name(write):
    """The command line is over every stage, `stages.NAME.` over one, and over what is said of all."""
    given = ["training.learning_rate=3e-5", "stages.dpo.training.learning_rate=4e-5", "stages.dpo.method.beta=0.3"]
    sft, dpo = load(write(COMMON + TWO), given, {"training.max_steps": "2"}).stages
    assert (sft.config.training.learning_rate, dpo.config.training.learning_rate) == (3e-5, 4e-5)
    assert (sft.config.training.max_steps, dpo.config.training.max_steps) == (2, 2)
    assert dpo.config.method.type == "dpo" and dpo.config.method.beta == 0.3


THREE = """stages:
  sft: {method: sft}
  ppo: {method: ppo, init_from: sft, rewards: [{type: math}]}
  dpo: {method: dpo, init_from: sft}
"""


def test_the_command_line_is_for_the_stages_that_read_it(write):
    """An error only if none does, or if it names the stage."""
    given = ["method.kl_coef=0.3", "method.assistant_only_loss=true", "rewards.0.weight=2"]
    sft, ppo, dpo = load(write(COMMON + THREE), given, {"method.num_generations": "3"}).stages
    assert sft.config.method.assistant_only_loss and dpo.config.method.assistant_only_loss
    assert ppo.config.method.num_generations == 3
    assert (ppo.config.method.kl_coef, dpo.config.method.beta) == (0.3, 0.3)
    assert ppo.config.rewards[0].weight == 2 and not sft.config.rewards
    of_one = ["stages.dpo.rewards=[{type: math}]", "stages.dpo.data={source: x, validation: {rows: 5}}"]
    _, ppo, dpo = load(write(COMMON + THREE), [*of_one, "rewards.0.weight=3"]).stages
    assert (ppo.config.rewards[0].weight, dpo.config.rewards[0].weight) == (3, 3)
    for wrong in ("stages.sft.method.num_generations=4", "method.num_trees=2", "stages.sft.rewards.0.weight=2"):
        with pytest.raises(ConfigError, match=re.escape(f"override {wrong}")):
            load(write(COMMON + THREE), [wrong])


def test_stages_are_inherited_by_name(write):
    write(COMMON + TWO, "base.yaml")
    stages = load(write("extends: base.yaml\nstages: {sft: {seed: 5}, more: {method: sft, init_from: dpo}}\n")).stages
    assert [(s.name, s.init_from, s.config.seed) for s in stages] == [
        ("sft", None, 5),
        ("dpo", "sft", 0),
        ("more", "dpo", 0),
    ]
    assert stages[0].config.training.learning_rate == 2e-5


def test_interpolation_sees_the_stage(write):
    text = COMMON.replace("max_steps: 7", "max_steps: '${training.batch_size}'") + TWO
    stages = load(write(text), ["stages.sft.training.batch_size=3"]).stages
    assert [s.config.training.max_steps for s in stages] == [3, 16]


def test_dumped_stages_load_back_equal(write):
    stages = load(write(COMMON + TWO)).stages
    text = dump(stages)
    assert load(write(text, "b.yaml")).stages == stages
    assert text.index("evaluation:") < text.index("stages:")  # what they share is said once, above
    several = COMMON.replace("model: gpt2", "models: [gpt2, {path: a/b, lora: {r: 2}}]") + TWO
    stages = load(write(several)).stages
    assert [m.lora and (m.lora.r, m.lora.alpha) for m in stages[1].config.models] == [(4, 32), (4, 32)]
    assert load(write(dump(stages), "b.yaml")).stages == stages


@pytest.mark.parametrize(
    ("text", "given", "message"),
    [
        (TWO.replace("m: sft", "m: stf"), [], r"a\.yaml:7: stage dpo: init_from: there is no stage stf; did you mean"),
        (TWO, ["stages.sft.init_from=dpo"], r"in a cycle: dpo <- sft <- dpo|in a cycle: sft <- dpo <- sft"),
        (TWO, ["stages.sft.init_from=sft"], r"in a cycle: sft <- sft"),
        (TWO, ["stages.dop.seed=1"], r"there is no stage dop; did you mean dpo\?"),
        (TWO, ["stages.dpo.name=x"], r"name belongs to the whole run"),
        (TWO, ["stages.dpo.model.path=b"], r"starts from the final model of another stage, but names a different"),
        (TWO, ["stages.sft.method.beta=1"], r"stage sft: override stages.*: method\.beta is not a setting of sft"),
        (TWO, ["data.fromat=x"], r"^override data\.fromat=x: data\.fromat is not a setting"),
        (TWO.replace("    method: sft\n", ""), [], r"stage sft: method is missing"),
        (TWO.replace("format: messages", "formt: messages"), [], r"stage sft: a\.yaml:12: data\.formt is not"),
        (TWO + "    output_dir: x\n", [], r"a\.yaml:14: output_dir belongs to the whole run"),
        ("stages: []\n", [], r"a\.yaml:5: stages must be a mapping of names"),
        ("stages: {}\n", [], r"stages must be a mapping of names"),
        ("stages: {final: {method: sft}}\n", [], r"a stage cannot be called 'final'"),
        ("stages: {a/b: {method: sft}}\n", [], r"a stage cannot be called 'a/b'"),
        ("stages: {..: {method: sft}}\n", [], r"a stage cannot be called '..'"),
        ('stages: {"a\\e[2J": {method: sft}}\n', [], r"a stage cannot be called 'a.x1b\[2J'"),
        (f"stages: {{{'a' * 201}: {{method: sft}}}}\n", [], r"at most 200 letters, digits"),
        ("stages: {a: 3}\n", [], r"the stage a must be a mapping"),
        ("method: sft\n", ["stages.dpo.seed=1"], r"the settings have no stages"),
        ("method: sft\ninit_from: sft\n", [], r"init_from is not a setting; it goes inside a stage"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_stages_is_said(write, text, given, message):
    with pytest.raises(ConfigError, match=message):
        load(write(COMMON + text), given)


def test_one_set_of_settings_where_one_is_needed(write):
    with pytest.raises(ConfigError, match=r"have several stages \(sft, dpo\)"):
        _ = load(write(COMMON + TWO)).config


@pytest.fixture
def numbered(tmp_path):
    """The same 60 pairs as JSONL, Parquet and, the other way round with a further column, JSON; half of them apart."""
    rows = [{"prompt": f"<{n}>" + "p" * (n % 9), "chosen": "c" * (n % 7 + 1), "rejected": "r" * 9} for n in range(60)]
    for name, some in (("rows", rows), ("half", rows[30:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    (tmp_path / "rows.json").write_text(json.dumps([{"note": None, **row} for row in reversed(rows)]))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    return tmp_path


TEN = {"rows": 10}


@pytest.mark.parametrize(
    "stages",
    [
        {"one": {"data": {"validation": TEN}}, "two": {"data": {"max_length": 12, "validation": TEN}}},
        {"one": {"data": {"validation": TEN}}, "two": {"method": "dpo"}},
        {"one": {}, "two": {"method": "dpo", "data": {"validation": {"ratio": 0.3}}}},
        {"one": {"seed": 1, "data": {"validation": TEN}}, "two": {"data": {"validation": {"rows": 11}}}},
        {"one": {"data": {"validation": TEN}}, "two": {"data": {"max_rows": 40, "validation": TEN}}, "three": {}},
        {"one": {"data": {"source": "rows.parquet", "validation": TEN}}, "two": {"data": {"source": "rows.json"}}},
        {"one": {"data": {"skip_rows": 20, "validation": TEN}}, "two": {"method": "dpo", "data": {"validation": TEN}}},
        {
            "one": {"data": {"source": [{"source": "half.jsonl", "weight": 3}, "rows.parquet"], "validation": TEN}},
            "two": {"method": "dpo", "data": {"source": "half.jsonl", "validation": {"ratio": 0.2}}},
        },
        {
            "one": {"data": {"columns": {"prompt": "rejected", "completion": "prompt"}, "format": "prompt_completion"}},
            "two": {"method": "dpo", "data": {"validation": TEN}},
        },
        {
            "one": {"data": {"source": "builtin:arithmetic", "max_rows": 60, "validation": TEN}},
            "two": {"method": "dpo", "data": {"source": "builtin:arithmetic-preference", "max_rows": 50}},
            "three": {"method": "kto", "data": {"source": "builtin:arithmetic-kto", "max_rows": 50, "validation": TEN}},
        },
    ],
)
def test_no_stage_trains_on_what_another_holds_out(numbered, monkeypatch, stages):
    monkeypatch.chdir(numbered)
    common = {"source": "rows.jsonl", "template": "none"}
    file = {"model": "gpt2", "method": "sft", "data": common, "stages": stages}
    trained, validated, tokenizer = {}, {}, byte_tokenizer()
    for stage in held_out_together(load(file).stages):
        prepared = prepare_run(stage.config, tokenizer)
        named = re.compile(r"<\d+>|What is .*\?")
        for sets, data in ((trained, prepared.train), (validated, prepared.validation.get("validation"))):
            texts = [tokenizer.decode(ids) for example in data or () for ids, _ in sequences(example.trees[0])]
            sets[stage.name] = {named.search(text)[0] for text in texts if named.search(text)}
    held_out = set.union(*validated.values())
    assert len(held_out) >= 8
    for name, some in trained.items():
        assert len(some) >= 10 and not some & held_out, name


def test_what_stages_hold_out_is_part_of_each_runs_settings(write):
    """Filled in once, and read back; a stage that holds out the same rows needs none; by the old rule there is none."""
    text = COMMON + TWO.replace("method: sft", "method: sft\n    seed: 3\n    data: {validation: {rows: 5}}").replace(
        "    data: {format: messages}\n", ""
    )
    sft, dpo = held_out_together(load(write(text)).stages)
    assert sft.config.data.excluded == () and dpo.config.data.excluded[0].seed == 3
    again = held_out_together((sft, dpo))
    assert again == (sft, dpo) and load(dump(dpo.config) and write(dump(dpo.config), "b.yaml")).config == dpo.config
    old = load(write("behavior_version: 1\n" + text)).stages
    assert held_out_together(old) == old


# --- training -------------------------------------------------------------------------------------------------------


def chain(tmp_path: Path, shared: Path, model: Path, **sections) -> tuple[Stage, ...]:
    """SFT with an adapter; a reward model and DPO, each on its final model, DPO with an adapter of its own."""
    hh = {"source": str(shared / "data/hh-harmless"), "format": "hh"}
    settings = {
        "name": "chain",
        "output_dir": str(tmp_path),
        "model": str(model),
        "data": {"max_rows": 16, "max_length": 400, "source": str(shared / "data/gsm8k/train.jsonl")},
        "training": {"batch_size": 4, "max_steps": 2, "learning_rate": 1e-3, "warmup_steps": 0},
        "tracking": {"logging_steps": 1},
        "checkpoint": {"save_steps": 1},
        "stages": {
            "sft": {"method": "sft", "model": {"lora": {"r": 4}}, "data": {"template": "tags"}},
            "reward": {"init_from": "sft", "method": "reward", "data": hh},
            "dpo": {"init_from": "sft", "method": "dpo", "model": {"lora": {"r": 2}}, "data": hh},
        },
    }
    if "models" in sections:
        del settings["model"]
    settings |= sections
    file = tmp_path / "chain.json"
    file.write_text(json.dumps(settings))
    return load(file).stages


LORA = {"r": 4, "alpha": 8, "dropout": 0.0}


def continued(tmp_path: Path, shared: Path, model: Path, **stages) -> Path:
    """The run's folder, its settings in `chain.json`: SFT with an adapter, then these stages with the same `lora`."""
    hh = {"source": str(shared / "data/hh-harmless"), "format": "hh", "template": "tags"}
    strong = {"batch_size": 4, "max_steps": 2, "learning_rate": 0.05, "warmup_steps": 0}  # far from the base
    first = {"method": "sft", "data": {"template": "tags"}, "training": strong}
    later = {name: {"init_from": "sft", "data": hh, **stage} for name, stage in stages.items()}
    every = {name: stage | {"model": {"lora": LORA}} for name, stage in {"sft": first, **later}.items()}
    chain(tmp_path, shared, model, stages=every)
    return tmp_path / "chain"


def lines(folder: Path) -> list[dict]:
    times = ("time", "seconds", "second", "memory")
    read = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not any(part in k for part in times)} for line in read]


def test_a_stage_with_the_same_lora_continues_the_adapter(tmp_path, shared, scratch_model):
    """`final/` is an adapter of the original base. The reference is the model as the stage began, not the base alone:
    DPO is what it is with SFT's model as `ref_model`. A reward stage continues the backbone's adapter."""
    labelled = {"source": str(tmp_path / "labelled.jsonl"), "format": "kto", "template": "tags"}
    rows = [{"prompt": f"Say {n}.", "completion": f"{n}", "label": n % 2 == 0} for n in range(8)]
    Path(labelled["source"]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = continued(
        tmp_path, shared, scratch_model,
        dpo={"method": "dpo"},
        named={"method": {"type": "dpo", "ref_model": str(tmp_path / "chain/sft/final")}},
        precomputed={"method": {"type": "dpo", "precompute_ref_log_probs": True}},
        kto={"init_from": "dpo", "method": "kto", "data": labelled},
        reward={"method": "reward"},
        again={"init_from": "reward", "method": "reward"},
    )  # fmt: skip
    assert main(["train", str(tmp_path / "chain.json")]) == 0
    adapters = {}
    for stage in ("sft", "dpo", "kto", "reward", "again"):
        final = run / stage / "final"
        assert json.loads((final / "adapter_config.json").read_text())["base_model_name_or_path"] == str(scratch_model)
        assert not (run / stage / "base").exists() and not [path for path in final.iterdir() if path.is_dir()]
        adapters[stage] = load_file(final / "adapter_model.safetensors")
    names = {name for name in adapters["sft"] if "lora" in name}
    assert names == adapters["kto"].keys() == {name for name in adapters["reward"] if "lora" in name}
    name = min(name for name in names if "lora_B" in name)
    for stage, source in (("dpo", "sft"), ("kto", "dpo"), ("reward", "sft"), ("again", "reward")):
        moved = float((adapters[stage][name] - adapters[source][name]).abs().max())
        assert 0 < moved <= 2.1e-3 < 2.5e-3 < float(adapters[source][name].abs().max()) + 1e-3, stage  # two steps
    head = "base_model.model.score.weight"
    assert float((adapters["again"][head] - adapters["reward"][head]).abs().max()) <= 2.1e-3
    dpo, named, precomputed = (lines(run / stage) for stage in ("dpo", "named", "precomputed"))
    assert dpo[0]["loss"] == pytest.approx(0.693147, abs=1e-6) and dpo[1]["loss"] != dpo[0]["loss"]
    for mine, *others in zip(dpo, named, precomputed, strict=True):
        for metric in mine.keys() - {"rewards/accuracies"}:  # margins of 0 may be rounded to either side
            for other in others:
                assert other[metric] == pytest.approx(mine[metric], rel=1e-4, abs=1e-5), metric
    # PEFT on the original base = our model.
    ids = torch.arange(5, 45)[None]
    base = AutoModelForCausalLM.from_pretrained(scratch_model)
    ours = load_model(ModelConfig(path=str(run / "kto/final")), "lm", torch.float32, torch.device("cpu"))
    ours.set_attn_implementation("sdpa")
    with torch.no_grad():
        want = PeftModel.from_pretrained(base, run / "kto/final").eval()(ids).logits
        torch.testing.assert_close(ours(ids).logits, want, rtol=1e-4, atol=1e-4)

    # The memory of the frozen copy is planned, before the run too.
    config = load(run / "dpo/config.yaml").config
    empty = empty_model(config, config.models[0])
    packs = pack([Example((Node(np.zeros(64, np.int64), trained=True),), row=0)], 64)
    parts = estimate(config, config.models[0], empty, packs, torch.device("cpu")).parts
    assert parts["reference"] == 4 * count(empty)[1]


def test_without_a_reference_model_a_continued_adapter_is_compared_with_its_start(tmp_path, shared, scratch_model):
    """`use_ref_model: false`: the loss begins at log 2 and the margins at 0, with SFT's adapter, far from the base."""
    own = {"method": {"type": "dpo", "use_ref_model": False}}
    run = continued(tmp_path, shared, scratch_model, own=own)
    assert runner.train(load(tmp_path / "chain.json").stages) == 0
    first, second = lines(run / "own")[:2]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6) and abs(first["rewards/margins"]) < 1e-5
    assert abs(second["loss"] - math.log(2)) > 1e-4


@pytest.mark.slow
def test_a_merged_base_has_its_own_dtype_and_adapters_know_it(tmp_path, shared, scratch_model, capsys):
    """Another `lora` needs SFT's adapter merged: the new one is refused on the original base (PEFT loads it)."""
    halved = AutoModelForCausalLM.from_pretrained(scratch_model, dtype=torch.bfloat16)
    halved.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(scratch_model).save_pretrained(tmp_path / "model")
    later = {name: {"init_from": "dpo", "method": "dpo"} for name in ("further", "third")}
    run = continued(tmp_path, shared, tmp_path / "model", dpo={"method": "dpo"}, **later)
    ranks = [f"stages.{name}.model.lora.r=2" for name in ("dpo", "further")]
    assert runner.train(load(tmp_path / "chain.json", ranks).stages) == 0
    final = run / "dpo/final"
    config = json.loads((final / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(run / "dpo/base")
    base = load_file(run / "dpo/base/model.safetensors")
    assert {tensor.dtype for tensor in base.values()} == {torch.bfloat16}
    sft = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32), run / "sft/final"
    )
    name = "model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(base[name], sft.merge_and_unload().state_dict()[name].bfloat16())
    # Both adapters as one of the original base; the merged base is rounded to bfloat16.
    assert main(["export", str(final), "-o", str(tmp_path / "one"), "--no-merge"]) == 1
    assert "or give --fold for an adapter of the original base" in capsys.readouterr().err
    ids = torch.arange(5, 45)[None]
    for stage, rank in {
        "dpo": 6,
        "further": 6,
        "third": 10,
    }.items():  # `further` trains DPO's adapter, on the same base
        folder, own = tmp_path / f"folded-{stage}", run / stage / "final"
        assert main(["export", str(run / stage), "-o", str(folder), "--fold"]) == 0
        folded = json.loads((folder / "adapter_config.json").read_text())
        assert (folded["r"], folded["base_model_name_or_path"]) == (rank, str(tmp_path / "model"))
        pairs = ((run / stage / "base", own), (tmp_path / "model", folder), (tmp_path / "model", own))
        with torch.no_grad():
            want, got, alone = (
                PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), adapter)
                .eval()(ids)
                .logits
                for model, adapter in pairs
            )
        error, effect = float((got - want).square().mean().sqrt()), float((alone - want).square().mean().sqrt())
        print(f"{stage}: logits differ by {error:.2g}; without the earlier adapters by {effect:.2g}")
        assert error < effect / 10
    sft_weights = run / "sft/final/adapter_model.safetensors"
    before = sft_weights.read_bytes()
    save_file({name: 2 * tensor for name, tensor in load_file(sft_weights).items()}, sft_weights)
    assert main(["export", str(run / "dpo"), "-o", str(tmp_path / "two"), "--fold"]) == 1
    assert "is no longer the adapter that was merged into" in capsys.readouterr().err
    sft_weights.write_bytes(before)
    adapter = ModelConfig(path=str(final))
    cpu = torch.device("cpu")
    load_model(adapter, "lm", torch.float32, cpu)
    (final / "adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": str(tmp_path / "model")})
    )
    with pytest.raises(
        WeightsError, match=r"final: was trained on weights that differ from those of .*model \(SHA-256"
    ):
        load_model(adapter, "lm", torch.float32, cpu)
    assert main(["export", str(final), "-o", str(tmp_path / "out")]) == 1
    (final / "base_weights.json").unlink()  # an adapter of others, or of an earlier version
    load_model(adapter, "lm", torch.float32, cpu)


def test_a_continued_adapter_of_a_trained_base_moves_with_the_run(tmp_path, shared, scratch_model):
    """Its base is the first stage's model, by a link; resumed elsewhere to the same bits."""
    run = continued(tmp_path, shared, scratch_model, dpo={"method": "dpo"}, more={"init_from": "dpo", "method": "dpo"})
    overrides = ["stages.sft.model.lora=null"]
    assert runner.train(load(tmp_path / "chain.json", overrides).stages) == 0
    for stage in ("dpo", "more"):
        assert (run / stage / "base").is_symlink() and (run / stage / "base").resolve() == run / "sft/final"
        assert (run / stage / "final/base_weights.json").is_file()
    whole = load_file(run / "more/final/adapter_model.safetensors")
    (tmp_path / "elsewhere").mkdir()
    run.rename(tmp_path / "elsewhere/chain")
    more = tmp_path / "elsewhere/chain/more"
    for name in ("final", "checkpoint-2"):
        shutil.rmtree(more / name)
    assert main(["train", "--resume", str(more)]) == 0
    again = load_file(more / "final/adapter_model.safetensors")
    assert all(torch.equal(again[name], whole[name]) for name in whole)


REWARDED = {
    "data": {"source": "data/gsm8k/train.jsonl", "format": "auto", "template": "tags"},
    "rewards": [{"type": "python", "function": "tests.test_stages:length"}],
    "rollout": {"max_completion_length": 8},
}


def length(completions, **_):
    return [float(len(text)) for text in completions]


ONLINE = {
    "grpo": {"type": "grpo", "num_generations": 2, "beta": 0.1},
    "ppo": {"type": "ppo", "num_generations": 2, "kl_coef": 0.1},
    "distill": {"type": "distill", "num_generations": 2, "teacher_system_prompt": "Be brief."},
}


@pytest.mark.slow
@pytest.mark.parametrize("method", ONLINE)
def test_a_continued_adapter_where_completions_are_sampled(tmp_path, shared, scratch_model, power_cut, method):
    """The KL to the reference is 0 at the start; resumed = uninterrupted, to the bit; the copy is not saved."""
    stage = {"method": ONLINE[method], **REWARDED} | ({"rewards": []} if method == "distill" else {})
    stage["data"] = REWARDED["data"] | {"source": str(shared / REWARDED["data"]["source"])}
    found = {}
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
        run = continued(tmp_path / name, shared, scratch_model, online=stage)
        stages = load(tmp_path / name / "chain.json").stages
        runner.train(stages, skip=["online"])
        if name == "broken":
            with power_cut(step=1):
                runner.train(stages, skip=["sft"])
        assert runner.train(stages, skip=["sft"], resume=name == "broken") == 0
        assert not [path for path in (run / "online/final").iterdir() if path.is_dir()]
        found[name] = load_file(run / "online/final/adapter_model.safetensors"), lines(run / "online")
    if method != "distill":
        assert found["whole"][1][0]["kl"] == pytest.approx(0, abs=1e-6)
    assert all("lora" in key and ".start." not in key for key in found["whole"][0])
    assert all(torch.equal(found["broken"][0][key], value) for key, value in found["whole"][0].items())
    assert found["broken"][1] == found["whole"][1]


def states(folder: Path) -> dict[str, str]:
    return {
        str(p.parent.relative_to(folder)): json.loads(p.read_text())["state"] for p in sorted(folder.rglob("run.json"))
    }


def first_line(folder: Path) -> dict:
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])


def test_each_stage_starts_from_the_one_it_names(tmp_path, shared, scratch_model, capsys):
    assert runner.train(chain(tmp_path, shared, scratch_model)) == 0
    run = tmp_path / "chain"
    assert states(run) == {"sft": "finished", "reward": "finished", "dpo": "finished"}

    base = AutoModelForCausalLM.from_pretrained(scratch_model)
    sft = PeftModel.from_pretrained(base, run / "sft/final").merge_and_unload().state_dict()
    # DPO's adapter names a model that is SFT's, its adapter merged in; the template has come with the tokenizer.
    settings = json.loads((run / "dpo/final/adapter_config.json").read_text())
    merged = AutoModelForCausalLM.from_pretrained(settings["base_model_name_or_path"]).state_dict()
    name = "model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(merged[name], sft[name])
    assert not torch.equal(merged[name], load_file(scratch_model / "model.safetensors")[name])
    assert "SOLUTION" in str(AutoTokenizer.from_pretrained(run / "dpo/final").chat_template)
    # Two steps at 1e-3 leave a reward model near where it started: SFT's weights, not the base model's.
    reward = AutoModelForSequenceClassification.from_pretrained(run / "reward/final").state_dict()
    base_weight = load_file(scratch_model / "model.safetensors")[name]
    assert (reward[name] - sft[name]).abs().max() <= 2.1e-3 < (sft[name] - base_weight).abs().max() + 2.1e-3
    assert first_line(run / "dpo")["loss"] == pytest.approx(0.6931, abs=1e-3)

    saved = load(run / "dpo/config.yaml").config
    assert saved.models[0].path == str(run / "sft/final") and saved.models[0].name == "tiny-qwen3"
    assert json.loads((run / "dpo/run.json").read_text())["provenance"]["init_from"]["stage"] == "sft"
    assert load(run / "config.yaml").stages == chain(tmp_path, shared, scratch_model)
    table = capsys.readouterr().err
    for stage in ("sft", "reward", "dpo"):
        assert f"{stage} of tiny-qwen3" in table
    assert table.count("finished") >= 3


def crash_at(monkeypatch, method: str, step: int, error: type[BaseException] = KeyboardInterrupt) -> None:
    after_step = Loop._after_step

    def crash(self):
        after_step(self)
        if self.job.config.method.type == method and self.state.step == step:
            raise error("power cut")

    monkeypatch.setattr(Loop, "_after_step", crash)


def test_going_on_at_stage_and_step(tmp_path, shared, scratch_model, monkeypatch):
    (tmp_path / "whole").mkdir()
    runner.train(chain(tmp_path / "whole", shared, scratch_model))
    stages = chain(tmp_path, shared, scratch_model)
    run = tmp_path / "chain"
    with monkeypatch.context() as broken:
        crash_at(broken, "reward", 1)
        with pytest.raises(KeyboardInterrupt):
            runner.train(stages)
    assert states(run) == {"sft": "finished", "reward": "interrupted"}
    before = (run / "sft/final/manifest.json").stat().st_mtime_ns
    with pytest.raises(RunError, match=r"there are already runs in .*sft.*--resume.*--overwrite"):
        runner.train(stages)

    # The folder of the whole run says it all: its config.yaml has the stages.
    assert main(["train", "--resume", str(run)]) == 0
    assert states(run) == {"sft": "finished", "reward": "finished", "dpo": "finished"}
    assert (run / "sft/final/manifest.json").stat().st_mtime_ns == before
    assert "resumed from checkpoint-1" in (run / "reward/training.log").read_text()
    for stage, name in (("reward", "model"), ("dpo", "adapter_model")):
        one = load_file(tmp_path / "whole/chain" / stage / f"final/{name}.safetensors")
        two = load_file(run / stage / f"final/{name}.safetensors")
        assert all(torch.equal(one[key], two[key]) for key in one), stage

    # A stage alone, extended; then one that builds on another that was trained anew is refused.
    longer = chain(tmp_path, shared, scratch_model, training={"batch_size": 4, "max_steps": 3, "learning_rate": 1e-3,
                   "warmup_steps": 0, "lr_scheduler_type": "cosine"})  # fmt: skip
    assert runner.train(longer, resume=run / "dpo/checkpoint-2") == 0
    assert json.loads((run / "dpo/results.json").read_text())["steps"] == 3
    runner.train(chain(tmp_path, shared, scratch_model, seed=1), overwrite=True, skip=("reward", "dpo"))
    with pytest.raises(RunError, match=r"sft.final is no longer the model that .*dpo was trained with"):
        runner.train(stages, resume=True, skip=("sft", "reward"))


def test_a_stage_that_is_added_holds_out_other_rows(tmp_path, shared, scratch_model, caplog):
    """A stage that was finished keeps to its own rows, which is said; the new one excludes those of the others."""
    stages = {"sft": {"method": "sft", "data": {"template": "tags", "validation": {"rows": 3}}}}
    both = {**stages, "more": {"method": "sft", "seed": 1, "data": {"template": "tags", "validation": {"rows": 4}}}}
    runner.train(chain(tmp_path, shared, scratch_model, stages={**stages, "last": stages["sft"]}))
    caplog.clear()
    assert (
        runner.train(chain(tmp_path, shared, scratch_model, stages={**both, "last": stages["sft"]}), resume=True) == 0
    )
    run = tmp_path / "chain"
    assert set(states(run).values()) == {"finished"} and caplog.text.count("still excludes those (data.excluded)") == 2
    assert load(run / "sft/config.yaml").config.data.excluded == ()
    assert [one.rows for one in load(run / "more/config.yaml").config.data.excluded] == [3]
    assert "3 of 3 held-out rows can be used by sft" in (run / "sft/training.log").read_text()
    assert "held out by other stages, not trained on" in (run / "more/training.log").read_text()


@pytest.mark.slow
def test_a_failed_stage_stops_what_builds_on_it_and_nothing_else(tmp_path, shared, scratch_model, monkeypatch, capsys):
    stories = shared / "models/stories260K"
    data = {"source": str(shared / "data/hh-harmless"), "format": "hh", "template": "none", "max_rows": 16,
            "max_length": 400}  # fmt: skip
    stages = {"dpo": {"method": "dpo"}, "more": {"method": "dpo", "init_from": "dpo"}, "reward": {"method": "reward"}}
    models = [{"path": str(stories)}, {"path": str(scratch_model)}]
    chained = chain(tmp_path, shared, stories, data=data, stages=stages, models=models)
    update = Loop.update

    def fail(self, packs, objective):
        if self.job.config.method.type == "dpo" and self.job.model.folder_name == "stories260K":
            raise ValueError("something in this model")
        update(self, packs, objective)

    with monkeypatch.context() as broken:
        broken.setattr(Loop, "update", fail)
        message = "1 of 6 runs failed: dpo of stories260K; therefore not run: more of stories260K"
        with pytest.raises(PosttrainError, match=message):
            runner.train(chained)
    run = tmp_path / "chain"
    assert states(run) == {
        "stories260K/dpo": "failed", "stories260K/reward": "finished",
        **{f"tiny-qwen3/{stage}": "finished" for stage in stages},
    }  # fmt: skip
    table = capsys.readouterr().err
    assert "something in this model" in table and "needs dpo, which failed" in table
    assert runner.train(chained, resume=True) == 0
    assert set(states(run).values()) == {"finished"} and "stories260K/more" in states(run)


def test_skipping(tmp_path, shared, scratch_model):
    stages = chain(tmp_path, shared, scratch_model)
    with pytest.raises(ConfigError, match="--skip stf: there is no such stage; did you mean sft"):
        runner.train(stages, skip=["stf"])
    with pytest.raises(RunError, match=r"--skip sft: reward of tiny-qwen3 starts from its final model"):
        runner.train(stages, skip=["sft"])
    assert not (tmp_path / "chain/reward").exists()
    runner.train(stages, skip=["reward", "dpo"])
    runner.train(stages, skip=["sft", "reward"])
    assert states(tmp_path / "chain") == {"sft": "finished", "dpo": "finished"}
    with pytest.raises(ConfigError, match="every stage is skipped"):
        runner.train(stages, skip=["sft", "reward", "dpo"])


@pytest.mark.slow
def test_plan_and_explore_show_all_stages(tmp_path, shared, scratch_model, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    chain(tmp_path, shared, scratch_model)
    file = str(tmp_path / "chain.json")
    for arguments in (["plan", file], ["train", file, "--dry-run"]):
        assert main(arguments) == 0
        out = capsys.readouterr().out
        assert "stage sft: sft of tiny-qwen3" in out and "stage dpo: dpo of tiny-qwen3, from sft" in out
    assert main(["train", file, "--dry-run", "--skip", "sft", "--skip", "dpo"]) == 0
    out = capsys.readouterr().out
    assert "stage reward" in out and "stage dpo" not in out
    assert main(["train", file, "--skip", "dop"]) == 1
    assert "did you mean dpo?" in capsys.readouterr().err
    assert main(["explore", file, "--rows", "1"]) == 0
    out = capsys.readouterr().out
    assert "stage sft" in out and "stage dpo" in out and "SOLUTION" in out
    assert not (tmp_path / "chain").exists()


def test_no_policy_starts_from_a_reward_stage(write):
    text = "model: gpt2\ndata: {source: x}\nstages:\n  rm: {method: reward}\n  dpo: {method: dpo, init_from: rm}\n"
    with pytest.raises(ConfigError, match="stage dpo starts from a reward model, which generates no completions"):
        load(write(text))
