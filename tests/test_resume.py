"""A resumed run is the uninterrupted one: weights, optimizer, metrics and order, to the bit, on CPU."""

import json
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from posttrain import runner
from posttrain.base.errors import ModelError, RunError
from posttrain.config import ModelConfig, load
from posttrain.models.load import load_model
from posttrain.optim import adamw
from posttrain.planning import estimate
from posttrain.runs.checkpoint import list_checkpoints
from posttrain.training import job
from posttrain.training.loop import MAX_SKIPPED_IN_A_ROW, Loop
from posttrain.training.saving import Saver

CLOCK = ("time",)  # the only thing in a line of metrics that two equal runs may differ in


def settings(shared, scratch_model, method: str, **training):
    """13 rows in batches of 4: epochs end in a short batch, and the interruption falls into the second."""
    data = {
        "sft": {"source": str(shared / "data/sft-demo/alpaca_en_demo.json"), "max_rows": 15},
        "reward": {"source": str(shared / "data/hh-harmless"), "format": "hh", "template": "none", "max_rows": 17},
        "dpo": {"source": str(shared / "data/hh-harmless"), "format": "hh", "template": "none", "max_rows": 17},
        "tr-dpo": {"source": str(shared / "data/hh-harmless"), "format": "hh", "template": "none", "max_rows": 17},
        "kto": {"source": str(shared / "data/preference-demo/kto_en_demo.json"), "max_rows": 34},
        "bco": {"source": str(shared / "data/preference-demo/kto_en_demo.json"), "max_rows": 34},
    }[method]
    variants = {
        "bco": {"type": "kto", "loss_type": "bco"},
        "tr-dpo": {"type": "dpo", "sync_ref_model": True, "ref_model_sync_steps": 3},
    }
    return {
        "name": "run",
        "model": {"path": str(scratch_model), "lora": {"r": 4, "dropout": 0.2} if method == "sft" else None},
        "method": variants.get(method, method),
        "data": {**data, "max_length": 600, "validation": {"rows": 3}},
        "training": {"batch_size": 4, "num_train_epochs": 2, "learning_rate": 1e-3, **training},
        "evaluation": {"eval_steps": 3},
        "checkpoint": {"save_steps": 2, "save_total_limit": None, "best_metric": "eval_loss"},
        "tracking": {"logging_steps": 2},
    }


def start(folder: Path, sections: dict, *overrides: str, resume=False):
    file = folder / "config.json"
    folder.mkdir(exist_ok=True)
    file.write_text(json.dumps(sections | {"output_dir": str(folder)}))
    return runner.train(load(file, overrides).config, resume=resume)


def numbers(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in CLOCK} for line in lines]


def assert_same_run(a: Path, b: Path) -> None:
    last = max((p for p in a.glob("checkpoint-*")), key=lambda p: int(p.name.split("-")[1]))
    for file in sorted(last.glob("*.safetensors")):
        one, two = load_file(file), load_file(b / last.name / file.name)
        assert one.keys() == two.keys()
        different = [name for name in one if not torch.equal(one[name], two[name])]
        assert not different, f"{file.name}: {different}"
    assert numbers(a) == numbers(b)


@pytest.mark.parametrize("method", ["sft", "reward", "dpo", "tr-dpo", "kto", "bco"])
def test_resumed_equals_uninterrupted(tmp_path, shared, scratch_model, power_cut, method):
    """Killed after step 5, in the second epoch; it goes on from checkpoint-4."""
    sections = settings(shared, scratch_model, method)
    start(tmp_path / "whole", sections)

    with power_cut(step=5):
        start(tmp_path / "broken", sections)
    state = json.loads((tmp_path / "broken/run/run.json").read_text())
    assert state["state"] == "failed" and "power cut" in state["reason"]
    assert start(tmp_path / "broken", sections, resume=True) == 0
    assert_same_run(tmp_path / "whole/run", tmp_path / "broken/run")


