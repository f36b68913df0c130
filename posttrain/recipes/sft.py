"""Supervised fine-tuning: the negative log-likelihood of the target tokens, averaged over the step's targets.

    loss = - (1 / N) sum_n log p(target_n | the tokens before it)

N counts the targets of the complete step, so packing and gradient accumulation do not change the loss. If messages have
loss weights, every target has its message's weight, and N is the sum of the weights over the complete step.
Tokenisation determines which tokens are targets (the completion, assistant turns or all). `loss_type` names the loss of
a token: nll (with `label_smoothing_factor`), dft, eaft, or a user's function of the log-probabilities.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from posttrain.batch import Example, Pack
from posttrain.config import SFTMethod
from posttrain.data import Prepared
from posttrain.losses import dft, eaft, global_mean, label_smoothed_nll, nll, own_token_loss
from posttrain.models.families import base_of
from posttrain.optim.update import Objective, summed
from posttrain.recipes.offline import Models, Offline
from posttrain.scoring import Scorer, Scores
from posttrain.training.job import Job
from posttrain.training.loop import Loop, ObjectiveOf
from posttrain.training.reference import Reference

TOP = 20  # the K of eaft, as in its paper


def train(job: Job, data: Prepared) -> Loop:
    run = Offline(job, data, objectives)
    for examples in run.steps():
        run.loop.update(*run.objective_of(examples))
    return run.loop


def objectives(models: Models[SFTMethod, Scorer, Reference]) -> ObjectiveOf:
    """A function from a batch of examples to its packs and loss."""
    job, scorer, method = models.job, models.scorer, models.method
    names = job.config.data.source_names
    top = TOP if method.loss_type == "eaft" else 0 if method.label_smoothing_factor else None

    def objective_of(examples: list[Example]) -> tuple[list[Pack], Objective]:
        packs = job.pack(examples)
        targets = sum(len(p.target_N) if p.weight_N is None else float(p.weight_N.double().sum()) for p in packs)
        sources = {id(pack): by_source(pack, examples, names) for pack in packs}
        counts = summed([{key: float(weight_N.sum()) for key, weight_N in own.items()} for own in sources.values()])

        def share(pack: Pack):
            own, pack = sources[id(pack)], pack.to(job.device)
            with noisy_embeddings(scorer, pack, method.neftune_noise_alpha):
                scores = scorer(pack, top=top)
            weight_N = None if pack.weight_N is None else pack.weight_N.to(job.device)
            loss_N = token_loss(method, scores)
            metrics = {name: global_mean(loss_N.detach(), counts[name], own[name].to(job.device)) for name in own}
            return global_mean(loss_N, targets, weight_N), metrics | {
                "entropy": global_mean(scores.entropy_N.detach(), targets, weight_N),
                "mean_token_accuracy": global_mean(scores.top1_N, targets, weight_N),
            }

        return packs, Objective(share, targets, counts)

    return objective_of


def by_source(pack: Pack, examples: Sequence[Example], names: Sequence[str]) -> dict[str, Tensor]:
    """The weights of a pack's targets (N) in the mean loss of each source, by metric; empty with one source."""
    own_S = [None if (source := examples[group].source) is None else names[source] for group in pack.groups]
    weight_N = torch.ones(len(pack.target_N)) if pack.weight_N is None else pack.weight_N
    return {
        f"loss/{name}": weight_N * torch.tensor([own == name for own in own_S])[pack.sequence_N]
        for name in dict.fromkeys(own_S)
        if name is not None
    }


def token_loss(method: SFTMethod, scores: Scores) -> Tensor:
    """The loss of each target (N)."""
    if scores.top_entropy_N is not None:
        return eaft(scores.logprob_N, scores.top_entropy_N, method.eaft_alpha)
    if scores.mean_N is not None:
        return label_smoothed_nll(scores.logprob_N, scores.mean_N, method.label_smoothing_factor)
    loss_of = {"nll": nll, "dft": dft}.get(method.loss_type) or own_token_loss(method.loss_type)
    return loss_of(scores.logprob_N)


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
