"""The live completions as tensors, and the step that gives each of them its next token.

On a GPU, a step of a small model launches hundreds of kernels, each of which runs for less time than its launch takes.
So steps on a GPU have few shapes, and for each shape the step is captured as a CUDA graph, which one call replays. A
graph has fixed addresses and sizes. So the state and the cache keep their memory between calls of `generate`, and
shapes are rounded up: rows to a power of two, columns to a multiple of 256. Extra rows are computed and discarded.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.base.log import log
from posttrain.engines.attention import Decoding, Shape
from posttrain.engines.cache import Cache, Room, in_columns, power_of_two
from posttrain.engines.protocol import Sampling
from posttrain.engines.sampling import sample_tokens, token_words
from posttrain.models.families import backbone_of, base_of, head_layer, uses_triton
from posttrain.models.graphs import adapters_of, addresses, beside, capture, states_of
from posttrain.scoring import next_token_logits, row_chunks

FEWEST_ROWS = 8
STEPS_BETWEEN_CHECKS = 8  # steps between two checks for finished rows, which idle until then; a check waits for the GPU
WARM_UPS = 2  # runs before a capture, in which libraries choose kernels and allocate memory


@dataclass(slots=True)
class DecodeState:
    """The tensors that a step reads and writes, on the device. The first rows are the live completions."""

    token_R: Tensor  # the last sampled token, the next input
    count_R: Tensor  # tokens sampled so far
    limit_R: Tensor
    done_R: Tensor
    group_R: Tensor  # the group's slot in the cache
    member_R: Tensor  # the row's slot among the live ones of its group
    row_GM: Tensor  # the row in each slot; 0 for an empty slot, since row 0 is in every step
    key_R2: Tensor  # the key of the row's random stream
    length_G: Tensor  # number of tokens of the group's prompt
    age_G: Tensor  # number of tokens of the group's completions
    tokens_RL: Tensor  # sampled tokens, with an extra column for tokens after a row is done
    logprobs_RL: Tensor

    @classmethod
    def empty(cls, room: Room, device: torch.device) -> DecodeState:
        rows, groups, columns = room.rows, room.groups, room.own_columns
        zeros = partial(torch.zeros, dtype=torch.int64, device=device)
        return cls(
            token_R=zeros(rows),
            count_R=zeros(rows) + 1,  # so that an unused row has a column to write
            limit_R=zeros(rows),
            done_R=torch.ones(rows, dtype=torch.bool, device=device),
            group_R=zeros(rows),
            member_R=zeros(rows),
            row_GM=zeros(groups, room.members),
            key_R2=zeros(rows, 2, dtype=torch.int32),
            length_G=zeros(groups),
            age_G=zeros(groups),
            tokens_RL=zeros(rows, columns + 1),
            logprobs_RL=zeros(rows, columns + 1, dtype=torch.float32),
        )

    def copy(self) -> DecodeState:
        return DecodeState(*(getattr(self, field.name).clone() for field in fields(self)))

    def become(self, other: DecodeState) -> None:
        """Copy the values of `other`; each tensor keeps its address."""
        for field in fields(self):
            getattr(self, field.name).copy_(getattr(other, field.name))

    def idle(self, start: int) -> None:
        """Make all rows from `start` on idle: mark them as done, and assign them to group 0."""
        self.done_R[start:] = True
        self.count_R[start:] = 1
        self.group_R[start:] = 0
        self.member_R[start:] = 0

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy the rows at `source` to `target`, except their group and member."""
        for name in ("token_R", "count_R", "limit_R", "done_R", "key_R2", "tokens_RL", "logprobs_RL"):
            tensor = getattr(self, name)
            tensor[target] = tensor[source]