def test_with_masters_in_halves_as_on_a_gpu(tmp_path, shared, scratch_model, power_cut, monkeypatch):
    """Of all weights but the embeddings in bfloat16, with averages and a reference that follows; also continued
    without halves."""
    pytest.importorskip("triton", reason="the kernel needs Triton: pip install -e .[gpu-dev]")
    monkeypatch.setattr(adamw, "is_large", lambda weight: weight.numel() % 16 == 0 and weight.numel() < 10_000)
    sections = settings(shared, scratch_model, "tr-dpo", ema_decay=0.9, max_steps=6)
    sections["model"]["dtype"] = "bfloat16"
    start(tmp_path / "plain", sections)
    for triton in (True, False):
        monkeypatch.setattr(job, "takes_triton", lambda *given: True)
        folder = tmp_path / ("halves" if triton else "mixed")
        with power_cut(step=5):
            start(folder, sections)
        monkeypatch.setattr(job, "takes_triton", lambda *given, triton=triton: triton)
        start(folder, sections, resume=True)
    monkeypatch.setattr(job, "takes_triton", lambda *given: True)
    start(tmp_path / "whole", sections)
    assert_same_run(tmp_path / "whole/run", tmp_path / "halves/run")
    names = ("plain", "whole", "mixed")
    plain, whole, mixed = (load_file(tmp_path / name / "run/checkpoint-6/optimizer.safetensors") for name in names)
    assert plain.keys() == whole.keys() == mixed.keys()
    for name in (name for name in plain if name.endswith(("|master", "|ema"))):
        for other in (whole, mixed):
            assert float((other[name] - plain[name]).norm() / plain[name].norm()) < 1e-2, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_that_follows_is_the_mixture_of_its_checkpoints(tmp_path, shared, scratch_model, dtype):
    """With a share so small that bfloat16 would round it away; mixed after every second update."""
    sections = settings(shared, scratch_model, "tr-dpo", max_steps=5)
    sections["method"] |= {"ref_model_sync_steps": 2, "ref_model_mixup_alpha": 1e-3}
    sections["model"]["dtype"] = dtype
    sections["checkpoint"] |= {"save_steps": 1}
    start(tmp_path, sections)
    expected = AutoModelForCausalLM.from_pretrained(scratch_model, dtype=getattr(torch, dtype)).float().state_dict()
    for step in range(1, 6):
        folder = tmp_path / f"run/checkpoint-{step}"
        reference = load_file(folder / "reference.safetensors")
        masters = load_file(folder / "optimizer.safetensors") if dtype == "bfloat16" else {}
        policy = load_file(folder / "model.safetensors")
        if step % 2 == 0:
            for name in reference:
                expected[name] = (1 - 1e-3) * expected[name] + 1e-3 * masters.get(f"{name}|master", policy[name])
        for name, weight in reference.items():
            torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-6)
    assert max(float((expected[name] - policy[name].float()).abs().max()) for name in reference) > 1e-3
    (tmp_path / "run/checkpoint-5/reference.safetensors").unlink()
    start(tmp_path, sections, "training.max_steps=6", resume=True)
    log = (tmp_path / "run/training.log").read_text()
    assert "checkpoint-5 is damaged (reference.safetensors: missing)" in log


def test_a_reference_of_another_architecture_cannot_follow(tmp_path, shared, scratch_model):
    other = AutoConfig.from_pretrained(scratch_model, intermediate_size=24)
    AutoModelForCausalLM.from_config(other).save_pretrained(tmp_path / "other")
    sections = settings(shared, scratch_model, "tr-dpo", max_steps=1)
    sections["method"]["ref_model"] = str(tmp_path / "other")
    with pytest.raises(ModelError, match=r"those of method\.ref_model differ from the policy"):
        start(tmp_path, sections)


