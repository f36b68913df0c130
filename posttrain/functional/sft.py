"""Supervised fine-tuning, one microbatch at a time."""

from torch import Tensor

from posttrain.functional.masking import masked_mean, masked_normalize
from posttrain.losses import nll


def sft_microbatch_train_step(
    policy_log_probs: Tensor, response_mask: Tensor, gradient_accumulation_steps: int, normalize_constant: float = 1.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood of the responses of one microbatch, and its gradients.

        loss = 1 / (B · k) Σ_b 1/c Σ_t m_bt · (−log π(y_bt | x_b, y_b<t))

    policy_log_probs (B, L), log π of every label, from `get_response_log_probs`; response_mask (B, L), 1 on response
    tokens; k = gradient_accumulation_steps, the microbatches before each optimizer step; c = normalize_constant.

    Calls backward: gradients of the k microbatches add up to those of one batch of k · B sequences. Returns the loss,
    a detached scalar that is divided by k already, and the metadata `nll`, the mean over the response tokens.

    Raises ValueError if the shapes differ or k is below 1.
    """
    check_microbatch(policy_log_probs, response_mask, gradient_accumulation_steps)
    loss_BL = nll(policy_log_probs.flatten()).view_as(policy_log_probs)
    loss = masked_normalize(loss_BL, response_mask, -1, normalize_constant).mean() / gradient_accumulation_steps
    loss.backward()
    return loss.detach(), {"nll": masked_mean(loss_BL.detach(), response_mask)}


def check_microbatch(policy_log_probs: Tensor, response_mask: Tensor, gradient_accumulation_steps: int) -> None:
    """Raise ValueError unless both tensors are (B, L) and gradient_accumulation_steps is 1 or more."""
    if policy_log_probs.ndim != 2 or policy_log_probs.shape != response_mask.shape:
        raise ValueError(
            "policy_log_probs and response_mask must both be (B, L), not "
            f"{list(policy_log_probs.shape)} and {list(response_mask.shape)}"
        )
    if gradient_accumulation_steps < 1:
        raise ValueError(f"gradient_accumulation_steps is {gradient_accumulation_steps}: it must be 1 or more")
