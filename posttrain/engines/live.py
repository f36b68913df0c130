"""The embedded engine as a service: a thread that generates for all requests until it is closed.

Requests join and leave at any step, each with its own sampling settings and adapter.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from posttrain.base.errors import DataError, EngineError, PosttrainError
from posttrain.base.log import log
from posttrain.base.words import by_key
from posttrain.engines.cache import CACHE_BYTES, Room, cache_tokens
from posttrain.engines.decode import DecodeState, Stepper
from posttrain.engines.embedded import evaluating, refuse_unsupported
from posttrain.engines.generation import Generation, Group, Memory, Slot, groups_of
from posttrain.engines.protocol import Completion, Request, Sampling, StopTexts, checked_requests
from posttrain.engines.sampling import sample_tokens
from posttrain.models.families import base_of, check_positions, head_layer, positions_of, vocabulary_of
from posttrain.models.matmul import packed_weights
from posttrain.scoring import next_token_logits, row_chunks

MAX_ROWS, MAX_WAITING, CONTEXT = 64, 256, 4096
Alternatives = list[tuple[int, float]]  # token ids with their log-probabilities, most likely first


@dataclass(slots=True, eq=False)
class Job:
    """A prompt to complete."""

    tokens: Sequence[int]
    sampling: Sampling  # includes the seed: completions have the random streams (seed, 0), (seed, 1), …
    adapter: str | None = None  # by name; None: the model without adapters
    alternatives: int = 0  # number of alternatives to report for each token
    streamed: bool = False  # whether each token is reported as an event
    processed: bool = False  # whether log-probabilities are those of the sampled distribution, at its temperature
    remaining: int = field(default=0, init=False)  # number of unfinished completions
    noted: dict[int, list[Alternatives]] = field(default_factory=dict, init=False)  # alternatives by completion, token


@dataclass(frozen=True, slots=True)
class Token:
    """Event: completion `number` of a streamed job has one more token."""

    job: Job
    number: int
    token: int
    logprob: float
    alternatives: Alternatives


@dataclass(frozen=True, slots=True)
class Ended:
    """Event: completion `number` of a job is finished. Its log-probabilities are the model's at temperature 1, unless
    the job has `processed`."""

    job: Job
    number: int
    completion: Completion
    alternatives: list[Alternatives]


@dataclass(frozen=True, slots=True)
class Failed:
    """Event: the job failed. No further events of this job follow."""

    job: Job
    error: Exception


Event = Token | Ended | Failed


class JoiningStepper(Stepper):
    """A stepper whose rows have different sampling settings: `jobs(start, stop)` returns the jobs of a range of rows.
    It stores the model's log-probabilities, before temperature and filters, or those after (`Job.processed`)."""

    def __init__(self, policy: torch.nn.Module, device: torch.device):
        super().__init__(policy, Sampling(), device)
        self.jobs: Callable[[int, int], list[Job]] = lambda start, stop: []
        self.alternatives: list[Alternatives] = []  # of the rows of the last `record`

    def record(self, state: DecodeState, rows: slice, hidden_R: Tensor) -> None:
        first = rows.start or 0
        jobs = self.jobs(first, first + len(hidden_R))  # may be fewer than the rows, because the last ones may be idle
        self.alternatives = []
        for part in row_chunks(self.policy, len(hidden_R)):
            start = first + (part.start or 0)
            live = jobs[start - first : start - first + len(hidden_R[part])]
            if live:
                self._record(state, start, live, next_token_logits(self.policy, hidden_R[part][: len(live)]))

    def _record(self, state: DecodeState, start: int, jobs: Sequence[Job], logits: Tensor) -> None:
        rows = slice(start, start + len(jobs))
        position_R, done_R, total_R = state.count_R[rows].clone(), state.done_R[rows], logits.logsumexp(-1)
        token_R, ended_R = state.token_R[rows].clone(), torch.zeros_like(done_R)
        processed_R = torch.zeros_like(total_R)
        # Only the settings that decide how a token is sampled; the others have one value.
        same = {"seed": 0, "num_generations": 1, "max_completion_length": 1, "stop": ()}
        for sampling, numbers in by_key((replace(job.sampling, **same), at) for at, job in enumerate(jobs)).items():
            index = torch.tensor(numbers, device=self.device)
            own, keys = logits[index], state.key_R2[rows][index]  # a copy, which sampling overwrites
            token, processed_R[index] = sample_tokens(own, sampling, self.words_V, keys, position_R[index])
            token_R[index] = torch.where(done_R[index], token_R[index], token)
            if sampling.stop_token_ids:
                stops = torch.tensor(sampling.stop_token_ids, device=self.device)
                ended_R[index] = (token[:, None] == stops).any(1)
        logprob_R = logits.gather(1, token_R[:, None]).squeeze(1) - total_R
        is_processed_R = torch.tensor([job.processed for job in jobs], device=self.device)
        logprob_R = torch.where(is_processed_R, processed_R, logprob_R)
        state.token_R[rows] = token_R
        state.tokens_RL[rows].scatter_(1, position_R[:, None], token_R[:, None])
        state.logprobs_RL[rows].scatter_(1, position_R[:, None], logprob_R[:, None])
        self.alternatives += self._likeliest(jobs, logits, total_R)
        state.count_R[rows] += ~done_R
        done_R |= ended_R | (state.count_R[rows] >= state.limit_R[rows])

    def _likeliest(self, jobs: Sequence[Job], logits: Tensor, total_R: Tensor) -> list[Alternatives]:
        most = max(job.alternatives for job in jobs)
        if not most:
            return [[] for _ in jobs]
        values, ids = logits.topk(min(most, logits.shape[-1]))
        pairs = zip(ids.tolist(), (values - total_R[:, None]).tolist(), strict=True)
        return [[*zip(*pair, strict=True)][: job.alternatives] for job, pair in zip(jobs, pairs, strict=True)]