def test_averages_are_saved_and_resumed(tmp_path, shared, scratch_model, power_cut):
    """ema/ is a model like final/, here an adapter with a start of its own, and the same after a power cut."""
    sections = settings(shared, scratch_model, "dpo", ema_decay=0.9)
    sections["model"]["lora"] = {"r": 4, "init": "pissa"}
    start(tmp_path / "whole", sections)
    with power_cut(step=5):
        start(tmp_path / "broken", sections)
    assert start(tmp_path / "broken", sections, resume=True) == 0
    assert_same_run(tmp_path / "whole/run", tmp_path / "broken/run")
    whole, again = (load_file(tmp_path / run / "run/ema/adapter_model.safetensors") for run in ("whole", "broken"))
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())
    final = load_file(tmp_path / "whole/run/final/adapter_model.safetensors")
    assert final.keys() == whole.keys() and not all(torch.equal(final[name], whole[name]) for name in final)
    averaged = load_model(ModelConfig(path=str(tmp_path / "whole/run/ema")), "lm", torch.float32, torch.device("cpu"))
    state = load_file(tmp_path / "whole/run/checkpoint-8/optimizer.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    A, B = (state[f"base_model.model.{name}.lora_{x}.default.weight|ema"] for x in "AB")
    A0 = whole[f"base_model.model.{name}.lora_A.weight"][4:]
    minus_B0 = whole[f"base_model.model.{name}.lora_B.weight"][:, 4:]
    published = load_model(ModelConfig(path=str(scratch_model)), "lm", torch.float32, torch.device("cpu"))
    want = published.get_parameter(f"{name}.weight") + 8 * (B @ A + minus_B0 @ A0)
    torch.testing.assert_close(averaged.get_parameter(f"{name}.weight"), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_run_goes_on(tmp_path, shared, scratch_model, monkeypatch, number):
    sections = settings(shared, scratch_model, "dpo")
    start(tmp_path / "whole", sections)
    update = Loop.update

    def interrupted(self, packs, objective):
        update(self, packs, objective)
        if self.state.step == 3:
            signal.raise_signal(number)

    monkeypatch.setattr(Loop, "update", interrupted)
    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit):
        start(tmp_path / "broken", sections)
    assert (tmp_path / "broken/run/checkpoint-3").is_dir()
    assert json.loads((tmp_path / "broken/run/run.json").read_text())["state"] == "interrupted"
    monkeypatch.setattr(Loop, "update", update)
    start(tmp_path / "broken", sections, resume=True)
    assert_same_run(tmp_path / "whole/run", tmp_path / "broken/run")


def test_a_finished_run_can_be_extended(tmp_path, shared, scratch_model):
    """With a constant learning rate, 4 steps and then 7 are 7 steps."""
    sections = settings(shared, scratch_model, "dpo", lr_scheduler_type="constant")
    sections |= {"evaluation": {"eval_steps": -1}, "checkpoint": {"save_steps": 2, "save_total_limit": None}}
    start(tmp_path / "whole", sections, "training.max_steps=7")
    start(tmp_path / "two", sections, "training.max_steps=4")
    start(tmp_path / "two", sections, "training.max_steps=7", "tracking.logging_steps=1", resume=True)
    a, b = tmp_path / "whole/run/checkpoint-7", tmp_path / "two/run/checkpoint-7"
    for name in ("model.safetensors", "optimizer.safetensors"):
        one, two = load_file(a / name), load_file(b / name)
        assert all(torch.equal(one[key], two[key]) for key in one)


def test_resume_refuses_other_settings_and_other_data(tmp_path, shared, scratch_model):
    sections = settings(shared, scratch_model, "dpo", max_steps=2)
    start(tmp_path, sections)
    with pytest.raises(RunError, match=r"method.beta: 0.1 -> 0.5"):
        start(tmp_path, sections, "method.beta=0.5", resume=True)
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{i}?", "chosen": " yes", "rejected": " no"} for i in range(12)]
    file.write_text("\n".join(map(json.dumps, rows)))
    sections["data"] = {"source": str(file), "format": "preference", "template": "none"}
    sections["checkpoint"] = {}
    start(tmp_path, sections, "name=other")
    file.write_text("\n".join(map(json.dumps, rows[::-1])))
    with pytest.raises(
        RunError, match=r"differs from the data that this run started with .another file.*this version of posttrain"
    ):
        start(tmp_path, sections, "name=other", resume=True)


def test_a_damaged_checkpoint_falls_back_one_and_a_missing_one_is_named(tmp_path, shared, scratch_model):
    sections = settings(shared, scratch_model, "dpo", max_steps=4)
    start(tmp_path, sections)
    run = tmp_path / "run"
    before = numbers(run)
    file = run / "checkpoint-4/model.safetensors"
    data = bytearray(file.read_bytes())
    data[-7] ^= 4
    file.write_bytes(data)
    start(tmp_path, sections, resume=True)
    log = (run / "training.log").read_text()
    assert "checkpoint-4 is damaged" in log and "model.safetensors" in log and "resumed from checkpoint-2" in log
    assert numbers(run) == before
    config = load(run / "config.yaml").config
    with pytest.raises(RunError, match=r"no checkpoint .*checkpoint-3.*checkpoint-2, checkpoint-4"):
        runner.train(config, resume=run / "checkpoint-3")
    assert runner.train(config, resume=run) == 0


# --- resuming with other intervals, with more steps, with nothing saved ---------------------------------------------


def test_intervals_may_change_on_resume_and_change_no_weight(tmp_path, shared, scratch_model):
    sections = settings(shared, scratch_model, "sft", max_steps=7)
    start(tmp_path / "whole", sections)
    sections["training"]["num_train_epochs"] = 3
    shutil.copytree(tmp_path / "whole", tmp_path / "other")
    for later in ("checkpoint-6", "checkpoint-7", "final"):
        shutil.rmtree(tmp_path / "other/run" / later)
    changes = ["checkpoint.save_steps=3", "checkpoint.save_total_limit=3", "evaluation.eval_steps=2"]
    start(tmp_path / "other", sections, *changes, "tracking.logging_steps=1", resume=True)
    run = tmp_path / "other/run"
    assert [path.name for path in list_checkpoints(run)] == ["checkpoint-4", "checkpoint-6", "checkpoint-7"]
    a, b = ((tmp_path / name / "run/checkpoint-7/adapter_model.safetensors") for name in ("whole", "other"))
    assert all(torch.equal(load_file(a)[name], load_file(b)[name]) for name in load_file(a))
    lines = numbers(run)
    assert [line["step"] for line in lines if "loss" in line] == [2, 4, 5, 6, 7]
    assert [line["step"] for line in lines if "eval_loss" in line] == [0, 3, 4, 6, 7]  # 4: due by the new interval


def test_more_steps_stretch_the_schedule_and_that_is_said(tmp_path, shared, scratch_model):
    sections = settings(shared, scratch_model, "dpo", lr_scheduler_type="linear", warmup_steps=0)
    sections["evaluation"] = {"eval_steps": -1}
    sections["checkpoint"] = {}
    start(tmp_path, sections, "training.max_steps=4", "tracking.logging_steps=1")
    start(tmp_path, sections, "training.max_steps=8", "tracking.logging_steps=1", resume=True)
    log = (tmp_path / "run/training.log").read_text()
    assert "resumed from checkpoint-4 at step 4 of 8" in log
    assert (
        "8 steps in total instead of 4: the linear schedule is stretched, so the learning rate of step 5 is 5.00e-04"
        in log
    )
    rates = [line["learning_rate"] for line in numbers(tmp_path / "run")]
    assert rates == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4, 5e-4, 3.75e-4, 2.5e-4, 1.25e-4])


