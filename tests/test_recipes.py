"""The three recipes on real data, through the settings a user writes: what they compute, leave behind, and refuse."""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from posttrain import recipes, runner
from posttrain.base.errors import ConfigError, PosttrainError, RunError
from posttrain.batch import Example, Node, pack
from posttrain.cli import main
from posttrain.config import SFTMethod, load
from posttrain.config.schema.methods import METHODS
from posttrain.optim.update import Objective, over_batches
from posttrain.recipes.sft import noisy_embeddings, token_loss
from posttrain.scoring import Scorer
from posttrain.training.best import Best, set_of
from posttrain.training.state import State, memory_settings

HH = {"format": "hh", "template": "none", "max_rows": 24, "max_length": 400}


def run(tmp_path: Path, *overrides: str, resume=False, overwrite=False, **sections) -> Path:
    """Train with settings given as a nested dict and overrides; returns the run folder."""
    settings = {"name": "run", "output_dir": str(tmp_path), **sections}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(settings))
    config = load(file, overrides).config
    assert runner.train(config, resume=resume, overwrite=overwrite) == 0
    return tmp_path / config.name


def dpo(shared, path, **sections):
    settings = {
        "model": {"path": str(path), **sections.pop("model", {})},
        "method": {"type": "dpo", **sections.pop("method", {})},
        "data": {"source": str(shared / "data/hh-harmless"), **HH, **sections.pop("data", {})},
        "training": {
            "batch_size": 4, "max_steps": 3, "tokens_per_pack": 4096, "learning_rate": 1e-3, "warmup_steps": 0,
            **sections.pop("training", {}),
        },
        "tracking": {"logging_steps": 1},
    }  # fmt: skip
    return settings | sections


def metrics(folder: Path, name: str) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    name = "adapter_model.safetensors" if (folder / "adapter_config.json").exists() else "model.safetensors"
    return load_file(folder / name)


@pytest.mark.pictures
def test_dpo_leaves_a_whole_run_folder(tmp_path, shared):
    model = shared / "models/stories260K"
    folder = run(
        tmp_path, **dpo(shared, model, data={"validation": {"rows": 4}}, checkpoint={"best_metric": "eval_loss"})
    )
    for name in (
        "run.json",
        "config.yaml",
        "metrics.jsonl",
        "training.log",
        "curves.png",
        "results.json",
        "report.html",
    ):
        assert (folder / name).stat().st_size > 100, name
    losses = metrics(folder, "loss")
    print(losses, metrics(folder, "eval_loss"))
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6) and metrics(folder, "rewards/margins")[0] == 0
    assert metrics(folder, "eval_loss")[0] == pytest.approx(math.log(2), abs=1e-6)
    assert len(metrics(folder, "eval_loss")) == 2
    assert json.loads((folder / "run.json").read_text())["state"] == "finished"
    for saved in (folder / "final", folder / "best", folder / "checkpoint-3"):
        trained = AutoModelForCausalLM.from_pretrained(saved)
        assert AutoTokenizer.from_pretrained(saved).eos_token is not None
    before = AutoModelForCausalLM.from_pretrained(model)
    assert not torch.equal(trained.model.norm.weight, before.model.norm.weight)


def test_a_saved_config_replays_the_run(tmp_path, shared):
    settings = dpo(shared, shared / "models/stories260K")
    first = run(tmp_path, **settings)
    config = load(first / "config.yaml", ["name=again"]).config
    assert runner.train(config) == 0
    assert metrics(first, "loss") == metrics(tmp_path / "again", "loss")
    a, b = weights(first / "final"), weights(tmp_path / "again/final")
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("loss_type", [["sigmoid"], ["aot", "sft"], ["kto_pair"]])
def test_packs_do_not_change_the_update(tmp_path, shared, loss_type):
    """One pack or many: the same losses and weights, also for losses that couple the pairs of a batch."""
    results = []
    for name, tokens in (("whole", 8192), ("split", 800)):
        settings = dpo(shared, shared / "models/stories260K", method={"loss_type": loss_type})
        settings["training"] |= {"tokens_per_pack": tokens, "batch_size": 6}
        folder = run(tmp_path, f"name={name}", **settings)
        results.append((metrics(folder, "loss"), metrics(folder, "grad_norm"), weights(folder / "final")))
    (loss_a, norm_a, a), (loss_b, norm_b, b) = results
    assert loss_a == pytest.approx(loss_b, rel=1e-4)
    assert norm_a == pytest.approx(norm_b, rel=1e-3)
    for name in a:
        # AdamW divides a gradient by its size: where one is all rounding, a weight moves by a part of a step (1e-3).
        difference = (a[name] - b[name]).abs()
        assert difference.mean() < 1e-6 and difference.max() < 1e-4, name


