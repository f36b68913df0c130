"""Events of the engine as the objects of OpenAI's interface, whole or as a stream."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from transformers import PreTrainedTokenizerBase

from posttrain.engines import text_of
from posttrain.engines.joining import Ended, Event, Failed, Job, Token
from posttrain.serving.host import TokenScore
from posttrain.serving.texts import Report, Reported, Streamed, Written

Json = dict[str, Any]


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
        *starts, self.total = accumulate((job.sampling.num_generations for job in jobs), initial=0)
        self.first = dict(zip(jobs, starts, strict=True))

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
                choices[index] = await asyncio.to_thread(self._choice, index, event)
        return {**self.form.head(), "choices": choices, "usage": usage([job.tokens for job in self.jobs], sampled)}

    def _choice(self, index: int, ended: Ended) -> Json:
        completion, prompt = ended.completion, ended.job.tokens
        text = cut(text_of(completion, self.stop_token_ids, self.tokenizer, prompt), ended.job.sampling.stop)
        logprobs = None
        if self.form.alternatives is not None:
            report, last = Report(self.tokenizer, prompt), len(completion.tokens) - 1
            alternatives = ended.alternatives or [[] for _ in completion.tokens]
            entries = enumerate(zip(completion.tokens, completion.logprobs, alternatives, strict=True))
            logprobs = self._logprobs(report.add(*entry, last=place == last) for place, entry in entries)
            if not self.form.chat:
                logprobs["text_offset"] = [min(place, len(text)) for place in logprobs["text_offset"]]
        body: Json = (
            {"message": {"role": "assistant", "content": text, "refusal": None}} if self.form.chat else {"text": text}
        )
        return {"index": index, **body, "logprobs": logprobs, "finish_reason": completion.finish_reason}

    async def chunks(self, events: AsyncIterator[Event], include_usage: bool) -> AsyncIterator[Json]:
        """The objects of a stream; a job that failed ends it with an `error`."""
        head, sampled = self.form.head(chunk=True), 0
        texts: dict[int, Streamed] = {}
        reports: dict[int, Report] = {}
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
                prompt = event.job.tokens
                texts[index] = Streamed(self.tokenizer, self.stop_token_ids, event.job.sampling.stop, prompt)
                reports[index] = Report(self.tokenizer, prompt)
                if self.form.chat:
                    yield chunk(index, "", None, None, begin=True)
            if isinstance(event, Token):
                text, logprobs = texts[index].add(event.token), None
                if self.form.alternatives is not None:
                    one = reports[index].add(event.token, event.logprob, event.alternatives)
                    logprobs = self._logprobs([replace(one, offset=texts[index].place(one.offset))])
                if text or logprobs:
                    yield chunk(index, text, logprobs, None)
            else:
                sampled += len(event.completion.tokens)
                yield chunk(index, texts[index].end(), None, event.completion.finish_reason)
        if include_usage:
            yield {**head, "choices": [], "usage": usage([job.tokens for job in self.jobs], sampled)}

    def prompt_logprobs(self, tokens: Sequence[int], scores: Sequence[TokenScore]) -> Json:
        """Those of a prompt, in the form of completions; the first token has none."""
        report = Report(self.tokenizer)
        return self._columns([report.add(token, of[0], of[2]) for token, of in zip(tokens, scores, strict=True)])

    def _logprobs(self, tokens: Iterable[Reported]) -> Json:
        if not self.form.chat:
            return self._columns([*tokens])
        content = [{**_token(one), "top_logprobs": [_token(other) for other in one.likely]} for one in tokens]
        return {"content": content, "refusal": None}

    def _columns(self, tokens: Sequence[Reported]) -> Json:
        return {
            "tokens": [one.text for one in tokens],
            "token_logprobs": [one.logprob for one in tokens],
            "top_logprobs": [None if one.logprob is None else _by_text(one) for one in tokens],
            "text_offset": [one.offset for one in tokens],
        }


def usage(prompts: Sequence[Sequence[int]], sampled: int) -> Json:
    """The numbers of tokens of a request."""
    count = sum(map(len, prompts))
    return {"prompt_tokens": count, "completion_tokens": sampled, "total_tokens": count + sampled}


def _by_text(token: Reported) -> dict[str, float | None]:
    """The likeliest tokens and the token itself by their texts, or where these are the same by their ids."""
    others = [one for one in token.likely if one.id != token.id]
    ids = {token.id: token.text}
    for one in others:
        ids[one.id] = one.text if one.text not in ids.values() else f"token_id:{one.id}"
    ordered = sorted([*others, token], key=lambda one: -(one.logprob or 0.0))
    return {ids[one.id]: one.logprob for one in ordered}


def _token(token: Written) -> Json:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.bytes)}


def cut(text: str, stops: Sequence[str]) -> str:
    """The text up to the first stop string."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(places)] if places else text