def test_a_run_keeps_the_default_rate_that_it_started_with(tmp_path, shared, scratch_model):
    """Another version may have another default; a run without the record has the method's."""
    sections = settings(shared, scratch_model, "sft", lr_scheduler_type="constant", warmup_steps=0, learning_rate=None)
    sections |= {"tracking": {"logging_steps": 1}, "evaluation": {"eval_steps": -1}, "checkpoint": {}}
    start(tmp_path, sections, "training.max_steps=1")
    file = tmp_path / "run/run.json"
    facts = json.loads(file.read_text())
    [default] = {line["learning_rate"] for line in numbers(tmp_path / "run")}
    assert facts["provenance"]["resolved"] == {"training.learning_rate": default}
    facts["provenance"]["resolved"] = {"training.learning_rate": 0.0123}
    for total, recorded in ((2, 0.0123), (3, default)):
        if recorded == default:
            del facts["provenance"]["resolved"]
        file.write_text(json.dumps(facts))
        start(tmp_path, sections, f"training.max_steps={total}", resume=True)
        assert numbers(tmp_path / "run")[-1]["learning_rate"] == recorded
        facts = json.loads(file.read_text())
        assert facts["provenance"]["resolved"] == {"training.learning_rate": recorded}
    assert load(tmp_path / "run/config.yaml").config.training.learning_rate is None, "what was set, stays"


