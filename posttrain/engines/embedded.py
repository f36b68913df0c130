"""The engine inside the training process: it runs the policy's own modules, so new weights are there at once.

A call of `generate` keeps up to `max_rows` completions alive. A prompt is prefilled once, its keys and values are read
by all its completions (cache.py), and every step gives each live completion its next token (decode.py). Finished rows
leave, the last ones move into their places, and when a whole group fits the next prompts enter.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.batch import Example, Sample, pack
from posttrain.engines.cache import Cache, Prefill
from posttrain.engines.decode import Shape, State, Stepper
from posttrain.engines.graphs import COLUMNS, StaticStepper
from posttrain.engines.protocol import Completion, Request, Sampling, not_finite, requests
from posttrain.engines.stops import StopTexts
from posttrain.engines.streams import keys
from posttrain.errors import ModelError
from posttrain.models.attention import width_step
from posttrain.models.families import backbone_of, base_of, check_positions, is_packed, positions_of
from posttrain.models.matmul import packed_weights

MAX_ROWS = 512  # more live completions are hardly faster
CACHE_BYTES = 2 << 30  # what their keys and values may take in main memory; on a GPU a quarter of it all
TOKENS_PER_PREFILL = 8192
FEWEST_COLUMNS = 32  # with fewer, PyTorch may take its slow way to products of small matrices


class EmbeddedEngine:
    """Engine (see protocol.py) for families that take packs. `tokenizer` is needed for stop texts only.

    The policy may be a plain transformers model or a PEFT one; adapters count as they are switched when `generate` is
    called. In float32 log-probabilities are those of `posttrain.scoring` to 1e-5. `static` says whether steps have few
    shapes and are recorded (graphs.py); by default they are on a GPU.
    """

    def __init__(
        self,
        policy: nn.Module,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        version: int = 0,
        max_rows: int = MAX_ROWS,
        static: bool | None = None,
    ):
        self.tokenizer, self.max_rows, self.static = tokenizer, max_rows, static
        self._held: _Memory | None = None
        self.load(policy, version)

    def load(self, policy: nn.Module, version: int) -> None:
        """Run on `policy` from now on. Its weights are used where they are, so for the same module this is a number."""
        base = base_of(policy)
        if not is_packed(base):
            raise ModelError(
                f"the embedded engine needs packed attention, and this {base.config.model_type} has "
                f"{base.config._attn_implementation}: set rollout.engine: transformers"
            )
        self.policy, self.version = policy, version

    def release(self) -> None:
        """Give back what a GPU holds between calls: the cache and the recorded steps, which are then made anew."""
        self._held = None

    def close(self) -> None:
        self.release()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        seeds: Sequence[int] | None = None,
        limits: Sequence[Sequence[int]] | None = None,
    ) -> list[list[Completion]]:
        base = base_of(self.policy)
        head = base.get_output_embeddings()
        asked = requests(
            prompts,
            sampling,
            seeds,
            limits,
            vocabulary=base.get_input_embeddings().weight.shape[0],  # pyright: ignore
            positions=positions_of(base.config),
        )
        if not asked:
            return []
        check_positions(base.config, max(len(request.tokens) + max(request.limits) - 1 for request in asked))
        texts = StopTexts(sampling.stop, self.tokenizer)
        device = head.weight.device  # pyright: ignore
        size = _Size.of(asked, sampling, self.max_rows, cache_tokens(base, device))
        with torch.inference_mode(), evaluating(self.policy), packed_weights(self.policy) as rows_step:
            memory = self._memory(sampling, size, device)
            try:
                return _Generation(memory, asked, texts, self.version, rows_step).completions()
            except BaseException:
                self._held = None  # it may hold what is not finite, which no mask hides
                raise

    def _memory(self, sampling: Sampling, size: _Size, device: torch.device) -> _Memory:
        """What to draw in: made for the call, or where shapes are static the one of the last call if it serves."""
        on_gpu = device.type == "cuda"
        if not (on_gpu if self.static is None else self.static):
            return _Memory(self.policy, sampling, size, device, Stepper(self.policy, sampling, device))
        if self._held is None or not self._held.serves(self.policy, sampling, size):
            self._held = None  # before the new one is made: there may not be room for two
            stepper = StaticStepper(self.policy, sampling, device, compiled=on_gpu)
            self._held = _Memory(self.policy, sampling, size.rounded(), device, stepper)
        return self._held


@contextlib.contextmanager
def evaluating(policy: nn.Module) -> Iterator[None]:
    """Every module in evaluation mode, without dropout, and afterwards as it was."""
    training = [module for module in policy.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@dataclass(slots=True, eq=False)
class Group:
    """A prompt whose completions are being drawn."""

    request: Request
    slot: int
    live: list[Row] = field(default_factory=list)
    age: int = 1  # tokens that each live completion has


@dataclass(slots=True, eq=False)
class Row:
    """A live completion: number `number` of its prompt."""

    group: Group
    number: int
    seen: int = 0  # tokens in which stop texts were looked for


class _Size(NamedTuple):
    """What the cache has room for."""

    rows: int
    groups: int
    members: int
    prompt_columns: int
    own_columns: int

    @classmethod
    def of(cls, asked: Sequence[Request], sampling: Sampling, max_rows: int, tokens: int) -> _Size:
        """At most `max_rows` completions, and so many that the keys and values of all are of at most `tokens`."""
        n = sampling.num_generations
        longest = max(max(request.limits) for request in asked)
        rows = min(len(asked) * n, max(n, min(max_rows, tokens // longest)))
        # Groups of which some completions are done hold a place while others enter.
        groups = min(len(asked), 2 * rows // n)
        return cls(rows, groups, n, max(len(request.tokens) for request in asked), max(longest, FEWEST_COLUMNS))

    def rounded(self) -> _Size:
        """With columns for somewhat longer prompts and completions, so that the next calls find room too."""
        prompt, own = (-(-columns // COLUMNS) * COLUMNS for columns in (self.prompt_columns, self.own_columns))
        return self._replace(prompt_columns=prompt, own_columns=own)


def cache_tokens(base: PreTrainedModel, device: torch.device) -> int:
    """How many tokens of completions there is room for. A function of model and machine alone, not of what is free
    now: rounding may depend on how many rows a step has, and a resumed run must draw what the first one drew."""
    config = base.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token = 2 * config.num_hidden_layers * heads * size * base.dtype.itemsize
    room = torch.cuda.get_device_properties(device).total_memory // 4 if device.type == "cuda" else CACHE_BYTES
    return room // token


class _Memory:
    """The tensors that completions are drawn in, and what steps over them."""

    def __init__(self, policy: nn.Module, sampling: Sampling, size: _Size, device: torch.device, stepper: Stepper):
        self.policy, self.sampling, self.size, self.device, self.stepper = policy, sampling, size, device, stepper
        self.cache = Cache(*size, still=stepper.still)
        self.state = State.empty(size.rows, size.groups, size.members, size.own_columns, device)

    def serves(self, policy: nn.Module, sampling: Sampling, size: _Size) -> bool:
        """Whether a call with these can use it: the same policy and drawing, and room enough."""
        same = self.policy is policy and self.size.members == size.members
        drawing = replace(sampling, seed=self.sampling.seed, max_completion_length=self.sampling.max_completion_length)
        return same and drawing == self.sampling and all(a >= b for a, b in zip(self.size, size, strict=True))


class _Generation:
    """One call of `generate`."""

    def __init__(self, memory: _Memory, asked: list[Request], texts: StopTexts, version: int, rows_step: int):
        self.rows_step = rows_step  # products are quick with a multiple of so many rows
        self.memory, self.policy, self.sampling, self.device = memory, memory.policy, memory.sampling, memory.device
        self.cache, self.state, self.stepper = memory.cache, memory.state, memory.stepper
        self.texts, self.version = texts, version
        self.n = n = memory.sampling.num_generations
        # Long prompts first would waste least, but the order of a caller is often by difficulty: it is kept.
        self.waiting = deque(asked)
        self.groups: list[Group] = []  # by slot
        self.rows: list[Row] = []  # by place in the state's tensors
        self.found: list[list[Completion | None]] = [[None] * n for _ in asked]

    def completions(self) -> list[list[Completion]]:
        while self.waiting or self.rows:
            if self.admit():
                self.retire()
            if self.rows:
                for _ in range(self.stepper.steps_between_checks):
                    shape = self.shape()
                    self.cache.widen(shape.rows, shape.own_columns)
                    self.stepper.step(self.state, self.cache, shape)
                    for group in self.groups:
                        group.age += 1
                self.retire()
        return [[done for done in group if done is not None] for group in self.found]

    def shape(self) -> Shape:
        lengths = {len(group.request.tokens) for group in self.groups}
        ages = {group.age for group in self.groups}
        members = max(len(group.live) for group in self.groups)
        rows = min(self.memory.size.rows, -(-len(self.rows) // self.rows_step) * self.rows_step)
        own_columns = max(FEWEST_COLUMNS, *ages)
        even_ages = ages == {own_columns}
        return Shape(rows, len(self.groups), members, max(lengths), own_columns, len(lengths) == 1, even_ages)

    def admit(self) -> bool:
        """Let waiting prompts in while a whole group fits; whether any came."""
        fresh: list[Group] = []
        while (
            self.waiting
            and len(self.rows) + (len(fresh) + 1) * self.n <= self.memory.size.rows
            and len(self.groups) + len(fresh) < self.memory.size.groups
        ):
            fresh.append(Group(self.waiting.popleft(), len(self.groups) + len(fresh)))
        if not fresh:
            return False
        hidden_G = self.prefill(fresh)
        begin = len(self.rows)
        for group in fresh:
            group.live = [Row(group, number) for number in range(self.n)]
            self.rows += group.live
        self.groups += fresh
        new = slice(begin, len(self.rows))
        self.cache.clear(new)
        state = self.state
        state.count_R[new] = 0
        state.done_R[new] = False
        state.limit_R[new] = self.whole([limit for group in fresh for limit in group.request.limits])
        state.key_R2[new] = keys([(row.group.request.seed, row.number) for row in self.rows[new]], self.device)
        self.stepper.record(state, new, hidden_G.repeat_interleave(self.n, 0))
        self.place()
        return True

    def prefill(self, fresh: list[Group]) -> torch.Tensor:
        """Each prompt once through the model, its keys and values into the cache; the last hidden states (G, D)."""
        examples = [Example((Sample(group.request.tokens),), index) for index, group in enumerate(fresh)]
        budget = max(TOKENS_PER_PREFILL, *(len(group.request.tokens) for group in fresh))
        step = width_step(self.device, budget)
        backbone = backbone_of(base_of(self.policy))
        parts, order = [], []
        for packed in pack(examples, budget, keep_last=True, pad_to=step):
            owners = packed.group_S.tolist()
            packed = packed.to(self.device)
            mask = Prefill(packed, self.cache, [fresh[owner].slot for owner in owners])
            out = backbone(
                input_ids=packed.tokens_T[None], position_ids=packed.position_T[None], use_cache=False, packed=mask
            )
            hidden = out.last_hidden_state[0]  # of all tokens, or of the last ones alone (models/lean.py)
            parts.append(hidden if len(hidden) == len(owners) else hidden[packed.last_S])
            order += owners
        return torch.cat(parts)[self.whole(order).argsort()]

    def retire(self) -> None:
        """Take out what is done, and close the gaps."""
        flags = self.state.done_R[: len(self.rows)]
        done = flags.nonzero().squeeze(1).tolist() if flags.any() else []
        ends = dict.fromkeys(done) | (self.stopped_by_text() if self.texts else {})
        if not ends:
            return
        self.collect(sorted(ends), ends)
        kept = [place for place in range(len(self.rows)) if place not in ends]
        holes = [place for place in sorted(ends) if place < len(kept)]
        tails = [place for place in kept if place >= len(kept)]
        if holes:
            source, target = self.whole(tails), self.whole(holes)
            self.cache.move_rows(source, target, max(self.rows[place].group.age for place in tails))
            self.state.move(source, target)
        for hole, tail in zip(holes, tails, strict=True):
            self.rows[hole] = self.rows[tail]
        del self.rows[len(kept) :]
        self.close_groups()
        self.place()

    def collect(self, places: list[int], ends: dict[int, int | None]) -> None:
        """Make completions of rows that are done, each up to where a stop text ended it or whole."""
        index = self.whole(places)
        counts = self.state.count_R[index].tolist()
        columns = max(counts)
        tokens = self.state.tokens_RL[index, :columns].tolist()
        logprobs_RL = self.state.logprobs_RL[index, :columns]
        if not logprobs_RL.isfinite().all():
            raise not_finite()
        logprobs = logprobs_RL.tolist()
        stops = set(self.sampling.stop_token_ids)
        for place, count, ids, values in zip(places, counts, tokens, logprobs, strict=True):
            row, end = self.rows[place], ends[place]
            row.group.live.remove(row)
            size = count if end is None else end
            stopped = end is not None or ids[size - 1] in stops
            completion = Completion(ids[:size], values[:size], "stop" if stopped else "length", self.version)
            self.found[row.group.request.index][row.number] = completion

    def stopped_by_text(self) -> dict[int, int | None]:
        """Places of the rows that have a stop text, with how many of their tokens it takes."""
        found: dict[int, int | None] = {}
        tokens = self.state.tokens_RL[: len(self.rows)].tolist()
        counts = self.state.count_R[: len(self.rows)].tolist()
        for place, (row, ids, count) in enumerate(zip(self.rows, tokens, counts, strict=True)):
            end = self.texts.first(ids[:count], row.seen)
            row.seen = count
            if end is not None:
                found[place] = end
        return found

    def close_groups(self) -> None:
        """Drop prompts without live completions; the last ones move into their places."""
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

    def place(self) -> None:
        """Tell the state which group each row is of, and which of its live rows it is."""
        member = {id(row): number for group in self.groups for number, row in enumerate(group.live)}
        state, rows, groups = self.state, slice(len(self.rows)), slice(len(self.groups))
        state.idle(len(self.rows))
        state.group_R[rows] = self.whole([row.group.slot for row in self.rows])
        state.member_R[rows] = self.whole([member[id(row)] for row in self.rows])
        state.row_GM.zero_()
        state.row_GM[state.group_R[rows], state.member_R[rows]] = torch.arange(len(self.rows), device=self.device)
        state.length_G[groups] = self.whole([len(group.request.tokens) for group in self.groups])
        state.age_G[groups] = self.whole([group.age for group in self.groups])

    def whole(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
