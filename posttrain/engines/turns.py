"""Conversations on an engine: a reply ends, others write, and the next reply continues from what is computed already.

    converse(engine, prompts, sampling, seeds=…, follow=follow)

calls `follow` for every reply. It returns None at the end of a conversation, or a future of the `Turn` that follows:
the tokens after the reply, which were not sampled, and the seed and the limit of the next reply. A conversation whose
future is not done yet holds no place in the engine, so a slow tool delays no other conversation.

The embedded engine keeps the keys and values of a conversation between its turns, so each token is computed once.
Other engines get the whole conversation as a prompt again (vLLM finds its beginning in the prefix cache).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from posttrain.base.errors import DataError
from posttrain.engines.attention import HIDDEN
from posttrain.engines.cache import Cache, Room
from posttrain.engines.generation import Generation, Group, Memory, Slot
from posttrain.engines.protocol import Completion, Engine, Request, Sampling, StopTexts
from posttrain.models.attention import How
from posttrain.models.families import backbone_of, base_of

WAIT_S = 0.05  # seconds of a wait for tools, so that Ctrl-C is handled in between


@dataclass(frozen=True, slots=True)
class Turn:
    """What follows a reply."""

    tokens: Sequence[int]  # after it, at least one
    seed: int  # of the next reply
    limit: int  # its tokens


Follow = Callable[[int, int, Completion], "Future[Turn | None] | None"]  # index of a prompt, number, reply


@dataclass(frozen=True, slots=True)
class Past:
    """A conversation between two turns: its tokens, and their keys and values but for the last token's."""

    index: int
    number: int
    tokens: list[int]
    layers: dict[int, tuple[Tensor, Tensor]]  # keys and values (K, L, d) by layer


class Resuming:
    """The new tokens of conversations in the engine's slots: each token sees its conversation up to itself.

    Their keys and values are written behind those of the conversation's past, which are in the slots.
    """

    def __init__(self, cache: Cache, slots: Sequence[int], seen: Sequence[int], counts: Sequence[int]):
        self.cache, self.parts = cache, []
        start = 0
        for slot, past, count in zip(slots, seen, counts, strict=True):
            self.parts.append((slot, past, start, start + count))
            start += count
        self.read: slice | Tensor = torch.tensor([stop - 1 for *_, stop in self.parts])

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor:
        layer = self.cache.layer(module, key)
        heads, size, outs = key.shape[1], key.shape[3], []
        for slot, past, start, stop in self.parts:
            columns = slice(past, past + stop - start)
            layer.prompt_key[slot, :, columns] = key[0, :, start:stop].to(layer.prompt_key.dtype)
            layer.prompt_value[slot, :, columns] = value[0, :, start:stop].to(layer.prompt_value.dtype)
            keys, values = (side[slot, :, : columns.stop] for side in (layer.prompt_key, layer.prompt_value))
            queries = query[0, :, start:stop].reshape(heads, -1, stop - start, size).float()
            logits = queries @ keys.float().transpose(1, 2)[:, None] * how.scaling
            if how.softcap is not None:
                logits = how.softcap * torch.tanh(logits / how.softcap)
            at = torch.arange(columns.stop, device=query.device)
            ahead = at[past:, None] - at
            hidden = (ahead < 0) if how.window is None else (ahead < 0) | (ahead >= how.window)
            shares = logits.masked_fill(hidden, HIDDEN).softmax(-1)
            outs.append((shares @ values.float()[:, None]).flatten(0, 1))
        return torch.cat(outs, 1)[None].to(query.dtype)


