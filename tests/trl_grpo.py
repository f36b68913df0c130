"""TRL's GRPO loss on given log-probabilities: `GRPOTrainer._compute_loss`, without a model around it."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch


def trl_grpo(
    logprob: torch.Tensor, mask: torch.Tensor, inputs: dict, settings: dict | None = None, **changes
) -> tuple[torch.Tensor, dict]:
    """The loss of log-probabilities (B, L) and TRL's metrics of it; `changes` are attributes of the trainer, `settings`
    those of its arguments that differ from TRL's, without the corrected KL."""
    grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer", reason="the oracle: pip install 'posttrain[bench]'")
    metrics = {"train": defaultdict(list)}
    defaults = {name: each.default for name, each in grpo_trainer.GRPOConfig.__dataclass_fields__.items()}
    given = {"use_bias_correction_kl": False, "steps_per_generation": 2, **(settings or {})}
    trainer = grpo_trainer.GRPOTrainer
    attributes = dict(
        get_off_policy_mask=trainer.get_off_policy_mask,
        get_gamma_weights=trainer.get_gamma_weights,
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprob, torch.zeros_like(logprob), None),
        accelerator=SimpleNamespace(gather=lambda x: x, reduce=lambda x, **_: x, num_processes=1),
        args=SimpleNamespace(**defaults | given),
        model=SimpleNamespace(training=True),
        importance_sampling_level="token",
        loss_type="grpo",
        beta=0.0,
        epsilon_low=0.2,
        epsilon_high=0.2,
        top_entropy_quantile=1.0,
        current_gradient_accumulation_steps=1,
        off_policy_mask_threshold=None,
        use_vllm=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics=metrics,
    )
    prompt = torch.ones(len(mask), 1, dtype=torch.long)
    inputs = {"prompt_ids": prompt, "prompt_mask": prompt, "completion_ids": mask, "completion_mask": mask, **inputs}
    loss = trainer._compute_loss(SimpleNamespace(**attributes | changes), None, inputs)
    return loss, metrics["train"]
