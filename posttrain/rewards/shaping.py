"""Rewards of a completion's tokens: length, overlong completions, repetition. Pure functions of one completion."""

from collections.abc import Sequence


def length(tokens: int, target: int, scale: float) -> float:
    """-|tokens - target| * scale: L1's reward for a target length (Aggarwal and Welleck 2025, eq. 1)."""
    return -abs(tokens - target) * scale


def overlong(tokens: int, max_completion_length: int, cache: int) -> float:
    """DAPO's soft overlong punishment (Yu et al. 2025, eq. 13).

    0, then linearly down to -1 over the last `cache` tokens before `max_completion_length`, and -1 beyond it.
    """
    safe = max_completion_length - cache
    if tokens <= safe:
        return 0.0
    return (safe - tokens) / cache if tokens <= max_completion_length else -1.0


def repetition(tokens: Sequence[int], ngram_size: int, max_penalty: float) -> float:
    """`max_penalty` times the share of n-grams that repeat an earlier one (Yeo et al. 2025, appendix C.2)."""
    total = len(tokens) - ngram_size + 1
    if total < 1:
        return 0.0
    distinct = len({tuple(tokens[start : start + ngram_size]) for start in range(total)})
    return (1 - distinct / total) * max_penalty
