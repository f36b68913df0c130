"""A step's batch under every loss: value, gradient norm, clipped share, and the cosines between the gradients."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.base.console import progress
from posttrain.base.errors import RunError
from posttrain.base.memory import available_memory
from posttrain.batch import Pack
from posttrain.config import DevicesConfig, RunConfig, dump
from posttrain.config.schema.methods import AnyMethod
from posttrain.inspection.loss_inputs import (
    Rows,
    StoredStep,
    Variant,
    Weights,
    logged_norm,
    rows_of,
    settings_of,
    stored_step,
    variants,
    weights_for,
)
from posttrain.models.devices import determinism, take_device
from posttrain.models.experts import RouterLoss
from posttrain.optim.adamw import AdamW
from posttrain.optim.update import Objective, balanced, numbers, shares_of
from posttrain.recipes import recipe_of
from posttrain.recipes.offline import Models, scorer_of
from posttrain.recipes.online import Step, split_prompts
from posttrain.runs.files import load_tensors, restore_rng, rng_state
from posttrain.runs.run import scratch_run
from posttrain.scoring import Scorer
from posttrain.training.job import Job
from posttrain.training.reference import TokenReference, is_reference_free, no_reference
from posttrain.training.state import Saved

GIB = 2**30
CHUNK = 1 << 20  # parameters multiplied at a time, in double precision


@dataclass(frozen=True, slots=True)
class LossRow:
    """One loss of the batch. `norm`: the gradient norm before clipping. Numbers that are not finite are None."""

    variant: Variant
    loss: float | None
    norm: float | None
    clipped: float | None  # share of tokens; None if the loss clips nothing
    clipped_last: float | None  # the same at the run's last update of the step; None if a step has one update


@dataclass(frozen=True, slots=True)
class Lab:
    """The losses of one step, the run's own first, and the cosine between the gradients of each pair.
    A cosine is None if one of the gradients is 0 or not finite."""

    folder: Path
    step: int
    weights: Weights
    batch: str
    rows: list[LossRow]
    cosines: list[list[float | None]]
    left_out: Mapping[str, str]  # losses that do not fit the batch, with the reason
    updates: int  # per step of the run
    logged: float | None  # the step's own gradient norm in metrics.jsonl, if it was logged and the step has one update


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss of the batch. `step`: what its forward passes record, for methods that sample."""

    packs: Sequence[Any]
    objective: Objective
    step: Step | None = None


class Bench:
    """Builds the loss of any method that fits a model and a batch. Every model is loaded once.
    `data_rows`: the step's rows, for a run that also trains on the data's completions."""

    def __init__(self, job: Job, weights: Weights, batch: Rows | StoredStep, data_rows: Rows | None = None):
        self.job, self.weights, self.batch, self.data_rows = job, weights, batch, data_rows
        method = job.config.method
        self.policy = job.policy(method.head)
        self.scorer = scorer_of(job, method, self.policy)
        trained = self.scorer if method.trains_values else self.policy
        self.optimizer = AdamW(trained, job.dtype)  # for its float32 gradients
        self.routers = RouterLoss(self.policy, job.router_aux_loss_coef, is_explicit=False)
        trained.train(method.dropout)
        self._references: dict[str | None, Any] = {}

    def loss(self, method: AnyMethod) -> Loss:
        """The loss of the batch under these settings, for one update over the whole batch."""
        made = self._of_rows(method, self.batch) if isinstance(self.batch, Rows) else self._of_step(method, self.batch)
        return replace(made, objective=balanced(made.objective, self.routers, len(made.packs)))

    def _of_rows(self, method: AnyMethod, batch: Rows) -> Loss:
        job, reference = self.job, no_reference
        if not is_reference_free(job.config, method):
            reference = self._reference(method, lambda: TokenReference(job, method, self.scorer).by_sequence)
        in_order = method.joins_completions and method.kind != "pair" and job.config.behavior_version >= 2
        more = {"previous": [batch.previous, *batch.examples[:-1]]} if in_order else {}
        return Loss(*recipe_of(method).objectives(self._models(method, reference))(batch.examples, **more))

    def _of_step(self, method: AnyMethod, batch: StoredStep) -> Loss:
        job, recipe, number, reference = self.job, recipe_of(method), self.weights.step, None
        if method.has_reference:
            reference = self._reference(method, lambda: recipe.reference_of(job, method, self.policy))
        more: dict[str, Any] = {}
        if method.has_ratio and not self.weights.exact:
            more["old_R"] = batch.old_R.to(job.device)
        if self.data_rows is not None:
            prompts, share = self.data_rows.examples, method.completed_share
            more["others"] = split_prompts(job.config.seed, number, prompts, share)[1]
        models = self._models(method, reference)
        step = recipe.step_of(models, batch.rollout, **more)
        for packs, objective in recipe.updates(models, number, step):
            return Loss(packs, objective, step)
        return Loss((), Objective(lambda pack: (torch.zeros(()), {}), 0), step)  # nothing is in the loss

    def _models(self, method: AnyMethod, reference: Any) -> Models[Any, Any, Any]:
        is_own = method.trains_values == self.job.config.method.trains_values
        return Models(self.job, method, self.scorer if is_own else Scorer(self.policy), reference, self.weights.state)

    def _reference(self, method: AnyMethod, load: Callable[[], Any]) -> Any:
        path = method.reference_path
        if path not in self._references:
            reference = load()
            self._references[path] = remembered(reference) if callable(reference) else reference  # otherwise a teacher
        return self._references[path]