def test_another_best_metric_begins_without_a_best(tmp_path, shared, scratch_model):
    sections = settings(shared, scratch_model, "sft", max_steps=4, lr_scheduler_type="linear")
    sections["evaluation"] = {"eval_steps": 1}
    start(tmp_path, sections)
    name = "eval_mean_token_accuracy"
    changed = ["training.max_steps=7", f"checkpoint.best_metric={name}", "checkpoint.early_stopping_patience=3"]
    start(tmp_path, sections, *changed, resume=True)
    later = [line[name] for line in numbers(tmp_path / "run") if name in line and line["step"] > 4]
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert len(later) == 3 and results["best"] == {name: max(later)}
    start(tmp_path, sections, "training.max_steps=8", "checkpoint.best_metric=null", resume=True)
    assert "best" not in json.loads((tmp_path / "run/results.json").read_text())


def test_a_refused_resume_leaves_the_run_as_it_is(tmp_path, shared, scratch_model):
    sections = settings(shared, scratch_model, "dpo", max_steps=4)
    start(tmp_path, sections)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    for override, message in (
        ("method.beta=0.5", "made with different settings"),
        ("training.max_steps=3", "checkpoint-4 is at step 4, beyond training.max_steps = 3: raise it"),
    ):
        with pytest.raises(RunError, match=message):
            start(tmp_path, sections, override, resume=True)
        assert {path: path.read_bytes() for path in before} == before
    given = (tmp_path / "run/config.yaml").read_text()
    (tmp_path / "run/config.yaml").write_text(given.replace("beta: 0.1", "beta: 0.5"))
    with pytest.raises(RunError, match=r"method\.beta: 0\.1 -> 0\.5"):  # the checkpoint's own settings count
        start(tmp_path, sections, "method.beta=0.5", resume=True)
    (tmp_path / "run/checkpoint-4/manifest.json").write_text("{")
    start(tmp_path, sections, "training.max_steps=3", resume=True)
    assert "falling back to checkpoint-2" in (tmp_path / "run/training.log").read_text()


def test_an_evaluation_that_is_made_anew_is_logged_once(tmp_path, shared, scratch_model, monkeypatch):
    """A run stopped in its last one has a checkpoint before it: every resume from there evaluates and logs."""
    sections = settings(shared, scratch_model, "dpo", max_steps=4)
    start(tmp_path / "whole", sections)
    evaluate = Loop.evaluate_by

    def stop(self, measure):
        if self.state.step == 4:
            self.saver.save(self.state)
            raise KeyboardInterrupt
        return evaluate(self, measure)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "evaluate_by", stop)
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path / "cut", sections)
    for _ in range(3):
        start(tmp_path / "cut", sections, resume=True)
        assert_same_run(tmp_path / "whole/run", tmp_path / "cut/run")


def test_the_last_step_of_a_run_that_stops_early_is_saved_once_with_its_line(tmp_path, shared, scratch_model):
    """Whatever kills it after that, a resumed run adds nothing."""
    sections = settings(shared, scratch_model, "sft", learning_rate=0.3, max_steps=20)
    sections["evaluation"] = {"eval_steps": 1}
    sections["tracking"] = {"logging_steps": 10}
    sections["checkpoint"] |= {"early_stopping_patience": 1}
    start(tmp_path, sections)
    last = list_checkpoints(tmp_path / "run")[-1]
    state = json.loads((last / "state.json").read_text())["loop"]
    assert state["step"] < 10 and state["window"] == {}
    before = numbers(tmp_path / "run")
    assert [line["step"] for line in before if "loss" in line] == [state["step"]]
    start(tmp_path, sections, resume=True)
    assert numbers(tmp_path / "run") == before


