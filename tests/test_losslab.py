"""`posttrain losses`: the run's own row is training's own step, another row the step of another run."""

import gzip
import json
import math
import re
import shutil
import sqlite3
from itertools import islice

import pytest
import torch
from pages import drawn
from test_online import EXACT, train
from test_recipes import dpo, run

from posttrain.base.errors import ConfigError, RunError
from posttrain.cli import main
from posttrain.config import DistillMethod, DPOMethod, GRPOMethod, KTOMethod, PPOMethod, RewardMethod, SFTMethod, load
from posttrain.config.schema.offline import SimPOMethod
from posttrain.inspection.loss_inputs import parsed, variants
from posttrain.inspection.losslab import cosines, losses
from posttrain.recipes.grpo import regraded
from posttrain.runs.folder import FolderLock
from posttrain.runs.metrics import read_metrics
from posttrain.runs.stored_rollouts import StoredRun

ALL = {"save_steps": 1, "save_total_limit": None}  # a checkpoint of every step


@pytest.fixture(scope="module")
def sampled(sums_home, tmp_path_factory):
    """A GRPO run of three steps."""
    folder = tmp_path_factory.mktemp("losslab-grpo")
    return train(sums_home, folder, {"beta": 0.0}, checkpoint=ALL, training={"max_steps": 3})


@pytest.fixture(scope="module")
def pairs(shared, tmp_path_factory):
    """A DPO run of three steps: an epoch and a half of ten pairs."""
    folder = tmp_path_factory.mktemp("losslab-dpo")
    with gzip.open(shared / "data/hh-harmless/train.jsonl.gz", "rt", encoding="utf-8") as rows:
        (folder / "rows.jsonl").write_text("".join(islice(rows, 12)), encoding="utf-8")
    return run(folder, **preferences(shared, folder, checkpoint=ALL))


def preferences(shared, folder, **sections):
    data = {"source": str(folder / "rows.jsonl"), "max_rows": None, "max_length": 200, "overlong": "truncate"}
    settings = dpo(shared, shared / "models/stories260K", data=data, **sections)
    return settings | {"data": settings["data"]}


def norm_of(folder, step):
    return next(line["grad_norm"] for line in read_metrics(folder) if line["step"] == step and "loss" in line)


def own_row_is_logged(folder, *steps):
    own = load(folder / "config.yaml").config.method.loss_name
    for step in steps:
        lab = losses(folder, step, [own])
        print(f"step {step}: {lab.weights}; logged {norm_of(folder, step)}, here {lab.rows[0].norm}")
        assert lab.weights.exact and lab.logged == norm_of(folder, step) > 0
        assert lab.rows[0].norm == pytest.approx(lab.logged, rel=1e-5)


def test_the_own_row_of_grpo_is_the_logged_step(sampled):
    own_row_is_logged(sampled, 1, 3)


def test_the_own_row_of_dpo_is_the_logged_step(pairs):
    own_row_is_logged(pairs, 1, 3)


def test_the_other_rows_are_the_steps_of_other_runs(sampled, pairs, sums_home, shared, tmp_path):
    """A run under DAPO samples the same first step: its gradient is the one that the lab says. So with IPO."""
    lab = losses(sampled, 1, ["dapo", "rloo"], {"beta": [0.0]})
    for row in lab.rows[1:]:
        method = {"beta": 0.0} | ({"type": "rloo"} if row.variant.name == "rloo" else {"loss_type": "dapo"})
        other = train(sums_home, tmp_path / row.variant.name, method, training={"max_steps": 1})
        print(f"{row.variant.label}: {row.norm} here, {norm_of(other, 1)} in a run of it")
        assert row.norm == pytest.approx(norm_of(other, 1), rel=1e-5) != pytest.approx(lab.rows[0].norm, rel=1e-2)
    other = run(tmp_path, **preferences(shared, pairs.parent, method={"loss_type": "ipo"}, training={"max_steps": 1}))
    ipo = losses(pairs, 1, ["ipo"]).rows[1]
    assert ipo.norm == pytest.approx(norm_of(other, 1), rel=1e-5)