@pytest.mark.parametrize(
    "variant", ["adapter off", "no model beside", "frozen copy", "precomputed", "saved", "named", "none"]
)
def test_references_agree(tmp_path, shared, variant):
    """Every way to hold a reference gives the same first losses; without one the loss differs from the start."""
    model = shared / "models/stories260K"
    method, lora, seed = {}, None, f"seed={int(variant == 'saved')}"  # nothing saved yet for this seed
    if variant in ("adapter off", "no model beside"):
        lora = {"r": 4, "alpha": 8, "dropout": 0.0}
    if variant in ("saved", "no model beside"):
        method = {"use_ref_model": False}
    elif variant == "precomputed":
        method = {"precompute_ref_log_probs": True}
    elif variant == "named":
        method = {"ref_model": str(model)}
    elif variant == "none":
        method = {"reference_free": True}
    folder = run(tmp_path, seed, **dpo(shared, model, method=method, model={"lora": lora}))
    losses = metrics(folder, "loss")
    print(variant, losses)
    if variant == "none":
        assert abs(losses[0] - math.log(2)) > 0.1
    else:
        assert losses[0] == pytest.approx(math.log(2), abs=1e-5)
    if variant in ("precomputed", "saved", "named"):
        plain = run(tmp_path, "name=plain", seed, **dpo(shared, model))
        assert losses == pytest.approx(metrics(plain, "loss"), abs=1e-4)
    if variant in ("precomputed", "saved"):
        again = run(tmp_path, "name=again", seed, **dpo(shared, model, method=method))
        assert metrics(again, "loss") == losses
        assert "computing the reference" in (folder / "training.log").read_text()
        assert "computing the reference" not in (again / "training.log").read_text()


@pytest.mark.parametrize(("loss_type", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.2), ("hinge", 0.0)])
def test_a_reference_free_loss_is_that_of_the_policys_log_probabilities(tmp_path, shared, loss_type, smoothing):
    """DPO's formula without a reference, by hand: with D = log pi(chosen) - log pi(rejected), -log sigmoid(0.3 D)."""
    path, beta, said = shared / "models/stories260K", 0.3, "Once upon a time, there"
    ends = [
        (" was a cat.", " were many dogs in a house."),
        (" lived a girl.", " was nothing."),
        (" was a big tree.", "."),
    ]
    rows = [{"prompt": said, "chosen": chosen, "rejected": rejected} for chosen, rejected in ends]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    prompt = tokenizer(said).input_ids

    def logprob(text: str) -> torch.Tensor:
        ids = torch.tensor([*tokenizer(said + text).input_ids, tokenizer.eos_token_id])
        assert ids[: len(prompt)].tolist() == prompt
        logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1)
        return logprobs.gather(1, ids[1:, None])[len(prompt) - 1 :].sum()

    with torch.no_grad():
        difference = beta * torch.stack([logprob(chosen) - logprob(rejected) for chosen, rejected in ends])
    losses = (1 - smoothing) * -logsigmoid(difference) + smoothing * -logsigmoid(-difference)
    want = (losses if loss_type == "sigmoid" else (1 - difference).relu()).mean()
    method = {"reference_free": True, "beta": beta, "loss_type": loss_type, "label_smoothing": smoothing}
    data = {"source": str(tmp_path / "rows.jsonl"), "format": "auto"}
    folder = run(tmp_path, **dpo(shared, path, method=method, data=data, training={"batch_size": 3, "max_steps": 1}))
    assert metrics(folder, "loss") == pytest.approx([float(want)], rel=1e-5)
    assert metrics(folder, "rewards/margins") == pytest.approx([float(difference.mean())], rel=1e-4)


def test_a_settings_file_a_model_rows_and_the_output_folder_may_be_links(tmp_path, shared, monkeypatch):
    """What the command line names is opened, whatever it leads to; a resume through the link finds the checkpoint."""
    monkeypatch.chdir(tmp_path)
    Path("real").mkdir()
    rows = "".join(json.dumps({"prompt": "Once", "completion": f" upon {n}"}) + "\n" for n in range(4))
    Path("real/rows.jsonl").write_text(rows)
    settings = {
        "name": "run", "output_dir": "runs", "model": "model", "method": "sft", "training": {"batch_size": 2},
        "data": {"source": "rows.jsonl", "template": "none"}, "checkpoint": {"save_steps": 1},
    }  # fmt: skip
    Path("real/settings.json").write_text(json.dumps(settings))
    links = {"model": shared / "models/stories260K", "runs": "real", "rows.jsonl": "real/rows.jsonl"}
    for name, target in {**links, "settings.json": "real/settings.json"}.items():
        Path(name).symlink_to(target)
    assert main(["train", "settings.json", "--max-steps", "1"]) == 0
    assert main(["train", "--resume", "runs/run", "--max-steps", "2"]) == 0
    assert metrics(Path("real/run"), "step")[-1] == 2 and Path("real/run/checkpoint-1").is_dir()
    assert main(["score", "runs/run/final", "rows.jsonl", "-o", "scores.jsonl"]) == 0
    assert len(Path("scores.jsonl").read_text().splitlines()) == 4


def test_lora_checkpoints_hold_the_adapter_only_and_load_with_peft(tmp_path, shared):
    model = shared / "models/stories260K"
    folder = run(tmp_path, **dpo(shared, model, model={"lora": {"r": 4, "alpha": 8}}))
    for saved in (folder / "final", folder / "checkpoint-3"):
        assert not (saved / "model.safetensors").exists()
        base = AutoModelForCausalLM.from_pretrained(model)
        adapted = PeftModel.from_pretrained(base, saved)
        tensors = {k: v for k, v in adapted.state_dict().items() if "lora_B" in k}
        assert tensors and all(v.abs().max() > 0 for v in tensors.values())