@pytest.mark.parametrize("on_an_adapter", [False, True])
def test_resume_without_a_checkpoint_begins_anew(tmp_path, shared, scratch_model, monkeypatch, caplog, on_an_adapter):
    """Adapters that go on adapters too, whose merged base the first try has left in `base/`."""
    sections = settings(shared, scratch_model, "dpo", max_steps=3)
    if on_an_adapter:
        start(tmp_path / "first", settings(shared, scratch_model, "sft", max_steps=1))
        sections["model"] = {"path": str(tmp_path / "first/run/final"), "lora": {"r": 4}}
    start(tmp_path / "whole", sections)
    update = Loop.update
    with monkeypatch.context() as patch:

        def crash(self, packs, objective):
            update(self, packs, objective)
            raise RuntimeError("power cut")

        patch.setattr(Saver, "save_after", lambda self, error: None)
        patch.setattr(Loop, "update", crash)
        with pytest.raises(RuntimeError):
            start(tmp_path / "cut", sections)
    with pytest.raises(RunError, match="there is no run folder"):
        start(tmp_path / "never", sections, resume=True)
    (tmp_path / "cut/run/config.yaml").unlink()  # as if killed between the first two files
    start(tmp_path / "cut", sections, resume=True)
    assert "has no checkpoint yet: the run starts over" in caplog.text and "of the previous run: best" in caplog.text
    assert (tmp_path / "cut/run/best.set-aside").is_dir()
    assert_same_run(tmp_path / "whole/run", tmp_path / "cut/run")


@pytest.mark.slow
def test_early_stopping_goes_on_where_it_was(tmp_path, shared, scratch_model, power_cut):
    """Patience is counted across a crash, and a stopped run that is resumed stays stopped."""
    sections = settings(shared, scratch_model, "dpo", learning_rate=0.3, max_steps=20)
    sections["evaluation"] = {"eval_steps": 1}
    sections["checkpoint"] |= {"save_steps": 1, "early_stopping_patience": 3}
    start(tmp_path / "whole", sections)
    stopped = len(list_checkpoints(tmp_path / "whole/run"))
    assert stopped < 20
    with power_cut(step=stopped - 1):
        start(tmp_path / "cut", sections)
    for _ in range(2):
        start(tmp_path / "cut", sections, resume=True)
        assert_same_run(tmp_path / "whole/run", tmp_path / "cut/run")


def test_float16_on_a_stand_in_for_a_gpu(tmp_path, shared, scratch_model, monkeypatch, power_cut):
    """On a CPU, which is refused otherwise. Overflows are skipped, counted and do not end the run, and a resumed run
    has the scales of the whole one."""
    sections = settings(shared, scratch_model, "dpo", max_steps=9)
    sections |= {"evaluation": {"eval_steps": -1}, "checkpoint": {"save_steps": 2, "save_total_limit": None}}
    sections["model"]["dtype"] = "float16"
    with pytest.raises(ModelError, match="float16 is for GPUs without bfloat16, but this run computes on cpu"):
        start(tmp_path / "refused", sections)
    monkeypatch.setattr(job, "compute_dtype", lambda model, device: torch.float16)
    monkeypatch.setattr(estimate, "compute_dtype", lambda model, device: torch.float16)
    grown = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", partial(grown, init_scale=2.0**24))
    start(tmp_path / "whole", sections)
    with power_cut(step=5):
        start(tmp_path / "broken", sections)
    assert start(tmp_path / "broken", sections, resume=True) == 0
    assert_same_run(tmp_path / "whole/run", tmp_path / "broken/run")
    results = json.loads((tmp_path / "whole/run/results.json").read_text())
    print(results["skipped_steps"], results["final"])
    assert MAX_SKIPPED_IN_A_ROW < results["skipped_steps"] < 9 and results["final"]["loss_scale"] < 2**20