class Stepper:
    """Feeds every live completion its last token and samples its next one."""

    steps_between_checks = 1
    still = False  # whether a step's addresses and shapes must not change

    def __init__(self, policy: nn.Module, sampling: Sampling, device: torch.device):
        self.policy, self.sampling, self.device = policy, sampling, device
        base = base_of(policy)
        weight = head_layer(base).weight
        self.backbone, self.fused = backbone_of(base), uses_triton(base, weight)
        self.words_V = token_words(len(weight), device)
        self.sample = sample_tokens
        self.stops = torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=device)

    def rounded(self, shape: Shape, room: Room) -> Shape:
        """Return the shape that the step runs at: `shape`, rounded up within `room`; here unchanged."""
        return shape

    def step(self, state: DecodeState, cache: Cache, shape: Shape) -> None:
        rows, groups = slice(shape.rows), slice(shape.groups)
        group_R, column_R = state.group_R[rows], state.count_R[rows] - 1
        decoding = Decoding(
            cache,
            group_R,
            state.member_R[rows],
            state.row_GM[groups, : shape.members],
            column_R,
            state.length_G[groups],
            state.age_G[groups],
            shape,
            self.fused,
        )
        token_R, position_R = state.token_R[rows], decoding.position_R
        out = self.backbone(input_ids=token_R[None], position_ids=position_R[None], use_cache=False, packed=decoding)
        self.record(state, rows, out.last_hidden_state[0])
        state.age_G[groups] += 1

    def record(self, state: DecodeState, rows: slice, hidden_R: Tensor) -> None:
        """Sample the next token of each row from its last hidden state. Rows that are done do not change."""
        position_R, done_R, key_R2 = state.count_R[rows].clone(), state.done_R[rows], state.key_R2[rows]
        for part in row_chunks(self.policy, len(hidden_R)):
            logits = next_token_logits(self.policy, hidden_R[part])
            token, logprob = self.sample(logits, self.sampling, self.words_V, key_R2[part], position_R[part])
            state.token_R[rows][part] = torch.where(done_R[part], state.token_R[rows][part], token)
            state.tokens_RL[rows][part].scatter_(1, position_R[part, None], token[:, None])
            state.logprobs_RL[rows][part].scatter_(1, position_R[part, None], logprob[:, None])
        state.count_R[rows] += ~done_R
        done_R |= state.count_R[rows] >= state.limit_R[rows]
        if len(self.stops):
            done_R |= (state.token_R[rows][:, None] == self.stops).any(1)


class Recordings:
    """The captured CUDA graphs of one policy's steps. They share one memory pool, because they never run together.

    A graph reads the weights and adapters at the addresses that they had when it was captured.
    """

    def __init__(self) -> None:
        self.graphs: dict[tuple[Stepper, Shape], torch.cuda.CUDAGraph] = {}
        self._recorded_with: object = None

    def check(self, policy: nn.Module) -> None:
        """Discard all graphs if weights have moved in memory or different adapters are active."""
        facts = addresses(chain(policy.parameters(), policy.buffers())), states_of(adapters_of(policy))
        if facts != self._recorded_with:
            self.graphs.clear()
        self._recorded_with = facts

    def drop(self, stepper: Stepper) -> None:
        """Discard the graphs of one stepper, whose state is gone."""
        self.graphs = {key: graph for key, graph in self.graphs.items() if key[0] is not stepper}


class StaticStepper(Stepper):
    """A stepper with few shapes over one state and one cache. On a GPU its steps are captured as CUDA graphs.

    With `compiled`, torch.compile fuses the operations of sampling, which read and write the logits. Sizes are
    symbolic, so one compilation serves every shape. The layers are not compiled: models/kernels already fuses their
    operations, and compiling 28 layers takes two minutes.
    """

    steps_between_checks = STEPS_BETWEEN_CHECKS
    still = True

    def __init__(
        self, policy: nn.Module, sampling: Sampling, device: torch.device, recordings: Recordings, compiled: bool
    ):
        super().__init__(policy, sampling, device)
        self.recordings = recordings
        if compiled:
            self.sample = torch.compile(_sample_copied, dynamic=True)

    def rounded(self, shape: Shape, room: Room) -> Shape:
        """Return the shape of the captured step: rounded up, with all prompt columns and every slot of a group."""
        return Shape(
            rows=min(room.rows, max(FEWEST_ROWS, power_of_two(shape.rows))),
            groups=min(room.groups, power_of_two(shape.groups)),
            members=room.members,
            prompt_columns=room.prompt_columns,
            own_columns=min(room.own_columns, in_columns(shape.own_columns)),
            even_prompts=False,
            even_ages=False,
        )

    def step(self, state: DecodeState, cache: Cache, shape: Shape) -> None:
        if self.device.type != "cuda":
            super().step(state, cache, shape)
            return
        graphs = self.recordings.graphs
        if (self, shape) not in graphs:
            graphs[self, shape] = self._record(state, cache, shape)
        graphs[self, shape].replay()

    def _record(self, state: DecodeState, cache: Cache, shape: Shape) -> torch.cuda.CUDAGraph:
        """Run the step on a side stream to warm up, undo its changes, and capture it."""
        before = state.copy()
        with beside(self.device):
            for _ in range(WARM_UPS):
                super().step(state, cache, shape)
                state.become(before)  # keys and values written by warm-ups are overwritten by later steps
        graph, _ = capture(partial(super().step, state, cache, shape), self.recordings.graphs.values())
        state.become(before)  # a capture computes nothing; the first replay gives the tokens
        log.debug("the engine captured a step of %s", shape)
        return graph


def _sample_copied(logits: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    """`sample_tokens` on a copy of `logits`, because compiled code would write changes back to `logits` at the end."""
    return sample_tokens(logits.clone(), *settings)
