"""The loop shared by all recipes: the order of the data, learning rates, logging, evaluation, checkpoints, resuming.

A recipe owns the `for` loop and calls `update` and `evaluate`; `Loop` yields the examples of each step, and logs, saves
and stops according to the settings. A checkpoint contains everything that determines the next step, so a resumed run
continues bit for bit. The order of the data is in training/order.py; the learning rate is a function of the step.
Learning-rate schedules have the names and values of transformers.
"""

import functools
import math
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import torch
from torch import nn

from posttrain.base.console import progress
from posttrain.base.errors import ConfigError, VitalSignError
from posttrain.base.log import log
from posttrain.batch import Example, Pack
from posttrain.config import RunConfig, learning_rate
from posttrain.data import Dataset, Prepared, longest_sequence
from posttrain.engines import seed_of
from posttrain.models.experts import RouterLoad, RouterLoss
from posttrain.models.families import base_of, check_longest
from posttrain.models.sharding import at_rest
from posttrain.optim.adamw import AdamW
from posttrain.optim.update import Batch, Objective, Updated, balanced, over_batches, over_updates, update
from posttrain.runs.checks import STEPS, Finding
from posttrain.runs.progress import TrainingProgress
from posttrain.scoring import ValueScorer
from posttrain.training.best import Best, prefix_of, set_of
from posttrain.training.checks import MovedWeights
from posttrain.training.evaluation import CompletionEvaluation, evaluated_rows
from posttrain.training.job import Job
from posttrain.training.order import Resting, batch_of, epoch_order
from posttrain.training.reference import TokenReference
from posttrain.training.saving import Interruption, Saver, Stop
from posttrain.training.state import State, total_steps
from posttrain.training.suites import SuiteEvaluation

MAX_SKIPPED_IN_A_ROW = 5
ObjectiveOf = Callable[..., tuple[list[Pack], Objective]]  # from a batch's examples to its packs and objective