class Joining(Generation):
    """A generation that never ends: jobs `join` and `leave` between turns, and every `turn` returns its events."""

    def __init__(self, room: Room, stepper: JoiningStepper, version: int, rows_step: int):
        super().__init__(Memory.of(room, stepper), room, [], version, rows_step, StopTexts((), None))
        stepper.jobs = lambda start, stop: [self.jobs[row.group.request.index] for row in self.rows[start:stop]]
        self.joined = 0
        self.jobs: dict[int, Job] = {}
        self.adapter: str | None = None
        self.switch: Callable[[str | None], None] = lambda adapter: None
        self.events: list[Event] = []
        self.leaving: set[int] = set()

    def join(self, job: Job, limit: int, texts: StopTexts) -> None:
        n = job.remaining = job.sampling.num_generations
        self.joined += 1
        self.jobs[self.joined] = job
        request = Request(self.joined, job.tokens, job.sampling.seed, (limit,) * n)
        self.waiting.extend(groups_of(request, job.sampling, texts, self.room.members))

    def leave(self, job: Job) -> None:
        """Remove the job at the next turn. No more events of the job follow."""
        self.leaving |= {index for index, other in self.jobs.items() if other is job}

    def turn(self) -> list[Event]:
        """Admit the jobs that fit, give every live completion its next token, and return the events."""
        self.events = []
        if self.leaving:
            self.waiting = deque(group for group in self.waiting if group.request.index not in self.leaving)
        begin = len(self.rows)
        if not begin:
            self.since = time.perf_counter()  # no completion is charged for idle time
        if self.admit():
            self._report(begin)
            self.retire()
        if self.rows:
            self.step()
            self._report(0)
            self.retire()
        for index in self.leaving:
            self.jobs.pop(index, None)
        self.leaving.clear()
        return self.events

    def fits(self, group: Group) -> bool:
        """Whether the group can enter now. Requests keep their order: one with a different adapter waits until no row
        is live, and later requests wait behind it."""
        adapter = self.jobs[group.request.index].adapter
        if adapter != self.adapter:
            if self.rows:
                return False
            self.switch(adapter)
            self.adapter = adapter
        return super().fits(group)

    def ended(self, row: Slot, completion: Completion) -> None:
        index = row.group.request.index
        job = self.jobs[index]
        if index not in self.leaving:
            noted = job.noted.pop(row.number, [])[: len(completion.tokens)]
            self.events.append(Ended(job, row.number, completion, noted))
        job.remaining -= 1
        if not job.remaining:
            del self.jobs[index]

    def stopped_early(self) -> dict[int, int | None]:
        gone = (index for index, row in enumerate(self.rows) if row.group.request.index in self.leaving)
        return super().stopped_early() | dict.fromkeys(gone)

    def _report(self, begin: int) -> None:
        """Store the alternatives of the newest tokens of the rows from `begin` on; add an event per streamed token."""
        rows, stepper = slice(begin, len(self.rows)), self.stepper
        assert isinstance(stepper, JoiningStepper)
        tokens, columns = self.state.token_R[rows].tolist(), self.state.count_R[rows] - 1
        logprobs = self.state.logprobs_RL[rows].gather(1, columns[:, None]).squeeze(1).tolist()
        newest = zip(self.rows[rows], tokens, logprobs, stepper.alternatives, strict=True)
        for row, token, logprob, alternatives in newest:
            index = row.group.request.index
            job = self.jobs[index]
            if job.alternatives:
                job.noted.setdefault(row.number, []).append(alternatives)
            if job.streamed and index not in self.leaving:
                self.events.append(Token(job, row.number, token, logprob, alternatives))


Result = TypeVar("Result")
# What the engine's thread does between two steps, and what it does instead if the engine has failed.
Work = tuple[Callable[[Joining], None], Callable[[Exception], object]]


class Busy(PosttrainError):
    """The queue is full."""


