"""pass@k: the probability that one of k completions is right, estimated from n (arXiv 2107.03374, eq. 1)."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from statistics import fmean


def pass_at_k(n: int, c: int, k: int) -> float:
    """The unbiased estimate, of n completions of which c are right: 1 - C(n - c, k) / C(n, k); k is at most n."""
    return 1.0 - comb(n - c, k) / comb(n, k)


def passes(groups: Sequence[Sequence[bool | None]], most: int) -> dict[str, float]:
    """`pass@k` for k = 1, 2, 4 ... up to `most` completions per prompt, as the mean over prompts.

    None is a completion without a verdict, which is not counted; prompts with fewer than k counted completions are not
    in pass@k.
    """
    judged = [[right for right in group if right is not None] for group in groups]
    sizes = sorted({most, *(1 << power for power in range(most.bit_length()))})
    found = {k: [pass_at_k(len(group), sum(group), k) for group in judged if len(group) >= k] for k in sizes}
    return {f"pass@{k}": fmean(values) for k, values in found.items() if values}
