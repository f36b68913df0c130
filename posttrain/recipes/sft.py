"""Supervised fine-tuning: the negative log-likelihood of the target tokens, averaged over the step's targets.

    loss = - (1 / N) sum_n log p(target_n | the tokens before it)

N counts the targets of the complete step, so packing and gradient accumulation do not change the loss. If messages have
loss weights, every target has its message's weight, and N is the sum of the weights over the complete step.
Tokenisation determines which tokens are targets (the completion, assistant turns or all). `loss_type` names a function
from the log-probabilities to the losses of the tokens: nll, dft, or a user's.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from posttrain.batch import Example, Pack
from posttrain.config import SFTMethod
from posttrain.data import Prepared
from posttrain.losses import dft, global_mean, nll, own_token_loss
from posttrain.models.families import base_of
from posttrain.optim.update import Objective
from posttrain.recipes.offline import Models, Offline
from posttrain.scoring import Scorer
from posttrain.training.job import Job
from posttrain.training.loop import Loop, ObjectiveOf
from posttrain.training.reference import Reference


def train(job: Job, data: Prepared) -> Loop:
    run = Offline(job, data, objectives)
    for examples in run.steps():
        packs, objective = run.objective_of(examples)
        run.loop.update(packs, objective)
    return run.loop


def objectives(models: Models[SFTMethod, Scorer, Reference]) -> ObjectiveOf:
    """A function from a batch of examples to its packs and loss."""
    job, scorer, named = models.job, models.scorer, models.method.loss_type
    loss_of = {"nll": nll, "dft": dft}.get(named) or own_token_loss(named)

    def objective_of(examples: list[Example]) -> tuple[list[Pack], Objective]:
        packs = job.pack(examples)
        targets = sum(len(p.target_N) if p.weight_N is None else float(p.weight_N.double().sum()) for p in packs)

        def share(pack: Pack):
            pack = pack.to(job.device)
            with noisy_embeddings(scorer, pack, models.method.neftune_noise_alpha):
                scores = scorer(pack)
            weight_N = None if pack.weight_N is None else pack.weight_N.to(job.device)
            loss = global_mean(loss_of(scores.logprob_N), targets, weight_N)
            return loss, {
                "entropy": global_mean(scores.entropy_N.detach(), targets, weight_N),
                "mean_token_accuracy": global_mean(scores.top1_N, targets, weight_N),
            }

        return packs, Objective(share, targets)

    return objective_of


@contextmanager
def noisy_embeddings(scorer: Scorer, pack: Pack, alpha: float | None) -> Iterator[None]:
    """In training, add uniform noise of at most α / √(L D) to a pack's embeddings, with L the tokens of an example and
    D the embedding's size. NEFTune, arXiv 2310.05914, algorithm 1. Nothing is added in an evaluation."""
    if alpha is None or not scorer.model.training:
        yield
        return

    def add(_module: nn.Module, _inputs: object, embedded: Tensor) -> Tensor:
        rows, columns, size = embedded.shape
        if rows == 1:
            starts = torch.tensor([*pack.tree_start, columns], device=embedded.device)
            length = starts.diff().repeat_interleave(starts.diff())[None]
        else:  # a model that takes rows, one per sequence
            length = pack.seen_ST().sum(1)[:, None]
        strength = alpha / (length.double() * size).sqrt()
        return embedded + torch.empty_like(embedded).uniform_(-1.0, 1.0) * strength[..., None].to(embedded)

    hook = base_of(scorer.model).get_input_embeddings().register_forward_hook(add)
    try:
        yield
    finally:
        hook.remove()
