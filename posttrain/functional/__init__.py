"""Alignment methods as functions of padded tensors, for teaching, for checking other code and for small training loops.

Names, arguments and results are those of the course CS336 (assignment 5). B is the number of sequences in a batch, L
the number of columns, V the vocabulary size; a mask is 1 on response tokens. The functions use the code that the
recipes train with: losses from posttrain/losses, log-probabilities from posttrain/scoring.py. Examples are in
docs/functional.md.
"""

from posttrain.functional.steps import (
    compute_group_normalized_rewards,
    compute_grpo_clip_loss,
    compute_naive_policy_gradient_loss,
    compute_policy_gradient_loss,
    grpo_microbatch_train_step,
    masked_mean,
    masked_normalize,
    question_only_reward_fn,
    r1_zero_reward_fn,
    sft_microbatch_train_step,
)
from posttrain.functional.tokens import (
    PackedSFTDataset,
    compute_entropy,
    compute_per_instance_dpo_loss,
    get_packed_sft_dataset,
    get_response_log_probs,
    iterate_batches,
    selective_log_softmax,
    tokenize_prompt_and_output,
)
from posttrain.grading.extract import parse_gsm8k_response, parse_mmlu_response

__all__ = [
    "PackedSFTDataset", "compute_entropy", "compute_group_normalized_rewards", "compute_grpo_clip_loss",
    "compute_naive_policy_gradient_loss", "compute_per_instance_dpo_loss", "compute_policy_gradient_loss",
    "get_packed_sft_dataset", "get_response_log_probs", "grpo_microbatch_train_step", "iterate_batches",
    "masked_mean", "masked_normalize", "parse_gsm8k_response", "parse_mmlu_response", "question_only_reward_fn",
    "r1_zero_reward_fn", "selective_log_softmax", "sft_microbatch_train_step", "tokenize_prompt_and_output",
]  # fmt: skip
