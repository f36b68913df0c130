"""Rows to token ids, tokenised as TRL 1.16 does: prompt and completion together, the prompt their common prefix.

A completion ends in the stop token: appended to texts, and to conversations whose template ends in no
special token.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import cast

import numpy as np
from transformers import BatchEncoding, PreTrainedTokenizerBase

from posttrain.data.render import PREFILL, Renderer, RenderRequest
from posttrain.data.rows import Row, RowError, Turns, as_turns
from posttrain.errors import DataError

Ids = Sequence[int]
Span = tuple[int, int]
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class Trained:
    """An SFT example: its tokens, the spans of them that are trained, and how many are prompt."""

    tokens: Ids
    spans: tuple[Span, ...]
    prompt: int
    shifted: bool = False  # the end of the prompt merged with the completion, so the prompt alone reads differently


@dataclass(frozen=True, slots=True)
class Compared:
    """A preference pair: prompt and replies; a prompt of its own for the rejected reply where the two differ."""

    prompt: Ids
    chosen: Ids
    rejected: Ids
    rejected_prompt: Ids | None
    margin: float | None
    tie: bool
    shifted: bool = False


class Tokeniser:
    """Tokenises batches of rows for one tokenizer. `renderer` is None when texts are used as they are.

    With `behavior_version` 1 a text that begins with the begin token gets a second one.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        renderer: Renderer | None,
        assistant_only_loss: bool,
        behavior_version: int = 2,
    ):
        self.tokenizer = tokenizer
        self.renderer = renderer
        self.assistant_only_loss = assistant_only_loss
        self.behavior_version = behavior_version
        self.stop = str(tokenizer.eos_token) if tokenizer.eos_token else ""
        self.endings = tuple(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
        # Whether the tokenizer itself ends a text with the stop token. It has one already, and a prompt is continued.
        whole, bare = (list(cast(list[Ids], self._call(["a"], special)["input_ids"])[0]) for special in (True, False))
        self.appends_stop = bool(bare) and whole[-len(bare) - 1 :] == [*bare, tokenizer.eos_token_id]
        self.begin = str(tokenizer.bos_token or "") if behavior_version > 1 else ""
        self.adds_begin = whole[:1] == [tokenizer.bos_token_id] != bare[:1]
        if assistant_only_loss and not tokenizer.is_fast:
            raise DataError("assistant_only_loss needs a fast tokenizer, which knows the characters of each token")

    def pairs(self, rows: Sequence[Row]) -> list[Compared | RowError]:
        """Preference pairs, all completion tokens trained."""
        texts = self._texts(
            [
                part
                for row in rows
                for part in (
                    (row, row.prompt, None),
                    (row, row.prompt, row.chosen),
                    (row, row.prompt if row.rejected_prompt is None else row.rejected_prompt, row.rejected),
                    (row, row.rejected_prompt, None),
                )
                if part[1] is not None
            ]
        )
        ids = iter(self._encode(texts))
        return [self._pair(row, [next(ids) for _ in range(3 if row.rejected_prompt is None else 4)]) for row in rows]

    def _pair(self, row: Row, encoded: list[Ids | RowError]) -> Compared | RowError:
        for item in encoded:
            if isinstance(item, RowError):
                return item
        prompt, chosen, rejected, *rest = cast(list[Ids], encoded)
        other = rest[0] if rest else prompt
        cut, other_cut = common_prefix(prompt, chosen), common_prefix(other, rejected)
        if not rest:
            cut = other_cut = min(cut, other_cut)
        shifted = cut < len(prompt) or other_cut < len(other)
        same = list(chosen[:cut]) == list(rejected[:other_cut])
        if same and list(chosen[cut:]) == list(rejected[other_cut:]):
            return RowError("chosen and rejected come to the same tokens")
        return Compared(
            prompt[:cut],
            chosen[cut:],
            rejected[other_cut:],
            None if same else other[:other_cut],
            row.margin,
            row.tie,
            shifted,
        )

    def completions(self, rows: Sequence[Row], completion_only_loss: bool) -> list[Trained | RowError]:
        """SFT examples with a prompt: the completion is trained, or without `completion_only_loss` everything."""
        turned = [index for index, row in enumerate(rows) if self.assistant_only_loss or row.train_history]
        wholes = [replace(rows[i], prompt=None, chosen=_joined(rows[i].prompt, rows[i].chosen)) for i in turned]
        turns = dict(zip(turned, self._assistant_turns(wholes), strict=True)) if turned else {}
        texts = self._texts([part for row in rows for part in ((row, row.prompt, None), (row, row.prompt, row.chosen))])
        ids = self._encode(texts)
        out: list[Trained | RowError] = []
        for index, row in enumerate(rows):
            prompt, full, masked = ids[2 * index], ids[2 * index + 1], turns.get(index)
            failed = next((item for item in (prompt, full, masked) if isinstance(item, RowError)), None)
            if failed is not None:
                out.append(failed)
                continue
            prompt, full, masked = cast(Ids, prompt), cast(Ids, full), cast(Trained | None, masked)
            cut = common_prefix(prompt, full)
            start = cut if completion_only_loss else 0
            spans: tuple[Span, ...] = ((start, len(full)),)
            if masked is not None and self.assistant_only_loss:
                start = 0 if row.train_history else start
                spans = tuple((max(a, start), b) for a, b in masked.spans if b > start)
            elif masked is not None:
                spans = (*((a, min(b, cut)) for a, b in masked.spans if a < cut), *spans)
            out.append(Trained(full, spans, cut, cut < len(prompt)))
        return out

    def unfinished(self, rows: Sequence[Row]) -> list[Trained | RowError]:
        """Prompts with replies (texts) that were cut off: no stop token and no end of turn follow."""
        prompts = self._texts([(row, row.prompt, None) for row in rows])
        wholes = [
            text if isinstance(text, RowError) else text + cast(str, row.chosen)
            for text, row in zip(prompts, rows, strict=True)
        ]
        out: list[Trained | RowError] = []
        for prompt, whole in zip(self._encode(prompts), self._encode(wholes), strict=True):
            if isinstance(prompt, RowError) or isinstance(whole, RowError):
                out.append(prompt if isinstance(prompt, RowError) else cast(RowError, whole))
                continue
            cut = common_prefix(prompt, whole)
            out.append(Trained(whole, ((cut, len(whole)),), cut, cut < len(prompt)))
        return out

    def prompts(self, rows: Sequence[Row]) -> list[tuple[str, Ids] | RowError]:
        """Text and tokens of each row's prompt as the model sees it before it answers."""
        texts = self._texts([(row, row.prompt, None) for row in rows])
        return [
            ids if isinstance(ids, RowError) else (cast(str, text), ids)
            for text, ids in zip(texts, self._encode(texts), strict=True)
        ]

    def documents(self, rows: Sequence[Row]) -> list[Trained | RowError]:
        """Plain texts, every token trained."""
        texts: list[str | RowError] = [self._stopped(cast(str, row.chosen)) for row in rows]
        return [
            item if isinstance(item, RowError) else Trained(item, ((0, len(item)),), 0)
            for item in self._encode(texts, plain=True)
        ]

    def conversations(self, rows: Sequence[Row]) -> list[Trained | RowError]:
        """Whole conversations: every token trained, or with `assistant_only_loss` the assistant's turns."""
        if self.assistant_only_loss:
            return self._assistant_turns(rows)
        texts = self._texts([(row, [], row.chosen) for row in rows])
        return [
            item if isinstance(item, RowError) else Trained(item, ((0, len(item)),), 0) for item in self._encode(texts)
        ]

    def _assistant_turns(self, rows: Sequence[Row]) -> list[Trained | RowError]:
        """Whole conversations with the assistant's turns trained."""
        if self.renderer is None:
            raise DataError(
                "method.assistant_only_loss needs conversations, but data.template is none, which has no turns"
            )
        template = self.tokenizer.get_chat_template()
        located = self._marked(rows) if GENERATION.search(template) else self._by_prefix(rows)
        return self._masked(located)

    def _texts(self, parts: Sequence[tuple[Row, str | Turns | None, str | Turns | None]]) -> list[str | RowError]:
        """The text of each (prompt, reply); without a reply, the prompt as the model sees it before it answers."""
        if self.renderer is None:
            texts: list[str | RowError] = []
            for _, prompt, reply in parts:
                pieces = [_plain(piece) for piece in (prompt, reply) if piece is not None]
                failed = next((piece for piece in pieces if isinstance(piece, RowError)), None)
                text = "".join(cast(list[str], pieces)) if failed is None else ""
                texts.append(failed or (text if reply is None else self._stopped(text)))
            return texts
        jobs = []
        for row, prompt, reply in parts:
            turns = _turns(prompt) if reply is None else _joined(prompt, reply)
            continued = reply is None and bool(turns) and PREFILL in turns[-1]
            jobs.append(RenderRequest(turns, row.tools, reply is None and not continued, continued=continued))
        return [
            RowError(done.error)
            if done.error
            else done.text
            if job.generate or job.continued
            else self._ended(done.text, job)
            for job, done in zip(jobs, self.renderer.render(jobs), strict=True)
        ]

    def _stopped(self, text: str) -> str:
        """A completion as text, with the stop token at its end."""
        return text if not self.stop or text.endswith(self.stop) else text + self.stop

    def _ended(self, text: str, job: RenderRequest) -> str:
        """A rendered conversation; the template's own end of turn, any special token, is as good as the stop token."""
        if job.messages[-1]["role"] != "assistant" or text.rstrip().endswith(self.endings):
            return text
        return self._stopped(text)

    def _encode(self, texts: Sequence[str | RowError], plain: bool | None = None) -> list[Ids | RowError]:
        plain = self.renderer is None if plain is None else plain
        good = [text if plain else self._begun_once(text)[0] for text in texts if isinstance(text, str)]
        encoded = cast(list[list[int]], self._call(good, plain)["input_ids"] if good else [])
        if plain and self.appends_stop:
            encoded = [tokens[:-1] for tokens in encoded]
        if plain and self.begin and self.adds_begin:
            encoded = [
                tokens[1:] if text.startswith(self.begin) and text != self.stop else tokens
                for text, tokens in zip(good, encoded, strict=True)
            ]
        ids = iter(encoded)
        return [text if isinstance(text, RowError) else next(ids) for text in texts]

    def _begun_once(self, text: str, spans: tuple[Span, ...] = ()) -> tuple[str, tuple[Span, ...]]:
        """A rendered text with one begin token, where the template writes one before a content that has its own."""
        cut = 0
        while self.begin and text.startswith(2 * self.begin, cut):
            cut += len(self.begin)
        return text[cut:], tuple((max(start - cut, 0), stop - cut) for start, stop in spans)

    def _call(self, texts: list[str], special: bool) -> BatchEncoding:
        # a template writes the beginning of the text itself, so special tokens are added to plain texts only
        return self.tokenizer(
            texts,
            add_special_tokens=special,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )

    def _marked(self, rows: Sequence[Row]) -> list[tuple[str, tuple[Span, ...]] | RowError]:
        """Conversations with the characters that the template marks with `{% generation %}`."""
        assert self.renderer is not None
        jobs = [RenderRequest(cast(Turns, row.chosen), row.tools, spans=True) for row in rows]
        return [
            RowError(done.error) if done.error else _end_span(done.text, self._ended(done.text, job), done.spans)
            for job, done in zip(jobs, self.renderer.render(jobs), strict=True)
        ]

    def _by_prefix(self, rows: Sequence[Row]) -> list[tuple[str, tuple[Span, ...]] | RowError]:
        """Conversations with the characters of the assistant's turns, found by rendering the conversation up to each.

        A turn begins where the opening that the template writes for the assistant ends, and ends with its end of turn.
        Raises DataError when the conversation up to a turn is not how the whole begins.
        """
        assert self.renderer is not None
        jobs, turns = [], []
        for row in rows:
            messages = cast(Turns, row.chosen)
            replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
            turns.append(replies)
            jobs.append(RenderRequest(messages, row.tools))
            for index in replies:
                if index:
                    jobs.append(RenderRequest(messages[:index], row.tools, generate=True))
                jobs.append(RenderRequest(messages[: index + 1], row.tools))
        done = iter(zip(jobs, self.renderer.render(jobs), strict=True))
        out: list[tuple[str, tuple[Span, ...]] | RowError] = []
        for replies in turns:
            job, whole = next(done)
            parts = [next(done)[1] for index in replies for _ in range(2 if index else 1)]
            error = next((part.error for part in (whole, *parts) if part.error), None)
            if error is None and replies and not replies[0]:
                error = "begins with the assistant's turn, whose opening is only known after another turn"
            if error:
                out.append(RowError(error))
                continue
            spans = []
            for before, upto in zip(parts[::2], parts[1::2], strict=True):
                start = common_prefix(before.text, whole.text)
                if not whole.text.startswith(upto.text) or start >= len(upto.text):
                    raise DataError(
                        "method.assistant_only_loss: the chat template writes earlier turns differently once later "
                        "ones follow, so the assistant's turns cannot be located. Use a template with "
                        "{% generation %} marks (data.template: FILE.jinja), or completion_only_loss to train "
                        "on the last turn"
                    )
                spans.append((start, len(upto.text)))
            out.append(_end_span(whole.text, self._ended(whole.text, job), tuple(spans)))
        return out

    def _masked(self, located: Sequence[tuple[str, tuple[Span, ...]] | RowError]) -> list[Trained | RowError]:
        """Tokenise each text once, and turn spans of characters into spans of tokens."""
        located = [item if isinstance(item, RowError) else self._begun_once(*item) for item in located]
        texts = [item[0] for item in located if not isinstance(item, RowError)]
        encoded = self._call(texts, special=False) if texts else None
        out: list[Trained | RowError] = []
        position = 0
        for item in located:
            if isinstance(item, RowError) or encoded is None:
                out.append(cast(RowError, item))
                continue
            tokens = cast(Ids, encoded["input_ids"][position])
            token_span = _token_span if self.behavior_version > 1 else _old_token_span
            spans = [token_span(encoded, position, span) for span in item[1]]
            out.append(Trained(tokens, tuple(span for span in spans if span is not None), 0))
            position += 1
        return out


def common_prefix(left: Sequence, right: Sequence) -> int:
    """Number of leading items that two sequences have in common."""
    shortest = min(len(left), len(right))
    if left[:shortest] == right[:shortest]:
        return shortest
    return next(index for index in range(shortest) if left[index] != right[index])


def _end_span(rendered: str, ended: str, spans: tuple[Span, ...]) -> tuple[str, tuple[Span, ...]]:
    """Let the last assistant turn own the stop token that was appended after it."""
    if len(ended) > len(rendered) and spans:
        spans = (*spans[:-1], (spans[-1][0], len(ended)))
    return ended, spans


def _token_span(encoded: BatchEncoding, row: int, span: Span) -> Span | None:
    """The tokens that have a character of a span, or a byte of one; None when there is none."""
    offsets = (encoded.encodings or [])[row].offsets  # a character of several tokens is in the offsets of each
    start = bisect_right(offsets, span[0], key=itemgetter(1))
    stop = bisect_left(offsets, span[1], key=itemgetter(0))
    return (start, stop) if start < stop else None


def _old_token_span(encoded: BatchEncoding, row: int, span: Span) -> Span | None:
    """The same in runs of behavior_version 1, without the later tokens of a last character of several."""
    start = next((t for c in range(*span) if (t := encoded.char_to_token(row, c)) is not None), None)
    last = next((t for c in reversed(range(*span)) if (t := encoded.char_to_token(row, c)) is not None), None)
    return None if start is None or last is None else (start, last + 1)


def _turns(value: str | Turns | None, role: str = "user") -> Turns:
    return [] if value is None else as_turns(value, role)


def _joined(prompt: str | Turns | None, reply: str | Turns) -> Turns:
    """The conversation of a prompt and its reply, which ends the prompt's last message where that is a prefill."""
    before, said = _turns(prompt), _turns(reply, "assistant")
    if not before or PREFILL not in before[-1] or not said or said[0]["role"] != "assistant":
        return [*before, *said]
    return [*before[:-1], {**before[-1], **said[0], "content": before[-1]["content"] + said[0]["content"]}, *said[1:]]


def _plain(value: str | Turns) -> str | RowError:
    """The text of a prompt or reply without a template: a single message is its content."""
    if isinstance(value, str):
        return value
    if len(value) != 1 or value[0].get("tool_calls"):
        return RowError("a conversation of several turns cannot be written with data.template: none")
    return value[0]["content"]


def first_trained(spans: Sequence[Span], length: int) -> int:
    """Index of the first target (the very first token of a sequence never is one); `length` when there is none."""
    return next((max(start, 1) for start, stop in spans if stop > max(start, 1)), length)


def span_array(spans: Sequence[Span]) -> np.ndarray:
    """Spans as a flat int32 array: start, stop, start, stop …"""
    return np.asarray(spans, np.int32).reshape(-1)
