"""Direct preference optimisation and its variants: the policy learns to prefer the chosen completion of each pair.

    DPO (arXiv 2305.18290, equation 7):
    loss = - log sigma(beta [log pi(chosen)/ref(chosen) - log pi(rejected)/ref(rejected)])

Every `loss_type` is a function of the pairs' summed log-probabilities (posttrain/losses/preference.py). The reference
is the policy as it was before training, another model, or none; policy and reference are scored with dropout off.
"""

from collections.abc import Callable
from functools import partial

import torch

from posttrain.batch import Example, Pack
from posttrain.config import DPOMethod
from posttrain.data import Prepared
from posttrain.losses import Pairs, couples_batch, loss_coefficients, preference_loss, preference_metrics
from posttrain.optim.update import Objective
from posttrain.scoring import Scorer
from posttrain.training.checks import check_margins, check_packing
from posttrain.training.job import Job
from posttrain.training.loop import Loop, ObjectiveOf
from posttrain.training.reference import Reference, make_reference, no_reference, whole_sets
from posttrain.training.state import State


def train(job: Job, data: Prepared) -> Loop:
    method = job.config.method
    assert isinstance(method, DPOMethod)
    policy = job.policy("lm")
    optimizer = job.optimizer(policy)
    scorer = Scorer(policy)
    reference = make_reference(job, method, scorer, data, whole_sets(job, data))
    loop = Loop(job, policy, optimizer, data)
    objective_of = objectives(job, method, scorer, reference, loop.state)
    for step, examples in loop.evaluated_steps(objective_of):
        packs, objective = objective_of(examples)
        if step == 1:
            check_packing(scorer, examples, job.pack_together, job.record)
        loop.update(packs, objective)
    return loop


def objectives(job: Job, method: DPOMethod, scorer: Scorer, reference: Reference, state: State) -> ObjectiveOf:
    """The packs and the loss of a batch of pairs; `state` is that of the loop."""

    def objective_of(examples: list[Example]) -> tuple[list[Pack], Objective]:
        packs = job.pack(examples)
        chosen_tokens = sum(int(pack.pairs(pack.length_S)[0].sum()) for pack in packs)
        tokens = sum(len(pack.target_N) for pack in packs)
        loss_of = partial(
            preference_loss,
            loss_type=method.loss_type,
            loss_weights=method.loss_weights,
            beta=method.beta,
            label_smoothing=method.label_smoothing,
            f_divergence_type=method.f_divergence_type,
            f_alpha_divergence_coef=method.f_alpha_divergence_coef,
            discopop_tau=method.discopop_tau,
            num_pairs=len(examples),
            num_chosen_tokens=chosen_tokens,
        )
        if couples_batch(method.loss_type) and len(packs) > 1:
            loss_of = couple(job, loss_of, packs, scorer, reference, examples)

        def share(pack: Pack):
            pack = pack.to(job.device)
            scores = scorer(pack)
            logprob_S, reference_S = pack.sum_by_sequence(scores.logprob_N), reference(pack, examples)
            if state.step == 0 and reference is not no_reference and method.ref_model is None:
                check_margins(logprob_S.detach() - reference_S, pack.length_S, job.dtype, job.record)
            pairs = pairs_of(pack, logprob_S, reference_S)
            metrics = {k: v / len(examples) for k, v in preference_metrics(pairs, method.beta).items()}
            metrics["entropy"] = scores.entropy_N.detach().sum() / tokens
            metrics["mean_token_accuracy"] = (scores.top1_N * pack.is_chosen_N).sum() / chosen_tokens
            return loss_of(pairs).sum() / len(examples), metrics

        return packs, Objective(share, len(examples), {"entropy": tokens, "mean_token_accuracy": chosen_tokens})

    return objective_of


def pairs_of(pack: Pack, policy_S: torch.Tensor, reference_S: torch.Tensor) -> Pairs:
    """A pack's pairs with the log-probabilities of policy and reference, and their lengths."""
    return Pairs(*pack.pairs(policy_S), *pack.pairs(reference_S), *pack.pairs(pack.length_S))


@torch.no_grad()
def couple(
    job: Job,
    loss_of: Callable[[Pairs], torch.Tensor],
    packs: list[Pack],
    scorer: Scorer,
    reference: Reference,
    examples: list[Example],
) -> Callable[[Pairs], torch.Tensor]:
    """Exact gradients of a loss that couples all pairs of the step, if they are in several packs.

    Scores every pack once without gradients, and computes the step's loss and its derivative with respect to each
    log-probability. Returns a function of the pairs of this rank's packs in turn: its value is their share of the loss,
    and its gradient is exact for the step.
    """
    policy = job.scores(packs, lambda pack: pack.sum_by_sequence(scorer(pack).logprob_N))
    references = job.scores(packs, lambda pack: reference(pack, examples))
    parts = [pairs_of(pack.to(job.device), *both) for pack, *both in zip(packs, policy, references, strict=True)]
    whole = Pairs(*(torch.cat([getattr(p, name) for p in parts]) for name in Pairs.__dataclass_fields__))
    loss_P, (to_chosen_P, to_rejected_P) = loss_coefficients(
        lambda chosen_P, rejected_P: loss_of(whole.with_policy(chosen_P, rejected_P)), whole.chosen_P, whole.rejected_P
    )
    sizes = [len(part) for part in parts]
    split = list(zip(loss_P.split(sizes), to_chosen_P.split(sizes), to_rejected_P.split(sizes), strict=True))
    shares = iter([*job.ranks.mine(split), *job.ranks.spare(split)])

    def share(pairs: Pairs) -> torch.Tensor:
        value_P, chosen_P, rejected_P = next(shares)
        linear_P = chosen_P * pairs.chosen_P + rejected_P * pairs.rejected_P
        return value_P + linear_P - linear_P.detach()

    return share