SFT_DATA = {
    "alpaca": ("data/sft-demo/alpaca_en_demo.json", {}),
    "messages": ("data/sft-demo/reason_tool_use_demo_50.jsonl", {"max_length": 2048}),
    "gsm8k": ("data/gsm8k/train.jsonl", {"template": "tags"}),
    "text": ("data/tinystories/sample.txt", {"template": "none"}),
}


@pytest.mark.parametrize("name", SFT_DATA)
def test_sft_on_real_data(tmp_path, shared, scratch_model, name):
    path, extra = SFT_DATA[name]
    folder = run(
        tmp_path,
        model=str(scratch_model),
        method="sft",
        data={"source": str(shared / path), "max_rows": 6, **extra},
        training={"batch_size": 6, "max_steps": 2, "learning_rate": 1e-3, "warmup_steps": 0},  # the same rows twice
        tracking={"logging_steps": 1},
    )
    losses = metrics(folder, "loss")
    print(name, losses)
    assert losses[0] == pytest.approx(math.log(6400), abs=0.3) and losses[1] < losses[0]
    tokenizer = AutoTokenizer.from_pretrained(folder / "final")
    if extra.get("template") == "tags":
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "1+1?"}], tokenize=False, add_generation_prompt=True
        )
        assert text.endswith("<start_working_out>")


def test_sft_loss_is_the_mean_over_the_targets(tmp_path, shared, scratch_model):
    """The first loss equals transformers' own cross-entropy over the same examples, one by one."""
    from posttrain.batch import sequences
    from posttrain.data import prepare
    from posttrain.models.load import load_tokenizer

    sections = {
        "model": str(scratch_model),
        "method": "sft",
        "data": {"source": str(shared / "data/sft-demo/alpaca_en_demo.json"), "max_rows": 5, "shuffle": False},
        "training": {"batch_size": 5, "max_steps": 1, "tokens_per_pack": 2048},
    }
    folder = run(tmp_path, **sections)
    config = load(tmp_path / "config.json").config
    data = prepare(config.data, load_tokenizer(config.models[0]), "sft")
    model = AutoModelForCausalLM.from_pretrained(scratch_model)
    total = count = 0
    for i in range(len(data.train)):
        [(ids, trained)] = sequences(data.train[i].trees[0])
        with torch.no_grad():
            logits = model(torch.tensor(ids)[None].long()).logits[0, :-1]
        nll = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]).long(), reduction="none")
        total += float(nll[torch.tensor(trained[1:])].sum())
        count += int(trained[1:].sum())
    assert metrics(folder, "loss")[0] == pytest.approx(total / count, rel=1e-5)


@pytest.mark.parametrize("lora", [None, {"r": 4, "alpha": 8}])
def test_reward_model_loads_as_a_sequence_classifier(tmp_path, shared, scratch_model, lora):
    """`final/` gives, in plain transformers and PEFT, the rewards that training saw."""
    data = {"source": str(shared / "data/hh-harmless"), **HH, "validation": {"rows": 4}}
    folder = run(
        tmp_path,
        model={"path": str(scratch_model), "lora": lora},
        method="reward",
        data=data,
        training={"batch_size": 4, "max_steps": 3, "learning_rate": 1e-3, "warmup_steps": 0},
        tracking={"logging_steps": 1},
    )
    assert metrics(folder, "loss")[0] == pytest.approx(math.log(2), abs=0.2)
    assert {"accuracy", "margin", "min_reward", "mean_reward", "max_reward"} <= set(
        json.loads((folder / "metrics.jsonl").read_text().splitlines()[1])
    )
    results = json.loads((folder / "final_results.json").read_text())
    assert results["steps"] == 3 and results["eval_accuracy"] == metrics(folder, "eval_accuracy")[-1]
    assert results["best_eval_accuracy"] == max(metrics(folder, "eval_accuracy")) and (folder / "best").is_dir()
    if lora:
        base = AutoModelForSequenceClassification.from_pretrained(scratch_model, num_labels=1)
        model = PeftModel.from_pretrained(base, folder / "final").eval()
        assert float(model.get_base_model().score.weight.std()) == pytest.approx(0.02, rel=0.5)
    else:
        model = AutoModelForSequenceClassification.from_pretrained(folder / "final").eval()
        assert model.config.num_labels == 1
    from posttrain.batch import sequences
    from posttrain.data import prepare
    from posttrain.models.load import load_tokenizer

    config = load(tmp_path / "config.json").config
    held_out = prepare(config.data, load_tokenizer(config.models[0]), "pair").validation["validation"]
    tokenizer = AutoTokenizer.from_pretrained(folder / "final")
    rows = [
        torch.tensor(ids).long() for i in range(len(held_out)) for t in held_out[i].trees for ids, _ in sequences(t)
    ]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(r) for r in rows], batch_first=True)
    with torch.no_grad():
        rewards = model(padded, attention_mask=mask).logits[:, 0]
    got = metrics(folder, "eval_mean_reward")[-1]
    assert got == pytest.approx(float(rewards.mean()), abs=1e-4)


