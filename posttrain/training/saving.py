"""The content of a run's checkpoints, restoring a run from a checkpoint, and ending a run on a signal or a failure.

The state after the last finished step is kept. If a run fails, that state is saved, so that the resumed run repeats the
failed step bit for bit. After a signal, a run ends when the current step is finished, or sooner if that takes too long.
"""

import logging
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from posttrain import __version__
from posttrain.base.errors import DamagedError, RunError, Stopped, is_out_of_memory
from posttrain.base.files import from_template
from posttrain.base.memory import available_memory, release_memory, return_free_pages
from posttrain.base.signals import handling
from posttrain.base.words import hub_id_of, model_name
from posttrain.config import load
from posttrain.data import Prepared
from posttrain.models.lora import save
from posttrain.models.sharding import whole, whole_state
from posttrain.optim.adamw import AdamW
from posttrain.parallel.ranks import ALONE, Ranks
from posttrain.runs.files import load_parts, load_tensors, part_file, restore_rng, rng_state, save_json, save_tensors
from posttrain.runs.logs import QUIET_LOGGER
from posttrain.runs.rollouts import RolloutStore
from posttrain.scoring import ValueScorer
from posttrain.training.checks import check_finite, check_same_weights
from posttrain.training.job import Job
from posttrain.training.reference import TokenReference
from posttrain.training.state import Saved, State

log = logging.getLogger("posttrain")

OPTIMIZER = "optimizer"  # file name without suffix, or the prefix of each rank's file name
Generators = tuple[dict[str, torch.Tensor], dict[str, Any]]
Batch = TypeVar("Batch")
PATIENCE_S = 3.0  # how long a step may run after a signal; schedulers kill 10 s after SIGTERM at the earliest


class GivenUpError(KeyboardInterrupt):
    """A signal arrived before anything had changed.

    It is a KeyboardInterrupt, so that neither `except Exception` in a reward's code nor asyncio's loop catches it.
    """


class LeaveAtOnceError(KeyboardInterrupt):
    """A second Ctrl-C: nothing is saved."""


class Stop:
    """Records SIGINT and SIGTERM, which request the end of the run, and ends the run."""

    def __init__(self) -> None:
        self._signal: signal.Signals | None = None
        self._when = 0.0
        self._may_give_up = False

    @property
    def requested(self) -> bool:
        return self._signal is not None

    @property
    def overdue(self) -> bool:
        """Whether the current work has taken too long since the signal."""
        return self.requested and time.monotonic() - self._when > PATIENCE_S

    def agree(self, ranks: Ranks) -> None:
        """Make all ranks end if any of them has received a signal."""
        received = next((number for number in ranks.gather(self._signal) if number is not None), None)
        if received is not None and self._signal is None:
            self._signal, self._when = received, time.monotonic()

    def listening(self) -> AbstractContextManager[None]:
        """Record signals inside the block; a second signal that is SIGINT ends the run at once, without saving."""
        return handling(self._note, signal.SIGINT, signal.SIGTERM, again=self._raise_again)

    @contextmanager
    def giving_up(self) -> Iterator[None]:
        """A context for work that changes nothing. A signal raises GivenUpError inside the block, and again at the end
        of the block if the code inside catches the error."""
        self._may_give_up = True
        try:
            if self.requested:
                raise GivenUpError
            yield
            self._may_give_up = False
            if self.requested:
                raise GivenUpError
        finally:
            self._may_give_up = False

    def leave_if_requested(self) -> None:
        """End the process cleanly, with the exit status of the signal."""
        if self._signal == signal.SIGINT:
            raise KeyboardInterrupt("stopped by Ctrl-C; continue with --resume")
        if self._signal is not None:
            raise Stopped(self._signal)

    def _note(self, number: int, frame: object) -> None:
        if self.requested and number == signal.SIGINT:
            raise LeaveAtOnceError
        first = not self.requested
        self._signal, self._when = signal.Signals(number), time.monotonic()
        if self._may_give_up and first:
            raise GivenUpError
        log.warning("%s: finishing the step, then saving a checkpoint (Ctrl-C now exits at once)", self._signal.name)

    def _raise_again(self, error: BaseException) -> None:
        if self._may_give_up or not isinstance(error, GivenUpError):  # otherwise the `giving_up` block has ended
            raise error


