"""The divergence between a student's and a teacher's next-token distributions, from their hidden states.

Both heads are applied to one chunk of rows at a time, and the student's gradient is computed in the same pass: no
[N, V] tensor of either model is ever created, and no logits are computed twice.

p is the student's distribution, q the teacher's, m = (1 − β) p + β q:

    reverse KL       KL(p ‖ q) = Σ p log(p / q)             seeks the teacher's modes (arXiv 2306.13649, section 3)
    forward KL       KL(q ‖ p) = Σ q log(q / p)             covers all modes: classic distillation
    Jensen-Shannon   β KL(q ‖ m) + (1 − β) KL(p ‖ m)        between the two (arXiv 2306.13649, equation 1)

Each divergence maps log p and log q (N, V) to its value per row (N) and its gradient with respect to the student's
logits (N, V), whose log-softmax is log p. As in the GKD of TRL 1.16, nothing is multiplied by the square of the
temperature.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from posttrain.models.matmul import float32_weight
from posttrain.scoring import chunks_of, head_gradients, head_of, logits_of, row_step

# Maximum elements of a chunk of logits. About five such chunks exist at a time; together they are about as large as one
# chunk of `ChunkedScores`.
CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 25}

Divergence = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def reverse_kl(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p ‖ q), and its gradient p (log(p / q) − KL)."""
    p, ratio = log_p.exp(), log_p - log_q
    value_N = torch.linalg.vecdot(p, ratio)
    return value_N, p.mul_(ratio.sub_(value_N[:, None]))