def test_many_models_and_a_failure_in_between(tmp_path, shared, scratch_model):
    sections = dpo(shared, "unused")
    del sections["model"]
    models = [
        {"path": str(shared / "models/stories260K")},
        {"path": str(tmp_path / "absent")},
        {"path": str(scratch_model)},
    ]
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"name": "many", "output_dir": str(tmp_path), "models": models, **sections}))
    with pytest.raises(PosttrainError, match="1 of 3 models failed: absent"):
        runner.train(load(file).config)
    states = {p.parent.name: json.loads(p.read_text())["state"] for p in (tmp_path / "many").glob("*/run.json")}
    assert states == {"stories260K": "finished", "absent": "failed", "tiny-qwen3": "finished"}
    runner.train(load(file).config, overwrite=True, model_index=2)


def test_what_is_said_of_a_step_is_what_is_logged(tmp_path, shared):
    """The means since the last line, not those of one step."""
    sections = dpo(shared, shared / "models/stories260K", training={"max_steps": 4})
    folder = run(tmp_path, **sections | {"tracking": {"logging_steps": 2}})
    said = re.findall(r"step (\d)/4  loss (\S+)", (folder / "training.log").read_text())
    assert said == [(str(2 * n), f"{loss:.4g}") for n, loss in enumerate(metrics(folder, "loss"), start=1)]


@pytest.mark.parametrize(("method", "differs"), [("sft", True), ("dpo", False)])
def test_dropout_is_on_where_a_policy_is_not_compared(tmp_path, shared, method, differs):
    losses = []
    for dropout in (0.0, 0.5):
        lora = {"r": 4, "alpha": 8, "dropout": dropout}
        sections = dpo(shared, shared / "models/stories260K", model={"lora": lora}) | {"method": method}
        losses.append(metrics(run(tmp_path, overwrite=dropout > 0, **sections), "loss"))
    assert (losses[0][1:] != losses[1][1:]) == differs and losses[0][0] == losses[1][0]


def test_out_of_memory_among_several_models_names_the_knobs(tmp_path, shared, monkeypatch, caplog):
    def train(job, data):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    monkeypatch.setitem(recipes.RECIPES, "dpo", SimpleNamespace(train=train))
    sections = dpo(shared, "unused")
    del sections["model"]
    models = [{"path": str(shared / "models/stories260K"), "name": name} for name in "ab"]
    (tmp_path / "c.json").write_text(
        json.dumps({"name": "many", "output_dir": str(tmp_path), "models": models, **sections})
    )
    with pytest.raises(PosttrainError, match="2 of 2 models failed"):
        runner.train(load(tmp_path / "c.json").config)
    assert caplog.text.count("failed: out of memory\nLower training.tokens_per_pack (4,096), then data.max_length") == 2


def test_an_existing_run_folder_is_refused(tmp_path, shared):
    sections = dpo(shared, shared / "models/stories260K")
    folder = run(tmp_path, **sections)
    provenance = json.loads((folder / "run.json").read_text())["provenance"]
    saved = json.loads((folder / "checkpoint-3/state.json").read_text())
    assert provenance["dataset_fingerprint"] == saved["data"]
    before = (folder / "metrics.jsonl").read_text()
    with pytest.raises(RunError, match=r"--resume.*--overwrite"):
        run(tmp_path, **sections)
    assert (folder / "metrics.jsonl").read_text() == before
    run(tmp_path, overwrite=True, **sections)


def test_bfloat16_keeps_float32_masters(tmp_path, shared):
    folder = run(tmp_path, **dpo(shared, shared / "models/stories260K", model={"dtype": "bfloat16"}))
    assert weights(folder / "final")["model.norm.weight"].dtype == torch.bfloat16
    state = load_file(folder / "checkpoint-3/optimizer.safetensors")
    assert state["model.norm.weight|master"].dtype == torch.float32
    assert metrics(folder, "loss")[0] == pytest.approx(math.log(2), abs=1e-3)


def test_gradient_checkpointing_changes_nothing(tmp_path, shared):
    sections = dpo(shared, shared / "models/stories260K")
    plain = run(tmp_path, "name=plain", **sections)
    saving = run(tmp_path, "name=saving", "training.gradient_checkpointing=true", **sections)
    assert metrics(plain, "loss") == pytest.approx(metrics(saving, "loss"), abs=1e-6)


def test_early_stopping_keeps_the_best(tmp_path, shared):
    """With a learning rate that ruins the model, validation never improves on the start, and patience ends the run."""
    sections = dpo(shared, shared / "models/stories260K", data={"validation": {"rows": 4}, "max_rows": 40})
    sections["training"] |= {"learning_rate": 0.3, "max_steps": 30}
    sections |= {
        "evaluation": {"eval_steps": 1},
        "checkpoint": {"best_metric": "eval_loss", "early_stopping_patience": 3},
    }
    folder = run(tmp_path, **sections)
    results = json.loads((folder / "results.json").read_text())
    losses = metrics(folder, "eval_loss")
    print(losses)
    assert results["steps"] < 30 and results["best"]["eval_loss"] == min(losses)
    assert len(losses) - 1 - losses.index(min(losses)) == 3