class Boundary:
    """The state after the last finished step: the loop's state, the random generators, and how to restore the weights.

    The loop's state and the generators are copied at every step. Weights and moments need no copy if a step is one
    update: forward, backward and the checks before the update do not change them. If a step has several updates,
    `copy_weights` copies them to CPU memory before the first.
    """

    state: State
    rng: Generators

    def __init__(self, optimizer: AdamW, device: torch.device):
        self._optimizer, self._device = optimizer, device
        self._copies: dict[str, torch.Tensor] = {}
        self._copied_at: int | None = None  # the step of the copies

    def mark(self, state: State) -> None:
        """Record that a step, or its evaluation, is finished."""
        self.state, self.rng = state.copy(), rng_state(self._device)

    @torch.no_grad()
    def copy_weights(self) -> None:
        """Copy weights and moments before a step of several updates, if CPU memory is large enough."""
        if not self._fits_in_memory:
            return
        masters = ((f"{name}|master", master) for name, master in self._optimizer.values.items())
        self._copied_at = None
        for name, tensor in chain(self._optimizer.state(masters=False).items(), masters):
            if name not in self._copies:
                self._copies[name] = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            self._copies[name].copy_(tensor, non_blocking=True)
        self._copied_at = self.state.step

    def go_back(self) -> bool:
        """Restore weights and moments to the last mark, and drop gradients. Return False if the weights have changed
        since the mark and there is no copy."""
        self._optimizer.forget()
        if self._optimizer.updates == self.state.updates:
            return True
        if self._copied_at != self.state.step:
            return False
        self._optimizer.load_state(self._copies)
        return True

    @cached_property
    def _fits_in_memory(self) -> bool:
        """Whether CPU memory has room for a copy. Warns if not."""
        values = sum(master.numel() for master in self._optimizer.masters.values())
        copies = 4 if self._optimizer.averages else 3  # masters, two moments and averages, float32
        size, free = copies * 4 * values, available_memory(torch.device("cpu"))
        if free is None or free > 2 * size:
            return True
        log.warning(
            "too little CPU memory (%.1f GiB free) for a copy of weights and moments (%.1f GiB): a failure between the "
            "updates of a step loses the steps since the last checkpoint",
            free / 2**30, size / 2**30,
        )  # fmt: skip
        return False