class Loop:
    """The training steps of one run over `data.train`."""

    def __init__(self, job: Job, policy: nn.Module, optimizer: AdamW, data: Prepared, reference: object = None):
        """`reference`: if it is a `TokenReference` that follows the policy, it is updated and saved."""
        self.job, self.policy, self.optimizer, self.data = job, policy, optimizer, data
        check_longest(base_of(getattr(policy, "model", policy)).config, longest_sequence(job.config, data))
        self.batch_size = job.config.training.batch_size
        self.steps_per_epoch = math.ceil(len(data.train) / self.batch_size)
        self.total = total_steps(job.config, len(data.train))
        if len(data.train) < self.batch_size:
            few = "the training data has %d examples, fewer than training.batch_size = %d: every step uses all of them"
            log.warning(few, len(data.train), self.batch_size)
        self.peak_rate = learning_rate(job.config, job.model)
        self.rate(1)  # raises for a schedule with wrong arguments, before anything is trained
        self.state = State()
        self._stop = Stop()
        self._rows = np.empty(0, int)  # the current step's rows
        self._order: tuple[int, np.ndarray] | None = None
        self._moved: MovedWeights | None = None
        self.saver = Saver(job, policy, optimizer, data, self.total)
        if isinstance(reference, TokenReference) and reference.weights:
            self.saver.follower = reference
        self.interruption = Interruption(self._stop, self.saver)
        routed = policy.model if isinstance(policy, ValueScorer) else policy
        self._router_load = RouterLoad(routed)
        is_explicit = job.config.method.router_aux_loss_coef is not None
        self._router_loss = RouterLoss(routed, job.router_aux_loss_coef, is_explicit)
        self._completions = CompletionEvaluation(job, policy, data, self.saver)
        self._suites = SuiteEvaluation(job, policy)
        self._best = Best(job.config, job.run, self.saver.save_model, job.watch, self._rows_of_best())
        if job.checkpoint is not None:
            self.state, total = self.saver.restore(job.checkpoint)
            log.info("resumed from %s at step %d of %d", job.checkpoint.name, self.state.step, self.total)
            report_schedule_change(job.config, self.peak_rate, self.state.step, total, self.total)
        curriculum = getattr(job.config.method, "curriculum", None)
        self.resting = None if curriculum is None else Resting(job.config, curriculum, data.train, self.state)
        self.saver.boundary.mark(self.state)
        job.run.on_failure(self.saver.save_after)
        self.progress = TrainingProgress(
            self.total,
            start_step=self.state.step,
            logging_steps=job.config.tracking.logging_steps,
            shown=("loss", "mean_token_accuracy", "rewards/margins", "accuracy", "reward"),
        )

    # Steps

    def steps(self) -> Iterator[tuple[int, list[Example]]]:
        """Yield each step's number, from 1, and its examples. After the loop body: log, save, stop if requested."""
        first, ranks = self.state.step + 1, self.job.ranks
        self.policy.train(self.job.config.method.dropout)
        self._moved = MovedWeights(self.policy, self.optimizer)
        if self.state.window and self._is_logged(self.state.step):
            self._log()  # the line that the run failed to write
        self.saver.boundary.mark(self.state)
        with self.progress, self._stop.listening(), closing(self._completions), closing(self._suites):
            for step in range(first, self.total + 1):
                if self._best.is_overdue(self.state):
                    self._best.report(self.state)
                    break
                started = time.perf_counter()
                ranks.at_step(step)
                if ranks.size > 1:  # one random stream per rank and step, so that no checkpoint needs its state
                    torch.manual_seed(seed_of(self.job.config.seed, "dropout", step, ranks.index))
                order, batch = self._batch_of(step)
                self._rows = order[batch] if self.resting is None else self.resting.batch()
                yield step, [self.data.train[int(row)] for row in self._rows]
                self.state.seconds += time.perf_counter() - started
                self._after_step()
            if self.state.window:
                self._log()
                self.saver.save(self.state)

    def previous(self) -> Example:
        """The example before the current step's first one, in the epoch's order; its last comes before its first."""
        order, batch = self._batch_of(self.state.step + 1)
        return self.data.train[int(order[batch.start - 1])]

    def _batch_of(self, step: int) -> tuple[np.ndarray, slice]:
        """The row order of the step's epoch, and the slice of that order that is the step's batch."""
        epoch, batch = batch_of(self.job.config, len(self.data.train), step)
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, epoch_order(self.job.config, self.data.train, epoch)
        return self._order[1], batch

    def update(self, packs: list[Pack], objective: Objective) -> None:
        """Make one optimizer step at the schedule's learning rate. A step that is not finite is skipped and counted."""
        self.updates([(packs, objective)])

    def updates(
        self,
        parts: Iterable[tuple[Sequence[Batch], Objective[Batch]]],
        measure: Callable[[Mapping[str, float]], Mapping[str, float]] | None = None,
    ) -> None:
        """Make the optimizer steps of one training step, all at its learning rate. An optimizer step that is not
        finite is skipped and counted.

        The step's metrics are means over its updates, or extremes for names that start with `min_` and `max_`.
        `measure` receives these metrics and returns additional ones; sampling methods also store rollouts in it.
        """
        state, step, tokens = self.state, self.state.step + 1, 0
        method, ranks = self.job.config.method, self.job.ranks
        made: list[dict[str, float]] = []
        if method.updates > 1:
            self.saver.boundary.copy_weights()
        for packs, objective in parts:
            coming = self.interruption.while_patient(ranks.mine(packs), frees=method.samples_completions)
            objective = balanced(objective, self._router_loss, len(packs))
            done = update(coming, objective, self.optimizer, self.rate(step), ranks, ranks.spare(packs))
            tokens += sum(pack.num_tokens for pack in packs)
            self._count_skipped(step, done)
            if not done.applied:
                continue
            made.append(done.metrics)
            if self._moved is not None and self.rate(step) > 0 and done.metrics["grad_norm"] > 0:
                self._moved.check(self.rate(step), done.metrics["grad_norm"], self.job.record)
                self._moved = None
        metrics = over_updates(made) | over_updates(ranks.gather(self._router_load.take()))
        if measure is not None:
            metrics |= measure(metrics)
        state.take(metrics)
        state.updates += len(made)
        state.step, state.evaluated = step, False
        state.num_tokens += tokens
        state.order = zlib.crc32(self._rows.astype("<i8").tobytes(), state.order)
        if self.saver.follower is not None:
            self.saver.follower.sync(self.optimizer.values, state.updates - len(made), state.updates)
        self.saver.boundary.mark(state)
        if self._is_logged(step):
            metrics = self._log()
        self.progress.step(step, tokens, metrics)

    def rate(self, step: int) -> float:
        return learning_rate_at(self.job.config, self.peak_rate, step - 1, self.total)

    def _count_skipped(self, step: int, done: Updated) -> None:
        # A lower scale of float16's losses fixes the next steps, so only other skipped steps can end the run.
        row = self.state.skipped_in_a_row = 0 if done.applied else self.state.skipped_in_a_row + (not done.rescaled)
        bad = ", ".join(name for name, value in done.metrics.items() if not math.isfinite(value))
        if not done.applied:
            self.state.skipped += 1
            lower = f"; float16's loss scale is {done.metrics['loss_scale']:g} now" if done.rescaled else ""
            log.warning("step %d skipped, weights unchanged; non-finite values: %s%s", step, bad, lower)
        failed = row == MAX_SKIPPED_IN_A_ROW
        self.job.record(Finding(STEPS, row, MAX_SKIPPED_IN_A_ROW - 1, "updates skipped in a row", failed=failed))
        if failed:
            raise VitalSignError(
                f"{MAX_SKIPPED_IN_A_ROW} steps in a row were not finite ({bad}), the last of them step {step}: "
                "lower training.learning_rate, or look for broken rows with `posttrain explore`"
            )

    def _after_step(self) -> None:
        state, every = self.state, self.job.config.checkpoint.save_steps
        if self.saver.rollouts is not None:
            self.saver.rollouts.check()
        if self._best.is_overdue(state) and state.window:  # the last step: log what remains
            self._log()
        self._stop.agree(self.job.ranks)
        if state.step % every == 0 or state.step == self.total or self._best.is_overdue(state) or self._stop.requested:
            self.saver.save(self.state)
        if self._stop.requested:
            self.job.ranks.gather(None)  # no rank exits before the checkpoint is written
        self._stop.leave_if_requested()

    def _is_logged(self, step: int) -> bool:
        return step % self.job.config.tracking.logging_steps == 0 or step == self.total

    def _log(self) -> dict[str, float]:
        """Log the mean metrics since the last log line, and return them."""
        state = self.state
        metrics = state.means() | {
            "learning_rate": self.rate(state.step),
            "epoch": state.step / self.steps_per_epoch,
            "num_tokens": state.num_tokens,
        }
        if self.job.config.method.samples_completions:
            metrics["num_updates"] = state.updates
            metrics |= {name: count for name, count in state.memory.items() if name.startswith("alarms/")}
        if state.skipped:
            metrics["skipped_steps"] = state.skipped
        self.job.run.log(state.step, metrics)
        state.window, state.window_steps = {}, {}
        self.saver.boundary.mark(state)  # a run that fails later resumes after this line
        return metrics

    # Evaluation

    def _rows_of_best(self) -> int | None:
        """The number of rows or items on which checkpoint.best_metric is measured; None if no evaluation does so."""
        config = self.job.config
        metric = config.best_metric
        if metric is None or not config.evaluates:
            return None
        for name, count in self._suites.sizes.items():
            if metric in (f"eval_{name}", f"eval_{name}_low", f"eval_{name}_high"):
                return count
        name = set_of(config, metric)
        sets = [sets[name] for sets in (self.data.validation, self.data.prompts) if name in sets]
        rows = (dataset.rows[evaluated_rows(config, 0, name, len(dataset))] for dataset in sets)
        return min((len(np.unique(numbers)) for numbers in rows), default=None)

    @property
    def evaluation_due(self) -> bool:
        """Whether an evaluation is due at this step (0 is before training)."""
        settings, step = self.job.config.evaluation, self.state.step
        if settings.eval_steps == -1 or not (self.data.validation or self._suites.sizes) or self.state.evaluated:
            return False
        return settings.at_start if step == 0 else step % settings.eval_steps == 0 or step == self.total

    def evaluate(self, objective_of: ObjectiveOf, with_previous: bool) -> None:
        """Evaluate every validation set without gradients, log the metrics, and save the model if it is the best yet.

        With `with_previous`, the objective also receives the example before each one; the last comes before the first.
        """

        def measure(name: str, dataset: Dataset) -> dict[str, float]:
            batches = self._batches(objective_of, name, dataset, with_previous)
            metrics, self._best.half_loss[name] = over_batches(batches, self.job.ranks)
            return {**metrics, **self._completions(name, self.state.step, self.interruption.sampling)}

        self.evaluate_by(measure)

    def evaluate_by(self, measure: Callable[[str, Dataset], Mapping[str, float]]) -> None:
        """Like `evaluate`, but with the method's own `measure`, which is called with each set's name and examples."""
        self.policy.eval()
        self.optimizer.release()  # sampling may need the memory
        metrics = {"epoch": self.state.step / self.steps_per_epoch}
        for name, dataset in self.data.validation.items():
            metrics |= {f"{prefix_of(name)}{key}": value for key, value in measure(name, dataset).items()}
        suites = self.job.ranks.first(lambda: self._suites(self.state.step, self.interruption.sampling))
        metrics |= {f"eval_{name}": value for name, value in suites.items()}
        self.policy.train(self.job.config.method.dropout)
        self.state.evaluated = True
        self.job.run.log(self.state.step, metrics)
        self.progress.validation(self.state.step, metrics)
        if self.job.watch is not None and self.state.step < self.total:
            self.job.watch.look(self.state.step, metrics)
        self._best.look(metrics, self.state)
        self.saver.boundary.mark(self.state)

    def _batches(
        self, objective_of: ObjectiveOf, name: str, dataset: Dataset, with_previous: bool
    ) -> Iterator[tuple[list[Pack], Objective[Pack]]]:
        """Yield the batches of a validation set. After a signal, the run ends when the current batch is finished."""
        rows = evaluated_rows(self.job.config, self.state.step, name, len(dataset))
        for start in progress(range(0, len(rows), self.batch_size), f"evaluating {name}"):
            batch = [int(row) for row in rows[start : start + self.batch_size]]
            more = {"previous": [dataset[row - 1] for row in batch]} if with_previous else {}
            packs, objective = objective_of([dataset[row] for row in batch], **more)
            yield packs, balanced(objective, self._router_loss, len(packs))
            if self._stop.requested:
                self.interruption.abandon()

    # Saving, stopping, resuming

    def save_final(self) -> None:
        """Save `final/`: the model in the format of transformers or PEFT, with its tokenizer and template; before it,
        `ema/`, the same of the averages of the weights."""
        if self.optimizer.averages:
            at_rest(self.policy)  # what was gathered for the last pass has other weights
            self.optimizer.swap_averages()
            try:
                self.saver.save_model(self.job.run.folder / "ema", self.state.step)
            finally:
                self.optimizer.swap_averages()
        self.saver.save_model(self.job.run.final, self.state.step)


