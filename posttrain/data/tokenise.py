"""Tokenises rows like TRL 1.16: prompt and completion together. The completion begins at the first token that differs
from the tokens of the prompt alone."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from typing import Any, TypeVar, cast

import numpy as np
from transformers import BatchEncoding, PreTrainedTokenizerBase

from posttrain.data.render import Renderer
from posttrain.data.rows import Row, RowError, Turns, UntrainedError
from posttrain.data.turns import Span, common_prefix, headers
from posttrain.data.writing import RowText, RowWriter, Texts

Ids = Sequence[int]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Trained:
    """An SFT example: its tokens, the spans that are trained on, and the number of prompt tokens."""

    tokens: Ids
    spans: tuple[Span, ...]
    prompt: int
    shifted: bool = False  # the end of the prompt merged with the completion, so the prompt alone has other tokens
    weights: Sequence[float] = ()  # loss weights of the spans; empty: all 1
    heads: Ids = ()  # where the prompt may be cut (`Tokeniser._heads`)


@dataclass(frozen=True, slots=True)
class Compared:
    """A preference pair: prompt and replies; the rejected reply has a separate prompt if the two prompts differ."""

    prompt: Ids
    chosen: Ids
    rejected: Ids
    rejected_prompt: Ids | None
    shifted: bool = False
    heads: Ids = ()
    rejected_heads: Ids = ()
    chosen_spans: Ids = ()  # with assistant_only_loss: start, stop, start, stop … of the trained tokens
    rejected_spans: Ids = ()


@dataclass(frozen=True, slots=True)
class _Encoded:
    """The tokens of a text, its `tokenizers.Encoding` (None for a slow tokenizer), and the number of characters skipped
    at its start (`cut`)."""

    ids: Ids
    encoding: Any
    cut: int
    text: str


@dataclass(frozen=True)
class _Read:
    """The tokens of a row's prompt and of its whole text, and the length of their common prefix (`cut`)."""

    prompt: _Encoded
    whole: _Encoded

    @cached_property
    def cut(self) -> int:
        return common_prefix(self.prompt.ids, self.whole.ids)

    @property
    def shifted(self) -> bool:
        return self.cut < len(self.prompt.ids)


