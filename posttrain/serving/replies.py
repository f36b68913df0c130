"""The replies of OpenAI's API, whole or as a stream."""

import asyncio
import json
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from posttrain.data.codec import Codec
from posttrain.engines import Completion, text_of
from posttrain.engines.live import Ended, Event, Failed, Job
from posttrain.serving.host import Policy, TokenScore
from posttrain.serving.texts import Report, ReportedToken, Streamed, TokenText, cut
from posttrain.serving.wire import Json


@dataclass(frozen=True, slots=True)
class Form:
    """The format of the objects that an endpoint returns."""

    chat: bool
    model: str
    alternatives: int | None  # most likely tokens to report at each position; None: no log-probabilities

    def head(self, chunk: bool = False) -> Json:
        name, prefix = "text_completion", "cmpl"
        if self.chat:
            name, prefix = "chat.completion.chunk" if chunk else "chat.completion", "chatcmpl"
        return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": name, "created": int(time.time()), "model": self.model}


class Replies:
    """Builds the replies to a request from engine events. `jobs`: one per prompt, in order, with `n` completions."""

    def __init__(self, form: Form, policy: Policy, jobs: Sequence[Job], codec: Codec | None = None):
        self.form, self.jobs, self.tokenizer, self.stop_token_ids = form, jobs, policy.tokenizer, policy.stops
        self.codec = codec  # reads tool calls; None: there are no tools
        *starts, self.total = accumulate((job.sampling.num_generations for job in jobs), initial=0)
        self.first = dict(zip(jobs, starts, strict=True))

    async def whole(self, events: AsyncIterator[Event]) -> Json:
        """The object with all completions. If a job failed, raises its error."""
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
            logprobs = self._logprobs(report.add(*entry, last=index == last) for index, entry in entries)
            if not self.form.chat:
                logprobs["text_offset"] = [min(offset, len(text)) for offset in logprobs["text_offset"]]
        body: Json = {"text": text}
        reason: str = completion.finish_reason
        if self.form.chat:
            body = {"message": {"role": "assistant", "content": text, "refusal": None}}
        if self.codec is not None:
            body["message"] |= (parsed := self._parsed(completion, ended.job.sampling.stop))
            reason = "tool_calls" if "tool_calls" in parsed and reason == "stop" else reason
        return {"index": index, **body, "logprobs": logprobs, "finish_reason": reason}

    def _parsed(self, completion: Completion, stops: Sequence[str]) -> Json:
        """A reply's content, reasoning and tool calls."""
        assert self.codec is not None
        reply = self.codec.parse(completion.tokens)
        message: Json = {"content": cut(reply.content, stops) or (None if reply.calls else "")}
        if reply.reasoning is not None:
            message["reasoning_content"] = reply.reasoning
        if reply.calls:
            message["tool_calls"] = [
                {
                    "id": secrets.token_hex(5)[:9],  # some templates refuse longer ids
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
                }
                for call in reply.calls
            ]
        return message

    async def chunks(self, events: AsyncIterator[Event], include_usage: bool) -> AsyncIterator[Json]:
        """Yield the objects of a stream. If a job failed, raises its error."""
        head, sampled = self.form.head(chunk=True), 0
        texts: dict[int, Streamed] = {}
        reports: dict[int, Report] = {}
        extra = {"usage": None} if include_usage else {}

        def chunk(index: int, text: str, logprobs: Json | None, reason: str | None, begin: bool = False) -> Json:
            body: Json = {"text": text}
            if self.form.chat:
                role: Json = {"role": "assistant"} if begin else {}
                body = {"delta": role | ({"content": text} if text or begin else {})}
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
            if isinstance(event, Ended):
                sampled += len(event.completion.tokens)
                if self.codec is None:
                    yield chunk(index, texts[index].end(), None, event.completion.finish_reason)
                else:
                    yield {**head, "choices": [await asyncio.to_thread(self._in_one_chunk, index, event)], **extra}
            elif self.codec is None:  # otherwise, whether a token belongs to a call is known at the end
                text, logprobs = texts[index].add(event.token), None
                if self.form.alternatives is not None:
                    token = reports[index].add(event.token, event.logprob, event.alternatives)
                    logprobs = self._logprobs([replace(token, offset=texts[index].clipped(token.offset))])
                if text or logprobs:
                    yield chunk(index, text, logprobs, None)
        if include_usage:
            yield {**head, "choices": [], "usage": usage([job.tokens for job in self.jobs], sampled)}

    def _in_one_chunk(self, index: int, ended: Ended) -> Json:
        """A whole reply as the choice of a chunk."""
        choice = self._choice(index, ended)
        delta = choice.pop("message")
        delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(delta.get("tool_calls", []))]
        return {**choice, "delta": {name: value for name, value in delta.items() if name != "tool_calls" or value}}

    def prompt_logprobs(self, tokens: Sequence[int], scores: Sequence[TokenScore]) -> Json:
        """A prompt's log-probabilities in the format of text completions; the first token has none."""
        report = Report(self.tokenizer)
        pairs = zip(tokens, scores, strict=True)
        return _columns([report.add(token, logprob, likely) for token, (logprob, _, likely) in pairs])

    def _logprobs(self, tokens: Iterable[ReportedToken]) -> Json:
        if not self.form.chat:
            return _columns([*tokens])
        content = [{**_token(token), "top_logprobs": [_token(other) for other in token.likely]} for token in tokens]
        return {"content": content, "refusal": None}


def _columns(tokens: Sequence[ReportedToken]) -> Json:
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [None if token.logprob is None else _by_text(token) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def usage(prompts: Sequence[Sequence[int]], sampled: int) -> Json:
    """The token counts of a request."""
    count = sum(map(len, prompts))
    return {"prompt_tokens": count, "completion_tokens": sampled, "total_tokens": count + sampled}


def _by_text(token: ReportedToken) -> dict[str, float | None]:
    """The log-probabilities of the most likely tokens and of the token itself, by text; by id if texts are equal."""
    others = [other for other in token.likely if other.id != token.id]
    names = {token.id: token.text}
    for other in others:
        names[other.id] = other.text if other.text not in names.values() else f"token_id:{other.id}"
    ordered = sorted([*others, token], key=lambda entry: -(entry.logprob or 0.0))
    return {names[entry.id]: entry.logprob for entry in ordered}


def _token(token: TokenText) -> Json:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.bytes)}
