"""The live completions as tensors, and the step that gives each of them its next token."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor, nn

from posttrain.engines.attention import Decoding
from posttrain.engines.cache import Cache, Room
from posttrain.engines.protocol import Sampling
from posttrain.engines.sampling import sample_tokens, token_words
from posttrain.models.families import backbone_of, base_of, head_layer, uses_triton
from posttrain.scoring import next_token_logits, row_chunks


class Shape(NamedTuple):
    """The sizes of a step: about the live part on a CPU, rounded up to a few sizes on a GPU."""

    rows: int  # may be a few more than the live ones
    groups: int
    members: int  # maximum number of live completions of a group
    prompt_columns: int
    own_columns: int
    even_prompts: bool  # every prompt has `prompt_columns` tokens
    even_ages: bool  # every live completion has `own_columns`


@dataclass(slots=True)
class State:
    """The tensors that a step reads and writes, on the device. The first rows are the live completions."""

    token_R: Tensor  # the last sampled token, the next input
    count_R: Tensor  # tokens sampled so far
    limit_R: Tensor
    done_R: Tensor
    group_R: Tensor  # the group's slot in the cache
    member_R: Tensor  # the row's slot among the live ones of its group
    row_GM: Tensor  # the row in each slot; 0 for an empty slot, since row 0 is in every step
    key_R2: Tensor  # of its random stream
    length_G: Tensor  # of the group's prompt
    age_G: Tensor  # tokens that its completions have
    tokens_RL: Tensor  # sampled tokens, with an extra column for tokens after a row is done
    logprobs_RL: Tensor

    @classmethod
    def empty(cls, room: Room, device: torch.device) -> State:
        rows, groups, columns = room.rows, room.groups, room.own_columns

        def whole(*size: int) -> Tensor:
            return torch.zeros(*size, dtype=torch.int64, device=device)

        return cls(
            token_R=whole(rows),
            count_R=torch.ones(rows, dtype=torch.int64, device=device),  # so that an unused row has a column to write
            limit_R=whole(rows),
            done_R=torch.ones(rows, dtype=torch.bool, device=device),
            group_R=whole(rows),
            member_R=whole(rows),
            row_GM=whole(groups, room.members),
            key_R2=torch.zeros(rows, 2, dtype=torch.int32, device=device),
            length_G=whole(groups),
            age_G=whole(groups),
            tokens_RL=whole(rows, columns + 1),
            logprobs_RL=torch.zeros(rows, columns + 1, device=device),
        )

    def copy(self) -> State:
        return State(*(getattr(self, field.name).clone() for field in fields(self)))

    def become(self, other: State) -> None:
        """Copy the other's values; each tensor keeps its address."""
        for field in fields(self):
            getattr(self, field.name).copy_(getattr(other, field.name))

    def idle(self, start: int) -> None:
        """Make the rows from `start` on idle: done, and with the prompt of group 0."""
        self.done_R[start:] = True
        self.count_R[start:] = 1
        self.group_R[start:] = 0
        self.member_R[start:] = 0

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy the rows at `source` to `target`, except group and member."""
        for tensor in (
            self.token_R,
            self.count_R,
            self.limit_R,
            self.done_R,
            self.key_R2,
            self.tokens_RL,
            self.logprobs_RL,
        ):
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
        """The shape of the step for `shape`, within the room."""
        return shape

    def step(self, state: State, cache: Cache, shape: Shape) -> None:
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
            prompt_columns=shape.prompt_columns,
            own_columns=shape.own_columns,
            even_prompts=shape.even_prompts,
            even_ages=shape.even_ages,
            fused=self.fused,
        )
        token_R, position_R = state.token_R[rows], decoding.position_R
        out = self.backbone(input_ids=token_R[None], position_ids=position_R[None], use_cache=False, packed=decoding)
        self.record(state, rows, out.last_hidden_state[0])
        state.age_G[groups] += 1

    def record(self, state: State, rows: slice, hidden_R: Tensor) -> None:
        """Sample the next token of the rows from their last hidden states. A row that is done does not change."""
        place_R, done_R, key_R2 = state.count_R[rows].clone(), state.done_R[rows], state.key_R2[rows]
        for part in row_chunks(self.policy, len(hidden_R)):
            logits = next_token_logits(self.policy, hidden_R[part])
            token, logprob = self.sample(logits, self.sampling, self.words_V, key_R2[part], place_R[part])
            state.token_R[rows][part] = torch.where(done_R[part], state.token_R[rows][part], token)
            state.tokens_RL[rows][part].scatter_(1, place_R[part, None], token[:, None])
            state.logprobs_RL[rows][part].scatter_(1, place_R[part, None], logprob[:, None])
        state.count_R[rows] += ~done_R
        done_R |= state.count_R[rows] >= state.limit_R[rows]
        if len(self.stops):
            done_R |= (state.token_R[rows][:, None] == self.stops).any(1)