@pytest.mark.parametrize(
    "method",
    [*(name for name in METHODS if METHODS[name].measured), {"type": "kto", "loss_type": "bco"}],
    ids=lambda m: m if isinstance(m, str) else "bco",
)
def test_what_each_method_measures_can_name_the_best_model(tmp_path, shared, method):
    """All of it, and nothing that the table of names lacks: the run's own names are the oracle."""
    name = method if isinstance(method, str) else method["type"]
    row = {"prompt": "Once", "completion": " upon", "chosen": " a time", "rejected": " at all"}
    keep = {"sft": ("prompt", "completion"), "kto": ("prompt", "completion", "label")}.get(
        name, ("prompt", "chosen", "rejected")
    )
    rows = ({**row, "prompt": f"Once {i}", "label": i % 2 == 0} for i in range(12))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({key: one[key] for key in keep}) + "\n" for one in rows))
    settings = {
        "model": str(shared / "models/stories260K"), "method": method, "training": {"batch_size": 4, "max_steps": 1},
        "data": {"source": str(tmp_path / "rows.jsonl"), "template": "none", "validation": {"rows": 4}},
    }  # fmt: skip
    folder = run(tmp_path, **settings, checkpoint={"best_metric": "eval_loss"})
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    measured = {key for line in lines for key in line if key.startswith("eval_")}
    names = {f"eval_{key}" for key in ("loss", *METHODS[name].measured)}
    assert measured - {"eval_kl", "eval_delta"} == names
    assert ("eval_kl" in measured) == (method == "kto")
    for metric in measured - {"eval_delta"}:
        load(settings | {"checkpoint": {"best_metric": metric}})
    for metric in {"eval_accuracy", "eval_reward", "eval_nll_loss", "eval_kl", "eval_more_loss"} - measured:
        with pytest.raises(ConfigError, match=rf"is {metric}, which {name} does not .*choose one of eval_loss, "):
            load(settings | {"checkpoint": {"best_metric": metric}})


@pytest.mark.parametrize(
    ("settings", "measured", "refused"),
    [
        ({"rewards": [{"type": "math"}]}, "reward answer_accuracy rewards/math/correct pass@4 loss accuracies/x",
         "accuracy margin more_reward"),
        ({"method": "grpo", "rewards": [{"type": "math"}]}, "reward completions/mean_length", "loss entropy kl"),
        ({"data": {"source": "x"}, "evaluation": {"datasets": [{"name": "a_b", "source": "y"}]}},
         "a_b_loss", "loss a_loss"),
        ({"data": {"source": "x"}, "evaluation": {"suites": ["gsm8k"]}}, "gsm8k gsm8k_low", "loss accuracy"),
        ({"evaluation": {"suites": ["my/accuracy.yaml"]}}, "accuracy mine_loss loss", ""),
        ({"evaluation": {"suites": ["my:suite"]}}, "accuracy margin", ""),
    ],
)  # fmt: skip
def test_a_metric_that_is_never_measured_is_refused(settings, measured, refused):
    """Once it was at the first evaluation. What rewards, sets and suites measure may be named."""
    base = {"model": "gpt2", "method": "sft", "data": {"source": "x", "validation": {"rows": 9}}, **settings}
    for name in measured.split():
        load(base | {"checkpoint": {"best_metric": f"eval_{name}", "best_direction": "higher"}})
    for name in refused.split():
        with pytest.raises(ConfigError, match=rf"checkpoint.best_metric is eval_{name}, which .* does not measure"):
            load(base | {"checkpoint": {"best_metric": f"eval_{name}", "best_direction": "higher"}})


def best_of(tmp_path, evaluations, rows=None, **checkpoint):
    """The steps of which `best/` was saved, and the state."""
    settings = {"best_metric": "eval_accuracy", **checkpoint}
    version = settings.pop("behavior_version", 2)
    method = {"eval_accuracy": "reward", "eval_entropy": "sft", "eval_reward": "grpo"}[settings["best_metric"]]
    rewards = [{"type": "math"}] if method == "grpo" else []
    config = load({"model": "gpt2", "method": method, "data": {"source": "x", "validation": {"rows": 30}},
                   "rewards": rewards, "behavior_version": version, "checkpoint": settings}).config  # fmt: skip
    saved, state = [], State()
    best = Best(config, SimpleNamespace(best=tmp_path), lambda folder, step: saved.append(step), rows=rows)
    for step, metrics in enumerate(evaluations):
        state.step = step
        best.look(metrics, state)
    return saved, state


