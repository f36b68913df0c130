"""Whole runs beside TRL 1.16: the same model, rows, order and settings give the same losses and the same model."""

import gzip
import itertools
import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from benchmarks.common import TRL_SETTINGS
from posttrain import runner
from posttrain.config import load

trl = pytest.importorskip("trl", reason="TRL is the oracle: pip install -e '.[bench]'")

BATCH = 4
RATE = 1e-3
Trained = tuple[Path, list[float]]  # the saved model, the loss of every step


def pairs(shared, count: int) -> list[dict[str, str]]:
    """HH pairs of a single prompt, short enough for a quick test."""
    rows = []
    marker = "\n\nAssistant:"
    with gzip.open(shared / "data/hh-harmless/train.jsonl.gz", "rt", encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            cut, other = (row[name].rindex(marker) + len(marker) for name in ("chosen", "rejected"))
            if row["chosen"][:cut] == row["rejected"][:other] and max(len(row["chosen"]), len(row["rejected"])) < 400:
                rows.append(
                    {"prompt": row["chosen"][:cut], "chosen": row["chosen"][cut:], "rejected": row["rejected"][cut:]}
                )
            if len(rows) == count:
                return rows
    raise AssertionError("the data set is smaller than it was")


def train_ours(
    tmp_path: Path, method: str, model: Path, rows: list[dict], epochs: int = 1, version: int = 2, **method_settings
) -> tuple[Path, list[float]]:
    source = tmp_path / "rows.jsonl"
    source.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    settings = {
        "name": "ours",
        "output_dir": str(tmp_path),
        "behavior_version": version,
        "model": str(model),
        "method": {"type": method, **method_settings},
        "data": {"source": str(source), "template": "none", "shuffle": False},
        "training": {
            "batch_size": BATCH,
            "max_steps": epochs * len(rows) // BATCH,
            "learning_rate": RATE,
            "lr_scheduler_type": "linear",
            "warmup_steps": 3,
            "weight_decay": 0.1,
            "tokens_per_pack": 2048,
        },
        "tracking": {"logging_steps": 1},
    }
    file = tmp_path / "ours.json"
    file.write_text(json.dumps(settings))
    runner.train(load(file).config)
    lines = [json.loads(line) for line in (tmp_path / "ours/metrics.jsonl").read_text().splitlines()]
    return tmp_path / "ours/final", [line["loss"] for line in lines]


EXPERIMENTAL = ("orpo", "cpo")


def trl_classes(method: str):
    """TRL's trainer and settings for one of our methods."""
    if method == "orpo":
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        return ORPOTrainer, ORPOConfig
    if method == "cpo":
        from trl.experimental.cpo import CPOConfig, CPOTrainer

        return CPOTrainer, CPOConfig
    return {
        "dpo": (trl.DPOTrainer, trl.DPOConfig),
        "kto": (trl.KTOTrainer, trl.KTOConfig),
        "reward": (trl.RewardTrainer, trl.RewardConfig),
        "sft": (trl.SFTTrainer, trl.SFTConfig),
    }[method]


def train_trl(
    tmp_path: Path, method: str, model: Path, rows: list[dict], epochs: int = 1, **method_settings
) -> tuple[Path, list[float]]:
    trainer_class, config_class = trl_classes(method)
    config = config_class(
        output_dir=str(tmp_path / "trl"),
        per_device_train_batch_size=BATCH,
        max_steps=epochs * len(rows) // BATCH,
        learning_rate=RATE,
        warmup_steps=3,
        weight_decay=0.1,
        max_length=1024,
        train_sampling_strategy="sequential",
        **TRL_SETTINGS | {"lr_scheduler_type": "linear"},
        **({} if method in EXPERIMENTAL else {"model_init_kwargs": {"dtype": "float32"}}),
        **method_settings,
    )
    dataset = Dataset.from_list(rows)
    if method in EXPERIMENTAL:  # these take a model, and read its tokenizer from nowhere
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        trainer = trainer_class(model=loaded, args=config, train_dataset=dataset, processing_class=tokenizer)
    else:
        trainer = trainer_class(model=str(model), args=config, train_dataset=dataset)
    trainer.train()
    trainer.save_model(str(tmp_path / "trl/final"))
    return tmp_path / "trl/final", [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def assert_same_losses(ours: list[float], theirs: list[float]) -> None:
    worst = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    print(f"losses {ours[0]:.4f} -> {ours[-1]:.4f}; largest difference from TRL {worst:.1e}")
    assert worst < 1e-3
    assert max(ours) - min(ours) > 0.01, "nothing moved, so nothing was compared"


def test_reward_model_equals_trl(tmp_path, shared, scratch_model):
    """After 20 steps from the same head, the margins of unseen pairs agree within numerical noise."""
    torch.manual_seed(0)
    start = AutoModelForSequenceClassification.from_pretrained(scratch_model, num_labels=1)
    torch.nn.init.normal_(start.score.weight, std=0.02)
    tokenizer = AutoTokenizer.from_pretrained(scratch_model)
    start.config.pad_token_id = tokenizer.pad_token_id
    start.save_pretrained(tmp_path / "start")
    tokenizer.save_pretrained(tmp_path / "start")
    rows = pairs(shared, 100)
    ours, our_losses = train_ours(tmp_path, "reward", tmp_path / "start", rows[:80])
    theirs, their_losses = train_trl(tmp_path, "reward", tmp_path / "start", rows[:80])
    assert_same_losses(our_losses, their_losses)

    def margins(folder: Path) -> torch.Tensor:
        model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
        rewards = []
        for row in rows[80:]:
            for name in ("chosen", "rejected"):
                ids = [*tokenizer(row["prompt"] + row[name])["input_ids"], tokenizer.eos_token_id]
                with torch.no_grad():
                    rewards.append(float(model(torch.tensor([ids])).logits))
        return torch.tensor(rewards).view(-1, 2) @ torch.tensor([1.0, -1.0])

    a, b = margins(ours), margins(theirs)
    print(f"margins: spread {a.std():.4f}, largest difference {(a - b).abs().max():.1e}")
    assert (a - b).abs().max() < 1e-2 * a.std()


@pytest.mark.parametrize("loss_type", [["ipo"], ["sigmoid", "sft"]])
def test_dpo_equals_trl(tmp_path, shared, loss_type):
    rows = pairs(shared, 8 * BATCH)
    model = shared / "models/stories260K"
    _, ours = train_ours(tmp_path, "dpo", model, rows, loss_type=loss_type)
    _, theirs = train_trl(tmp_path, "dpo", model, rows, loss_type=loss_type)
    assert_same_losses(ours, theirs)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("orpo", {}),
        ("cpo", {"label_smoothing": 0.1}),
        ("cpo", {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0.0}),
    ],
    ids=str,
)
def test_reference_free_equals_trl(tmp_path, shared, method, settings):
    rows = pairs(shared, 8 * BATCH)
    model = shared / "models/stories260K"
    if settings.get("loss_type") == "simpo":
        ours_settings = {name: value for name, value in settings.items() if name != "loss_type"}
        _, ours = train_ours(tmp_path, "simpo", model, rows, **ours_settings)
    else:
        _, ours = train_ours(tmp_path, method, model, rows, **settings)
    _, theirs = train_trl(tmp_path, method, model, rows, **settings)
    assert_same_losses(ours, theirs)


