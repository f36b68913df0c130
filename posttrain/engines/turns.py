"""Conversations on an engine: a reply ends, others write, and the next reply continues from what is computed already.

    converse(engine, started, sampling, follow=follow, longest=…)

`started` has a future for each conversation, of None or of a `Turn` whose tokens are the prompt. `follow` is called for
every reply. It returns None at the end of a conversation, or a future of the turn that follows: the tokens after the
reply, which were not sampled, and the seed and the limit of the next reply. A conversation whose future is not done yet
holds no place in the engine, so a slow tool delays no other conversation.

The embedded engine keeps the keys and values of a conversation between its turns, so each token is computed once, and
once for all conversations with the same prompt. A branch begins with the tokens of a conversation that has ended, which
are not computed again either. Other engines get the whole conversation as a prompt again (vLLM finds its beginning
in the prefix cache).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from posttrain.base.errors import DataError
from posttrain.engines.attention import HIDDEN
from posttrain.engines.cache import Cache
from posttrain.engines.generation import Generation, Group, Memory, Slot
from posttrain.engines.protocol import Completion, Engine, Request, Sampling, StopTexts
from posttrain.models.attention import How

WAIT_S = 0.05  # seconds of a wait for tools, so that Ctrl-C is handled in between
KEPT_PROMPTS = 8  # whose keys stay for further conversations from the same prompt; these begin one after another
KEPT_SHARE = 4  # of a part of the cache's tokens: the keys of ended conversations, kept for branches that begin soon


@dataclass(frozen=True, slots=True)
class Turn:
    """What precedes a reply: the prompt, or what follows the reply before."""

    tokens: Sequence[int]  # at least one
    seed: int  # of the next reply
    limit: int  # its tokens
    keep: int | None = None  # the tokens of the conversation so far that it follows, at least one; None: all
    branches_from: int | None = None  # of a prompt: the index of the conversation that begins with the same tokens


Started = Sequence[Future[Turn | None]]  # of each conversation: its prompt, or None if there is none
Follow = Callable[[int, Completion], "Future[Turn | None] | None"]  # index of a conversation, reply
Layers = dict[int, tuple[Tensor, Tensor]]  # keys and values (K, L, d) by layer


@dataclass(frozen=True, slots=True)
class Past:
    """A conversation between two turns: its tokens, and their keys and values but for the last token's."""

    index: int
    tokens: list[int]  # none before the prompt
    layers: Layers

    def until(self, keep: int | None) -> Past:
        """The conversation's first `keep` tokens."""
        if keep is None:
            return self
        layers = {index: (keys[:, : keep - 1], values[:, : keep - 1]) for index, (keys, values) in self.layers.items()}
        return Past(self.index, self.tokens[:keep], layers)