def test_the_best_has_the_lower_loss_among_equal_ones(tmp_path, caplog):
    caplog.set_level("INFO", "posttrain")
    pairs = [(0.5, 0.7), (0.8, 0.6), (0.8, 0.65), (0.8, 0.5), (0.7, 0.1), (0.8, math.nan), (0.8, 0.4)]
    evaluations = [{"eval_accuracy": accuracy, "eval_loss": loss} for accuracy, loss in pairs]
    saved, state = best_of(tmp_path, evaluations)
    assert saved == [0, 1, 3, 6] and (state.best, state.best_loss, state.evaluations_since_best) == (0.8, 0.4, 5)
    assert "the highest eval_accuracy; the lower loss breaks ties" in caplog.text
    assert best_of(tmp_path, evaluations, behavior_version=1)[0] == [0, 1]
    falling = [{"eval_entropy": value} for value in (2.0, 1.0, 1.5, math.nan, 0.5)]
    assert best_of(tmp_path, falling, best_metric="eval_entropy")[0] == [0, 1, 4]
    assert best_of(tmp_path, falling, best_metric="eval_entropy", behavior_version=1)[0] == [0]
    assert best_of(tmp_path, falling, best_metric="eval_entropy", best_direction="higher")[0] == [0]
    assert State.from_json({k: v for k, v in state.as_json().items() if k != "best_loss"}).best_loss is None


def test_the_set_of_a_metric_is_the_one_with_the_longest_name():
    entries = [{"name": name, "source": "a"} for name in ("validation", "test", "test_b")]
    config = load({"model": "m", "method": "sft", "data": {"source": "d"}, "evaluation": {"datasets": entries}}).config
    sets = {"eval_loss": "validation", "eval_test_loss": "test", "eval_test_b_loss": "test_b"}
    assert {metric: set_of(config, metric) for metric in sets} == sets
    assert set_of(config, "eval_reward") == "validation"


def test_few_rows_that_decide_are_a_warning_with_an_interval(tmp_path, caplog):
    caplog.set_level("INFO", "posttrain")
    best_of(tmp_path, [{"eval_accuracy": 1.0}], rows=1)
    assert "eval_accuracy decides best/ on 1 row, fewer than 20" in caplog.text
    assert "the best eval_accuracy so far: 1 (95 % interval 0.207 to 1 of 1 row)" in caplog.text  # 1 / (1 + 1.96²)
    best_of(tmp_path, [], rows=19, early_stopping_patience=2)
    assert "eval_accuracy decides best/ and early stopping on 19 rows" in caplog.text
    caplog.clear()
    best_of(tmp_path, [{"eval_accuracy": 0.5}], rows=20)
    assert "fewer than" not in caplog.text and "0.299 to 0.701 of 20 rows" in caplog.text
    rewards = [{"eval_reward": 2.0, "eval_reward_std": 1.0}]
    best_of(tmp_path, rewards, rows=4, best_metric="eval_reward")
    assert f"interval {2 - 3.182 / 2:.3g} to {2 + 3.182 / 2:.3g} of 4 rows" in caplog.text, "t with 3 degrees"


def test_the_interval_of_a_loss_is_that_of_a_ratio_of_sums():
    """Over 2,000 samples of 12 batches, it covers the true mean of tokens in 95 % of them; one batch has none."""
    generator, covered = np.random.default_rng(0), 0
    for _ in range(2000):
        weights = generator.integers(20, 60, 12)
        values = generator.normal(2.0, 1.0, 12)
        batches = [
            ([value], Objective(lambda pack: (torch.tensor(pack, dtype=torch.float32), {}), int(weight)))
            for value, weight in zip(values, weights, strict=True)
        ]
        means, half = over_batches(batches)
        assert means["loss"] == pytest.approx(np.average(values, weights=weights), rel=1e-5) and half is not None
        covered += abs(means["loss"] - 2.0) < half
    assert 0.93 < covered / 2000 < 0.965
    assert over_batches(batches[:1])[1] is None


def test_a_run_shows_the_interval_of_the_loss_that_decides(tmp_path, shared, caplog):
    data = {"validation": {"rows": 5}, "overlong": "truncate"}
    settings = dpo(shared, shared / "models/stories260K", data=data, training={"max_steps": 2, "batch_size": 2})
    settings |= {"checkpoint": {"best_metric": "eval_loss"}, "evaluation": {"eval_steps": 1, "at_start": False}}
    with caplog.at_level("INFO", "posttrain"):
        folder = run(tmp_path, **settings)
    losses = metrics(folder, "eval_loss")
    found = re.findall(r"the best eval_loss so far: (\S+) \(95 % interval (\S+) to (\S+) of 5 rows\)", caplog.text)
    assert found and all(float(low) < float(value) < float(high) for value, low, high in found)
    assert float(found[0][0]) == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.parametrize(
    ("validation", "evaluation", "rows"), [(3, {}, 3), (25, {}, None), (25, {"num_batches": 2}, 8)]
)
def test_a_run_says_how_few_rows_decide(tmp_path, shared, caplog, validation, evaluation, rows):
    """The rows that an evaluation reads, of those that are usable."""
    sections = dpo(shared, shared / "models/stories260K", data={"validation": {"rows": validation}, "max_rows": 60})
    sections["data"] |= {"overlong": "truncate"}
    sections["training"] |= {"max_steps": 1, "batch_size": 4}
    sections |= {"evaluation": evaluation, "checkpoint": {"best_metric": "eval_rewards/accuracies"}}
    run(tmp_path, **sections)
    found = re.search(r"eval_rewards/accuracies decides best/ on (\d+) rows", caplog.text)
    usable = int(re.search(rf"validation: (\d+) of {validation} held-out rows", caplog.text)[1])
    evaluated = min(usable, 8) if evaluation else usable
    assert (int(found[1]) if found else None) == (evaluated if evaluated < 20 else None)
    assert (usable >= 20) == (validation == 25)


