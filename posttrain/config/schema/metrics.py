"""The metrics of an evaluation by name, and which way each of them gets better."""

import re

# Regular expressions of names without `eval_` and the name of a validation set. Lengths: shorter is better.
LOWER = (
    r"(\w+_)?loss",
    r"entropy",
    r"(\w+_)?kl",
    r"jsd",
    r"clip_ratio(/\w+)?",
    r"completions/(clipped_ratio|\w+_length)",
    r"reasoning_(length|tokens)",
    r"(logps|rewards)/rejected",
    r"reward_std",
    r"frac_reward_zero_std",
    r"resampled_groups",
    r"rewards/(left_out|left_out_ratio|no_verdict_ratio|not_applicable)",
    r"rewards/[^/]+/(std|wrong|ungraded|bad_gold|timeout|crashed|not_applicable|00|01|10|unreadable|requests|\w*tokens)",
    r"router/\w+",
)
HIGHER = (
    r"(\w+_)?accuracy",
    r"margin",
    r"(\w+_)?reward",
    r"rewards/(accuracies|margins|chosen)",
    r"logps/chosen",
    r"log_odds_(ratio|chosen)",
    r"rewards/[^/]+/(mean|correct|11)",
    r"(pass|maj)@\d+",
    r"reasoning_share",
)
# Of sampled completions: regular expressions.
OF_COMPLETIONS = (
    *(r"reward(_std)?", r"rewards/.+", r"completions/\w+", "frac_reward_zero_std", r"reasoning_\w+", r"(pass|maj)@\d+"),
    "(format|answer)_accuracy",
)
SHARES = (
    r"(\w+_)?accuracy",
    r"rewards/accuracies",
    r"(pass|maj)@\d+",
    r"reasoning_share",
    r"completions/clipped_ratio",
)


def is_one_of(names: tuple[str, ...], metric: str) -> bool:
    """Whether `eval_…` is one of these metrics, of any validation set."""
    return re.fullmatch(rf"eval_(.*_)?({'|'.join(names)})", metric) is not None


def lower_is_better(metric: str) -> bool | None:
    """Whether a metric gets better as it falls; None for one that is not in the tables."""
    if is_one_of(LOWER, metric):
        return True
    return False if is_one_of(HIGHER, metric) else None
