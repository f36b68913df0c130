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
from posttrain.losses import loss_coefficients
from posttrain.losses.preference import Pairs, couples_batch, preference_loss, preference_metrics
from posttrain.optim.update import Objective
from posttrain.recipes.offline import Models, Offline
from posttrain.scoring import Scorer
from posttrain.training.checks import check_margins
from posttrain.training.job import Job
from posttrain.training.loop import Loop, ObjectiveOf
from posttrain.training.reference import Reference, no_reference

Preference = Models[DPOMethod, Scorer, Reference]


def train(job: Job, data: Prepared) -> Loop:
    run = Offline(job, data, objectives)
    for examples in run.steps():
        run.loop.update(*run.objective_of(examples))
    return run.loop


def objectives(models: Preference) -> ObjectiveOf:
    """A function from a batch of pairs to its packs and loss."""
    job, method, scorer, reference = models.job, models.method, models.scorer, models.reference

    def objective_of(examples: list[Example]) -> tuple[list[Pack], Objective]:
        packs = job.pack(examples)
        chosen_tokens = sum(int(pack.pairs(pack.length_S)[0].sum()) for pack in packs)
        tokens = sum(len(pack.target_N) for pack in packs)
        counts = {"num_pairs": len(examples), "num_chosen_tokens": chosen_tokens}
        loss_of = partial(preference_loss, **dict(method), **counts)
        if couples_batch(method.loss_type) and len(packs) > 1:
            loss_of = couple(models, loss_of, packs, examples)

        def share(pack: Pack):
            pack = pack.to(job.device)
            scores = scorer(pack)
            logprob_S, reference_S = pack.sum_by_sequence(scores.logprob_N), reference(pack, examples)
            if models.state.step == 0 and reference is not no_reference and method.ref_model is None:
                check_margins(logprob_S.detach() - reference_S, pack.length_S, job.dtype, job.record)
            pairs = pairs_of(pack, logprob_S, reference_S)
            metrics = {k: v / len(examples) for k, v in preference_metrics(pairs, method.beta).items()}
            metrics["entropy"] = scores.entropy_N.detach().sum() / tokens
            metrics["mean_token_accuracy"] = (scores.top1_N * pack.is_chosen_N).sum() / chosen_tokens
            return loss_of(pairs).sum() / len(examples), metrics

        return packs, Objective(share, len(examples), {"entropy": tokens, "mean_token_accuracy": chosen_tokens})

    return objective_of


def pairs_of(pack: Pack, policy_S: torch.Tensor, reference_S: torch.Tensor) -> Pairs:
    """A pack's pairs with the log-probabilities under policy and reference, and their lengths."""
    return Pairs(*pack.pairs(policy_S), *pack.pairs(reference_S), *pack.pairs(pack.length_S))


@torch.no_grad()
def couple(
    models: Preference, loss_of: Callable[[Pairs], torch.Tensor], packs: list[Pack], examples: list[Example]
) -> Callable[[Pairs], torch.Tensor]:
    """Make gradients exact for a loss that couples all pairs of a step when the pairs are in several packs.

    Scores every pack once without gradients, and computes the step's loss and its derivative with respect to each
    log-probability. Returns a function to call with the pairs of each of this rank's packs in turn: its value is their
    share of the loss, and its gradient is exact for the step.
    """
    job = models.job
    policy = job.scores(packs, lambda pack: pack.sum_by_sequence(models.scorer(pack).logprob_N))
    references = job.scores(packs, lambda pack: models.reference(pack, examples))
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
