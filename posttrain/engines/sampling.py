"""Samples a token for every row of logits. Each completion has its own random stream.

A random number is a hash of (the stream's key, the position in the stream, the token id). So there is no state, rows
can enter and leave without changing the streams of other rows, and CPU and GPU give the same numbers.

Sampling is an exponential race: token i arrives at time e_i / p_i, where e_i is exponentially distributed, and the
first token wins. Token i wins with probability p_i. Rounding that depends on the rest of the batch (1e-6 of p) changes
the winner only if two tokens arrive within 1e-6 of each other. Sampling by cumulative probabilities would accumulate
the errors of all tokens.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from posttrain.engines.protocol import Sampling, mix64

# Odd 32-bit multipliers, as signed integers, whose products spread every bit (Wellons, "lowbias32").
SPREAD_1, SPREAD_2 = 0x7FEB352D, 0x846CA68B - (1 << 32)
GOLDEN = 0x9E3779B9 - (1 << 32)  # 2^32 over the golden ratio: multiples of it are far apart
LARGEST = 1 - 2.0**-24  # the largest float32 below 1


def keys(streams: Sequence[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """Return the keys of random streams, each given as (seed, completion number): int32 (len(streams), 2)."""
    mixed = [mix64(mix64(seed & (1 << 64) - 1) + number + 1) for seed, number in streams]
    return torch.from_numpy(np.array(mixed, "<u8").view("<i4").reshape(-1, 2)).to(device)  # the lower 32 bits first


def _hash(x: torch.Tensor) -> torch.Tensor:
    """lowbias32, in place on int32: a bijection in which every bit of the result depends on every bit of x."""
    x ^= (x >> 16).bitwise_and_(0xFFFF)  # the shift of signed integers copies the sign, which the mask removes
    x *= SPREAD_1
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= SPREAD_2
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


def token_words(vocabulary: int, device: torch.device) -> torch.Tensor:
    """Return a 32-bit word for each token id (V), the same for all streams."""
    return _hash(torch.arange(1, vocabulary + 1, dtype=torch.int32, device=device))


def exponentials(words_V: torch.Tensor, key_B2: torch.Tensor, position_B: torch.Tensor) -> torch.Tensor:
    """Return exponential random numbers of mean 1 (B, V), float32 above 0, of streams `key_B2` at `position_B`."""
    first_B = _hash(key_B2[:, 0] + position_B.to(torch.int32) * GOLDEN)
    x = words_V[None, :] ^ first_B[:, None]
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= SPREAD_1
    x ^= (first_B * SPREAD_2 ^ key_B2[:, 1])[:, None]
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= SPREAD_2
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    uniform = x.bitwise_and_(0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=LARGEST)
    return uniform.neg_().log1p_().neg_()


def process(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return the logits of the sampling distribution: (B, V) float32, -inf for filtered tokens. May overwrite `logits`.

    Like transformers' logits warpers, except that tokens exactly as likely as the last kept token are kept as well.
    """
    if sampling.greedy:
        return logits
    if sampling.temperature != 1.0:
        logits = logits.div_(sampling.temperature)
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k).values[:, -1:]
        logits = logits.masked_fill_(logits < least, -torch.inf)
    if sampling.top_p < 1.0:
        ordered = logits.sort(descending=True).values
        share = ordered.softmax(-1)
        before = _running_sum(share).sub_(share)  # total probability of more likely tokens
        least = ordered.masked_fill_(before >= sampling.top_p, torch.inf).amin(-1, keepdim=True)
        logits = logits.masked_fill_(logits < least, -torch.inf)
    if sampling.min_p > 0.0:
        least = logits.amax(-1, keepdim=True) + math.log(sampling.min_p)
        logits = logits.masked_fill_(logits < least, -torch.inf)
    return logits


def _running_sum(share: torch.Tensor) -> torch.Tensor:
    """Cumulative sum along the last axis. A GPU sums in varying order, so there it adds integers (units of 2^-40)."""
    if not share.is_cuda:
        return share.cumsum(-1)
    return (share.double() * 2.0**40).long().cumsum(-1).double().mul_(2.0**-40).float()


def sample_tokens(
    logits: torch.Tensor, sampling: Sampling, words_V: torch.Tensor, key_B2: torch.Tensor, position_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample a token per row (B, int64); return it with its log-probability (B, float32, nats) after processing.

    `logits` (B, V) float32 are overwritten. If a row is not finite, its log-probability is not finite.
    """
    logits = process(logits, sampling)
    highest = logits.amax(-1, keepdim=True)
    weight = (logits - highest).exp_()
    total = weight.sum(-1)
    race = logits if sampling.greedy else weight.div_(exponentials(words_V, key_B2, position_B))
    token_B = race.max(-1).indices  # on a CPU this takes half the time of argmax
    chosen = logits.gather(1, token_B[:, None]).squeeze(1)
    return token_B, chosen - highest.squeeze(1) - total.log()
