"""Events of the engine as the objects of OpenAI's interface, whole or as a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from posttrain.engines import text_of
from posttrain.engines.joining import Alternatives, Ended, Event, Failed, Job, Token
from posttrain.serving.host import TokenScore
from posttrain.serving.texts import Streamed, piece_after, pieces_of

Json = dict[str, Any]
Entry = tuple[int, str, float | None, Alternatives]  # a token, its text, its log-probability, the likeliest ones


@dataclass(frozen=True, slots=True)
class Form:
    """How an endpoint writes its objects."""

    chat: bool
    model: str
    alternatives: int | None  # None: no log-probabilities

    @property
    def kind(self) -> str:
        return "chat.completion" if self.chat else "text_completion"

    def head(self, chunk: bool = False) -> Json:
        name = "chat.completion.chunk" if self.chat and chunk else self.kind
        prefix = "chatcmpl" if self.chat else "cmpl"
        return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": name, "created": int(time.time()), "model": self.model}


class Replies:
    """The replies to one request: `jobs` in the order of its prompts, each with `n` completions."""

    def __init__(
        self, form: Form, tokenizer: PreTrainedTokenizerBase, jobs: Sequence[Job], stop_token_ids: Sequence[int]
    ):
        self.form, self.tokenizer, self.jobs, self.stop_token_ids = form, tokenizer, jobs, tuple(stop_token_ids)
        self.first = {}
        total = 0
        for job in jobs:
            self.first[job] = total
            total += job.sampling.num_generations
        self.total = total

    @cached_property
    def prompt_tokens(self) -> int:
        return sum(len(job.tokens) for job in self.jobs)

    def usage(self, sampled: int) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": self.prompt_tokens + sampled,
        }

    async def whole(self, events: AsyncIterator[Event]) -> Json:
        """The object with all completions. Raises the error of a job that failed."""
        choices: list[Json | None] = [None] * self.total
        sampled = 0
        async for event in events:
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Ended):
                sampled += len(event.completion.tokens)
                index = self.first[event.job] + event.number
                choices[index] = self._choice(index, event)
        return {**self.form.head(), "choices": choices, "usage": self.usage(sampled)}

    def _choice(self, index: int, ended: Ended) -> Json:
        completion = ended.completion
        text = cut(text_of(completion, self.stop_token_ids, self.tokenizer), ended.job.sampling.stop)
        logprobs = None
        if self.form.alternatives is not None:
            pieces = pieces_of(self.tokenizer, completion.tokens)
            likely = ended.alternatives or [[] for _ in pieces]
            entries = zip(completion.tokens, pieces, completion.logprobs, likely, strict=True)
            logprobs = self._logprobs([*entries], ended.job.tokens[-1])
        body: Json = (
            {"message": {"role": "assistant", "content": text, "refusal": None}} if self.form.chat else {"text": text}
        )
        return {"index": index, **body, "logprobs": logprobs, "finish_reason": completion.finish_reason}

    async def chunks(self, events: AsyncIterator[Event], include_usage: bool) -> AsyncIterator[Json]:
        """The objects of a stream; a job that failed ends it with an `error`."""
        head, sampled = self.form.head(chunk=True), 0
        texts: dict[int, Streamed] = {}
        last: dict[int, int] = {}  # each completion's last token
        extra = {"usage": None} if include_usage else {}

        def chunk(index: int, text: str, logprobs: Json | None, reason: str | None, begin: bool = False) -> Json:
            body: Json = {"text": text}
            if self.form.chat:
                body = {
                    "delta": ({"role": "assistant"} if begin else {}) | ({"content": text} if text or begin else {})
                }
            choice = {"index": index, **body, "logprobs": logprobs, "finish_reason": reason}
            return {**head, "choices": [choice], **extra}

        async for event in events:
            if isinstance(event, Failed):
                raise event.error
            index = self.first[event.job] + event.number
            if index not in texts:
                texts[index] = Streamed(self.tokenizer, self.stop_token_ids, event.job.sampling.stop)
                if self.form.chat:
                    yield chunk(index, "", None, None, begin=True)
            if isinstance(event, Token):
                text, logprobs = texts[index].add(event.token), None
                if self.form.alternatives is not None:
                    before = last.get(index, event.job.tokens[-1])
                    piece = piece_after(self.tokenizer, before, event.token)
                    entries = [(event.token, piece, event.logprob, event.alternatives)]
                    logprobs, last[index] = self._logprobs(entries, before), event.token
                if text or logprobs:
                    yield chunk(index, text, logprobs, None)
            else:
                sampled += len(event.completion.tokens)
                yield chunk(index, texts[index].end(), None, event.completion.finish_reason)
        if include_usage:
            yield {**head, "choices": [], "usage": self.usage(sampled)}

    def prompt_logprobs(self, scores: Sequence[TokenScore]) -> Json:
        """Those of a prompt, in the form of completions; the first token has none."""
        return self._columns([(one.id, one.text, one.logprob, one.alternatives) for one in scores], None)

    def _logprobs(self, entries: Sequence[Entry], before: int) -> Json:
        """Of tokens after the token `before`."""
        if not self.form.chat:
            return self._columns(entries, before)
        previous = [before, *(token for token, *_ in entries)]
        return {"content": [self._entry(*one) for one in zip(previous, entries, strict=False)], "refusal": None}

    def _columns(self, entries: Sequence[Entry], before: int | None) -> Json:
        previous = [before, *(token for token, *_ in entries)]
        offsets, place = [], 0
        for _, piece, _, _ in entries:
            offsets.append(place)
            place += len(piece)
        return {
            "tokens": [piece for _, piece, _, _ in entries],
            "token_logprobs": [logprob for _, _, logprob, _ in entries],
            "top_logprobs": [
                {piece_after(self.tokenizer, last, id): value for id, value in likely}
                for last, (*_, likely) in zip(previous, entries, strict=False)
            ],
            "text_offset": offsets,
        }

    def _entry(self, before: int, entry: Entry) -> Json:
        _, piece, logprob, likely = entry
        others = [_token(piece_after(self.tokenizer, before, id), value) for id, value in likely]
        return {**_token(piece, logprob), "top_logprobs": others}


def _token(text: str, logprob: float | None) -> Json:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode(errors="replace"))}


def cut(text: str, stops: Sequence[str]) -> str:
    """The text up to the first stop string."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(places)] if places else text
