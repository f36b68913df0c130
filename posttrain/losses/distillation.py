"""Divergences between the next-token distributions of a student and a teacher, with their exact gradients.

p is the student's distribution, q the teacher's, m = (1 − β) p + β q:

    reverse KL       KL(p ‖ q) = Σ p log(p / q)             seeks the teacher's modes (arXiv 2306.13649, section 3)
    forward KL       KL(q ‖ p) = Σ q log(q / p)             covers all modes: classic distillation
    Jensen-Shannon   β KL(q ‖ m) + (1 − β) KL(p ‖ m)        between the two (arXiv 2306.13649, equation 1)

Each function maps log p and log q (N, V) to the divergence of each row (N) and its gradient by the student's logits
(N, V), the logits that log p is the log-softmax of. As in TRL 1.16's GKD, nothing is multiplied by the square of a
temperature.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

Divergence = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

DIVERGENCES = ("reverse_kl", "forward_kl", "jsd")


def reverse_kl(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p ‖ q); by the logits p (log(p / q) − KL)."""
    p, ratio = log_p.exp(), log_p - log_q
    value_N = torch.linalg.vecdot(p, ratio)
    return value_N, p.mul_(ratio.sub_(value_N[:, None]))


def forward_kl(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """KL(q ‖ p); by the logits p − q."""
    q = log_q.exp()
    value_N = torch.linalg.vecdot(q, log_q - log_p)
    return value_N, q.neg_().add_(log_p.exp())


def jensen_shannon(log_p: Tensor, log_q: Tensor, *, beta: float) -> tuple[Tensor, Tensor]:
    """β KL(q ‖ m) + (1 − β) KL(p ‖ m), 0 < β < 1; by the logits (1 − β) p (log(p / m) − KL(p ‖ m))."""
    log_m = log_q + math.log(beta)
    torch.logaddexp(log_p + math.log1p(-beta), log_m, out=log_m)
    p, ratio = log_p.exp(), log_p - log_m
    of_student_N = torch.linalg.vecdot(p, ratio)
    of_teacher_N = torch.linalg.vecdot(log_q.exp(), log_m.neg_().add_(log_q))
    gradient = p.mul_(ratio.sub_(of_student_N[:, None])).mul_(1 - beta)
    return beta * of_teacher_N + (1 - beta) * of_student_N, gradient


def divergence_of(name: str, beta: float) -> Divergence:
    """The divergence of this name, one of DIVERGENCES (KeyError otherwise); `beta` is Jensen-Shannon's."""
    return {
        "reverse_kl": reverse_kl,
        "forward_kl": forward_kl,
        "jsd": partial(jensen_shannon, beta=beta),
    }[name]
