"""Preference optimisation without a reference: ORPO, CPO and SimPO. One model in memory, one forward pass per step.

    loss = mean over pairs of a comparison of chosen and rejected + w · negative log-likelihood of the chosen per token

The comparison is ORPO's odds ratio (arXiv 2403.07691), CPO's contrast (arXiv 2401.08417) or SimPO's margin of means per
token (arXiv 2405.14734); see posttrain/losses/reference_free.py. The likelihood term keeps the policy near the data, as
a reference would; w is 1 in ORPO and `cpo_alpha` in CPO and SimPO. Dropout is off.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from posttrain.batch import Example, Pack, sent
from posttrain.config.schema.base import MethodSettings
from posttrain.config.schema.offline import CPOMethod, ORPOMethod, SimPOMethod
from posttrain.data import Prepared
from posttrain.losses import called
from posttrain.losses.preference import Pairs
from posttrain.losses.reference_free import contrastive, contrastive_metrics, odds_ratio, odds_ratio_metrics
from posttrain.optim.update import Metrics, Objective
from posttrain.recipes.offline import Models, Offline
from posttrain.scoring import Scorer
from posttrain.training.job import Job
from posttrain.training.loop import Loop, ObjectiveOf
from posttrain.training.reference import Reference

AnyMethod = ORPOMethod | CPOMethod | SimPOMethod


def train(job: Job, data: Prepared) -> Loop:
    run = Offline(job, data, objectives)
    for examples in run.steps():
        run.loop.update(*run.objective_of(examples))
    return run.loop


def objectives(models: Models[AnyMethod, Scorer, Reference]) -> ObjectiveOf:
    """A function from a batch of pairs to its packs and loss."""
    job, method, scorer = models.job, models.method, models.scorer
    nll_weight = 1.0 if isinstance(method, ORPOMethod) else method.cpo_alpha
    compare = comparison(method)

    def objective_of(examples: list[Example]) -> tuple[list[Pack], Objective]:
        packs = pack_with_chosen_prompts(job.pack, examples) if scores_prompts(method) else job.pack(examples)
        likely = sum(int(pack.is_chosen_N.sum()) for pack in packs)  # tokens of the likelihood term
        tokens = sum(int((~in_prompt(pack, examples)).sum()) for pack in packs)

        def share(pack: Pack):
            completion_N = sent(~in_prompt(pack, examples), job.device)
            pack = pack.to(job.device)
            scores = scorer(pack)
            is_chosen_N = pack.is_chosen_N
            pairs = pairs_of(pack, scores.logprob_N * completion_N, completion_N)
            loss_P, sums = compare(pairs)
            nll = -(scores.logprob_N * is_chosen_N).sum() / likely
            metrics = {name: value / len(examples) for name, value in sums.items()}
            metrics["nll_loss"] = nll.detach()
            metrics["entropy"] = (scores.entropy_N.detach() * completion_N).sum() / tokens
            metrics["mean_token_accuracy"] = (scores.top1_N * is_chosen_N).sum() / likely
            return loss_P.sum() / len(examples) + nll_weight * nll, metrics

        counts = {"nll_loss": likely, "mean_token_accuracy": likely, "entropy": tokens}
        return packs, Objective(share, len(examples), counts)

    return objective_of


def comparison(method: AnyMethod) -> Callable[[Pairs], tuple[torch.Tensor, Metrics]]:
    """The method's comparison of chosen and rejected: a loss per pair (P), and metrics as sums over the pairs."""
    if isinstance(method, ORPOMethod):
        return lambda pairs: (odds_ratio(pairs, beta=method.beta), odds_ratio_metrics(pairs, method.beta))
    settings = {"loss_type": "simpo"} | dict(method)
    return lambda pairs: (called(contrastive, pairs, **settings), called(contrastive_metrics, pairs, **settings))


def pairs_of(pack: Pack, logprob_N: torch.Tensor, completion_N: torch.Tensor) -> Pairs:
    """A pack's pairs with their log-probabilities (0 for the reference) and lengths."""
    logprob_S, length_S = pack.sum_by_sequence(logprob_N), pack.sum_by_sequence(completion_N.float())
    chosen_P, rejected_P = pack.pairs(logprob_S)
    none_P = torch.zeros_like(chosen_P)
    return Pairs(chosen_P, rejected_P, none_P, none_P, *pack.pairs(length_S))


def scores_prompts(method: MethodSettings) -> bool:
    """Whether the method also trains on the prompt of the chosen completion."""
    return isinstance(method, ORPOMethod) and not method.completion_only_loss


def pack_with_chosen_prompts(pack_of: Callable[[list[Example]], list[Pack]], examples: list[Example]) -> list[Pack]:
    """Packs in which the prompt of a pair is also a target, once, at the start of the chosen sequence."""
    marked = [
        replace(example, trees=(replace(example.trees[0], trained=True), *example.trees[1:])) for example in examples
    ]
    return [pack.with_targets(~in_prompt(pack, examples) | pack.is_chosen_N) for pack in pack_of(marked)]


def in_prompt(pack: Pack, examples: list[Example]) -> torch.Tensor:
    """Which targets belong to a prompt and not to a completion, bool (N), on the pack's device."""
    prompts = [[len(tree.tokens) for tree in example.trees for _ in tree.children] for example in examples]
    prompt_S = torch.tensor([length for group in pack.pair_groups for length in prompts[group]])
    depth_N = pack.position_T[pack.source_N] + 1  # the target's own position
    return depth_N < prompt_S.to(depth_N.device)[pack.sequence_N]