def test_lora_on_a_lora_folder_keeps_the_first_adapter(tmp_path, shared):
    """The second adapter names a base that has the first one merged in: `final/` is the model that was trained."""
    model = shared / "models/stories260K"
    lora = {"lora": {"r": 4, "alpha": 8}}
    first = run(tmp_path, "name=first", **dpo(shared, model, model=lora))
    lora["lora"] |= {"r": 2}
    second = run(tmp_path, "name=second", **dpo(shared, first / "final", model=lora))
    assert metrics(second, "loss")[0] == pytest.approx(math.log(2), abs=1e-6)
    settings = json.loads((second / "final/adapter_config.json").read_text())
    base = AutoModelForCausalLM.from_pretrained(settings["base_model_name_or_path"])
    merged = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), first / "final").merge_and_unload()
    name = "model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(base.state_dict()[name], merged.state_dict()[name])
    assert not torch.equal(base.state_dict()[name], AutoModelForCausalLM.from_pretrained(model).state_dict()[name])


def test_resuming_many_models_starts_those_never_reached(tmp_path, shared, scratch_model):
    sections = dpo(shared, "unused")
    del sections["model"]
    models = [{"path": str(shared / "models/stories260K")}, {"path": str(scratch_model)}]
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"name": "many", "output_dir": str(tmp_path), "models": models, **sections}))
    assert runner.train(load(file).config, model_index=0) == 0
    assert runner.train(load(file).config, resume=True) == 0
    assert (tmp_path / "many/tiny-qwen3/final/model.safetensors").exists()


def test_each_method_has_its_own_settings_that_lower_memory(tmp_path):
    """A method without completions of its own is not advised to shorten them; what is set already is not advised."""

    def advice(method, **sections):
        settings = {"model": "m", "method": method, "data": {"source": "rows.jsonl"}, **sections}
        (tmp_path / "c.json").write_text(json.dumps(settings))
        return memory_settings(load(tmp_path / "c.json").config)

    reward = advice("reward", training={"gradient_checkpointing": True})
    assert "max_completion_length" not in reward and "gradient_checkpointing" not in reward
    assert reward.startswith("Lower training.tokens_per_pack (8,192), then data.max_length (1,024)")
    online = advice("grpo", rewards=[{"type": "math"}], model={"path": "m", "lora": True})
    assert "then rollout.max_completion_length (512), then method.num_generations (8)" in online
    assert "model.lora" not in online


def test_margins_of_the_data_enter_the_reward_loss(tmp_path, shared):
    """A margin of 3 on every pair lifts the first loss from log 2 to about log(1 + e^3)."""
    rows = [{"prompt": f"Once {i}", "chosen": " a cat", "rejected": " a dog", "margin": 3.0} for i in range(8)]
    source = tmp_path / "rows.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)))
    folder = run(
        tmp_path,
        model=str(shared / "models/stories260K"),
        method="reward",
        data={"source": str(source), "template": "none"},
        training={"batch_size": 8, "max_steps": 1},
        tracking={"logging_steps": 1},
    )
    assert metrics(folder, "loss")[0] == pytest.approx(math.log1p(math.exp(3)), abs=0.5)


def test_a_reward_model_learns_that_ties_are_even(tmp_path, shared):
    """The same two replies tied in every row end with equal rewards; without the ties they come apart."""
    found = {}
    for tie in (True, False):
        rows = [{"prompt": f"Once {i}", "chosen": " a cat", "rejected": " a dog", "tie": tie} for i in range(8)]
        source = tmp_path / "rows.jsonl"
        source.write_text("\n".join(map(json.dumps, [*rows, {**rows[0], "prompt": "Now", "tie": False}])))
        folder = run(
            tmp_path,
            f"name=tie-{tie}",
            model=str(shared / "models/stories260K"),
            method="reward",
            data={"source": str(source), "template": "none"},
            training={"batch_size": 9, "max_steps": 8, "learning_rate": 1e-3, "num_train_epochs": 8},
            tracking={"logging_steps": 1},
        )
        found[tie] = metrics(folder, "loss"), metrics(folder, "accuracy"), metrics(folder, "margin")
    print(found)
    (even, accuracy, margin), (apart, _, other) = found[True], found[False]
    assert even[-1] > 0.55 > apart[-1] and other[-1] > margin[-1]
    assert set(accuracy) <= {0.0, 1.0}  # of the one pair that is not a tie


def test_pad_token_of_a_reward_model_leaves_the_tokenizer_as_it_was(shared):
    """GPT-2 has one special token, its stop token: padding gets the id of a byte that no text has."""
    from transformers import GPT2Config, GPT2ForSequenceClassification

    from posttrain.training.job import set_pad_token

    tokenizer = AutoTokenizer.from_pretrained(shared / "tokenizers/gpt2")
    model = GPT2ForSequenceClassification(GPT2Config(n_embd=8, n_layer=1, n_head=2, num_labels=1))
    set_pad_token(model, tokenizer)
    pad = model.config.pad_token_id
    assert pad not in (None, tokenizer.eos_token_id) and tokenizer.decode([pad]) == "\ufffd"
    assert tokenizer.pad_token is None