def forward_kl(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """KL(q ‖ p), and its gradient p − q."""
    q = log_q.exp()
    value_N = torch.linalg.vecdot(q, log_q - log_p)
    return value_N, q.neg_().add_(log_p.exp())


def jensen_shannon(log_p: Tensor, log_q: Tensor, *, beta: float) -> tuple[Tensor, Tensor]:
    """β KL(q ‖ m) + (1 − β) KL(p ‖ m), 0 < β < 1, and its gradient (1 − β) p (log(p / m) − KL(p ‖ m))."""
    log_m = log_q + math.log(beta)
    torch.logaddexp(log_p + math.log1p(-beta), log_m, out=log_m)
    p, ratio = log_p.exp(), log_p - log_m
    of_student_N = torch.linalg.vecdot(p, ratio)
    of_teacher_N = torch.linalg.vecdot(log_q.exp(), log_m.neg_().add_(log_q))
    gradient = p.mul_(ratio.sub_(of_student_N[:, None])).mul_(1 - beta)
    return beta * of_teacher_N + (1 - beta) * of_student_N, gradient


def divergence_of(name: str, beta: float) -> Divergence:
    """Return the divergence called `name` (KeyError if there is none). Only `jsd` uses `beta`."""
    return {"reverse_kl": reverse_kl, "forward_kl": forward_kl, "jsd": partial(jensen_shannon, beta=beta)}[name]


class Comparison(NamedTuple):
    """Student and teacher compared on N scored tokens, float32. Only `loss` has a gradient."""

    loss: Tensor  # sum of weight_N * divergence_N
    divergence_N: Tensor  # nats
    logprob_N: Tensor  # nats, the student's log-probability of the target
    entropy_N: Tensor  # nats, the entropy of the student's distribution
    teacher_logprob_N: Tensor  # nats, the teacher's log-probability of the target


class Head(NamedTuple):
    """A function from hidden states to logits: softcap(hidden W^T + b) / temperature.
    The weights are those of the adapters that are active when it is made."""

    weight: Tensor
    bias: Tensor | None
    temperature: float
    softcap: float | None

    @classmethod
    def of(cls, model: nn.Module, temperature: float = 1.0) -> Head:
        """The model's LM head."""
        head, scale, softcap = head_of(model)
        return cls(head.weight, head.bias, temperature / scale, softcap)

    def first(self, vocabulary: int) -> Head:
        """The head for the first `vocabulary` token ids."""
        if len(self.weight) == vocabulary:
            return self
        bias = None if self.bias is None else self.bias[:vocabulary]
        return self._replace(weight=self.weight[:vocabulary], bias=bias)

    def log_probs(self, hidden: Tensor, wide: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return a chunk's log-probabilities, float32, and, for the gradient of a cap, the capped logits."""
        logits, capped = logits_of(hidden, wide, self.bias, self.temperature, self.softcap)
        return logits.sub_(logits.logsumexp(-1, keepdim=True)), capped


class Top(NamedTuple):
    """A teacher's most likely tokens at N positions, and their log-probabilities, nats, both (N, K). Where a position
    has fewer than K tokens, the others are copies of the first one, with a log-probability of -inf."""

    ids_NK: Tensor
    logprob_NK: Tensor

    def at(self, index: Tensor | slice) -> Top:
        return Top(self.ids_NK[index], self.logprob_NK[index])

    def log_probs(self, rows: slice, log_p: Tensor) -> Tensor:
        """Return the teacher's log-probabilities at the rows of a chunk, given the student's (N, V).

        The probability of the tokens that are not among the K is divided among them as the student divides its own. So
        divergences and their gradients are those over K + 1 classes, the last of which has all other tokens: TRL's tail
        bucket, with its lower bound of 1e-7."""
        ids, log_q = self.at(rows)
        rest_q, rest_p = map(_rest, (log_q, log_p.gather(1, ids).where(log_q > -math.inf, -math.inf)))
        return (log_p + (rest_q - rest_p)).scatter_(1, ids, log_q.where(log_q > -math.inf, log_q[:, :1]))


def _rest(logprob_NK: Tensor) -> Tensor:
    """The log-probability (N, 1) of all tokens that are not among K."""
    return torch.log(-torch.expm1(logprob_NK.logsumexp(1, keepdim=True).clamp(max=-1e-7)))


Taught = tuple[Head, Tensor] | Top


def compare_distributions(
    student: tuple[Head, Tensor], teacher: Taught, target_N: Tensor, weight_N: Tensor, divergence: Divergence
) -> Comparison:
    """Compare student and teacher, each given as its head and the hidden states (N, D) that predict the targets, or the
    teacher as its most likely tokens.

    If the heads differ in size, for instance because one vocabulary is padded, they are compared on the ids that both
    have, and each distribution is normalised over these ids. `divergence` comes from `divergence_of`.
    """
    ours, hidden_N = student
    if isinstance(teacher, Top):
        log_q_of, step = teacher.log_probs, 1
    else:
        theirs, teacher_N = teacher
        vocabulary = min(len(ours.weight), len(theirs.weight))
        ours, theirs = ours.first(vocabulary), theirs.first(vocabulary)
        teacher_wide = float32_weight(theirs.weight)
        step = row_step(teacher_wide)

        def log_q_of(rows: slice, log_p: Tensor) -> Tensor:
            return theirs.log_probs(teacher_N[rows], teacher_wide)[0]

    of_student = hidden_N, ours.weight, ours.bias, ours
    return Comparison(*ChunkedDivergence.apply(*of_student, log_q_of, step, target_N, weight_N, divergence))


class ChunkedDivergence(torch.autograd.Function):
    """The outputs of `Comparison`. Sums run in float32 whatever the models' dtypes.

    The weights of the sum are known beforehand, so forward can compute the gradients with respect to hidden states and
    head, and backward multiplies them by the incoming gradient.
    """

    @staticmethod
    def forward(ctx, hidden_N, weight, bias, ours, log_q_of, step, target_N, weight_N, divergence):
        size, wide = len(target_N), float32_weight(weight)
        value_N, logprob_N, entropy_N, teacher_N = hidden_N.new_empty(4, size, dtype=torch.float32).unbind()
        most = CHUNK_ELEMENTS.get(weight.device.type, CHUNK_ELEMENTS["cpu"])
        chunks = chunks_of(size, most, weight, max(row_step(wide), step))

        def compared(rows: slice) -> Tensor:
            """Set the outputs of a chunk, and return its gradient with respect to h W^T + b."""
            log_p, capped = ours.log_probs(hidden_N[rows], wide)
            log_q = log_q_of(rows, log_p)
            at = target_N[rows, None]
            logprob_N[rows], teacher_N[rows] = log_p.gather(1, at)[:, 0], log_q.gather(1, at)[:, 0]
            entropy_N[rows] = -torch.linalg.vecdot(log_p.exp(), log_p)
            value_N[rows], grad_logits = divergence(log_p, log_q)
            del log_p, log_q
            grad_logits *= weight_N[rows, None] / ours.temperature
            if capped is not None:
                grad_logits *= 1 - (capped / ours.softcap) ** 2
            return grad_logits

        ctx.gradients = head_gradients(ctx.needs_input_grad, hidden_N, weight, bias, chunks, compared)
        ctx.mark_non_differentiable(value_N, logprob_N, entropy_N, teacher_N)
        ctx.set_materialize_grads(False)
        return torch.linalg.vecdot(weight_N, value_N), value_N, logprob_N, entropy_N, teacher_N

    @staticmethod
    def backward(ctx, *grad_outputs):
        (factor, *_), gradients = grad_outputs, ctx.gradients
        ctx.gradients = None  # they are scaled in place, so they can be used only once
        if gradients is None:
            raise RuntimeError("this divergence was already backpropagated: compute it again")
        return (*(None if grad is None or factor is None else grad.mul_(factor) for grad in gradients), *[None] * 6)
