"""Reward model: a scalar head on the last token, trained so that chosen completions score above rejected ones.

    loss = - log sigma(r_chosen - r_rejected - margin) + c (r_chosen + r_rejected)^2

The Bradley-Terry model of preferences, as in InstructGPT (arXiv 2203.02155, equation 1). The margin comes from the
data, if it has one (Llama 2, arXiv 2307.09288); the centering coefficient c is `center_rewards_coefficient`. A tie
counts half in each direction (WebGPT, arXiv 2112.09332). Rewards are computed with dropout off.
"""

import torch

from posttrain.batch import Example, Pack, sent
from posttrain.config import RewardMethod
from posttrain.data import Prepared
from posttrain.losses import global_mean
from posttrain.losses.reference_free import bradley_terry, reward_metrics, reward_range
from posttrain.optim.update import Objective
from posttrain.recipes.offline import Models, Offline
from posttrain.scoring import RewardScorer
from posttrain.training.job import Job
from posttrain.training.loop import Loop, ObjectiveOf
from posttrain.training.reference import Reference


def train(job: Job, data: Prepared) -> Loop:
    run = Offline(job, data, objectives)
    for examples in run.steps():
        run.loop.update(*run.objective_of(examples))
    return run.loop


def objectives(models: Models[RewardMethod, RewardScorer, Reference]) -> ObjectiveOf:
    """A function from a batch of pairs to its packs and loss."""
    job, method, scorer = models.job, models.method, models.scorer

    def objective_of(examples: list[Example]) -> tuple[list[Pack], Objective]:
        packs = job.pack(examples, keep_last=True)

        def share(pack: Pack):
            pack = pack.to(job.device)
            reward_S = scorer(pack)
            chosen_P, rejected_P = pack.pairs(reward_S)
            tie_P = ties(pack, examples)
            loss_P = bradley_terry(
                chosen_P, rejected_P, margins(pack, examples), method.center_rewards_coefficient, tie_P
            )
            sums = reward_metrics(chosen_P, rejected_P, tie_P)
            metrics = {k: v / counts.get(k, len(examples)) for k, v in sums.items() if counts.get(k) != 0}
            return global_mean(loss_P, len(examples)), metrics | reward_range(chosen_P, rejected_P)

        decided = sum(not example.tie for example in examples)
        counts = {"accuracy": decided, "margin": decided}
        return packs, Objective(share, len(examples), counts)

    return objective_of


def ties(pack: Pack, examples: list[Example]) -> torch.Tensor | None:
    """Which pairs of a pack are ties, bool (P); None if there are no ties."""
    values = [examples[group].tie for group in pack.pair_groups]
    return sent(torch.tensor(values), pack.tokens_T.device) if any(values) else None


def margins(pack: Pack, examples: list[Example]) -> torch.Tensor | None:
    """The margins (P) of a pack's pairs, 0 for rows without a margin; None if no row has one."""
    values = [examples[group].margin for group in pack.pair_groups]
    if all(value is None for value in values):
        return None
    return sent(torch.tensor([value or 0.0 for value in values]), pack.tokens_T.device)