def labelled(pairs: list[dict[str, str]]) -> list[dict]:
    """Completions one by one: five chosen of eight, three rejected, so that batches differ in their classes."""
    return [
        {"prompt": row["prompt"], "completion": row["chosen" if label else "rejected"], "label": label}
        for row, label in zip(pairs, itertools.cycle(map(bool, (1, 1, 0, 1, 1, 1, 0, 0))), strict=False)
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {"beta": 0.5},
        pytest.param(
            {"loss_type": "apo_zero_unpaired", "desirable_weight": 0.7, "undesirable_weight": 1.2},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_kto_equals_trl(tmp_path, shared, settings):
    """Every step's loss, with the KL of completions behind other prompts. TRL rotates them within a batch: as we do
    where a batch is an epoch, and as our runs of behaviour version 1 do."""
    model = shared / "models/stories260K"
    for rows, epochs, version in ((BATCH, 8, 2), (8 * BATCH, 1, 1)):
        data, folder = labelled(pairs(shared, rows)), tmp_path / f"{version}"
        folder.mkdir()
        _, ours = train_ours(folder, "kto", model, data, epochs, version, **settings)
        _, theirs = train_trl(folder, "kto", model, data, epochs, **settings)
        assert_same_losses(ours, theirs)


@pytest.mark.parametrize(
    "settings", [{"loss_type": "nll"}, {"loss_type": "dft"}, {"label_smoothing_factor": 0.2}], ids=str
)
def test_sft_equals_trl(tmp_path, shared, scratch_model, settings):
    rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in pairs(shared, 8 * BATCH)]
    # For a random model p log p is nearly 0.
    model = scratch_model if settings == {"loss_type": "nll"} else shared / "models/stories260K"
    _, ours = train_ours(tmp_path, "sft", model, rows, **settings)
    _, theirs = train_trl(tmp_path, "sft", model, rows, **settings)
    assert_same_losses(ours, theirs)
