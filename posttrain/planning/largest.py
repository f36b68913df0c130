"""The step of a run that needs the most memory, and the largest `tokens_per_pack` that fits.

The step is found from the lengths of the examples. `probe` finds the size with real steps of the run's own model,
optimizer and data. On a GPU, a size that is too large runs out of memory without harm. On a CPU, it would slow down
the entire machine or kill the process. So on a CPU the peak of each size is measured and compared with a limit, and a
size whose predicted peak is above the limit is not tried.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
import torch

from posttrain.base.console import PlainConsole
from posttrain.base.errors import ConfigError, ModelError, is_out_of_memory
from posttrain.base.log import log
from posttrain.base.memory import available_memory, memory_in_use, peak_memory, release_memory, reset_peak_memory
from posttrain.batch import Example, Node, Pack, pack
from posttrain.config import ModelConfig, RunConfig, dump
from posttrain.data import Prepared
from posttrain.models.attention import width_step
from posttrain.models.devices import take_device
from posttrain.planning.activations import empty_model
from posttrain.planning.estimate import estimate, holds_reference, start_job
from posttrain.recipes.reference_free import pack_with_chosen_prompts, scores_prompts
from posttrain.runs.run import scratch_run
from posttrain.scoring import RewardScorer, Scorer
from posttrain.training.job import Job, router_weight
from posttrain.training.order import epoch_order
from posttrain.training.reference import frozen_model

CANDIDATES = 8  # number of steps, those with the most tokens, that are packed to find the fullest pack
PRECISION = 16  # the result is accurate to a sixteenth of its size
MULTIPLE = 64  # sizes tried by bisection are multiples of this
MARGIN = 1.25  # an estimate is at most this many times the true peak
GIB = 2**30


@dataclass(frozen=True, slots=True)
class FirstEpoch:
    """The steps of a run's first epoch, packed for all ranks as the method's recipe does."""

    config: RunConfig
    data: Prepared
    feeds_last: bool = False  # see `Job.feeds_last`
    ranks: int = 1

    def rows(self) -> list[np.ndarray]:
        """The rows of each step, in training order."""
        order, training = epoch_order(self.config, self.data.train, 0), self.config.training
        starts = range(0, len(order), training.batch_size)[: training.max_steps or None]
        return [order[start : start + training.batch_size] for start in starts]

    def packs(self, rows: np.ndarray, tokens_per_pack: int, pad_to: int | None = None) -> list[Pack]:
        """The packs of a step."""
        examples, method = [self.data.train[int(row)] for row in rows], self.config.method
        if method.samples_completions:
            length, n = self.config.rollout.max_completion_length, method.completions_per_prompt
            completed = (with_completions(one, n, length, tokens_per_pack, self.feeds_last) for one in examples)
            examples = [example for parts in completed for example in parts]
        keep_last = self.feeds_last or method.head == "reward"
        pack_of = partial(pack, tokens_per_pack=tokens_per_pack, keep_last=keep_last, pad_to=pad_to, ranks=self.ranks)
        return pack_with_chosen_prompts(pack_of, examples) if scores_prompts(method) else pack_of(examples)

    def largest(self, tokens_per_pack: int, pad_to: int | None = None) -> list[Pack]:
        """The packs of the step with the fullest pack; this pack comes first."""
        lengths = self.data.train.lengths
        steps = sorted(self.rows(), key=lambda rows: -int(lengths[rows].sum()))[:CANDIDATES]
        packed = [self.packs(rows, tokens_per_pack, pad_to) for rows in steps]
        return sorted(max(packed, key=lambda packs: max(map(_weight, packs))), key=_weight, reverse=True)


def with_completions(
    prompt: Example, n: int, length: int, tokens_per_pack: int, feeds_last: bool = False
) -> list[Example]:
    """Give a prompt `n` completions of `length` tokens each, divided into examples as in a rollout."""
    tree = prompt.trees[0]
    leaf = Node(np.zeros(length, np.int64), trained=True)
    each = max(1, (tokens_per_pack - len(tree.tokens)) // max(length - int(not feeds_last), 1))
    whole, rest = divmod(n, each)
    counts = [each] * whole + [rest] * (rest > 0)
    return [replace(prompt, trees=(replace(tree, children=(leaf,) * count),)) for count in counts]


def with_room(job: Job, data: Prepared) -> Job:
    """The job with what a GPU has room for during its largest update: the engine's memory, and CUDA graphs."""
    if job.device.type != "cuda":
        return job
    size = job.config.training.tokens_per_pack
    ranks = job.ranks.size
    packs = FirstEpoch(job.config, data, job.feeds_last, ranks).largest(size, width_step(job.device, size))
    memory = estimate(job.config, job.model, empty_model(job.config, job.model), packs, job.device, ranks=ranks)
    # vLLM's settings limit its memory.
    keeps = memory.keeps_engine or job.config.rollout.engine != "embedded" or not memory.engine
    if not keeps:
        log.warning(
            "the GPU has no room for completions' keys and values during an update, so they are reallocated in every "
            "step, which takes time; a smaller training.tokens_per_pack leaves room"
        )
    return replace(job, keeps_engine=keeps, cuda_graphs=memory.captured)