def warmup_count(warmup_steps: float, total: int) -> int:
    """The number of warm-up steps. A value below 1 is a share of the run, rounded up, as in transformers.

    A share leaves at least one step without warm-up: the rate of the first warm-up step may be 0, and then a run of
    one step would train nothing.
    """
    return min(math.ceil(total * warmup_steps), max(total - 1, 0)) if warmup_steps < 1 else int(warmup_steps)


def learning_rate_at(config: RunConfig, peak: float, step: int, total: int) -> float:
    """The learning rate after `step` of `total` steps; `peak` is its maximum.

    The schedules are transformers': the k-th of w warm-up steps (k from 1) has (k - 1) / w of the peak. Methods that
    sample have k / w, so that no rollout is spent on a rate of 0. Raises ConfigError for arguments that the schedule
    does not take.
    """
    training, warmup = config.training, warmup_count(config.training.warmup_steps, total)
    if training.lr_scheduler_type != "constant" and step < warmup and not config.method.warmup_from_zero:
        return peak * (step + 1) / warmup
    arguments = tuple(sorted(training.lr_scheduler_kwargs.items()))
    return peak * schedule(training.lr_scheduler_type, peak, warmup, total, arguments)(step)


@functools.cache
def schedule(
    kind: str, peak: float, warmup: int, total: int, arguments: tuple[tuple[str, Any], ...] = ()
) -> Callable[[int], float]:
    """The factor on the learning rate at each step (0 is the first), a schedule of transformers."""
    from transformers.optimization import get_scheduler

    optimizer = torch.optim.SGD([torch.zeros(1)], lr=peak or 1.0)  # some arguments are learning rates
    try:
        return get_scheduler(kind, optimizer, warmup, total, dict(arguments)).lr_lambdas[0]  # pyright: ignore
    except (TypeError, ValueError) as error:
        raise ConfigError(f"training.lr_scheduler_kwargs: {kind} does not take {dict(arguments)}: {error}") from error


def report_schedule_change(config: RunConfig, peak: float, step: int, before: int, total: int) -> None:
    """Warn if a resumed run has a new total number of steps, which stretches the schedule of the remaining steps."""
    if before == total or step >= total:
        return
    old = learning_rate_at(config, peak, min(step, before), before)
    new = learning_rate_at(config, peak, step, total)
    if new != old:
        log.warning(
            "%d steps in total instead of %d: the %s schedule is stretched, so the learning rate of step %d is %.2e "
            "instead of %.2e. A run with %d steps from the start would differ",
            total, before, config.training.lr_scheduler_type, step + 1, new, old, total,
        )  # fmt: skip