class Live:
    """Generates completions for requests that arrive at any time. `deliver` receives the events of each step, in the
    engine's thread.

    At most `max_rows` completions are generated together, fewer if their keys and values exceed `cache_bytes`. Prompt
    and completion have together at most `context` tokens (None: what the model allows, up to CONTEXT). At most
    `max_waiting` prompts wait. A request's tokens depend on its seed, not on other requests; in float32 they equal the
    tokens of EmbeddedEngine. A request may name an adapter of a PEFT model.

    Raises ModelError for a model that the embedded engine does not run, and for one whose rotary embedding depends on
    the lengths in a batch (`check_positions`).
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
        refuse_unsupported(base)
        self.policy, self.tokenizer, self.deliver, self.max_waiting = policy, tokenizer, deliver, max_waiting
        positions = positions_of(base.config)
        # The last sampled token is not fed, so it needs no position.
        self.context = context or min(CONTEXT, CONTEXT if positions is None else positions + 1)
        check_positions(base.config, self.context - 1)
        self.positions = self.context - 1 if positions is None else min(positions, self.context - 1)
        self.vocabulary = vocabulary_of(base)
        tokens = cache_tokens(base.config, base.dtype, base.device, cache_bytes or CACHE_BYTES // 2)
        rows = max(1, min(max_rows, tokens // (2 * self.context)))
        self.room = Room(rows, rows, rows, self.context, self.context)
        self._base, self._queued, self._wake = base, deque[Work](), threading.Condition()
        self._closed, self._waiting, self._live = False, 0, 0
        self._thread = threading.Thread(target=self._run, name="posttrain-live", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job; its events follow. Raises Busy if the queue is full, DataError for a prompt that is empty, has
        unknown token ids or leaves no room, and for an unknown adapter."""
        [request] = checked_requests([job.tokens], job.sampling, None, None, self.vocabulary, self.positions)
        texts = StopTexts(job.sampling.stop, self.tokenizer)
        if job.adapter is not None and job.adapter not in self.adapters:
            raise DataError(f"there is no adapter {job.adapter}; available: {', '.join(self.adapters) or 'none'}")
        with self._wake:
            if self._waiting >= self.max_waiting:
                raise Busy(f"{self._waiting} prompts are already waiting: try again later")
            self._waiting += 1
        self._post(
            lambda generation: generation.join(job, request.limits[0], texts),
            lambda error: self.deliver([Failed(job, error)]),
        )

    def cancel(self, job: Job) -> None:
        """Cancel the job. At most one more step reports events of the job."""
        self._post(lambda generation: generation.leave(job), lambda error: None)

    def call(self, work: Callable[[nn.Module], Result], adapter: str | None = None) -> Future[Result]:
        """Run `work` on the policy between two steps, with this adapter active."""
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

        self._post(run, future.set_exception)
        return future

    @property
    def adapters(self) -> list[str]:
        return sorted(getattr(self.policy, "peft_config", ()))

    @property
    def load(self) -> tuple[int, int]:
        """The number of live completions, and the number of waiting prompts."""
        return self._live, self._waiting

    def close(self) -> None:
        """Stop the engine. Unfinished jobs fail."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()

    def _post(self, *work: *Work) -> None:
        with self._wake:
            if self._closed:
                raise EngineError("the engine is closed")
            self._queued.append(work)
            self._wake.notify()

    def _run(self) -> None:
        try:
            self._generate()
        except Exception as error:  # for example, there is no memory for keys and values
            log.exception("the engine failed and cannot go on")
            with self._wake:
                self._closed = True
            for _, fail in self._queued:
                fail(error)

    def _generate(self) -> None:
        base: Any = self._base
        with torch.inference_mode(), evaluating(self.policy), packed_weights(self.policy, head_layer(base)) as step:
            generation = self._fresh(step)
            while self._next(generation):
                failed = False
                try:
                    events = generation.turn()
                except Exception as error:
                    log.exception("the engine failed, so %d requests failed", len(generation.jobs))
                    failed, events = True, generation.events + [Failed(job, error) for job in generation.jobs.values()]
                if events:
                    self.deliver(events)
                if failed:  # only after all requests are answered: allocating new memory may fail too
                    generation = self._fresh(step)
                with self._wake:
                    self._waiting, self._live = len(generation.waiting) + len(self._queued), len(generation.rows)
            error = EngineError("the server was stopped")
            self.deliver([Failed(job, error) for job in generation.jobs.values()])

    def _next(self, generation: Joining) -> bool:
        """Wait until there is something to do, and do the queued work. Return False if the engine is closed."""
        with self._wake:
            while not (self._closed or self._queued or generation.rows or generation.waiting):
                self._wake.wait()
            queued, closed = list(self._queued), self._closed
            self._queued.clear()
        for work, _ in queued:
            work(generation)
        return not closed

    def _fresh(self, rows_step: int) -> Joining:
        generation = Joining(self.room, JoiningStepper(self.policy, self._base.device), 0, rows_step)
        generation.switch = self._switch
        self._switch(None)
        return generation

    def _switch(self, adapter: str | None) -> None:
        """Activate one adapter; None: deactivate all."""
        if not hasattr(self.policy, "peft_config"):
            return
        tuner: Any = self.policy.base_model
        if adapter is None:
            tuner.disable_adapter_layers()
        else:
            tuner.enable_adapter_layers()
            tuner.set_adapter(adapter)