@dataclass
class Tokeniser:
    """Tokenises batches of rows with one tokenizer. `renderer` is None if texts are used as they are.

    With `behavior_version` 1, a text that begins with the begin token receives a second one, and rows are written by
    older rules (`RowWriter`).
    """

    tokenizer: PreTrainedTokenizerBase
    renderer: Renderer | None
    assistant_only_loss: bool
    behavior_version: int = 2

    def __post_init__(self) -> None:
        self.writer = RowWriter(self.tokenizer, self.renderer, self.assistant_only_loss, self.behavior_version)
        self._headers: tuple[str, ...] | None = None
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        # Whether the tokenizer appends the stop token, which is then removed: texts already end with one.
        whole, bare = (list(cast(list[Ids], self._call(["a"], special)["input_ids"])[0]) for special in (True, False))
        self.appends_stop = bool(bare) and whole[-len(bare) - 1 :] == [*bare, eos]
        self.begin = str(self.tokenizer.bos_token or "") if self.behavior_version > 1 else ""
        self.adds_begin = whole[:1] == [bos] != bare[:1]

    def pairs(self, rows: Sequence[Row]) -> list[Compared | RowError]:
        """Preference pairs; trained on all tokens of the completions, or on those of the assistant's turns."""
        parts = []
        for row in rows:
            other = row.prompt if row.rejected_prompt is None else row.rejected_prompt
            parts += [(row, row.prompt, row.chosen), (row, other, cast(str | Turns, row.rejected))]
        texts = self.writer.with_prompts(parts)
        read, turns = iter(self._read(rows, texts)), iter(self.writer.assistants([row for row, *_ in parts], texts))
        return [self._pair(row, next(read), next(read), (next(turns), next(turns))) for row in rows]

    def _pair(
        self, row: Row, best: _Read | RowError, worst: _Read | RowError, turns: Sequence[Sequence[Span]]
    ) -> Compared | RowError:
        if isinstance(best, RowError):
            return best
        if isinstance(worst, RowError):
            return worst
        cut, other_cut = best.cut, worst.cut
        if row.rejected_prompt is None:
            cut = other_cut = min(cut, other_cut)
        shifted = cut < len(best.prompt.ids) or other_cut < len(worst.prompt.ids)
        chosen, rejected = best.whole.ids, worst.whole.ids
        same = list(chosen[:cut]) == list(rejected[:other_cut])
        if same and list(chosen[cut:]) == list(rejected[other_cut:]):
            return RowError("chosen and rejected have the same tokens")
        spans = [()] * 2
        if self.assistant_only_loss:
            spans, sides = [], (("chosen", best, cut), ("rejected", worst, other_cut))
            for (name, side, start), its_turns in zip(sides, turns, strict=True):
                own = [(max(a, start), b) for a, b in self._token_spans(side.whole, its_turns) if b > start]
                if not own:
                    return RowError(f"{name} has no turn of the assistant")
                spans.append([end - start for span in own for end in span])
        return Compared(
            chosen[:cut],
            chosen[cut:],
            rejected[other_cut:],
            None if same else rejected[:other_cut],
            shifted,
            self._heads(best.prompt, cut),
            () if same else self._heads(worst.prompt, other_cut),
            *spans,
        )

    def completions(self, rows: Sequence[Row], completion_only_loss: bool) -> list[Trained | RowError]:
        """SFT examples with a prompt; trained on the completion, or without `completion_only_loss` on every token."""
        texts = self.writer.with_prompts([(row, row.prompt, row.chosen) for row in rows])
        return self._examples(rows, texts, completion_only_loss)

    def conversations(self, rows: Sequence[Row]) -> list[Trained | RowError]:
        """Whole conversations; trained on every token, or with `assistant_only_loss` on the assistant's turns."""
        return self._examples(rows, self.writer.conversations(rows), None)

    def _examples(
        self, rows: Sequence[Row], texts: Texts, completion_only_loss: bool | None
    ) -> list[Trained | RowError]:
        """SFT examples with loss weights; `completion_only_loss`: None for rows without a prompt."""
        turns = self.writer.assistants(rows, texts)
        read, weights = self._read(rows, texts), self.writer.weights(texts)
        out: list[Trained | RowError] = []
        for row, item, characters, weighted in zip(rows, read, turns, weights, strict=True):
            if isinstance(item, RowError):
                out.append(item)
                continue
            cut, ids = 0 if completion_only_loss is None else item.cut, item.whole.ids
            start = cut if completion_only_loss else 0
            spans: tuple[Span, ...] = ((start, len(ids)),)
            assistant = self._token_spans(item.whole, characters)
            if self.assistant_only_loss:
                start = 0 if row.train_history else start
                spans = tuple((max(first, start), stop) for first, stop in assistant if stop > start)
            elif row.train_history:
                spans = (*((first, min(stop, cut)) for first, stop in assistant if first < cut), *spans)
            shifted = completion_only_loss is not None and item.shifted
            example = Trained(ids, spans, cut, shifted, heads=self._heads(item.whole, cut))
            out.append(example if weighted is None else self._weighted(example, item.whole, weighted))
        return out

    def _weighted(
        self, example: Trained, whole: _Encoded, weights: Sequence[tuple[Span, float]]
    ) -> Trained | UntrainedError:
        """The example with the loss weights of its messages; `weights` has their character spans."""
        weight = np.zeros(len(example.tokens), np.float32)
        for start, stop in example.spans:
            weight[start:stop] = 1
        for characters, factor in weights:
            for start, stop in self._token_spans(whole, [characters]):
                weight[start:stop] *= factor
        edges = [0, *(np.flatnonzero(np.diff(weight)) + 1).tolist(), len(weight)]
        spans = [(a, b) for a, b in pairwise(edges) if b > a and weight[a] > 0]
        factors = [float(weight[start]) for start, _ in spans]
        if first_trained(spans, len(weight)) >= len(weight):
            return UntrainedError("every message that would be trained on has the loss weight 0")
        return replace(example, spans=tuple(spans), weights=() if set(factors) == {1.0} else factors)

    def unfinished(self, rows: Sequence[Row]) -> list[Trained | RowError]:
        """Prompts with replies (strings) that were cut off, so no stop token and no end of turn follow."""
        texts = [
            replace(text, stock=text.prompt + cast(str, row.chosen)) if isinstance(text, RowText) else text
            for text, row in zip(self.writer.prompts(rows), rows, strict=True)
        ]
        return _each(
            self._read(rows, texts),
            lambda item: Trained(item.whole.ids, ((item.cut, len(item.whole.ids)),), item.cut, item.shifted),
        )

    def prompts(self, rows: Sequence[Row]) -> list[tuple[str, Ids] | RowError]:
        """Text and tokens of each row's prompt, as the model sees it before it replies."""
        return _each(self._read(rows, self.writer.prompts(rows)), lambda item: (item.whole.text, item.whole.ids))

    def without_completions(self, rows: Sequence[Row]) -> list[Trained | RowError]:
        """Each row's prompt as a sequence without trained tokens."""
        return _each(
            self._read(rows, self.writer.prompts(rows)),
            lambda item: (
                Trained(item.whole.ids, (), item.cut, heads=self._heads(item.whole, item.cut))
                if len(item.whole.ids)
                else RowError("the prompt has no tokens")
            ),
        )

    def documents(self, rows: Sequence[Row]) -> list[Trained | RowError]:
        """Plain texts; every token is trained on."""
        read = self._read(rows, self.writer.documents(rows), plain=True)
        return _each(read, lambda item: Trained(item.whole.ids, ((0, len(item.whole.ids)),), 0))

    def _read(self, rows: Sequence[Row], texts: Texts, plain: bool = False) -> list[_Read | RowError]:
        """The tokens of each text and of its prompt; without a renderer, all texts are `plain`."""
        self.writer.count(rows, texts)
        strings = [string for text in texts if isinstance(text, RowText) for string in (text.prompt, text.whole)]
        encoded = iter(self._encode(strings, plain or self.renderer is None))
        return [text if isinstance(text, RowError) else _Read(next(encoded), next(encoded)) for text in texts]

    def _encode(self, texts: Sequence[str], plain: bool) -> list[_Encoded]:
        unique = {text: index for index, text in enumerate(dict.fromkeys(texts))}
        if not unique:
            return []
        again = {text: 0 if plain else self._begun_again(text) for text in unique}
        batch = self._call([text[again[text] :] for text in unique], plain)
        begins = plain and self.begin and self.adds_begin
        out: list[_Encoded] = []
        for text in texts:
            ids = cast(list[list[int]], batch["input_ids"])[unique[text]]
            opened = begins and text.startswith(self.begin) and text != self.writer.stop
            kept = ids[bool(opened) : -1 if plain and self.appends_stop else None]
            encoding = batch.encodings[unique[text]] if batch.encodings else None
            out.append(_Encoded(kept, encoding, again[text], text))
        return out

    def _begun_again(self, text: str) -> int:
        """The number of characters before the last of several leading begin tokens: the template writes one, and the
        content begins with another."""
        cut = 0
        while self.begin and text.startswith(2 * self.begin, cut):
            cut += len(self.begin)
        return cut

    def _call(self, texts: list[str], special: bool) -> BatchEncoding:
        # a template writes the beginning of the text itself, so special tokens are added to plain texts only
        return self.tokenizer(
            texts, add_special_tokens=special, return_attention_mask=False, return_token_type_ids=False, verbose=False
        )

    def _heads(self, item: _Encoded, prompt: int) -> Ids:
        """Where a prompt of `prompt` tokens may be cut: the number of its begin tokens, then for each turn the first
        token of its header and of its text. Empty if there are neither, or with behavior_version 1."""
        if self.behavior_version == 1 or not prompt:
            return ()
        positions: list[int] = []
        if self.renderer is not None and self.tokenizer.is_fast:
            if self._headers is None:
                self._headers = headers(self.renderer, self.begin)
            offsets = item.encoding.offsets
            text, end = item.text[item.cut :], offsets[prompt - 1][1]
            longest = {}  # by start: the stop of the longest header
            for header in self._headers:
                start = text.find(header)
                while start >= 0 and start + len(header) <= end:
                    longest.setdefault(start, start + len(header))
                    start = text.find(header, start + 1)
            for span in sorted(longest.items()):
                header, body = (bisect_left(offsets, at, hi=prompt, key=itemgetter(0)) for at in span)
                if not positions or header >= positions[-1]:
                    positions += [header, body]
        begins = item.ids[0] == self.tokenizer.bos_token_id
        return [int(begins), *positions] if begins or positions else ()

    def _token_spans(self, item: _Encoded, spans: Sequence[Span]) -> tuple[Span, ...]:
        """Convert character spans to token spans."""
        token_span = _token_span if self.behavior_version > 1 else _old_token_span
        moved = ((max(start - item.cut, 0), stop - item.cut) for start, stop in spans)
        return tuple(found for span in moved if (found := token_span(item.encoding, span)) is not None)


def _each(read: Sequence[_Read | RowError], make: Callable[[_Read], T]) -> list[T | RowError]:
    return [item if isinstance(item, RowError) else make(item) for item in read]


def _token_span(encoding: Any, span: Span) -> Span | None:
    """The span of tokens that contain a character in `span`, or a byte of one; None if there is no such token."""
    offsets = encoding.offsets  # if tokens share a character, the offsets of each include it
    start = bisect_right(offsets, span[0], key=itemgetter(1))
    stop = bisect_left(offsets, span[1], key=itemgetter(0))
    return (start, stop) if start < stop else None


def _old_token_span(encoding: Any, span: Span) -> Span | None:
    """`_token_span` of behavior_version 1: if the last character has several tokens, only the first is included."""
    tokens = [token for at in range(*span) if (token := encoding.char_to_token(at)) is not None]
    return (tokens[0], tokens[-1] + 1) if tokens else None


def first_trained(spans: Sequence[Span], length: int) -> int:
    """Index of the first target (the first token of a sequence is never a target); `length` if there is none."""
    return next((max(start, 1) for start, stop in spans if stop > max(start, 1)), length)
