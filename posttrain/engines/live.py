"""The embedded engine as a service: a thread that generates for all requests that are there, until it is closed."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from posttrain.base.errors import DataError, EngineError, PosttrainError
from posttrain.engines.cache import CACHE_BYTES, Room, cache_tokens
from posttrain.engines.embedded import evaluating
from posttrain.engines.joining import Event, Failed, Job, Joining, JoiningStepper
from posttrain.engines.protocol import requests
from posttrain.engines.stops import StopTexts
from posttrain.models.families import base_of, check_positions, head_layer, positions_of
from posttrain.models.matmul import packed_weights

log = logging.getLogger("posttrain")

MAX_ROWS, MAX_WAITING, CONTEXT = 64, 256, 4096
Result = TypeVar("Result")


class Busy(PosttrainError):
    """The queue is full."""


class Live:
    """Completions for requests that come and go. `deliver` gets the events of each step, in the engine's thread.

    At most `max_rows` completions are generated together, each of a prompt and its completion of at most `context`
    tokens in all (None: what the model has, up to CONTEXT); fewer if their keys and values exceed `cache_bytes`. At
    most `max_waiting` prompts wait. A request's tokens depend on its seed alone, not on the others, and in float32 are
    those of EmbeddedEngine. Adapters are those of a PEFT model, by name.

    Raises ModelError for a model that the embedded engine does not run.
    """

    def __init__(
        self,
        policy: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        deliver: Callable[[Sequence[Event]], None],
        *,
        max_rows: int = MAX_ROWS,
        context: int | None = None,
        max_waiting: int = MAX_WAITING,
        cache_bytes: int | None = None,
    ):
        base = base_of(policy)
        self.policy, self.tokenizer, self.deliver, self.max_waiting = policy, tokenizer, deliver, max_waiting
        positions = positions_of(base.config)
        # The last sampled token is not fed, so it needs no position.
        self.context = context or min(CONTEXT, CONTEXT if positions is None else positions + 1)
        check_positions(base.config, self.context - 1)
        self.positions = self.context - 1 if positions is None else min(positions, self.context - 1)
        self.vocabulary: int = base.get_input_embeddings().weight.shape[0]  # pyright: ignore
        tokens = cache_tokens(base.config, base.dtype, base.device, cache_bytes or CACHE_BYTES // 2)
        rows = max(1, min(max_rows, tokens // (2 * self.context)))
        self.room = Room(rows, rows, rows, self.context, self.context)
        self._base, self._queued, self._wake = base, deque[Callable[[Joining], None]](), threading.Condition()
        self._closed, self._waiting, self._live = False, 0, 0
        self._thread = threading.Thread(target=self._run, name="posttrain-live", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job; its events follow. Raises Busy if the queue is full, DataError for a prompt that has no room."""
        [asked] = requests([job.tokens], job.sampling, None, None, vocabulary=self.vocabulary, positions=self.positions)
        texts = StopTexts(job.sampling.stop, self.tokenizer)
        if job.adapter is not None and job.adapter not in self.adapters:
            raise DataError(f"there is no adapter {job.adapter}; there are {', '.join(self.adapters) or 'none'}")
        with self._wake:
            if self._waiting >= self.max_waiting:
                raise Busy(f"{self._waiting} prompts wait already: try again later")
            self._waiting += 1
        self._post(lambda generation: generation.join(job, asked.limits[0], texts))

    def cancel(self, job: Job) -> None:
        """Forget the job; at most one more step has events of it."""
        self._post(lambda generation: generation.leave(job))

    def call(self, work: Callable[[nn.Module], Result], adapter: str | None = None) -> Future[Result]:
        """Run `work` on the policy between two steps, with the adapter active."""
        future: Future[Result] = Future()

        def run(generation: Joining) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                generation.switch(adapter)
                future.set_result(work(self.policy))
            except Exception as error:
                future.set_exception(error)
            finally:
                generation.switch(generation.adapter)

        self._post(run)
        return future

    @property
    def adapters(self) -> list[str]:
        return sorted(getattr(self.policy, "peft_config", ()))

    @property
    def load(self) -> tuple[int, int]:
        """Live completions, and waiting prompts."""
        return self._live, self._waiting

    def close(self) -> None:
        """Stop; jobs that are not complete fail."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()

    def _post(self, work: Callable[[Joining], None]) -> None:
        with self._wake:
            if self._closed or not self._thread.is_alive():
                raise EngineError("the engine is closed")
            self._queued.append(work)
            self._wake.notify()

    def _run(self) -> None:
        base: Any = self._base
        with (
            torch.inference_mode(),
            evaluating(self.policy),
            packed_weights(self.policy, head_layer(base)) as step,
        ):
            generation = self._fresh(step)
            while self._next(generation):
                failed = False
                try:
                    events = generation.turn()
                except Exception as error:
                    log.exception("the engine failed, and with it %d requests", len(generation.jobs))
                    failed, events = True, generation.events + [Failed(job, error) for job in generation.jobs.values()]
                if events:
                    self.deliver(events)
                if failed:  # after its requests have their answer: the new memory may not fit either
                    generation = self._fresh(step)
                with self._wake:
                    self._waiting, self._live = len(generation.waiting) + len(self._queued), len(generation.rows)
            error = EngineError("the server was stopped")
            self.deliver([Failed(job, error) for job in generation.jobs.values()])

    def _next(self, generation: Joining) -> bool:
        """Wait until there is something to do, and take in what came; False when closed."""
        with self._wake:
            while not (self._closed or self._queued or generation.rows or generation.waiting):
                self._wake.wait()
            came = list(self._queued)
            self._queued.clear()
            closed = self._closed
        for work in came:
            work(generation)
        return not closed

    def _fresh(self, rows_step: int) -> Joining:
        generation = Joining(self.room, JoiningStepper(self.policy, self._base.device), 0, rows_step)
        generation.switch = self._switch
        self._switch(None)
        return generation

    def _switch(self, adapter: str | None) -> None:
        """Activate an adapter, or none."""
        if not hasattr(self.policy, "peft_config"):
            return
        tuner: Any = self.policy.base_model
        if adapter is None:
            tuner.disable_adapter_layers()
        else:
            tuner.enable_adapter_layers()
            tuner.set_adapter(adapter)