def _weight(pack: Pack) -> tuple[int, int]:
    return len(pack.tokens_T), len(pack.target_N)


@dataclass(frozen=True, slots=True)
class Probed:
    """The largest size that fits in `limit` bytes, its peak, and the smallest size that did not fit (None: all fit)."""

    tokens_per_pack: int
    peak: int
    limit: int
    too_large: int | None

    def __str__(self) -> str:
        rest = "no step has more" if self.too_large is None else f"{self.too_large:,} does not fit"
        held = f"{self.peak / GIB:.2f} of {self.limit / GIB:.2f} GiB at the peak"
        return f"tokens_per_pack {self.tokens_per_pack:,}: {held}; {rest}"


def probe(config: RunConfig, model: ModelConfig, data: Prepared, limit: int | None = None) -> Probed:
    """Find the largest size that fits, from the smallest that the settings allow to the tokens of the largest step.

    `limit`: maximum memory of the process on the device, in bytes; None: all free memory. Raises ModelError if
    not even the smallest size fits.
    """
    device = take_device(config.devices)
    if device.type == "cuda" and config.training.gradient_checkpointing == "auto":  # on for the largest packs
        training = config.training.model_copy(update={"gradient_checkpointing": True})
        config = config.model_copy(update={"training": training})
    release_memory()
    trials = Trials(config, model, data, device, limit)
    low = config.longest_example
    high = max(low, *(each.num_tokens for each in trials.epoch.largest(1 << 62)))  # all tokens of the largest step
    if trials.before + trials.estimated(low).peak / MARGIN > trials.limit:
        good, bad = None, low
    else:
        with trials.loaded():
            good, bad = largest_that_fits(trials.fits, low, high)
    if good is None:
        raise ModelError(
            f"{model.path}: even tokens_per_pack {low:,}, the smallest for data.max_length "
            f"{config.data.max_length:,}, does not fit in {trials.limit / GIB:.2f} GiB: lower data.max_length, set "
            "training.gradient_checkpointing=true, choose another training.optimizer, or train only adapters "
            "with model.lora=true"
        )
    return Probed(good, trials.peaks[good], trials.limit, bad)