class Resuming:
    """The new tokens of conversations in the engine's slots: each token sees its conversation up to itself. Their keys
    and values are written behind those of the conversation's past, which are in the slots."""

    attend_new: Callable[..., Tensor] | None = None

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
    """A generation whose completions are replies of conversations, each a group of its own."""

    def __init__(
        self,
        memory: Memory,
        started: Started,
        version: int,
        rows_step: int,
        texts: StopTexts,
        request_of: Callable[[Sequence[int], Turn, Sampling], Request],
        follow: Follow,
        branching: bool,
    ):
        super().__init__(memory, memory.room, [], version, rows_step, texts)
        self.request_of, self.follow, self.texts = request_of, follow, texts
        self.pending: dict[Future[Turn | None], Past] = {future: Past(i, [], {}) for i, future in enumerate(started)}
        self.pasts: dict[Group, Past] = {}  # of waiting and live groups
        self.prompts: dict[tuple[int, ...], tuple[Layers, Tensor]] = {}  # keys and values, and the last hidden state
        self.trunks = dict[int, Past]()  # conversations that have ended, if others may branch from them
        self.branching = branching

    def run(self) -> None:
        """Generate until every conversation has ended."""
        while self.waiting or self.rows or self.pending:
            self._resume(block=not (self.waiting or self.rows))
            self.advance()

    def _resume(self, block: bool) -> None:
        """Queue the conversations whose next turn is there; with `block`, wait for one."""
        if block:
            wait(self.pending, WAIT_S, FIRST_COMPLETED)
        ready = [(self.pending.pop(future), future.result()) for future in list(self.pending) if future.done()]
        if self.branching:
            self.trunks |= {past.index: past for past, turn in ready if turn is None and past.tokens}
            while sum(len(past.tokens) for past in self.trunks.values()) > self.room.tokens // KEPT_SHARE:
                del self.trunks[next(iter(self.trunks))]
        for past, turn in ready:
            if turn is not None:
                trunk = None if turn.branches_from is None else self.trunks.get(turn.branches_from)
                if trunk is not None and trunk.tokens[: len(turn.tokens)] == [*turn.tokens]:
                    # The keys and values of the trunk for all but the prompt's last token, and nothing to add.
                    past = replace(trunk.until(len(turn.tokens)), index=past.index)
                    turn = replace(turn, tokens=())
                past = past.until(turn.keep)
                group = Group(self._request(past, turn), range(1), self.stepper.sampling, self.texts)
                self.pasts[group] = past
                self.waiting.append(group)

    def _request(self, past: Past, turn: Turn) -> Request:
        """The request of the next reply. Raises DataError for one that the room does not hold."""
        tokens = [*past.tokens, *turn.tokens]
        if len(tokens) > self.room.prompt_columns or turn.limit > self.room.own_columns:
            raise DataError(
                f"conversation {past.index} has {len(tokens)} tokens before a reply of up to {turn.limit}; there is "
                f"room for {self.room.prompt_columns} and {self.room.own_columns}: end it before, or give `longest` "
                "and `max_completion_length` of the longest conversation"
            )
        return replace(self.request_of(tokens, turn, self.stepper.sampling), index=past.index)

    def ended(self, row: Slot, completion: Completion) -> None:
        group = row.group
        past = self.pasts.pop(group)
        if (future := self.follow(past.index, completion)) is not None:
            own = len(completion.tokens) - 1  # the last one has not been fed
            layers = self._copied(group, self.rows.index(row), own)
            self.pending[future] = Past(past.index, [*group.request.tokens, *completion.tokens], layers)

    def _copied(self, group: Group, row: int, own: int) -> Layers:
        length = len(group.request.tokens)
        return {
            index: (
                torch.cat([layer.prompt_key[group.slot, :, :length], layer.own_key[row, :, :own]], 1),
                torch.cat([layer.prompt_value[group.slot, :, :length], layer.own_value[row, :, :own]], 1),
            )
            for index, layer in self.cache.layers.items()
        }

    def prefill(self, fresh: list[Group]) -> Tensor:
        """The last hidden states (G, D): prompts are run, each once for all its conversations; others are resumed."""
        hidden: dict[Group, Tensor] = {}
        first = [group for group in fresh if not self.pasts[group].tokens]
        resumed = [group for group in fresh if self.pasts[group].tokens]
        new = {tuple(group.request.tokens): group for group in first}
        runs = [group for prompt, group in new.items() if prompt not in self.prompts]
        if runs:
            for group, state in zip(runs, super().prefill(runs), strict=True):
                self.prompts[tuple(group.request.tokens)] = self._copied(group, 0, 0), state
        for group in first:
            layers, hidden[group] = self.prompts[tuple(group.request.tokens)]
            self._write(group, layers, len(group.request.tokens))
        for prompt in list(self.prompts)[:-KEPT_PROMPTS]:
            del self.prompts[prompt]
        if resumed:
            hidden |= dict(zip(resumed, self._resumed(resumed), strict=True))
        return torch.stack([hidden[group] for group in fresh])

    def _write(self, group: Group, layers: Layers, length: int) -> None:
        for index, (keys, values) in layers.items():
            layer = self.cache.layers[index]
            layer.prompt_key[group.slot, :, :length], layer.prompt_value[group.slot, :, :length] = keys, values

    def _resumed(self, groups: Sequence[Group]) -> Tensor:
        seen, new, positions = [], [], []
        for group in groups:
            past = self.pasts[group]
            known = len(past.tokens) - 1
            self._write(group, past.layers, known)
            self.pasts[group] = replace(past, layers={})
            seen.append(known)
            new.append(list(group.request.tokens)[known:])
            positions += range(known, len(group.request.tokens))
        mask = Resuming(self.cache, [group.slot for group in groups], seen, [len(tokens) for tokens in new])
        tokens = self.tensor([token for part in new for token in part])
        return self.last_states(tokens, self.tensor(positions), mask, len(groups))


def converse(
    engine: Engine, started: Started, sampling: Sampling, *, follow: Follow, longest: int, branching: bool = False
) -> None:
    """Hold conversations of at most `longest` tokens each. `follow` is called in this thread, in no particular order.
    With `branching`, conversations may begin with the tokens of others (`Turn.branches_from`). Raises what a future has
    raised. `num_generations` of `sampling` is not read."""
    sampling = replace(sampling, num_generations=1)
    own = getattr(engine, "converse", None)  # of an engine that keeps conversations between their turns
    if own is not None:
        own(started, sampling, follow=follow, longest=longest, branching=branching)
        return
    pending: dict[Future, Past] = {future: Past(index, [], {}) for index, future in enumerate(started)}
    while pending:
        wait(pending, WAIT_S, FIRST_COMPLETED)
        ready = [(pending.pop(future), future.result()) for future in list(pending) if future.done()]
        turns = [(past.until(turn.keep), turn) for past, turn in ready if turn is not None]
        if not turns:
            continue
        whole = [[*past.tokens, *turn.tokens] for past, turn in turns]
        seeds, limits = [turn.seed for _, turn in turns], [[turn.limit] for _, turn in turns]
        replies = engine.generate(whole, sampling, seeds=seeds, limits=limits)
        for (past, _), tokens, [reply] in zip(turns, whole, replies, strict=True):
            if (future := follow(past.index, reply)) is not None:
                pending[future] = Past(past.index, [*tokens, *reply.tokens], {})
