"""Whole GRPO runs beside TRL 1.16: from the same completions come the same rewards, gradients and model.

posttrain samples; TRL is given the completions, in place of its own `generate`.
"""

import json

import pytest
import torch
from datasets import Dataset
from test_trl import pairs
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import TRL_SETTINGS
from posttrain import runner
from posttrain.config import load
from posttrain.engines import EmbeddedEngine

trl = pytest.importorskip("trl", reason="TRL is the oracle: pip install -e '.[bench]'")

PROMPTS, GROUP, STEPS, LIMIT, RATE = 3, 4, 6, 12, 1e-3
# What is set: ours, and TRL's where it has another name or default.
VARIANTS = {
    "grpo": ({"loss_type": "grpo", "beta": 0.04}, {}),
    "bnpo": ({"loss_type": "bnpo", "beta": 0.0}, {}),
    "dapo": ({"loss_type": "dapo", "beta": 0.0, "epsilon_high": 0.28, "scale_rewards": "batch"}, {}),
    "dr_grpo": ({"loss_type": "dr_grpo", "beta": 0.0, "scale_rewards": "none"}, {}),
    "gspo, twice": (
        {"loss_type": "gspo", "beta": 0.0, "num_iterations": 2},
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    ),
    "sapo, twice, corrected KL": (
        {"loss_type": "sapo", "beta": 0.04, "num_iterations": 2, "use_bias_correction_kl": True},
        {},
    ),
    "GDPO": (
        {"loss_type": "dapo", "beta": 0.0, "multi_objective_aggregation": "normalize_then_sum"},
        {"reward_weights": [1.0, 0.5]},
    ),
    "TR-DPO's reference": (
        {
            "loss_type": "grpo", "beta": 0.4, "num_iterations": 2, "sync_ref_model": True,
            "ref_model_mixup_alpha": 0.3, "ref_model_sync_steps": 4, "use_bias_correction_kl": True,
        },
        {},
    ),
    "vespo, twice": ({"loss_type": "vespo", "beta": 0.0, "num_iterations": 2}, {}),
    "entropy": (
        {
            "loss_type": "bnpo", "beta": 0.0, "use_adaptive_entropy": True, "entropy_coef": 0.05,
            "entropy_coef_delta": 0.02, "entropy_target": 9.0, "top_entropy_quantile": 0.5,
        },
        {},
    ),
}  # fmt: skip


def letters(completions, **_columns) -> list[float]:
    """A reward that differs nearly always: the share of vowels."""
    return [sum(letter in "aeiou" for letter in text) / max(1, len(text)) for text in completions]


def length(completions, **_columns) -> list[float | None]:
    """The number of characters; no reward where a completion begins with a space."""
    return [None if text.startswith(" ") else float(len(text)) for text in completions]


def train_ours(folder, model, prompts: list[str], monkeypatch, training=None, weights=(1.0,), **method):
    """The run folder, and for each step the prompts' tokens and the completions sampled for them."""
    sampled, generate = [], EmbeddedEngine.generate

    def recorded(self, asked, *arguments, **named):
        groups = generate(self, asked, *arguments, **named)
        sampled.append((asked, groups))
        return groups

    monkeypatch.setattr(EmbeddedEngine, "generate", recorded)
    source = folder / "rows.jsonl"
    source.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    settings = {
        "name": "ours",
        "output_dir": str(folder),
        "model": {"path": str(model), "dtype": "float32"},
        "method": {"type": "grpo", "num_generations": GROUP, **method},
        "rewards": [
            {"type": "python", "function": f"test_trl_online:{function}", "weight": weight}
            for function, weight in zip(("letters", "length"), weights, strict=False)
        ],
        "data": {
            "source": str(source),
            "template": "none",
            "shuffle": False,
            "max_length": 256,
            "max_prompt_length": None,
        },
        "rollout": {"max_completion_length": LIMIT},
        "training": {
            "batch_size": PROMPTS,
            "max_steps": STEPS,
            "learning_rate": RATE,
            "lr_scheduler_type": "constant",
            "warmup_steps": 0,
            "weight_decay": 0.1,
            "tokens_per_pack": 512,
            **(training or {}),
        },
        "tracking": {"logging_steps": 1},
        "devices": {"type": "cpu"},
    }
    file = folder / "ours.json"
    file.write_text(json.dumps(settings))
    assert runner.train(load(file).config) == 0
    return folder / "ours", sampled


