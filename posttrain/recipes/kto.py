"""KTO and its variants: single completions labelled desirable or undesirable, each compared with a KL baseline.

    KTO (arXiv 2402.01306, equation 7), c = log pi(y|x) - log pi_ref(y|x):
    loss = 1 - sigma( beta (c - KL))  desirable,    1 - sigma(-beta (c - KL))  undesirable

KL estimates KL(pi || pi_ref) as the mean log-ratio of mismatched pairs: each prompt with the previous completion. The
mean is over the complete step, computed before the first backward pass, so packing does not change the gradient. BCO
compares rewards with their running mean instead, and APO-zero with 0 (posttrain/losses/unpaired.py). Dropout is off.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np
import torch

from posttrain.base.log import log
from posttrain.batch import Example, Pack
from posttrain.config import KTOMethod
from posttrain.data import Dataset, Prepared
from posttrain.losses import called
from posttrain.losses.unpaired import RunningMean, kl_estimate, unpaired_loss, unpaired_metrics
from posttrain.optim.update import Objective
from posttrain.recipes.offline import Models, Offline
from posttrain.scoring import Scorer
from posttrain.training.checks import check_margins
from posttrain.training.job import Job
from posttrain.training.loop import Loop, ObjectiveOf
from posttrain.training.order import epoch_order
from posttrain.training.reference import Portion, Reference, whole_sets
from posttrain.training.state import total_steps

KTO = Models[KTOMethod, Scorer, Reference]


@dataclass(frozen=True, slots=True)
class Levels:
    """The baseline of a batch's completions, without gradients."""

    reference_B: torch.Tensor  # log-probability of each completion under the reference
    shift: torch.Tensor | float  # the baseline of the rewards: beta KL, or the running mean of the rewards
    metric: str | None = None  # the name of the logged metric
    value: torch.Tensor | float = 0.0  # its value
    rewards: RunningMean | None = None  # BCO's running mean, including this batch


def train(job: Job, data: Prepared) -> Loop:
    method = job.config.method
    assert isinstance(method, KTOMethod)
    advise_on_weights(method, data.train.labels)
    in_order = method.joins_completions and job.config.behavior_version >= 2
    if in_order:
        # Training data has both labels, but a validation set with one example has no other completion.
        for name in (name for name, dataset in data.validation.items() if len(dataset) == 1):
            log.warning("%s has only one example, so the KL is estimated from its own completion: add rows", name)
    portions_of = in_training_order if method.joins_completions else whole_sets
    run = Offline(job, data, objectives, portions_of, evaluation=partial(objectives, training=False))
    loop = run.loop
    for examples in run.steps(with_previous=in_order):
        previous = [loop.previous(), *examples[:-1]] if in_order else None
        baseline = levels(run.models, examples, previous, training=True)
        loop.update(*run.objective_of(examples, baseline=baseline))
        if baseline.rewards is not None and not loop.state.skipped_in_a_row:
            loop.state.memory = asdict(baseline.rewards)
    return loop


def objectives(models: KTO, training: bool = True) -> ObjectiveOf:
    """A function from a batch of completions, with the previous examples or a baseline, to its packs and loss."""
    job, method, scorer = models.job, models.method, models.scorer

    def objective_of(
        examples: list[Example], previous: Sequence[Example] | None = None, baseline: Levels | None = None
    ) -> tuple[list[Pack], Objective]:
        packs = job.pack(examples)
        shift = baseline or levels(models, examples, previous, training)
        tokens = sum(len(pack.target_N) for pack in packs)
        desirable_B = torch.tensor([bool(example.label) for example in examples], device=job.device)
        desirable = sum(bool(example.label) for example in examples)
        undesirable = len(examples) - desirable

        def share(pack: Pack):
            pack = pack.to(job.device)
            scores = scorer(pack)
            logprob_S, desirable_S = pack.sum_by_sequence(scores.logprob_N), desirable_B[pack.group_S]
            logratio_S = logprob_S - shift.reference_B[pack.group_S]
            if models.state.step == 0 and method.ref_model is None:
                check_margins(logratio_S.detach(), pack.length_S, job.dtype, job.record)
            loss_S = called(unpaired_loss, logratio_S, desirable_S, shift=shift.shift, **dict(method))
            metrics = unpaired_metrics(logprob_S, logratio_S, desirable_S, method.beta, desirable, undesirable)
            metrics["entropy"] = scores.entropy_N.detach().sum() / tokens
            if shift.metric:
                mean = shift.value * pack.num_sequences / len(examples)
                metrics[shift.metric] = torch.zeros((), device=job.device) + mean  # adding needs no copy to the GPU
            return loss_S.sum() / len(examples), metrics

        counts = {f"{name}/chosen": desirable for name in ("rewards", "logps")}
        counts |= {f"{name}/rejected": undesirable for name in ("rewards", "logps")}
        return packs, Objective(share, len(examples), counts | {"entropy": tokens})

    return objective_of


