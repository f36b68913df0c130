"""The engine inside the training process: it runs the policy's own modules, so new weights are there at once.

A call of `generate` keeps up to `max_rows` completions alive. A prompt is prefilled once, its keys and values are read
by all its completions (cache.py), and every step gives each live completion its next token (decode.py). Finished rows
leave, the last ones move into their places, and when a whole group fits the next prompts enter.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from posttrain.batch import Example, Sample, pack
from posttrain.engines.cache import Cache, Prefill
from posttrain.engines.decode import Shape, State, Stepper
from posttrain.engines.protocol import Completion, Request, Sampling, requests
from posttrain.engines.sampling import keys
from posttrain.engines.stops import StopTexts
from posttrain.errors import ModelError, VitalSignError
from posttrain.models.attention import width_step
from posttrain.models.families import backbone_of, base_of, check_positions, is_packed

MAX_ROWS = 256  # more live completions are hardly faster, and take memory
TOKENS_PER_PREFILL = 8192


class EmbeddedEngine:
    """Engine (see protocol.py) for families that take packs. `tokenizer` is needed for stop texts only.

    The policy may be a plain transformers model or a PEFT one; adapters count as they are switched when `generate` is
    called. In float32 log-probabilities are those of `posttrain.scoring` to 1e-5.
    """

    def __init__(
        self,
        policy: nn.Module,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        version: int = 0,
        max_rows: int = MAX_ROWS,
    ):
        self.tokenizer, self.max_rows = tokenizer, max_rows
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
            positions=getattr(base.config, "max_position_embeddings", None),
        )
        if not asked:
            return []
        check_positions(base.config, max(len(request.tokens) + max(request.limits) for request in asked))
        texts = StopTexts(sampling.stop, self.tokenizer)
        with torch.inference_mode(), evaluating(self.policy):
            run = _Generation(self.policy, asked, sampling, texts, self.version, self.max_rows, head.weight.device)
            return run.completions()


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


class _Generation:
    """One call of `generate`."""

    def __init__(
        self,
        policy: nn.Module,
        asked: list[Request],
        sampling: Sampling,
        texts: StopTexts,
        version: int,
        max_rows: int,
        device: torch.device,
    ):
        self.policy, self.sampling, self.texts, self.version, self.device = policy, sampling, texts, version, device
        self.n = n = sampling.num_generations
        # Long prompts first would waste least, but the order of a caller is often by difficulty: it is kept.
        self.waiting = deque(asked)
        self.max_rows = min(len(asked) * n, max(n, max_rows))
        # Groups of which some completions are done hold a place while others enter.
        self.max_groups = min(len(asked), 2 * self.max_rows // n)
        longest = max(max(request.limits) for request in asked)
        columns = max(len(request.tokens) for request in asked)
        self.cache = Cache(self.max_groups, self.max_rows, n, columns, longest)
        self.state = State.empty(self.max_rows, self.max_groups, longest, device)
        self.stepper = Stepper(policy, sampling, device)
        self.groups: list[Group] = []  # by slot
        self.rows: list[Row] = []  # by place in the state's tensors
        self.found: list[list[Completion | None]] = [[None] * n for _ in asked]

    def completions(self) -> list[list[Completion]]:
        while self.waiting or self.rows:
            if self.admit():
                self.retire()
            if self.rows:
                self.stepper.step(self.state, self.cache, self.shape())
                for group in self.groups:
                    group.age += 1
                self.retire()
        return [[done for done in group if done is not None] for group in self.found]

    def shape(self) -> Shape:
        lengths = {len(group.request.tokens) for group in self.groups}
        ages = {group.age for group in self.groups}
        members = max(len(group.live) for group in self.groups)
        ragged = len(lengths) > 1 or len(ages) > 1
        return Shape(len(self.rows), len(self.groups), members, max(lengths), max(ages), ragged)

    def admit(self) -> bool:
        """Let waiting prompts in while a whole group fits; whether any came."""
        fresh: list[Group] = []
        while (
            self.waiting
            and len(self.rows) + (len(fresh) + 1) * self.n <= self.max_rows
            and len(self.groups) + len(fresh) < self.max_groups
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
            raise VitalSignError(
                "the engine: the model gives log-probabilities that are not finite, so nothing can be drawn from it: "
                "its weights have diverged or are damaged; go back to an earlier checkpoint, or lower the learning rate"
            )
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
        state.group_R[rows] = self.whole([row.group.slot for row in self.rows])
        state.member_R[rows] = self.whole([member[id(row)] for row in self.rows])
        state.length_G[groups] = self.whole([len(group.request.tokens) for group in self.groups])
        state.age_G[groups] = self.whole([group.age for group in self.groups])

    def whole(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