def train_trl(folder, model, prompts: list[str], sampled, updates: int, **method):
    config = trl.GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=PROMPTS * GROUP,
        num_generations=GROUP,
        max_completion_length=LIMIT,
        max_steps=STEPS * updates,
        learning_rate=RATE,
        weight_decay=0.1,
        shuffle_dataset=False,
        **TRL_SETTINGS,
        model_init_kwargs={"dtype": "float32"},
        **method,
    )
    rows = Dataset.from_list([{"prompt": prompt} for prompt in prompts])
    functions = [letters, length][: len(method.get("reward_weights", [1.0]))]
    trainer = trl.GRPOTrainer(str(model), functions, args=config, train_dataset=rows)
    coming = iter(sampled)

    def replayed(input_ids, attention_mask, **_unused):
        asked, groups = next(coming)
        given = [row[mask.bool()].tolist() for row, mask in zip(input_ids, attention_mask, strict=True)]
        assert given == [list(prompt) for prompt in asked for _ in range(GROUP)], "TRL asks for other prompts"
        tokens = [torch.tensor(completion.tokens) for group in groups for completion in group]
        pad = trainer.processing_class.pad_token_id
        return torch.cat([input_ids, torch.nn.utils.rnn.pad_sequence(tokens, True, pad)], 1)

    trainer.model.generate = replayed
    trainer.train()
    assert next(coming, None) is None
    return trainer.model, [entry for entry in trainer.state.log_history if "loss" in entry]


def assert_same_weights(start, ours, theirs: dict[str, torch.Tensor]) -> None:
    """From the model in folder `start` training led to the one in folder `ours`, and TRL's next to it."""
    before, after = (
        dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())
        for folder in (start, ours)
    )
    moved = torch.cat([(after[name] - before[name]).flatten() for name in before])
    apart = torch.cat([(after[name] - parameter).flatten() for name, parameter in theirs.items()])
    print(f"weights moved by {moved.abs().mean():.2e} in the mean, and are {apart.abs().mean():.2e} apart")
    assert apart.abs().mean() < 0.01 * moved.abs().mean()


@pytest.mark.parametrize("variant", VARIANTS)
def test_grpo_equals_trl(tmp_path, shared, scratch_model, monkeypatch, variant):
    method, differently = VARIANTS[variant]
    prompts = [row["prompt"][-120:] for row in pairs(shared, PROMPTS * STEPS)]
    weights, model = differently.get("reward_weights", [1.0]), scratch_model
    if "top_entropy_quantile" in method:  # entropies that rounding does not reorder
        model = tmp_path / "sharp"
        sharp = AutoModelForCausalLM.from_pretrained(scratch_model)
        sharp.get_output_embeddings().weight.data *= 20
        sharp.save_pretrained(model)
        AutoTokenizer.from_pretrained(scratch_model).save_pretrained(model)
    folder, sampled = train_ours(tmp_path, model, prompts, monkeypatch, weights=weights, **method)
    updates = method.get("num_iterations", 1)
    theirs, log = train_trl(tmp_path, model, prompts, sampled, updates, **(method | differently))

    ours = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["reward"] for line in ours] == pytest.approx([line["reward"] for line in log[::updates]], abs=1e-6)
    for number, line in enumerate(ours):
        same = log[number * updates : (number + 1) * updates]
        norm = sum(entry["grad_norm"] for entry in same) / updates
        assert line["grad_norm"] == pytest.approx(norm, rel=2e-3)
        assert line["loss"] == pytest.approx(sum(entry["loss"] for entry in same) / updates, abs=1e-4)
    assert max(line["grad_norm"] for line in ours) > 0.01, "nothing was learned, so nothing was compared"

    assert_same_weights(model, folder / "final", dict(theirs.named_parameters()))