OTHERS = {
    "lora": ({}, {"model": {"lora": {"r": 4}}}),
    "multiple": ({"loss_type": ["aot", "sft"]}, {"training": {"tokens_per_pack": 500}}),
    "bfloat16": ({}, {"model": {"dtype": "bfloat16"}}),
    "precomputed": ({"precompute_ref_log_probs": True}, {}),
    "orpo": ({"type": "orpo"}, {}),
    "simpo": ({"type": "simpo"}, {}),
    "reward": ({"type": "reward"}, {}),
    "sft with dropout": ({"type": "sft"}, {"model": {"lora": {"r": 4, "dropout": 0.2}}}),
    "bco": ({"type": "kto", "loss_type": "bco"}, {}),
    "kto": ({"type": "kto"}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_the_own_row_of_every_method_of_rows(pairs, shared, tmp_path, name):
    method, sections = OTHERS[name]
    settings = preferences(shared, pairs.parent, method=method, checkpoint=ALL, **sections)
    if method.get("type") == "kto":
        rows = [{"prompt": f"a {n}", "completion": " big cat sat"[: 5 + n], "label": n % 3 > 0} for n in range(12)]
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        settings["data"] |= {"source": str(tmp_path / "rows.jsonl"), "format": "kto"}
    folder = run(tmp_path, **settings)
    own_row_is_logged(folder, 1, 3)


SAMPLING = {
    "lora": ({}, {"model": {"lora": {"r": 4, "target_modules": "all-linear"}}}),
    "kl in the reward": ({"kl_in": "reward", "kl_estimator": "k1", "mask_truncated_completions": True}, {}),
    "one update of ppo": ({"type": "ppo", "num_ppo_epochs": 1, "num_minibatches": 1, "target_kl": 1.0}, {}),
    "reinforce++": ({"type": "reinforce_plus_plus"}, {}),
    "distill": ({"type": "distill", "num_generations": 2, "on_policy_fraction": 0.5}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLING)
def test_the_own_row_of_every_method_that_samples(sampled, sums_home, tmp_path, name):
    method, sections = SAMPLING[name]
    if "model" in sections:
        sections["model"]["path"] = str(sums_home / "model")
    if name == "distill":
        rows = [json.loads(line) for line in (sums_home / "train.jsonl").read_text().splitlines()]
        (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row | {"completion": row["answer"]}) for row in rows))
        method = method | {"teacher": str(sampled / "final")}
        sections = {"data": {"source": str(tmp_path / "rows.jsonl"), "template": "none", "max_length": 24}}
    folder = train(sums_home, tmp_path, method, checkpoint=ALL, training={"max_steps": 3}, **sections)
    own_row_is_logged(folder, 1, 3)


@pytest.mark.slow
def test_every_loss_of_pairs_has_a_gradient(pairs):
    lab = losses(pairs, 2)
    assert len(lab.rows) == 22 and all(row.norm and row.loss is not None for row in lab.rows) and not lab.left_out


def test_several_updates(sums_home, tmp_path):
    """The first update is on the policy, so it clips nothing; at the last one, the stored share is clipped."""
    method = {
        "num_iterations": 4,
        "epsilon": 0.2,
        "beta": 0.0,
    }  # the rate moves a tenth of the ratios by more than that
    folder = train(sums_home, tmp_path, method, training={"max_steps": 1, "learning_rate": 3e-4})
    lab = losses(folder, 1, ["grpo", "reinforce_with_baseline"], {"epsilon": [1e-6]})
    own, tight, plain = lab.rows
    with sqlite3.connect(folder / "rollouts.sqlite") as connection:
        marks = b"".join(row[0] for row in connection.execute("SELECT clipped FROM rollouts"))
    assert own.clipped == 0 and own.clipped_last == pytest.approx(sum(marks) / len(marks)) and sum(marks)
    assert tight.clipped_last > own.clipped_last and plain.clipped is plain.clipped_last is None
    assert lab.logged is None and lab.updates == 4


# --- weights --------------------------------------------------------------------------------------------------------


def test_the_nearest_earlier_weights(sampled, tmp_path):
    folder = shutil.copytree(sampled, tmp_path / "run")
    shutil.rmtree(folder / "checkpoint-2")
    lab = losses(folder, 3, ["grpo"], {"epsilon": [1e-6]})
    assert (lab.weights.name, lab.weights.exact, lab.logged) == ("checkpoint-1", False, None)
    assert "no checkpoint-2" in str(lab.weights) and lab.rows[1].clipped > 0  # the policy that sampled is another
    with open(folder / "checkpoint-1/model.safetensors", "ab") as file:
        file.write(b"x")
    lab = losses(folder, 3, ["grpo"])
    assert lab.weights.name == "the initial model" and "checkpoint-1 is damaged" in lab.weights.skipped[0]


def length(completions, **_columns) -> list[float | None]:
    """The number of characters; no reward for an answer that begins with a 1."""
    return [None if text.startswith("1") else float(len(text)) for text in completions]


def test_stored_parts_and_a_reference_that_follows_are_those_of_training(sums_home, tmp_path, capsys):
    """GDPO's advantages from the stored parts, and the reference as it was: mixed after steps 1 and 2."""
    rewards = [EXACT, {"type": "python", "function": "test_losslab:length", "weight": 0.5}]
    method = {"multi_objective_aggregation": "normalize_then_sum", "beta": 5.0}
    method |= {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
    folder = train(sums_home, tmp_path, method, rewards=rewards, checkpoint=ALL, training={"max_steps": 3})
    own_row_is_logged(folder, 1, 3)
    with StoredRun(folder) as stored:
        rows = stored.rollouts(3)
    assert any(row["parts"]["length"]["value"] is None for row in rows)
    settings, own = load(folder / "config.yaml").config.method, [row["reward"] for row in rows]
    assert regraded(settings, rows, own) == pytest.approx([row["advantage"] for row in rows], abs=1e-5)
    with pytest.raises(RunError, match="of some completions only the sum of their rewards is stored"):
        regraded(settings, [*rows[:-1], rows[-1] | {"parts": {}}], own)
    assert main(["regrade", str(folder), *(f"--reward={json.dumps(reward)}" for reward in rewards)]) == 0
    assert re.search(r"\b0 of \d+ advantages change sign", capsys.readouterr().out)


# --- bad input ------------------------------------------------------------------------------------------------------


def test_equal_rewards_have_no_direction(sampled, tmp_path, capsys):
    folder = shutil.copytree(sampled, tmp_path / "run")
    with sqlite3.connect(folder / "rollouts.sqlite") as connection:
        connection.execute("UPDATE rollouts SET reward = 1")
    assert main(["losses", str(folder), "--step", "2", "--loss", "dapo,no_baseline"]) == 0
    shown = capsys.readouterr().out
    print(shown)
    assert "no cosine" in shown
    found = json.loads((folder / "losses-step-2.json").read_text())
    assert [one["grad_norm"] for one in found["losses"]][:2] == [0, 0] and found["losses"][2]["grad_norm"] > 0
    assert found["cosines"] == [[None] * 3, [None] * 3, [None, None, 1.0]]
    assert drawn(folder / "losses-step-2.svg").count("–") == 8


def test_wrong_runs_and_steps_are_refused(sampled, pairs, tmp_path, monkeypatch):
    def refused(folder, step, message, names=()):
        with pytest.raises((RunError, ConfigError), match=message):
            losses(folder, step, names)

    refused(sampled, 9, "no rollouts of step 9; the file has steps 1 to 3")
    refused(pairs, 9, "has finished 3 steps: there is no step 9")
    refused(pairs.parent, 1, "has several runs: name one of them")
    refused(sampled / "final", 1, "is not a run folder")
    refused(sampled, 1, "did you mean dapo", ["dappo"])
    folder = shutil.copytree(sampled, tmp_path / "run")
    lock = FolderLock(folder)
    refused(folder, 1, "is active")
    lock.release()
    with sqlite3.connect(folder / "rollouts.sqlite") as connection:
        connection.execute("UPDATE rollouts SET old_logprobs = substr(old_logprobs, 5) WHERE step = 2")
        connection.execute("UPDATE prompts SET facts = '{' WHERE step = 3")
        connection.execute("DELETE FROM prompts WHERE step = 1")
    refused(folder, 1, "the file has steps 2 to 3")
    refused(folder, 2, "completion 0 of prompt 0 of step 2 is damaged")
    refused(folder, 3, "is damaged")
    (folder / "rollouts.sqlite").write_bytes(b"no database" * 1000)
    refused(folder, 2, "cannot be read")
    (folder / "rollouts.sqlite").unlink()
    refused(folder, 2, "has no rollouts.sqlite")
    monkeypatch.setattr("posttrain.inspection.losslab.available_memory", lambda device: 10)
    refused(pairs, 1, "choose fewer losses with --loss")


def test_changed_data_and_models_are_refused(shared, pairs, tmp_path):
    shutil.copy(pairs.parent / "rows.jsonl", tmp_path)
    model = shutil.copytree(shared / "models/stories260K", tmp_path / "model")
    settings = preferences(shared, tmp_path, training={"max_steps": 1}) | {"model": {"path": str(model)}}
    folder = run(tmp_path, **settings)
    rows = (tmp_path / "rows.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "rows.jsonl").write_text("".join(rows[1:]))
    with pytest.raises(RunError, match="the training data differs"):
        losses(folder, 1)
    (model / "config.json").write_text((model / "config.json").read_text() + "\n")
    with pytest.raises(RunError, match="is not the model that"):
        losses(folder, 1)


# --- variants, numbers, output --------------------------------------------------------------------------------------


def labels(own, names=(), *settings):
    return [row.label for row in variants(own, names, parsed(settings))[0]]


def test_the_losses_that_fit():
    grpo = labels(GRPOMethod())
    assert grpo[0] == "grpo" and {"dapo", "gspo", "luspo", "cispo", "sapo", "vespo", "rloo"} < set(grpo)
    assert {"grpo scale_rewards=batch", "grpo scale_rewards=none"} < set(grpo) and "ppo" not in grpo
    assert len(grpo) == len(set(grpo)) == 15
    assert len(labels(DPOMethod())) == 22 and labels(DPOMethod(loss_type=("ipo", "sft")))[0] == "ipo+sft"
    assert labels(SimPOMethod())[0] == "simpo" and len(labels(SimPOMethod())) == 22
    assert labels(KTOMethod(loss_type="bco")) == ["bco", "kto", "apo_zero_unpaired"]
    assert labels(SFTMethod()) == ["nll", "dft", "eaft"] and len(labels(RewardMethod())) == 2
    teacher = DistillMethod(teacher="x", divergence="forward_kl")
    assert labels(teacher) == ["forward_kl", "reverse_kl", "jsd"]
    rows, left_out = variants(PPOMethod(kl_coef=0.2, cliprange=0.1), (), {})
    assert [row.name for row in rows] == ["ppo", "no_baseline", "reinforce_plus_plus"]
    assert "compares a prompt's completions" in left_out["dapo"]
    assert (rows[2].method.beta, rows[2].method.epsilon, rows[0].method.updates) == (0.2, 0.1, 1)


def test_settings_of_losses():
    assert labels(GRPOMethod(), ["grpo", "reinforce_with_baseline"], "epsilon=0.1,0.2", "beta=0,0.05") == [
        "grpo epsilon=0.2 beta=0.05",
        "grpo epsilon=0.1 beta=0",
        "grpo epsilon=0.1 beta=0.05",
        "grpo epsilon=0.2 beta=0",
        "reinforce_with_baseline beta=0",
        "reinforce_with_baseline beta=0.05",
    ]
    assert labels(DPOMethod(), ["sft", "ipo"], "beta=0.5,1") == [
        "sigmoid beta=0.1",
        "ipo beta=0.5",
        "ipo beta=1",
        "sft",
    ]
    dapo = variants(GRPOMethod(epsilon_high=0.3, scale_rewards="none"), ["dapo", "rloo"], {})[0]
    assert dapo[1].method.epsilon_high == dapo[2].method.epsilon_high == 0.3 and dapo[1].method.scale_rewards == "none"
    assert dapo[2].method.kl_in == "reward"  # its own default, as the run left it at that of GRPO
    for wrong, message in (
        ("betta=1", "did you mean beta"),
        ("beta=-1", "--set beta is -1; it must be a number above 0"),
        ("beta", "such as epsilon"),
        ("beta=1,,2", "such as epsilon"),
        ("loss_type=ipo", "--loss"),
        ("ref_model=x", "another model"),
    ):
        with pytest.raises(ConfigError, match=message):
            labels(DPOMethod(), (), wrong)
    with pytest.raises(ConfigError, match="--set label_smoothing: none of these losses reads it: ipo, sft"):
        labels(DPOMethod(), ["ipo", "sft"], "label_smoothing=0.1")


def test_cosines_are_those_of_pairs():
    gradients = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0))
    gradients[1] = -2 * gradients[0]
    gradients[2] = 0
    found = cosines(gradients)
    wanted = torch.cosine_similarity(gradients[0].double(), gradients[3].double(), dim=0).item()
    assert found[0][3] == found[3][0] == pytest.approx(wanted) and found[0][1] == pytest.approx(-1)
    assert found[2] == [None] * 4 and [row[2] for row in found] == [None] * 4 and found[3][3] == 1
    gradients[3, 5] = math.inf
    assert cosines(gradients)[3] == [None] * 4


def test_the_command_shows_and_writes(pairs, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    before = sorted(path.name for path in pairs.iterdir())
    assert main(["losses", str(pairs), "--step", "2", "--loss", "hinge,sft,orpo,simpo", "-o", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    print(shown)
    assert all(len(line) <= 80 for line in shown.splitlines() if str(tmp_path) not in line and str(pairs) not in line)
    assert "checkpoint-1, which step 2 began with" in shown and "(relative difference" in shown
    assert sorted(path.name for path in pairs.iterdir()) == before
    found = json.loads((tmp_path / "losses-step-2.json").read_text())
    assert [one["name"] for one in found["losses"]][:2] == ["sigmoid", "hinge"] and found["weights"]["exact"]
    assert found["losses"][0]["grad_norm"] == pytest.approx(found["logged_grad_norm"], rel=1e-5)
    matrix = torch.tensor(found["cosines"])
    assert torch.equal(matrix, matrix.T) and matrix.diagonal().eq(1).all()
    texts, count = drawn(tmp_path / "losses-step-2.svg"), len(found["losses"])
    assert texts.count("1.00") >= count and len(texts) == 1 + 2 * count + count**2
    for arguments, message in (
        (["nowhere", "--step", "1"], "no such folder"),
        ([str(pairs), "--step", "0"], "greater than or equal to 1"),
        ([str(pairs), "--step", "1", "--output", "nowhere"], "--output nowhere"),
        ([str(pairs), "--step", "1", "--device", "tpu"], "--device"),
    ):
        assert main(["losses", *arguments]) == 2 and message in capsys.readouterr().err