def levels(models: KTO, examples: list[Example], previous: Sequence[Example] | None, training: bool) -> Levels:
    """The baseline of a batch's rewards: KTO's KL estimate, or BCO's running mean, which is updated if `training`.

    `previous`: for each example, the one before it, whose completion is used to estimate the KL; None: as in behaviour
    version 1.
    """
    job, method, scorer, memory = models.job, models.method, models.scorer, models.state.memory

    def policy_logprobs(examples: list[Example]) -> torch.Tensor:
        return logprobs(lambda pack, _: pack.sum_by_sequence(scorer(pack).logprob_N), job, examples)

    if method.joins_completions:
        pairs = with_other_completions(examples, job.config.data.max_length, previous)
        reference_B, ref_others_B = logprobs(models.reference, job, pairs).view(-1, 2).unbind(1)
        others_B = policy_logprobs([keep_other(pair) for pair in pairs])
        kl = kl_estimate(others_B - ref_others_B)
        return Levels(reference_B, method.beta * kl, "kl", kl)
    reference_B = logprobs(models.reference, job, examples)
    if method.loss_type == "apo_zero_unpaired":
        return Levels(reference_B, 0.0)
    rewards = RunningMean(memory.get("mean", 0.0), int(memory.get("count", 0)))
    if training:
        rewards = rewards.after(method.beta * (policy_logprobs(examples) - reference_B))
    return Levels(reference_B, rewards.mean, "delta", rewards.mean, rewards)


@torch.no_grad()
def logprobs(score: Callable[[Pack, list[Example]], torch.Tensor], job: Job, examples: list[Example]) -> torch.Tensor:
    """The log-probability of every sequence of the examples, in their order: (sequences)."""
    packs = job.pack(examples)
    scored = torch.cat(job.scores(packs, lambda pack: score(pack, examples)))
    group = torch.cat([pack.group_S for pack in packs])
    return scored[group.argsort(stable=True).to(job.device)]


def with_other_completions(
    examples: Sequence[Example], max_length: int, previous: Sequence[Example] | None = None
) -> list[Example]:
    """Each prompt with two completions: its own, and the completion of the `previous` example.

    If `previous` is None, the previous example is the one before it in the list (for the first, the last). This is TRL
    1.16's rotation within a batch, in which a single example has its own completion twice. If prompt and other
    completion together exceed `max_length`, the completion is truncated, as in TRL 1.16.
    """
    pairs = []
    for example, before in zip(examples, previous or [examples[-1], *examples[:-1]], strict=True):
        [prompt], [other] = example.trees, before.trees[0].children
        room = max_length - len(prompt.tokens)
        trained = other.trained if isinstance(other.trained, bool) else other.trained[:room]
        other = replace(other, tokens=other.tokens[:room], trained=trained)
        pairs.append(replace(example, trees=(replace(prompt, children=(*prompt.children, other)),)))
    return pairs


def keep_other(pair: Example) -> Example:
    """The prompt with only the other example's completion."""
    [prompt] = pair.trees
    return replace(pair, trees=(replace(prompt, children=prompt.children[1:]),))


def in_training_order(job: Job, data: Prepared) -> list[Portion]:
    """Every batch of the run and of its evaluations, in an order that decides which completion follows which prompt."""
    config, rows, in_order = job.config, len(data.train), job.config.behavior_version >= 2
    size, total = config.training.batch_size, total_steps(config, rows)

    def batches(dataset: Dataset, order: np.ndarray) -> Iterator[list[Example]]:
        for start in range(0, len(order), size):
            examples = [dataset[int(row)] for row in order[start : start + size]]
            previous = [dataset[int(order[start - 1])], *examples[:-1]] if in_order else None
            yield with_other_completions(examples, config.data.max_length, previous)

    def training() -> Iterator[list[Example]]:
        orders = (epoch_order(config, data.train, epoch) for epoch in itertools.count())
        return itertools.islice(itertools.chain.from_iterable(batches(data.train, order) for order in orders), total)

    order = ("shuffled" if config.data.shuffle else "in-order") + ("-after-previous" if in_order else "")
    portions = [Portion(f"train-{total}-steps-of-{size}-{order}", training, total)]
    for name, dataset in data.validation.items():
        batched = f"{name}-after-previous" if in_order else f"{name}-batches-of-{size}"
        portions.append(Portion(batched, partial(batches, dataset, np.arange(len(dataset))), -(-len(dataset) // size)))
    return portions


def advise_on_weights(method: KTOMethod, labels: np.ndarray) -> None:
    """Warn if the weights break the paper's rule: desirable examples weigh 1 to 1.33 times as much as undesirable ones.

    n_D w_D / (n_U w_U) in [1, 4/3]: arXiv 2402.01306, equation 8.
    """
    desirable, undesirable = int(labels.sum()), int((~labels).sum())
    log.info("%d desirable and %d undesirable training examples", desirable, undesirable)
    weight_D, weight_U = desirable * method.desirable_weight, undesirable * method.undesirable_weight
    if desirable == undesirable or weight_U <= weight_D <= 4 / 3 * weight_U:
        return
    low, high = (factor * undesirable * method.undesirable_weight / desirable for factor in (1, 4 / 3))
    log.warning(
        "the classes have unequal sizes, and the weights do not balance them: KTO's authors advise "
        "method.desirable_weight from %.2f to %.2f with method.undesirable_weight %g",
        low, high, method.undesirable_weight,
    )  # fmt: skip