class Saver:
    """Writes a run's checkpoints and models, and restores a run from a checkpoint."""

    def __init__(self, job: Job, policy: nn.Module, optimizer: AdamW, data: Prepared, total: int):
        self.policy, self._job, self._optimizer, self._data, self._total = policy, job, optimizer, data, total
        self._savers = job.ranks if job.ranks.in_step else ALONE  # the ranks that write a checkpoint together
        self.rollouts: RolloutStore | None = None  # None for methods without rollouts
        self.follower: TokenReference | None = None  # a reference that follows the policy
        self.boundary = Boundary(optimizer, job.device)
        self._newest = 0  # the step of the last checkpoint

    def save(self, state: State) -> None:
        """Wait until all rollouts so far are on disk, then save a complete checkpoint: the model, the optimizer, the
        random generators and the state of the loop.

        Raises RunError, or VitalSignError for weights that are not finite.
        """
        if self.rollouts is not None:
            self.rollouts.flush()
        check_same_weights(self._job.ranks, self._optimizer.values, state.step)
        self._write(state, rng_state(self._job.device))

    def save_finished(self) -> None:
        """Save the run as of the last mark of `boundary`, unless that is already saved. Afterwards the run must end.

        Rollouts that could not be written go into the checkpoint. If the weights have changed since the mark and there
        is no copy, nothing is saved, with a warning.
        """
        state, ranks = self.boundary.state, self._job.ranks
        if state.step <= self._newest or not (ranks.is_first or ranks.in_step):
            return
        if ranks.in_step and not ranks.ended_together:
            log.warning(
                "the weights are sharded, and not every rank can save its part: the run is saved as of step %d",
                self._newest,
            )
            return
        if self.boundary.go_back():
            self._write(state, self.boundary.rng)
            log.info("saved checkpoint-%d, the state of the run after step %d", state.step, state.step)
        else:
            log.warning(
                "step %d was interrupted after changing the weights: the run is saved as of step %d",
                state.step + 1, self._newest,
            )  # fmt: skip

    def save_after(self, error: BaseException) -> None:
        """Like `save_finished`, after a failure. A second Ctrl-C saves nothing. Raises the errors of saving."""
        if isinstance(error, LeaveAtOnceError):
            return
        if is_out_of_memory(error):
            traceback.clear_frames(error.__traceback__)  # its frames hold memory that the save needs
            release_memory()
        self.save_finished()

    def _write(self, state: State, rng: Generators) -> None:
        started, ranks = time.perf_counter(), self._job.ranks
        self._savers.together(lambda: check_finite(self._optimizer.values, state.step, self._job.record))
        generators, rng_facts = rng

        def write(folder: Path) -> None:
            self._write_model(folder)
            tensors = self._write_optimizer(folder)
            save_tensors(folder / "rng.safetensors", generators)
            facts = Saved(state, rng_facts, self._data.fingerprint, self._total, tensors)
            save_json(folder / "state.json", facts.as_json())
            (folder / "config.yaml").write_text(self._job.run.config_yaml, encoding="utf-8")
            if self.rollouts is not None:
                self.rollouts.save_unwritten(folder, state.step)

        with whole(self.policy):
            saved = self._job.run.save_checkpoint(state.step, write, self._job.config.checkpoint.save_total_limit)
        if ranks.in_step and not ranks.is_first:
            self._write_optimizer(None)
        self._newest = state.step
        seconds = time.perf_counter() - started
        state.save_seconds += seconds
        logging.getLogger(QUIET_LOGGER).info("saved %s in %.3f s", saved.name, seconds)

    def _write_optimizer(self, folder: Path | None) -> int:
        """Write the optimizer's state and the weights of a reference that follows the policy; with a sharded model,
        each rank writes its parts. Returns the number of the optimizer's tensors.

        Only the first rank needs `folder`; the other ranks receive it from the first.
        """
        ranks, tensors = self._job.ranks, self._optimizer.state()
        own = {name: value for name, value in tensors.items() if ranks.is_first or self._optimizer.is_part(name)}
        files = {OPTIMIZER: own} | ({self.follower.FILE: self.follower.weights} if self.follower else {})
        target = self._savers.gather(folder)[0]
        assert target is not None
        place = (ranks.index, ranks.size) if ranks.in_step else ()

        def write() -> None:
            for name, values in files.items():
                save_tensors(part_file(target, name, *place), values)

        self._savers.together(write)
        return len(tensors)

    def restore(self, checkpoint: Path) -> tuple[State, int]:
        """Restore the optimizer and the generators; then, when nothing more can fail, rewind the run folder to the
        checkpoint. Returns the state of the loop and its total number of steps when it was saved.

        Raises RunError if the data differs, DamagedError if the checkpoint is damaged.
        """
        saved = Saved.read(checkpoint)
        if saved.data != self._data.fingerprint:
            raise RunError(
                f"{checkpoint}: the training data differs from the data that this run started with (another file, "
                "split, template or tokenizer: restore it), or this version of posttrain reads it differently from the "
                "version that started the run (see run.json): resume with that version, or start a new run"
            )
        tensors = load_parts(checkpoint, OPTIMIZER, self._optimizer.rows_of)
        if saved.tensors not in (None, len(tensors)):
            raise DamagedError(
                f"{OPTIMIZER}.safetensors: it has {len(tensors)} tensors, but {saved.tensors} were saved"
            )
        self._optimizer.load_state(tensors)
        restore_rng(load_tensors(checkpoint / "rng.safetensors"), saved.rng, self._job.device)
        state = saved.loop
        with self._job.ranks.ahead():
            self._job.run.rewind(state.step, state.evaluated)
        before, now = load(checkpoint / "config.yaml").config, self._job.config
        was_discarded = state.best is not None and not self._job.run.best.exists()
        metric = now.best_metric
        is_other = before.best_metric != metric or (
            metric is not None and before.lower_is_better(metric) != now.lower_is_better(metric)
        )
        if was_discarded or is_other:  # best/ came from a later step, or has a different metric or direction
            state.best, state.best_loss, state.evaluations_since_best = None, None, 0
        self._newest = state.step
        return state, saved.total

    def save_model(self, folder: Path, step: int) -> None:
        """Create or replace `best/` or `final/`. If the model is sharded, all ranks must call this together."""
        with whole(self.policy):
            self._job.run.save_model(folder, step, self._write_model)

    def _write_model(self, folder: Path) -> None:
        """Write the model in the format of transformers or PEFT, with its tokenizer and template."""
        write = self.policy.save_pretrained if isinstance(self.policy, ValueScorer) else partial(save, self.policy)
        write(folder, state_dict=whole_state(self.policy))
        self._job.tokenizer.save_pretrained(folder)
        model = next(module for module in self.policy.modules() if isinstance(module, PreTrainedModel))
        if model.can_generate() and model.generation_config is not None:  # PEFT does not save it
            model.generation_config.save_pretrained(folder)
        if (folder / "adapter_config.json").is_file():  # PEFT's README has only headings to fill in
            (folder / "README.md").write_text(self._card(), encoding="utf-8")

    def _card(self) -> str:
        """The README of an adapter. It has no local paths; `posttrain export` writes the full card."""
        config, start = self._job.config, self._job.model.path
        facts = {"hub_id": hub_id_of(start), "start": hub_id_of(start) or model_name(start), "version": __version__}
        facts["task"] = "SequenceClassification" if config.method.head == "reward" else "CausalLM"
        return from_template(__file__, "adapter.md.jinja", {}, name=config.name, method=config.method.type, **facts)


