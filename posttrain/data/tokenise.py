"""Rows to token ids, tokenised as TRL 1.16 does: prompt and completion together, the prompt their common prefix.

A completion ends in the stop token: appended to texts, and to conversations whose template ends in no
special token.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import itemgetter
from typing import cast

import numpy as np
from transformers import BatchEncoding, PreTrainedTokenizerBase

from posttrain.data.render import PREFILL, WEIGHT, Message, Rendered, Renderer, RenderRequest
from posttrain.data.rows import Row, RowError, Turns, UntrainedError, as_turns
from posttrain.data.turns import (
    THINKING,
    TOOLS,
    VARIABLE,
    Endings,
    Part,
    Span,
    Whole,
    agreed,
    common_prefix,
    headers,
    locate,
    unwritten,
)
from posttrain.errors import DataError

Ids = Sequence[int]
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class Trained:
    """An SFT example: its tokens, the spans of them that are trained, and how many are prompt."""

    tokens: Ids
    spans: tuple[Span, ...]
    prompt: int
    shifted: bool = False  # the end of the prompt merged with the completion, so the prompt alone reads differently
    weights: Sequence[float] = ()  # of the spans; empty: all 1
    heads: Ids = ()  # where the prompt may be cut (`Tokeniser._heads`)


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
    heads: Ids = ()
    rejected_heads: Ids = ()


@dataclass(frozen=True, slots=True)
class _Written:
    """A row's text and its prompt's. Of a conversation also how it was rendered, what `{% generation %}` marks in its
    stock rendering, and what of it the template does not write (`unwritten`)."""

    prompt: str | RowError
    text: str | RowError
    whole: Whole | None = None
    marks: tuple[Span, ...] = ()
    missing: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class _Encoded:
    """The tokens of a text, where the batch has them, and how many of its first characters were not read."""

    ids: Ids
    batch: BatchEncoding
    row: int
    cut: int
    text: str


class Tokeniser:
    """Tokenises batches of rows for one tokenizer. `renderer` is None when texts are used as they are.

    With `behavior_version` 1 a text that begins with the begin token gets a second one, a prompt may differ from that
    of inference, and the turns are found by another rule (`locate`).
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
        special = tuple(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
        self.endings = Endings(special, self.stop)
        self._headers: tuple[str, ...] | None = None
        self.unwritten: Counter[str] = Counter()  # rows by what the template does not write of them
        self.names = set(re.findall(r"\w+", str(tokenizer.chat_template))) if renderer is not None else set[str]()
        self.marked = renderer is not None and bool(GENERATION.search(str(tokenizer.chat_template)))
        # Whether the tokenizer itself ends a text with the stop token. It has one already, and a prompt is continued.
        whole, bare = (list(cast(list[Ids], self._call(["a"], special)["input_ids"])[0]) for special in (True, False))
        self.appends_stop = bool(bare) and whole[-len(bare) - 1 :] == [*bare, tokenizer.eos_token_id]
        self.begin = str(tokenizer.bos_token or "") if behavior_version > 1 else ""
        self.adds_begin = whole[:1] == [tokenizer.bos_token_id] != bare[:1]

    def pairs(self, rows: Sequence[Row]) -> list[Compared | RowError]:
        """Preference pairs, all completion tokens trained."""
        parts = []
        for row in rows:
            other = row.prompt if row.rejected_prompt is None else row.rejected_prompt
            parts += [(row, row.prompt, row.chosen), (row, other, cast(str | Turns, row.rejected))]
        both = self._counted(self._with_prompts(parts), rows)
        ids = iter(self._encode([text for item in both for text in (item.prompt, item.text)]))
        return [self._pair(row, [next(ids) for _ in range(4)]) for row in rows]

    def _pair(self, row: Row, encoded: list[_Encoded | RowError]) -> Compared | RowError:
        for item in encoded:
            if isinstance(item, RowError):
                return item
        prompt, chosen, other, rejected = (item.ids for item in cast(list[_Encoded], encoded))
        cut, other_cut = common_prefix(prompt, chosen), common_prefix(other, rejected)
        if row.rejected_prompt is None:
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
            self._heads(encoded[0], cut),
            () if same else self._heads(encoded[2], other_cut),
        )

    def completions(self, rows: Sequence[Row], completion_only_loss: bool) -> list[Trained | RowError]:
        """SFT examples with a prompt: the completion is trained, or without `completion_only_loss` everything."""
        written = self._counted(self._with_prompts([(row, row.prompt, row.chosen) for row in rows]), rows)
        turned = [index for index, row in enumerate(rows) if self._finds_turns(row)]
        turns = dict(zip(turned, self._assistants([written[index] for index in turned]), strict=True)) if turned else {}
        ids = self._encode([text for one in written for text in (one.prompt, one.text)])
        out: list[Trained | RowError] = []
        for index, row in enumerate(rows):
            prompt, full = ids[2 * index], ids[2 * index + 1]
            if isinstance(prompt, RowError) or isinstance(full, RowError):
                out.append(prompt if isinstance(prompt, RowError) else cast(RowError, full))
                continue
            cut = common_prefix(prompt.ids, full.ids)
            start = cut if completion_only_loss else 0
            spans: tuple[Span, ...] = ((start, len(full.ids)),)
            found = self._token_spans(full, turns.get(index, ()))
            if self.assistant_only_loss:
                start = 0 if row.train_history else start
                spans = tuple((max(first, start), stop) for first, stop in found if stop > start)
            elif row.train_history:
                spans = (*((first, min(stop, cut)) for first, stop in found if first < cut), *spans)
            out.append(Trained(full.ids, spans, cut, cut < len(prompt.ids), heads=self._heads(full, cut)))
        return self._weighed(out, written, rows)

    def _weighed(
        self, trained: list[Trained | RowError], written: Sequence[_Written], rows: Sequence[Row]
    ) -> list[Trained | RowError]:
        """The examples with the loss weights of their messages."""
        turns = [[*_turns(row.prompt), *_turns(row.chosen, "assistant")] for row in rows]
        flagged = [n for n, some in enumerate(turns) if any(WEIGHT in turn for turn in some)]
        flagged = [n for n in flagged if isinstance(trained[n], Trained)]
        if not flagged:
            return trained
        out, texts = list(trained), [written[n].text for n in flagged]
        if self.renderer is None:  # a message each, of which only the reply has a text of its own
            found = [{0: (len(cast(str, written[n].prompt)), len(cast(str, written[n].text)))} for n in flagged]
            messages = [_turns(rows[n].chosen, "assistant") for n in flagged]
        else:
            found = self._placed([written[n] for n in flagged], lambda message: WEIGHT in message)
            messages = [cast(Whole, written[n].whole).job.messages for n in flagged]
        for n, item, places, said in zip(flagged, self._encode(texts), found, messages, strict=True):
            one, item = cast(Trained, trained[n]), cast(_Encoded, item)
            weight = np.zeros(len(one.tokens), np.float32)
            for start, stop in one.spans:
                weight[start:stop] = 1
            for index, place in places.items():
                if index + 1 == len(said):  # owns a stop token that was appended
                    place = place[0], len(item.text)
                for start, stop in self._token_spans(item, [place]):
                    weight[start:stop] *= said[index].get(WEIGHT, ("", 1.0))[1]
            edges = [0, *(np.flatnonzero(np.diff(weight)) + 1).tolist(), len(weight)]
            spans = [(a, b) for a, b in pairwise(edges) if b > a and weight[a] > 0]
            weights = [float(weight[start]) for start, _ in spans]
            if first_trained(spans, len(weight)) >= len(weight):
                out[n] = UntrainedError("every message that would be trained has the loss weight 0")
            else:
                out[n] = replace(one, spans=tuple(spans), weights=() if set(weights) == {1.0} else weights)
        return out

    def unfinished(self, rows: Sequence[Row]) -> list[Trained | RowError]:
        """Prompts with replies (texts) that were cut off: no stop token and no end of turn follow."""
        prompts = [one.prompt for one in self._prompts(rows)]
        wholes = [
            text if isinstance(text, RowError) else text + cast(str, row.chosen)
            for text, row in zip(prompts, rows, strict=True)
        ]
        out: list[Trained | RowError] = []
        for prompt, whole in zip(self._encode(prompts), self._encode(wholes), strict=True):
            if isinstance(prompt, RowError) or isinstance(whole, RowError):
                out.append(prompt if isinstance(prompt, RowError) else cast(RowError, whole))
                continue
            cut = common_prefix(prompt.ids, whole.ids)
            out.append(Trained(whole.ids, ((cut, len(whole.ids)),), cut, cut < len(prompt.ids)))
        return out

    def prompts(self, rows: Sequence[Row]) -> list[tuple[str, Ids] | RowError]:
        """Text and tokens of each row's prompt as the model sees it before it answers."""
        items = self._encode([one.prompt for one in self._prompts(rows)])
        return [item if isinstance(item, RowError) else (item.text, item.ids) for item in items]

    def without_completions(self, rows: Sequence[Row]) -> list[Trained | RowError]:
        """Each row's prompt as a sequence in which nothing is trained."""
        out: list[Trained | RowError] = []
        for item in self._encode([one.prompt for one in self._counted(self._prompts(rows), rows)]):
            if isinstance(item, RowError):
                out.append(item)
            elif not len(item.ids):
                out.append(RowError("the prompt has no tokens"))
            else:
                out.append(Trained(item.ids, (), len(item.ids), heads=self._heads(item, len(item.ids))))
        return out

    def documents(self, rows: Sequence[Row]) -> list[Trained | RowError]:
        """Plain texts, every token trained."""
        items = self._encode([self._stopped(cast(str, row.chosen)) for row in rows], plain=True)
        return [item if isinstance(item, RowError) else Trained(item.ids, ((0, len(item.ids)),), 0) for item in items]

    def conversations(self, rows: Sequence[Row]) -> list[Trained | RowError]:
        """Whole conversations: every token trained, or with `assistant_only_loss` the assistant's turns."""
        written = self._counted(self._conversations(rows), rows)
        spans = self._assistants(written) if self.assistant_only_loss else None
        out: list[Trained | RowError] = []
        for index, item in enumerate(self._encode([one.text for one in written])):
            if isinstance(item, RowError):
                out.append(item)
            else:
                whole = ((0, len(item.ids)),)
                out.append(Trained(item.ids, whole if spans is None else self._token_spans(item, spans[index]), 0))
        return self._weighed(out, written, rows)

    def _prompts(self, rows: Sequence[Row]) -> list[_Written]:
        """Each row's prompt as the model sees it before it answers."""
        if self.renderer is None:
            return [_Written(_plain(cast(str | Turns, row.prompt)), "") for row in rows]
        jobs = [self._prompt_job(row, row.prompt) for row in rows]
        done = self.renderer.render(jobs)
        missing = self._missing(jobs, done)
        return [
            _Written(RowError(done.error) if done.error else done.text, "", missing=roles)
            for done, roles in zip(done, missing, strict=True)
        ]

    def _with_prompts(self, parts: Sequence[tuple[Row, str | Turns | None, str | Turns]]) -> list[_Written]:
        """The text of each (prompt, reply), and its prompt's as the model sees it before it answers."""
        if self.renderer is None:
            return [self._written_plainly(prompt, reply) for _, prompt, reply in parts]
        asked = {(id(row), id(prompt)): self._prompt_job(row, prompt) for row, prompt, _ in parts}
        jobs = [self._job(row, _joined(prompt, reply)) for row, prompt, reply in parts]
        done = self.renderer.render([*asked.values(), *jobs])
        prompts = dict(zip(asked, done, strict=False))
        out: list[_Written] = []
        for (row, prompt, reply), job, whole in zip(parts, jobs, done[len(asked) :], strict=True):
            before = prompts[id(row), id(prompt)]
            if error := RowError(before.error) if before.error else self._refusal(job, whole):
                out.append(_Written(error, error))
                continue
            replies = len(job.messages) - len(_turns(reply, "assistant"))
            found = Whole(job, whole.text, asked[id(row), id(prompt)], before.text, replies)
            out.append(_Written(before.text, self._ended(whole.text, job), found, whole.spans))
        return self._agreed(out) if self.behavior_version > 1 else out

    def _agreed(self, written: list[_Written]) -> list[_Written]:
        """The same, with the prompt in each text as the model sees it; and what the template does not write of it."""
        assert self.renderer is not None
        good = [n for n, one in enumerate(written) if one.whole is not None]
        wholes = agreed(self.renderer, [cast(Whole, written[n].whole) for n in good], self.endings)
        out = list(written)
        for n, whole in zip(good, wholes, strict=True):
            if isinstance(whole, str):
                out[n] = _Written(error := RowError(whole), error)
            elif whole.joint is not None:
                out[n] = replace(written[n], text=self._ended(whole.text, whole.job), whole=whole)
        good = [n for n in good if out[n].whole is not None]
        rendered = [cast(Whole, out[n].whole).rendered for n in good]
        for n, roles in zip(good, unwritten(self.renderer, rendered), strict=True):
            out[n] = replace(out[n], missing=roles)
        return out

    def _conversations(self, rows: Sequence[Row]) -> list[_Written]:
        """Whole conversations. Where the template loses a message's text of one that ends with the assistant's turn,
        what is before it is as the model sees it."""
        if self.renderer is None:
            return [self._written_plainly("", row.chosen) for row in rows]
        jobs = [self._job(row, cast(Turns, row.chosen)) for row in rows]
        done = self.renderer.render(jobs)
        out = []
        for job, whole, roles in zip(jobs, done, self._missing(jobs, done), strict=True):
            error = self._refusal(job, whole)
            found = None if error else Whole(job, whole.text, job, "", 0)
            out.append(_Written("", error or self._ended(whole.text, job), found, whole.spans, roles))
        lossy = [
            n
            for n, one in enumerate(out)
            if {*one.missing} - {TOOLS, THINKING} and jobs[n].messages[-1]["role"] == "assistant"
        ]
        parts = [(rows[n], rows[n].chosen[:-1], rows[n].chosen[-1:]) for n in lossy]
        for n, one in zip(lossy, self._with_prompts(parts), strict=True):
            if one.whole is not None and one.whole.joint is not None:
                out[n] = one
        return out

    def _missing(self, jobs: Sequence[RenderRequest], done: Sequence[Rendered]) -> list[set[str]]:
        """What the template does not write of each conversation."""
        assert self.renderer is not None
        return unwritten(self.renderer, [(job, one.text) for job, one in zip(jobs, done, strict=True)])

    def _counted(self, written: list[_Written], rows: Sequence[Row]) -> list[_Written]:
        """Count what the template does not write of each row, which has one text, or of a pair two."""
        each = len(written) // max(len(rows), 1)
        for index, row in enumerate(rows):
            lost = {what for one in written[each * index : each * (index + 1)] for what in one.missing}
            lost |= {f"{VARIABLE}{name}" for name in row.variables or () if name not in self.names}
            self.unwritten.update(sorted(lost))
        return written

    def _refusal(self, job: RenderRequest, done: Rendered) -> RowError | None:
        """Why a conversation cannot be used: the template's error; in runs of behavior_version 1 a first turn of the
        assistant, where turns are found by rendering."""
        if done.error:
            return RowError(done.error)
        found = self.assistant_only_loss and not self.marked
        if self.behavior_version == 1 and found and job.messages[0]["role"] == "assistant":
            return RowError("begins with the assistant's turn, whose opening is only known after another turn")
        return None

    def _assistants(self, written: Sequence[_Written]) -> list[list[Span]]:
        """The characters of the assistant's turns: those that the template marks with `{% generation %}`, or those
        found by rendering."""
        if written and not self.tokenizer.is_fast:
            raise DataError(
                "assistant_only_loss and history need a fast tokenizer, which knows the characters of each token"
            )
        if self.marked:
            out: list[list[Span]] = []
            for one in written:
                joint = 0 if one.whole is None else one.whole.joint or 0
                moved = len(cast(str, one.prompt)) - joint if joint else 0
                spans = [(start + moved, stop + moved) for start, stop in one.marks if start >= joint]
                out.append(_to_end(spans, one))
            return out
        found = self._placed(written, lambda message: message["role"] == "assistant")
        return [_to_end(list(spans.values()), one) for one, spans in zip(written, found, strict=True)]

    def _placed(self, written: Sequence[_Written], which: Callable[[Message], bool]) -> list[dict[int, Span]]:
        """The characters of the messages that `which` selects, by their index."""
        if self.renderer is None:
            raise DataError(
                "method.assistant_only_loss needs conversations, but data.template is none, which has no turns"
            )
        parts = []
        for one in written:
            if (whole := one.whole) is None:
                continue
            chosen = [index for index, message in enumerate(whole.job.messages) if which(message)]
            apart = whole.count if whole.joint is not None else 0
            parts.append(Part(whole.prompt_job, whole.prompt, [index for index in chosen if index < apart]))
            parts.append(Part(whole.job, whole.stock, [index for index in chosen if index >= apart]))
        found = iter(locate(self.renderer, parts, self.endings, old=self.behavior_version == 1))
        out: list[dict[int, Span]] = []
        for one in written:
            before, after = ({}, {}) if one.whole is None else (next(found), next(found))
            moved = 0 if one.whole is None or one.whole.joint is None else len(one.whole.prompt) - one.whole.joint
            out.append(before | {index: (start + moved, stop + moved) for index, (start, stop) in after.items()})
        return out

    def _finds_turns(self, row: Row) -> bool:
        return self.assistant_only_loss or row.train_history

    def _job(self, row: Row, messages: Turns) -> RenderRequest:
        return RenderRequest(messages, row.tools, spans=self.marked and self._finds_turns(row), variables=row.variables)

    def _prompt_job(self, row: Row, prompt: str | Turns | None) -> RenderRequest:
        """A prompt with the opening of its reply, or with the beginning of the reply that it has (a prefill)."""
        turns = _turns(prompt)
        continued = bool(turns) and PREFILL in turns[-1]
        return RenderRequest(turns, row.tools, generate=not continued, continued=continued, variables=row.variables)

    def _written_plainly(self, prompt: str | Turns | None, reply: str | Turns) -> _Written:
        """Prompt and reply without a template, concatenated."""
        before, after = ("" if piece is None else _plain(piece) for piece in (prompt, reply))
        if isinstance(before, RowError) or isinstance(after, RowError):
            error = before if isinstance(before, RowError) else after
            return _Written(error, error)
        return _Written(before, self._stopped(before + after))

    def _stopped(self, text: str) -> str:
        """A completion as text, with the stop token at its end."""
        return text if not self.stop or text.endswith(self.stop) else text + self.stop

    def _ended(self, text: str, job: RenderRequest) -> str:
        """A rendered conversation; the template's own end of turn, any special token, is as good as the stop token."""
        if job.messages[-1]["role"] != "assistant" or text.rstrip().endswith(self.endings.special):
            return text
        return self._stopped(text)

    def _encode(self, texts: Sequence[str | RowError], plain: bool | None = None) -> list[_Encoded | RowError]:
        plain = self.renderer is None if plain is None else plain
        unique = {text: index for index, text in enumerate(dict.fromkeys(t for t in texts if isinstance(t, str)))}
        again = {text: 0 if plain else self._begun_again(text) for text in unique}
        batch = self._call([text[again[text] :] for text in unique], plain) if unique else None
        out: list[_Encoded | RowError] = []
        for text in texts:
            if isinstance(text, RowError) or batch is None:
                out.append(cast(RowError, text))
                continue
            ids = cast(list[list[int]], batch["input_ids"])[unique[text]]
            begun = plain and self.begin and self.adds_begin and text.startswith(self.begin) and text != self.stop
            kept = ids[bool(begun) : -1 if plain and self.appends_stop else None]
            out.append(_Encoded(kept, batch, unique[text], again[text], text))
        return out

    def _begun_again(self, text: str) -> int:
        """Characters before the last begin token, where a template writes one before a content that has its own."""
        cut = 0
        while self.begin and text.startswith(2 * self.begin, cut):
            cut += len(self.begin)
        return cut

    def _call(self, texts: list[str], special: bool) -> BatchEncoding:
        # a template writes the beginning of the text itself, so special tokens are added to plain texts only
        return self.tokenizer(
            texts,
            add_special_tokens=special,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )

    def _heads(self, item: _Encoded | RowError, prompt: int) -> Ids:
        """Where a prompt of this many tokens may be cut: how many begin tokens it has, and the first token of each
        turn's header and of its text. Empty if it has neither, and with behavior_version 1."""
        item = cast(_Encoded, item)
        if self.behavior_version == 1 or not prompt:
            return ()
        places: list[int] = []
        if self.renderer is not None and self.tokenizer.is_fast:
            if self._headers is None:
                self._headers = headers(self.renderer, self.begin)
            offsets = (item.batch.encodings or [])[item.row].offsets
            text, end = item.text[item.cut :], offsets[prompt - 1][1]
            found = {}  # the longest header at each place
            for header in self._headers:
                place = text.find(header)
                while place >= 0 and place + len(header) <= end:
                    found.setdefault(place, place + len(header))
                    place = text.find(header, place + 1)
            for start, stop in sorted(found.items()):
                header, said = (bisect_left(offsets, at, hi=prompt, key=itemgetter(0)) for at in (start, stop))
                if not places or header >= places[-1]:
                    places += [header, said]
        begins = item.ids[0] == self.tokenizer.bos_token_id
        return [int(begins), *places] if begins or places else ()

    def _token_spans(self, item: _Encoded, spans: Sequence[Span]) -> tuple[Span, ...]:
        """Spans of characters as spans of tokens."""
        token_span = _token_span if self.behavior_version > 1 else _old_token_span
        moved = [(max(start - item.cut, 0), stop - item.cut) for start, stop in spans]
        found = [token_span(item.batch, item.row, span) for span in moved]
        return tuple(span for span in found if span is not None)


def _to_end(spans: list[Span], one: _Written) -> list[Span]:
    """Let the last turn own the stop token that was appended after it."""
    if spans and one.whole is not None and len(cast(str, one.text)) > len(one.whole.text):
        spans[-1] = spans[-1][0], len(cast(str, one.text))
    return spans


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
