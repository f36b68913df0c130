"""Samples a token for every row of logits, each row with its own random stream.

Sampling is an exponential race: token i arrives after e_i / p_i, with e_i exponential, and the first one wins, which is
i with probability p_i. Rounding that depends on the rest of the batch (1e-6 of p) changes the winner only if two
arrive within 1e-6 of each other; sampling by cumulative probabilities would accumulate the errors of all tokens.
"""

import math

import torch

from posttrain.engines.protocol import Sampling
from posttrain.engines.streams import exponentials


def process(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The logits of the sampling distribution: (B, V) float32, -inf for filtered tokens.

    Like transformers' warpers, but tokens exactly as likely as the last one kept are kept, too. May overwrite `logits`.
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
        before = _running_sum(share).sub_(share)  # of the more likely tokens
        least = ordered.masked_fill_(before >= sampling.top_p, torch.inf).amin(-1, keepdim=True)
        logits = logits.masked_fill_(logits < least, -torch.inf)
    if sampling.min_p > 0.0:
        least = logits.amax(-1, keepdim=True) + math.log(sampling.min_p)
        logits = logits.masked_fill_(logits < least, -torch.inf)
    return logits


def _running_sum(share: torch.Tensor) -> torch.Tensor:
    """Along the last axis. A GPU adds floats in any order, so there shares are integers, in units of 2^-40."""
    if not share.is_cuda:
        return share.cumsum(-1)
    return (share.double() * 2.0**40).long().cumsum(-1).double().mul_(2.0**-40).float()


def sample_tokens(
    logits: torch.Tensor, sampling: Sampling, words_V: torch.Tensor, key_B2: torch.Tensor, place_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token of each row (B, int64) and its log-probability (B, float32, nats) under the processed distribution.

    `logits` (B, V) float32 are overwritten. A row that is not finite gives a log-probability that is not.
    """
    logits = process(logits, sampling)
    highest = logits.amax(-1, keepdim=True)
    weight = (logits - highest).exp_()
    total = weight.sum(-1)
    race = logits if sampling.greedy else weight.div_(exponentials(words_V, key_B2, place_B))
    token_B = race.max(-1).indices  # on a CPU half the time of argmax
    chosen = logits.gather(1, token_B[:, None]).squeeze(1)
    return token_B, chosen - highest.squeeze(1) - total.log()