class Interruption:
    """Ends a run on a signal; an abandoned step counts as never started."""

    def __init__(self, stop: Stop, saver: Saver):
        self._stop, self._saver = stop, saver

    def while_patient(self, packs: Sequence[Batch], frees: bool) -> Iterator[Batch]:
        """Yield the packs of an update. Abandon the update between packs if a signal came more than PATIENCE_S ago.

        `frees`: release free memory after the first and fullest pack, whose gradients fragment the heap."""
        for number, pack in enumerate(packs):
            if self._stop.overdue:
                self.abandon("takes too long to finish")
            if frees and number == 1:
                return_free_pages()
            yield pack

    @contextmanager
    def sampling(self, evaluating: bool = False) -> Iterator[None]:
        """A context in which each rank samples and scores independently with the whole model. Nothing has changed yet,
        so a signal abandons the work at once."""
        return_free_pages()
        try:
            with whole(self._saver.policy), self._stop.giving_up():
                yield
                return_free_pages()
        except GivenUpError:
            self.abandon("" if evaluating else "is still sampling")

    def abandon(self, why: str = "") -> None:
        """Leave a step or an evaluation unfinished, and save a checkpoint of the last finished step."""
        if why:
            log.warning("stopping: step %d %s, so it is abandoned", self._saver.boundary.state.step + 1, why)
        self._saver.save_finished()
        self._stop.leave_if_requested()
