"""One call of the embedded engine: the live completions and their slots in its memory.

The memory is allocated for the call, or, on a GPU, kept between calls together with the captured CUDA graphs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from posttrain.batch import Example, Node, pack
from posttrain.engines.attention import Prefill, Shape
from posttrain.engines.cache import FEWEST_COLUMNS, Buffers, Cache, Room
from posttrain.engines.decode import DecodeState, Recordings, StaticStepper, Stepper
from posttrain.engines.protocol import Completion, Finished, Request, Sampling, StopSearch, StopTexts, not_finite
from posttrain.engines.sampling import keys
from posttrain.models.attention import Visible, width_step
from posttrain.models.families import backbone_of, base_of

MOST_KEPT = 4  # maximum number of sampling settings (a run's, its evaluations') whose state and graphs are kept
TOKENS_PER_PREFILL = 8192


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory for live completions, and the stepper that uses it."""

    room: Room
    cache: Cache
    state: DecodeState
    stepper: Stepper

    @classmethod
    def of(cls, room: Room, stepper: Stepper, buffers: Buffers | None = None) -> Memory:
        cache = Cache(room, stepper.still, buffers)
        return cls(room, cache, DecodeState.empty(room, stepper.device), stepper)


class Kept:
    """The memory of static shapes that is kept for one policy.

    Evaluation often differs from training in the number of completions and in the temperature. So each set of sampling
    settings has its own state and CUDA graphs, but all of them use the same buffers for keys and values in turn. A call
    uses only the part of the memory within its own room, so earlier calls have no influence.
    """

    def __init__(self, policy: nn.Module, device: torch.device):
        self.policy, self.device = policy, device
        self.recordings = Recordings()
        self.memories: dict[Sampling, Memory] = {}
        self._buffers = Buffers(0)
        self._steppers: dict[Sampling, StaticStepper] = {}  # `release` keeps them: compiled code is used again

    def memory(self, sampling: Sampling, room: Room, tokens: int) -> Memory:
        """Return memory that covers `room`, and also the earlier room if both together take at most `tokens` tokens."""
        self.recordings.check(self.policy)
        key = replace(sampling, seed=0, max_completion_length=1, stop=())
        held = self.memories.get(key)
        if held is not None and held.room.covers(room):
            return held
        if held is not None and (both := held.room.joined(room)).tokens <= tokens:
            room = both
        del held
        stepper = self._stepper(key)
        self.memories.pop(key, None)
        self.recordings.drop(stepper)
        if room.tokens > self._buffers.tokens:
            self.release()  # before the new allocation: there may not be memory for both
            self._buffers = Buffers(room.tokens, finite=True)
        self.memories[key] = Memory.of(room, stepper, self._buffers)
        return self.memories[key]

    def _stepper(self, key: Sampling) -> StaticStepper:
        if key not in self._steppers:
            while len(self._steppers) >= MOST_KEPT:
                oldest = next(iter(self._steppers))
                self.recordings.drop(self._steppers.pop(oldest))
                self.memories.pop(oldest, None)
            compiled = self.device.type == "cuda"
            self._steppers[key] = StaticStepper(self.policy, key, self.device, self.recordings, compiled)
        return self._steppers[key]

    def release(self) -> None:
        """Release everything except compiled code."""
        self.memories.clear()
        self.recordings.graphs.clear()
        self._buffers = Buffers(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


@dataclass(slots=True, eq=False)
class Group:
    """A prompt, with the numbers of those completions that are generated together."""

    request: Request
    numbers: range
    sampling: Sampling
    texts: StopTexts
    slot: int = -1  # in the cache
    live: list[Slot] = field(default_factory=list)
    age: int = 1  # tokens that each live completion has


@dataclass(slots=True, eq=False)
class Slot:
    """A live completion: number `number` of its prompt."""

    group: Group
    number: int
    began: float = 0.0  # `Generation.spent` at its admission
    search: StopSearch | None = None  # for stop strings


def groups_of(request: Request, sampling: Sampling, texts: StopTexts, members: int) -> Iterator[Group]:
    """Yield the groups of a prompt: several if it has more completions than `members`."""
    n = len(request.limits)
    for first in range(0, n, members):
        yield Group(request, range(first, min(first + members, n)), sampling, texts)


class Generation:
    """One call of `generate`. It uses the part of the memory within `room`."""

    def __init__(
        self,
        memory: Memory,
        room: Room,
        requests: list[Request],
        version: int,
        rows_step: int,
        texts: StopTexts,
        finished: Finished | None = None,
    ):
        self.room = room
        self.rows_step = rows_step  # products are fast with a multiple of this number of rows
        self.cache, self.state, self.stepper = memory.cache, memory.state, memory.stepper
        self.policy, self.device = self.stepper.policy, self.stepper.device
        self.version, self.finished = version, finished
        self.spent, self.since = 0.0, time.perf_counter()  # seconds charged to a completion that is live throughout
        # Taking long prompts first would waste least, but callers often sort by difficulty, so their order is kept.
        sampling = self.stepper.sampling
        groups = (group for request in requests for group in groups_of(request, sampling, texts, room.members))
        self.waiting = deque(groups)
        self.groups: list[Group] = []  # by slot
        self.rows: list[Slot] = []  # in the order of the state's tensors
        self.completed: list[list[Completion | None]] = [[None] * len(request.limits) for request in requests]

    def completions(self) -> list[list[Completion]]:
        while self.waiting or self.rows:
            self.advance()
        return [[done for done in group if done is not None] for group in self.completed]

    def advance(self) -> None:
        """Admit the prompts that fit, and give every live completion its next tokens."""
        if self.admit():
            self.retire()
        if self.rows:
            for _ in range(self.stepper.steps_between_checks):
                self.step()
            self.retire()

    def step(self) -> None:
        """Give every live completion its next token."""
        shape = self.shape()
        self.cache.widen(shape.rows, shape.own_columns)
        self.stepper.step(self.state, self.cache, shape)
        for group in self.groups:
            group.age += 1

    def shape(self) -> Shape:
        lengths = {len(group.request.tokens) for group in self.groups}
        ages = {group.age for group in self.groups}
        members = max(len(group.live) for group in self.groups)
        rows = min(self.room.rows, -(-len(self.rows) // self.rows_step) * self.rows_step)
        own_columns = max(FEWEST_COLUMNS, *ages)
        even_ages = ages == {own_columns}
        shape = Shape(rows, len(self.groups), members, max(lengths), own_columns, len(lengths) == 1, even_ages)
        return self.stepper.rounded(shape, self.room)

    def admit(self) -> bool:
        """Admit waiting prompts while a complete group fits. Return whether any was admitted."""
        begin, before = len(self.rows), len(self.groups)
        while self.waiting and self.fits(self.waiting[0]):
            group = self.waiting.popleft()
            group.slot = len(self.groups)
            group.live = [
                Slot(group, number, self.spent, group.texts.search(group.request.tokens)) for number in group.numbers
            ]
            self.rows += group.live
            self.groups.append(group)
        fresh = self.groups[before:]
        if not fresh:
            return False
        hidden_G = self.prefill(fresh)
        new = slice(begin, len(self.rows))
        self.cache.clear(new)
        state = self.state
        state.count_R[new] = 0
        state.done_R[new] = False
        state.limit_R[new] = self.tensor([row.group.request.limits[row.number] for row in self.rows[new]])
        state.key_R2[new] = keys([(row.group.request.seed, row.number) for row in self.rows[new]], self.device)
        self.stepper.record(state, new, hidden_G[self.tensor([row.group.slot - before for row in self.rows[new]])])
        self.assign_slots()
        return True

    def fits(self, group: Group) -> bool:
        """Whether the group can enter now."""
        return len(self.rows) + len(group.numbers) <= self.room.rows and len(self.groups) < self.room.groups

    def prefill(self, fresh: list[Group]) -> Tensor:
        """Run each prompt once and store its keys and values in the cache. Return the last hidden states (G, D)."""
        examples = [Example((Node(group.request.tokens),), index) for index, group in enumerate(fresh)]
        budget = max(TOKENS_PER_PREFILL, *(len(group.request.tokens) for group in fresh))
        step = width_step(self.device, budget)
        parts, order = [], []
        for packed in pack(examples, budget, keep_last=True, pad_to=step):
            owners = packed.group_S.tolist()
            packed = packed.to(self.device)
            mask = Prefill(packed, self.cache, [fresh[owner].slot for owner in owners])
            parts.append(self.last_states(packed.tokens_T, packed.position_T, mask, len(owners)))
            order += owners
        return torch.cat(parts)[self.tensor(order).argsort()]

    def last_states(self, tokens_T: Tensor, position_T: Tensor, mask: Visible, count: int) -> Tensor:
        """Run the model, and return the last hidden states (count, D) of the tokens that `mask` reads."""
        tokens, positions, backbone = tokens_T[None], position_T[None], backbone_of(base_of(self.policy))
        out = backbone(input_ids=tokens, position_ids=positions, use_cache=False, packed=mask)
        hidden = out.last_hidden_state[0]  # for all tokens, or only for the last ones (models/lean.py)
        return hidden if len(hidden) == count else hidden[mask.read]

    def retire(self) -> None:
        """Remove finished rows and close the gaps."""
        flags = self.state.done_R[: len(self.rows)]
        done = flags.nonzero().squeeze(1).tolist() if flags.any() else []
        ends = dict.fromkeys(done) | self.stopped_early()
        self.charge()
        if not ends:
            return
        self.collect(sorted(ends), ends)
        kept = [index for index in range(len(self.rows)) if index not in ends]
        holes = [index for index in sorted(ends) if index < len(kept)]
        tails = [index for index in kept if index >= len(kept)]
        if holes:
            source, target = self.tensor(tails), self.tensor(holes)
            self.cache.move_rows(source, target, max(self.rows[index].group.age for index in tails))
            self.state.move(source, target)
        for hole, tail in zip(holes, tails, strict=True):
            self.rows[hole] = self.rows[tail]
        del self.rows[len(kept) :]
        self.close_groups()
        self.assign_slots()

    def charge(self) -> None:
        """Share the time since the last call among the live completions."""
        now = time.perf_counter()
        self.spent += (now - self.since) / len(self.rows)
        self.since = now

    def collect(self, rows: list[int], ends: dict[int, int | None]) -> None:
        """Convert finished rows to completions, each up to the end of its stop string, if it has one."""
        index = self.tensor(rows)
        counts = self.state.count_R[index].tolist()
        columns = max(counts)
        tokens = self.state.tokens_RL[index, :columns].tolist()
        logprobs_RL = self.state.logprobs_RL[index, :columns]
        if not logprobs_RL.isfinite().all():
            raise not_finite()
        for number, count, ids, logprobs in zip(rows, counts, tokens, logprobs_RL.tolist(), strict=True):
            row, end = self.rows[number], ends[number]
            row.group.live.remove(row)
            size = count if end is None else end
            stopped = end is not None or ids[size - 1] in row.group.sampling.stop_token_ids
            reason, seconds = "stop" if stopped else "length", self.spent - row.began
            self.ended(row, Completion(ids[:size], logprobs[:size], reason, self.version, seconds))

    def ended(self, row: Slot, completion: Completion) -> None:
        index = row.group.request.index
        group = self.completed[index]
        group[row.number] = completion
        if self.finished is not None and None not in group:
            self.finished(index, [done for done in group if done is not None])

    def stopped_early(self) -> dict[int, int | None]:
        """Return the rows that contain a stop string, with the number of tokens up to its end."""
        ends: dict[int, int | None] = {}
        if not any(group.texts for group in self.groups):
            return ends
        tokens = self.state.tokens_RL[: len(self.rows)].tolist()
        counts = self.state.count_R[: len(self.rows)].tolist()
        for index, (row, ids, count) in enumerate(zip(self.rows, tokens, counts, strict=True)):
            if row.search is not None and (end := row.search.first(ids[:count])) is not None:
                ends[index] = end
        return ends

    def close_groups(self) -> None:
        """Remove prompts without live completions. The last prompts move into the free slots."""
        slot = 0
        while slot < len(self.groups):
            if self.groups[slot].live:
                slot += 1
                continue
            last = self.groups.pop()
            if last.slot != slot:
                self.cache.move_group(last.slot, slot, len(last.request.tokens))
                last.slot = slot
                self.groups[slot] = last

    def assign_slots(self) -> None:
        """Set each row's group and its slot among the group's live rows."""
        member = {id(row): number for group in self.groups for number, row in enumerate(group.live)}
        state, rows, groups = self.state, slice(len(self.rows)), slice(len(self.groups))
        state.idle(len(self.rows))
        state.group_R[rows] = self.tensor([row.group.slot for row in self.rows])
        state.member_R[rows] = self.tensor([member[id(row)] for row in self.rows])
        state.row_GM.zero_()
        state.row_GM[state.group_R[rows], state.member_R[rows]] = torch.arange(len(self.rows), device=self.device)
        state.length_G[groups] = self.tensor([len(group.request.tokens) for group in self.groups])
        state.age_G[groups] = self.tensor([group.age for group in self.groups])

    def tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