def test_neftune_adds_the_noise_of_transformers(scratch_model):
    """With the noise of transformers' own hook for an example alone; in a pack each example has its own strength; an
    evaluation has none."""
    from transformers.integrations.neftune import neftune_post_forward_hook

    model = AutoModelForCausalLM.from_pretrained(scratch_model)
    embedding = model.get_input_embeddings()
    alone, both = (pack([Example((Node(ids, True),), row=0) for ids in some], 64)[0] for some in (
        [list(range(5, 14))], [list(range(5, 14)), list(range(3))],
    ))  # fmt: skip

    def noise(packed, training=True):
        plain = embedding(packed.tokens_T[None])
        torch.manual_seed(3)
        with noisy_embeddings(Scorer(model.train(training)), packed, 5.0):
            return (embedding(packed.tokens_T[None]) - plain)[0]

    embedding.neftune_noise_alpha = 5.0
    torch.manual_seed(3)
    plain = embedding(alone.tokens_T[None])
    theirs = neftune_post_forward_hook(embedding.train(), (), plain.clone())
    torch.testing.assert_close(noise(alone), (theirs - plain)[0])
    assert not noise(both, training=False).any()
    made, most = noise(both).abs(), [5 / math.sqrt(tokens * plain.shape[-1]) for tokens in (8, 2)]
    for part, bound in zip(made.split([8, 2]), most, strict=True):
        assert 0.9 * bound < part.max() <= bound
    assert not (embedding(both.tokens_T[None])[0] - embedding(both.tokens_T)).any()  # the hook is gone


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 2.0])
def test_eaft_weights_tokens_by_the_entropy_of_the_20_largest_logits(shared, alpha):
    """Loss and gradients equal the dense formula: cross-entropy x (entropy of the top 20 / log 20)^alpha, detached."""
    model = AutoModelForCausalLM.from_pretrained(shared / "models/stories260K")
    ids = torch.tensor([1, 410, 293, 316, 265, 403, 13, 9])
    [packed] = pack([Example((Node(ids.tolist(), True),), row=0)], 64)
    head = model.get_output_embeddings().weight

    def found(loss_N):
        return loss_N, torch.autograd.grad(loss_N.sum(), head)[0]

    ours = found(token_loss(SFTMethod(loss_type="eaft", eaft_alpha=alpha), Scorer(model)(packed, top=20)))
    logits = model(ids[None]).logits[0, :-1]
    top = logits.detach().topk(20).values
    p = torch.exp(top - top.logsumexp(-1, keepdim=True))
    weight = (-(p * p.log()).sum(-1) / math.log(20)) ** alpha
    print(weight)
    theirs = found(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none") * weight)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert alpha == 0 or weight.std() > 0.05


@pytest.mark.parametrize("loss", [{"loss_type": "eaft", "eaft_alpha": 0.5}, {"label_smoothing_factor": 0.1}], ids=str)
def test_packs_do_not_change_losses_that_need_more_scores(tmp_path, shared, loss):
    found = []
    for name, tokens in (("whole", 4096), ("split", 450)):
        settings = dpo(shared, shared / "models/stories260K", training={"tokens_per_pack": tokens}) | {"name": name}
        found.append(metrics(run(tmp_path, **settings | {"method": {"type": "sft", **loss}}), "loss"))
    assert found[0] == pytest.approx(found[1], rel=1e-4)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ({"label_smoothing_factor": 0.1, "loss_type": "dft"}, "is read by loss_type: nll only, not by dft"),
        ({"eaft_alpha": 2.0}, "is read by loss_type: eaft only, not by nll"),
        ({"eaft_alpha": 2.0, "loss_type": "losses:own"}, "is read by loss_type: eaft only, not by losses:own"),
        ({"eaft_alpha": -1.0, "loss_type": "eaft"}, "eaft_alpha is -1"),
        ({"label_smoothing_factor": 1.0}, "label_smoothing_factor is 1"),
    ],
)
def test_settings_of_token_losses_are_checked(tmp_path, method, message):
    file = tmp_path / "sft.json"
    file.write_text(json.dumps({"model": "m", "method": {"type": "sft", **method}, "data": {"source": "x.jsonl"}}))
    with pytest.raises(ConfigError, match=message):
        load(file)


def test_runs_with_dft_neftune_and_muon_resume_to_the_bit(tmp_path, shared, scratch_model, power_cut):
    settings = dpo(shared, scratch_model, training={"optimizer": "muon", "max_steps": 4}) | {
        "method": {"type": "sft", "loss_type": "dft", "neftune_noise_alpha": 5.0},
        "checkpoint": {"save_steps": 2},
    }
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    whole = run(tmp_path / "whole", **settings)
    with power_cut(3):
        run(tmp_path / "cut", **settings)
    cut = run(tmp_path / "cut", **settings, resume=True)
    assert all(torch.equal(a, weights(cut / "final")[name]) for name, a in weights(whole / "final").items())
    assert metrics(cut, "loss")[-2:] == metrics(whole, "loss")[-2:]