class Conversing(Generation):
    """A generation whose completions are replies of conversations."""

    def __init__(
        self,
        memory: Memory,
        room: Room,
        requests: list[Request],
        version: int,
        rows_step: int,
        texts: StopTexts,
        follow: Follow,
        request_of: Callable[[Sequence[int], Turn, Sampling], Request],
    ):
        super().__init__(memory, room, requests, version, rows_step, texts)
        self.follow, self.request_of, self.texts = follow, request_of, texts
        self.pending: dict[Future[Turn | None], Past] = {}
        self.pasts: dict[Group, Past] = {}  # of groups that continue a conversation

    def run(self) -> None:
        """Generate until every conversation has ended."""
        while self.waiting or self.rows or self.pending:
            self._resume(block=not (self.waiting or self.rows))
            if self.admit():
                self.retire()
            if self.rows:
                for _ in range(self.stepper.steps_between_checks):
                    self.step()
                self.retire()

    def _resume(self, block: bool) -> None:
        """Queue the conversations whose next turn is there; with `block`, wait for one."""
        if block:
            wait(self.pending, WAIT_S, FIRST_COMPLETED)
        for future in [future for future in self.pending if future.done()]:
            past, turn = self.pending.pop(future), future.result()
            if turn is None:
                continue
            group = Group(self._request(past, turn), range(1), self.stepper.sampling, self.texts)
            self.pasts[group] = past
            self.waiting.append(group)

    def _request(self, past: Past, turn: Turn) -> Request:
        """The request of the next reply. Raises DataError for one that the room does not hold."""
        tokens = [*past.tokens, *turn.tokens]
        if len(tokens) > self.room.prompt_columns or turn.limit > self.room.own_columns:
            raise DataError(
                f"a conversation of prompt {past.index} has {len(tokens)} tokens before a reply of up to {turn.limit}; "
                f"there is room for {self.room.prompt_columns} and {self.room.own_columns}: end it before, or give "
                "`longest` and the first limits the sizes of the longest conversation"
            )
        return replace(self.request_of(tokens, turn, self.stepper.sampling), index=past.index)

    def ended(self, row: Slot, completion: Completion) -> None:
        group = row.group
        past = self.pasts.pop(group, None)
        index, number = group.request.index, row.number if past is None else past.number
        if (future := self.follow(index, number, completion)) is not None:
            tokens = [*group.request.tokens, *completion.tokens]
            own = len(completion.tokens) - 1  # the last one has not been fed
            self.pending[future] = Past(index, number, tokens, self._copied(group, self.rows.index(row), own))

    def _copied(self, group: Group, row: int, own: int) -> dict[int, tuple[Tensor, Tensor]]:
        length = len(group.request.tokens)
        return {
            index: (
                torch.cat([layer.prompt_key[group.slot, :, :length], layer.own_key[row, :, :own]], 1),
                torch.cat([layer.prompt_value[group.slot, :, :length], layer.own_value[row, :, :own]], 1),
            )
            for index, layer in self.cache.layers.items()
        }

    def prefill(self, fresh: list[Group]) -> Tensor:
        """The last hidden states (G, D): prompts are run, conversations are resumed."""
        resumed = [number for number, group in enumerate(fresh) if group in self.pasts]
        begun = [number for number in range(len(fresh)) if number not in resumed]
        parts = [super().prefill([fresh[number] for number in begun])] if begun else []
        if resumed:
            parts.append(self._resumed([fresh[number] for number in resumed]))
        return torch.cat(parts)[self.tensor([*begun, *resumed]).argsort()]

    def _resumed(self, groups: Sequence[Group]) -> Tensor:
        seen, new, positions = [], [], []
        for group in groups:
            past = self.pasts[group]
            known = len(past.tokens) - 1
            for index, (keys, values) in past.layers.items():
                layer = self.cache.layers[index]
                layer.prompt_key[group.slot, :, :known], layer.prompt_value[group.slot, :, :known] = keys, values
            self.pasts[group] = replace(past, layers={})
            seen.append(known)
            new.append(list(group.request.tokens)[known:])
            positions += range(known, len(group.request.tokens))
        mask = Resuming(self.cache, [group.slot for group in groups], seen, [len(tokens) for tokens in new])
        tokens = self.tensor([token for part in new for token in part])
        backbone = backbone_of(base_of(self.policy))
        out = backbone(input_ids=tokens[None], position_ids=self.tensor(positions)[None], use_cache=False, packed=mask)
        hidden = out.last_hidden_state[0]
        return hidden if len(hidden) == len(groups) else hidden[mask.read]


def converse(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    seeds: Sequence[int],
    limits: Sequence[Sequence[int]],
    follow: Follow,
    longest: int,
) -> None:
    """Hold `sampling.num_generations` conversations from every prompt, of at most `longest` tokens each.

    `follow` is called in this thread, in no particular order.
    """
    if hasattr(engine, "converse"):
        engine.converse(prompts, sampling, seeds=seeds, limits=limits, follow=follow, longest=longest)  # pyright: ignore
        return
    single = replace(sampling, num_generations=1)
    pending: dict[Future[Turn | None], tuple[int, int, list[int]]] = {}

    def ended(index: int, number: int, tokens: list[int], reply: Completion) -> None:
        if (future := follow(index, number, reply)) is not None:
            pending[future] = (index, number, [*tokens, *reply.tokens])

    groups = engine.generate(prompts, sampling, seeds=seeds, limits=limits)
    for index, group in enumerate(groups):
        for number, reply in enumerate(group):
            ended(index, number, list(prompts[index]), reply)
    while pending:
        wait(pending, WAIT_S, FIRST_COMPLETED)
        ready = [(*pending.pop(future), future.result()) for future in list(pending) if future.done()]
        turns = [(index, number, tokens, turn) for index, number, tokens, turn in ready if turn is not None]
        if not turns:
            continue
        whole = [[*tokens, *turn.tokens] for *_, tokens, turn in turns]
        replies = engine.generate(
            whole, single, seeds=[turn.seed for *_, turn in turns], limits=[[turn.limit] for *_, turn in turns]
        )
        for (index, number, _, _), tokens, [reply] in zip(turns, whole, replies, strict=True):
            ended(index, number, tokens, reply)
