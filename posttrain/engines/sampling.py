"""Drawing a token for every row of logits, each row with a random stream of its own.

A token is drawn by a race: token i finishes after e_i / p_i, with e_i exponential, and the first one is taken, which is
i with probability p_i. Rounding that differs with what else is in a batch (1e-6 of p) changes the winner only where two
finish within 1e-6 of one another; a draw from cumulated probabilities, by contrast, moves with the error of all the
tokens before.

The numbers of the race are a hash of (the stream's key, the place in the completion, the token id), so nothing is kept
from step to step, and CPU and GPU have the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from posttrain.engines.protocol import Sampling

WORD = 0xFFFFFFFF
# Multipliers of 32-bit integers, as signed ones: odd numbers whose products spread every bit (Wellons, "lowbias32").
SPREAD_1, SPREAD_2 = 0x7FEB352D, 0x846CA68B - (1 << 32)
GOLDEN = 0x9E3779B9 - (1 << 32)  # 2^32 over the golden ratio: multiples of it are far apart
LARGEST = 1 - 2.0**-24  # below 1 in float32


def keys(streams: Sequence[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """Keys of streams, each given as (seed, number of the completion): int32 (len(streams), 2)."""
    words = []
    for seed, number in streams:
        mixed = _mix64(_mix64(seed & (1 << 64) - 1) + number + 1)
        words.append([_signed(mixed & WORD), _signed(mixed >> 32)])
    return torch.tensor(words, dtype=torch.int32, device=device).view(-1, 2)


def _mix64(x: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): every bit of the result depends on every bit of x."""
    x = (x + 0x9E3779B97F4A7C15) & (1 << 64) - 1
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    x = (x ^ x >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
    return x ^ x >> 31


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def _hash(x: torch.Tensor) -> torch.Tensor:
    """lowbias32 in place on int32: a bijection, every bit of whose result depends on every bit of x."""
    x ^= (x >> 16).bitwise_and_(0xFFFF)  # the shift of signed integers copies the sign, which a mask takes away
    x *= SPREAD_1
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= SPREAD_2
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


def token_words(vocabulary: int, device: torch.device) -> torch.Tensor:
    """A 32-bit word for each token id (V), the same for all streams: made once."""
    return _hash(torch.arange(1, vocabulary + 1, dtype=torch.int32, device=device))


def exponentials(words_V: torch.Tensor, key_B2: torch.Tensor, place_B: torch.Tensor) -> torch.Tensor:
    """Standard exponential numbers (B, V), float32 above 0, of streams `key_B2` at the places `place_B`."""
    first_B = _hash(key_B2[:, 0] + place_B.to(torch.int32) * GOLDEN)
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
    """The logits of the distribution to draw from: (B, V) float32, -inf where a filter leaves a token out.

    As transformers' warpers; tokens exactly as likely as the last one kept are kept too. May overwrite `logits`.
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
        before = share.cumsum(-1).sub_(share)  # of the tokens likelier than each
        least = ordered.masked_fill_(before >= sampling.top_p, torch.inf).amin(-1, keepdim=True)
        logits = logits.masked_fill_(logits < least, -torch.inf)
    if sampling.min_p > 0.0:
        least = logits.amax(-1, keepdim=True) + math.log(sampling.min_p)
        logits = logits.masked_fill_(logits < least, -torch.inf)
    return logits


def draw(
    logits: torch.Tensor, sampling: Sampling, words_V: torch.Tensor, key_B2: torch.Tensor, place_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token of each row (B, int64) and its log-probability (B, float32, nats) under the processed distribution.

    `logits` (B, V) float32 are overwritten. A row that is not finite gives a log-probability that is not.
    """
    logits = process(logits, sampling)
    highest = logits.amax(-1, keepdim=True)
    weight = (logits - highest).exp_()
    total = weight.sum(-1)
    if sampling.greedy:
        token_B = logits.argmax(-1)
    else:
        token_B = weight.div_(exponentials(words_V, key_B2, place_B)).argmax(-1)
    chosen = logits.gather(1, token_B[:, None]).squeeze(1)
    return token_B, chosen - highest.squeeze(1) - total.log()
