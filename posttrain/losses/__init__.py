"""Losses as pure functions of tensors, unreduced; _P is pairs, _N scored tokens (legend in posttrain/batch.py)."""

from posttrain.losses.divergence import F_DIVERGENCES, divergence_score
from posttrain.losses.pairs import Pairs, preference_metrics
from posttrain.losses.policy import group_advantages, grpo_clip, policy_gradient
from posttrain.losses.preference import (
    PREFERENCE_LOSSES,
    PreferenceLoss,
    couples_batch,
    preference_loss,
)
from posttrain.losses.reduce import global_mean, loss_coefficients
from posttrain.losses.reference_free import (
    CONTRASTIVE_LOSSES,
    contrastive,
    contrastive_metrics,
    log_odds_ratio,
    odds_ratio,
    odds_ratio_metrics,
)
from posttrain.losses.reward import bradley_terry, reward_metrics, reward_range
from posttrain.losses.sft import nll
from posttrain.losses.unpaired import UNPAIRED_LOSSES, RunningMean, kl_estimate, unpaired_loss, unpaired_metrics

__all__ = [
    "CONTRASTIVE_LOSSES",
    "F_DIVERGENCES",
    "PREFERENCE_LOSSES",
    "UNPAIRED_LOSSES",
    "Pairs",
    "PreferenceLoss",
    "RunningMean",
    "bradley_terry",
    "contrastive",
    "contrastive_metrics",
    "couples_batch",
    "divergence_score",
    "global_mean",
    "group_advantages",
    "grpo_clip",
    "kl_estimate",
    "log_odds_ratio",
    "loss_coefficients",
    "nll",
    "odds_ratio",
    "odds_ratio_metrics",
    "policy_gradient",
    "preference_loss",
    "preference_metrics",
    "reward_metrics",
    "reward_range",
    "unpaired_loss",
    "unpaired_metrics",
]