def largest_that_fits(fits: Callable[[int], bool], low: int, high: int) -> tuple[int | None, int | None]:
    """Return the largest size from `low` to `high` that fits, and the smallest that did not; either may be None.
    The size is doubled, then bisected until the gap is a sixteenth of the size."""
    if not fits(low):
        return None, low
    good, bad = low, None
    while good < high and (bad is None or bad - good > max(good // PRECISION, MULTIPLE)):
        size = min(2 * good, high) if bad is None else (good + bad) // 2 // MULTIPLE * MULTIPLE
        if size <= good:  # no multiple lies between them
            break
        if fits(size):
            good = size
        else:
            bad = size
    return good, bad


class Trials:
    """Trial steps with packs of several sizes. `peaks`: the peak, in bytes, of each size that fits."""

    def __init__(self, config: RunConfig, model: ModelConfig, data: Prepared, device: torch.device, limit: int | None):
        self.config, self.model, self.device = config, model, device
        self.console = PlainConsole(stderr=True)
        self.before = 0 if device.type == "cuda" else memory_in_use()
        free = 0 if limit else available_memory(device)
        if free is None:
            raise ConfigError("--probe: this system does not report its free memory: give --memory-limit")
        self.limit = limit or self.before + free
        self.peaks: dict[int, int] = {}
        self.epoch = FirstEpoch(config, data, router_weight(config, model) > 0)
        empty = empty_model(config, model)
        # the estimated memory of a run with packs of a size
        self.estimated = cache(lambda size: estimate(config, model, empty, self.packs(size), device, captured=False))
        self._step: Step | None = None

    def packs(self, size: int) -> list[Pack]:
        """The two fullest packs of the largest step: the second is computed while the gradients of the first exist."""
        return self.epoch.largest(size, width_step(self.device, size))[:2]

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """A context in which the model and the rest of a run are in memory. On a GPU, torch's allocator is limited."""
        if self.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, self.limit / total), self.device)
        try:
            with scratch_run(dump(self.config)) as run:
                self._step = Step(start_job(self.config, self.model, run))
                yield
        finally:
            self._step = None
            release_memory()
            if self.device.type == "cuda":
                torch.cuda.set_per_process_memory_fraction(1.0, self.device)

    def fits(self, size: int) -> bool:
        """Whether a step of packs of this size stays within the limit."""
        assert self._step is not None
        if self.device.type != "cuda" and self.peaks and self.predicted(size) > self.limit:
            self.console.print(f"tokens_per_pack {size:,}: not tried (predicted: {self.predicted(size) / GIB:.2f} GiB)")
            return False
        packs = self.packs(size)
        release_memory()
        reset_peak_memory(self.device)
        peak = None
        try:
            for _ in range(1 if self.peaks else 2):  # the first step allocates the optimizer's moments
                self._step.take(packs)
            # on a GPU, all memory that torch has reserved must fit, not only what it has allocated
            on_gpu = self.device.type == "cuda"
            peak = torch.cuda.max_memory_reserved(self.device) if on_gpu else peak_memory(self.device)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        # Outside the except block: the error's frames, and the tensors in them, are released only now.
        self._step.optimizer.forget()
        if peak is not None:
            peak = self._with_engine(peak, size)
        if peak is None or peak > self.limit:
            self.console.print(f"tokens_per_pack {size:,}: does not fit")
            return False
        self.console.print(f"tokens_per_pack {size:,}: {peak / GIB:.2f} GiB at the peak")
        self.peaks[size] = peak
        return True

    def _with_engine(self, peak: int, size: int) -> int:
        """The peak including the estimated memory of generation, during or before the update."""
        memory = self.estimated(size)
        if memory.keeps_engine:
            return peak + memory.engine
        held = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else memory_in_use()
        return max(peak, held + memory.engine)

    def predicted(self, size: int) -> int:
        """The predicted peak: the peak of the largest size that fits, plus the difference between the two estimates."""
        known = max(self.peaks)
        return self.peaks[known] + self.estimated(size).peak - self.estimated(known).peak


class Step:
    """A run in memory. Its steps change no weights, because the learning rate is 0."""

    def __init__(self, job: Job):
        self.device, method = job.device, job.config.method
        policy = job.policy(method.head)
        policy.train(method.dropout)
        self.optimizer = job.optimizer(policy)
        self.scorer = RewardScorer(policy) if method.head == "reward" else Scorer(policy)
        self.reference: Scorer | None = None
        if holds_reference(job.config, job.model):
            self.reference = Scorer(frozen_model(job, method.reference_path))

    def take(self, packs: list[Pack]) -> None:
        """Run forward and backward for each pack, then the optimizer's step, which allocates the moments."""
        for each in packs:
            moved = each.to(self.device)
            if self.reference is not None:
                with torch.no_grad():
                    self.reference(moved)
            scores = self.scorer(moved)
            (scores if isinstance(scores, torch.Tensor) else scores.logprob_N).sum().backward()
        self.optimizer.step(0.0)
