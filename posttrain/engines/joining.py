"""A generation that requests join and leave at any step, each with its own sampling settings and adapter."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from posttrain.engines.cache import Room
from posttrain.engines.decode import State, Stepper
from posttrain.engines.generation import Generation, Group, Memory, Slot, groups_of
from posttrain.engines.protocol import Completion, Request, Sampling
from posttrain.engines.sampling import sample_tokens
from posttrain.engines.stops import StopTexts
from posttrain.scoring import next_token_logits, row_chunks

Alternatives = list[tuple[int, float]]  # token ids with their log-probabilities, the likeliest first


@dataclass(slots=True, eq=False)
class Job:
    """A prompt to complete. `adapter`: by name; None: the model without adapters."""

    tokens: Sequence[int]
    sampling: Sampling  # with its seed: `num_generations` completions have the streams (seed, 0), (seed, 1), …
    adapter: str | None = None
    alternatives: int = 0  # of each token, to report
    streamed: bool = False  # whether each token is an event
    left: int = field(default=0, init=False)  # completions that are not complete
    noted: dict[int, list[Alternatives]] = field(default_factory=dict, init=False)  # by completion and token


@dataclass(frozen=True, slots=True)
class Token:
    """A streamed job's completion `number` has one more token."""

    job: Job
    number: int
    token: int
    logprob: float
    alternatives: Alternatives


@dataclass(frozen=True, slots=True)
class Ended:
    """The job's completion `number` is complete. Its log-probabilities are the model's, at temperature 1."""

    job: Job
    number: int
    completion: Completion
    alternatives: list[Alternatives]


@dataclass(frozen=True, slots=True)
class Failed:
    """The job has no completions."""

    job: Job
    error: Exception


Event = Token | Ended | Failed


class JoiningStepper(Stepper):
    """A stepper whose rows have settings of their own, which `jobs` gives by place.

    The log-probabilities that it records are those of the model, before temperature and filters.
    """

    def __init__(self, policy: torch.nn.Module, device: torch.device):
        super().__init__(policy, Sampling(), device)
        self.jobs: Callable[[int, int], list[Job]] = lambda start, stop: []
        self.alternatives: list[Alternatives] = []  # of the rows of the last `record`

    def record(self, state: State, rows: slice, hidden_R: Tensor) -> None:
        first = rows.start or 0
        jobs = self.jobs(first, first + len(hidden_R))  # fewer than rows: the last ones may be idle
        self.alternatives = []
        for part in row_chunks(self.policy, len(hidden_R)):
            start = first + (part.start or 0)
            some = jobs[start - first : start - first + len(hidden_R[part])]
            if some:
                self._record(state, start, some, next_token_logits(self.policy, hidden_R[part][: len(some)]))

    def _record(self, state: State, start: int, jobs: Sequence[Job], logits: Tensor) -> None:
        rows = slice(start, start + len(jobs))
        place_R, done_R, total_R = state.count_R[rows].clone(), state.done_R[rows], logits.logsumexp(-1)
        token_R, ended_R = state.token_R[rows].clone(), torch.zeros_like(done_R)
        for sampling, places in _by_settings(jobs).items():
            index = torch.tensor(places, device=self.device)
            own, keys = logits[index], state.key_R2[rows][index]  # a copy, which sampling overwrites
            token, _ = sample_tokens(own, sampling, self.words_V, keys, place_R[index])
            token_R[index] = torch.where(done_R[index], token_R[index], token)
            if sampling.stop_token_ids:
                stops = torch.tensor(sampling.stop_token_ids, device=self.device)
                ended_R[index] = (token[:, None] == stops).any(1)
        logprob_R = logits.gather(1, token_R[:, None]).squeeze(1) - total_R
        state.token_R[rows] = token_R
        state.tokens_RL[rows].scatter_(1, place_R[:, None], token_R[:, None])
        state.logprobs_RL[rows].scatter_(1, place_R[:, None], logprob_R[:, None])
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


def _by_settings(jobs: Sequence[Job]) -> dict[Sampling, list[int]]:
    """The places of the jobs by what decides how a token is sampled."""
    found: dict[Sampling, list[int]] = {}
    for place, job in enumerate(jobs):
        key = replace(job.sampling, seed=0, num_generations=1, max_completion_length=1, stop=())
        found.setdefault(key, []).append(place)
    return found


class Joining(Generation):
    """A generation without an end: `join` and `leave` between turns; every turn gives its events."""

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
        n = job.left = job.sampling.num_generations
        self.joined += 1
        self.jobs[self.joined] = job
        request = Request(self.joined, job.tokens, job.sampling.seed, (limit,) * n)
        self.waiting.extend(groups_of(request, job.sampling, texts, self.room.members))

    def leave(self, job: Job) -> None:
        """Remove the job at the next turn; it gets no more events."""
        self.leaving |= {index for index, one in self.jobs.items() if one is job}

    def turn(self) -> list[Event]:
        """Admit what fits, and give every live completion its next token."""
        self.events = []
        self._remove_waiting()
        begin = len(self.rows)
        if not begin:
            self.since = time.perf_counter()  # idle time is no completion's
        if self.admit():
            self._tell(begin)
            self.retire()
        if self.rows:
            self.step()
            self._tell(0)
            self.retire()
        for index in self.leaving:
            self.jobs.pop(index, None)
        self.leaving.clear()
        return self.events

    def fits(self, group: Group) -> bool:
        """Requests keep their order: one with another adapter waits until no row is live, and the others behind it."""
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
        job.left -= 1
        if not job.left:
            del self.jobs[index]

    def stopped_early(self) -> dict[int, int | None]:
        gone = [place for place, row in enumerate(self.rows) if row.group.request.index in self.leaving]
        return super().stopped_early() | dict.fromkeys(gone)

    def _remove_waiting(self) -> None:
        if self.leaving:
            kept = [group for group in self.waiting if group.request.index not in self.leaving]
            self.waiting.clear()
            self.waiting.extend(kept)

    def _tell(self, begin: int) -> None:
        """Note the alternatives of the newest tokens, and tell streamed jobs of these tokens."""
        rows = slice(begin, len(self.rows))
        tokens, columns = self.state.token_R[rows].tolist(), self.state.count_R[rows] - 1
        logprobs = self.state.logprobs_RL[rows].gather(1, columns[:, None]).squeeze(1).tolist()
        for row, token, logprob, likely in self._newest(begin, tokens, logprobs):
            index = row.group.request.index
            job = self.jobs[index]
            if job.alternatives:
                job.noted.setdefault(row.number, []).append(likely)
            if job.streamed and index not in self.leaving:
                self.events.append(Token(job, row.number, token, logprob, likely))

    def _newest(
        self, begin: int, tokens: Sequence[int], logprobs: Sequence[float]
    ) -> Iterator[tuple[Slot, int, float, Alternatives]]:
        stepper = self.stepper
        assert isinstance(stepper, JoiningStepper)
        return zip(self.rows[begin:], tokens, logprobs, stepper.alternatives, strict=True)
