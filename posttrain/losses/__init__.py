"""Losses as pure functions of tensors, unreduced; _P is pairs, _N scored tokens (legend in posttrain/batch.py)."""

from posttrain.losses.advantage import gae, group_advantages, leave_one_out, normalized, rewards_to_go, whitened
from posttrain.losses.distillation import DIVERGENCES, divergence_of
from posttrain.losses.divergence import F_DIVERGENCES, divergence_score
from posttrain.losses.kl import KL_ESTIMATORS, adapted_kl_coef, kl_penalty
from posttrain.losses.pairs import Pairs, preference_metrics
from posttrain.losses.policy import (
    POLICY_LOSSES,
    Counts,
    PolicyLoss,
    cispo,
    grpo_clip,
    policy_gradient,
    policy_loss,
    token_weights,
    truncated_weights,
)
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
from posttrain.losses.value import ReturnScale, value_loss

__all__ = [
    "CONTRASTIVE_LOSSES",
    "DIVERGENCES",
    "F_DIVERGENCES",
    "KL_ESTIMATORS",
    "POLICY_LOSSES",
    "PREFERENCE_LOSSES",
    "UNPAIRED_LOSSES",
    "Counts",
    "Pairs",
    "PolicyLoss",
    "PreferenceLoss",
    "ReturnScale",
    "RunningMean",
    "adapted_kl_coef",
    "bradley_terry",
    "cispo",
    "contrastive",
    "contrastive_metrics",
    "couples_batch",
    "divergence_of",
    "divergence_score",
    "gae",
    "global_mean",
    "group_advantages",
    "grpo_clip",
    "kl_estimate",
    "kl_penalty",
    "leave_one_out",
    "log_odds_ratio",
    "loss_coefficients",
    "nll",
    "normalized",
    "odds_ratio",
    "odds_ratio_metrics",
    "policy_gradient",
    "policy_loss",
    "preference_loss",
    "preference_metrics",
    "reward_metrics",
    "reward_range",
    "rewards_to_go",
    "token_weights",
    "truncated_weights",
    "unpaired_loss",
    "unpaired_metrics",
    "value_loss",
    "whitened",
]