def remembered(score: Callable[..., Any]) -> Callable[..., Tensor]:
    """Make a reference score each pack only once: all losses pack the batch in the same way."""
    known: dict[tuple[bytes, ...], Tensor] = {}

    def score_once(pack: Pack, *rest: Any) -> Tensor:
        facts = (pack.tokens_T, pack.end_T, pack.source_N, pack.target_N, pack.sequence_N)
        key = tuple(fact.cpu().numpy().tobytes() for fact in facts)
        if key not in known:
            known[key] = score(pack, *rest)
        return known[key]

    return score_once


def clipped(method: AnyMethod, loss: Loss, stored: StoredStep | None) -> tuple[float | None, float | None]:
    """The share of tokens that the loss clipped in its last forward pass, and the share that it would clip at the
    step's last update, given the `stored` log-probabilities. None if it clips nothing, or if nothing is stored."""
    step = loss.step
    if step is None or not method.clips or not len(step.in_loss_S):
        return None, None
    inside_R = torch.isin(step.rollout.sequence_R, step.in_loss_S)
    share = step.clipped_R.cpu()[inside_R].float().mean().item()
    if stored is None:
        return share, None
    length_S = stored.rollout.length_S[step.in_loss_S]
    numbers = stored.new_R[inside_R], stored.old_R[inside_R], step.advantage_R.cpu()[inside_R]
    sequence_N = torch.arange(len(length_S)).repeat_interleave(length_S)
    last_N = recipe_of(method).surrogate(method, *numbers, sequence_N, length_S)[1]
    return share, last_N.float().mean().item()


def losses(
    folder: Path,
    step: int,
    names: Sequence[str] = (),
    settings: Mapping[str, Sequence[Any]] | None = None,
    devices: DevicesConfig | None = None,
) -> Lab:
    """Compute a run's batch of `step` under its own loss and the losses in `names` (empty: all that fit).

    `settings`: values by setting; every combination makes a row for each loss that reads the settings. The run folder
    is only read. Raises RunError if the batch is missing, ConfigError for an unknown loss or setting.
    """
    config = settings_of(folder)
    config = config if devices is None else config.model_copy(update={"devices": devices})
    chosen, left_out = variants(config.method, names, settings or {})
    sampled = stored_step(folder, step) if config.method.samples_completions else None
    weights = weights_for(folder, step)
    with determinism(config.devices), _job(config, weights) as job:
        batch = rows_of(job, folder, step) if sampled is None else sampled
        bench = Bench(job, weights, batch, rows_of(job, folder, step) if config.method.reads_completions else None)
        if config.method.dropout and (saved := weights.checkpoint) is not None:
            restore_rng(load_tensors(saved / "rng.safetensors"), Saved.read(saved).rng, job.device)
        rows, gradients = _measure(bench, chosen)
    norm = logged_norm(folder, step) if weights.exact and config.method.updates == 1 else None
    return Lab(folder, step, weights, str(batch), rows, cosines(gradients), left_out, config.method.updates, norm)


@contextmanager
def _job(config: RunConfig, weights: Weights):
    """A context with the run's job at these weights. The job writes to a temporary folder."""
    checkpointing = config.training.gradient_checkpointing
    recompute = checkpointing is True or (checkpointing == "auto" and take_device(config.devices).type == "cuda")
    training = config.training.model_copy(update={"optimizer": "adamw"})  # offloading would keep the model off the GPU
    config = config.model_copy(update={"training": training})
    with scratch_run(dump(config)) as run:
        yield Job.start(config, config.models[0], run, weights.checkpoint, recompute)


def _measure(bench: Bench, chosen: Sequence[Variant]) -> tuple[list[LossRow], Tensor]:
    """Return a row for each loss, and the gradients (rows, parameters): float32, in main memory. Raises RunError if
    they do not fit."""
    count = sum(master.numel() for master in bench.optimizer.masters.values())
    needed, free = 4 * len(chosen) * count, available_memory(torch.device("cpu"))
    if free is not None and needed > free:
        raise RunError(
            f"the gradients of {len(chosen)} losses take {needed / GIB:.1f} GiB of main memory, but {free / GIB:.1f} "
            "GiB are free: choose fewer losses with --loss"
        )
    gradients = torch.zeros(len(chosen), count)
    stored = bench.batch if isinstance(bench.batch, StoredStep) and bench.job.config.method.updates > 1 else None
    generators, rows = rng_state(bench.job.device), []
    for variant, gradient in zip(progress(chosen, "losses"), gradients, strict=True):
        restore_rng(*generators, bench.job.device)  # the same dropout for all losses
        loss = bench.loss(variant.method)
        metrics = numbers(shares_of(loss.packs, loss.objective))
        masters = list(bench.optimizer.masters.values())
        # as the optimizer computes it
        norm = torch.nn.utils.get_total_norm([master.grad for master in masters if master.grad is not None])
        for master, part in zip(masters, gradient.split([master.numel() for master in masters]), strict=True):
            if master.grad is not None:
                part.copy_(master.grad.flatten())
        bench.optimizer.forget()
        value = metrics.get("loss", 0.0)
        rows.append(LossRow(variant, _finite(value), _finite(float(norm)), *clipped(variant.method, loss, stored)))
    return rows, gradients


def cosines(gradients: Tensor) -> list[list[float | None]]:
    """The cosine between each pair of rows; None where a row is 0 or not finite."""
    products = torch.zeros(len(gradients), len(gradients), dtype=torch.float64)
    for part in gradients.split(CHUNK, dim=1):
        products += part.double() @ part.double().T
    norms = products.diagonal().sqrt()
    matrix = products / (norms[:, None] * norms[None, :])
    matrix.fill_diagonal_(1.0)
    undefined = ~(torch.isfinite(norms) & (norms > 0))
    matrix[undefined] = matrix.T[undefined] = math.nan
    return [[_finite(value) for value in row] for row in matrix.clamp(-1, 1).tolist()]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
