"""The JSON of OpenAI's API: validated request bodies, and replies, whole or as a stream."""

import asyncio
import json
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Annotated, Any, Literal, Self, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, model_validator
from transformers import PreTrainedTokenizerBase

from posttrain.base.errors import DataError
from posttrain.config.schema.data import Variables
from posttrain.data.calls import tool_calls
from posttrain.data.codec import Codec
from posttrain.engines import Completion, text_of
from posttrain.engines.live import Ended, Event, Failed, Job, Token
from posttrain.engines.protocol import Sampling
from posttrain.serving.host import TokenScore
from posttrain.serving.texts import Report, ReportedToken, Streamed, TokenText, cut

MOST_COMPLETIONS, MOST_STOPS, MOST_ALTERNATIVES, MOST_PROMPTS = 64, 16, 20, 64
MOST_STOP_CHARACTERS = 1024
MOST_REWARDED = 4096
Json = dict[str, Any]
# Parameters that are ignored.
IDLE = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
# Unsupported parameters that affect tokens: accepted only with a value that changes nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_tokens"), (0, None)),
    **dict.fromkeys(("best_of", "repetition_penalty", "length_penalty"), (1, None)),
    **dict.fromkeys(("tools", "functions", "stop_token_ids", "bad_words"), ([], None)),
    **dict.fromkeys(("use_beam_search", "early_stopping", "include_stop_str_in_output", "echo"), (False, None)),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "add_generation_prompt"), (True, None)),
    "parallel_tool_calls": (True, False, None),
    "logit_bias": ({}, None),
    "suffix": ("", None),
    "response_format": ({"type": "text"}, None),
    "modalities": (["text"], None),
    "tool_choice": ("none", "auto", None),
    "function_call": ("none", None),
}
# Empty fields of a reply's `model_dump()`, which clients send back in messages.
EMPTY: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("refusal", "function_call", "audio", "tool_call_id", "name"), (None,)),
    **dict.fromkeys(("tool_calls", "annotations"), ([], None)),
    **dict.fromkeys(("reasoning_content", "reasoning"), ("", None)),
}

Text = Annotated[str, Field(min_length=1)]
Item = TypeVar("Item")
Listed = Annotated[list[Item], Field(fail_fast=True)]  # reports the first error instead of one for every item


# --- requests ---------------------------------------------------------------------------------------------------------


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_idle(cls, values: Any) -> Any:
        try:
            json.dumps(values, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("the text contains half of a surrogate pair, which is not a character") from None
        except RecursionError:
            raise ValueError("the body is nested too deeply") from None
        if not isinstance(values, dict):
            return values
        for name, neutral in NEUTRAL.items():
            if name in values and name not in cls.model_fields and values[name] not in neutral:
                raise ValueError(f"{name} is not supported: leave it out")
        idle = (IDLE | NEUTRAL.keys()) - cls.model_fields.keys()
        return {name: value for name, value in values.items() if name not in idle}


class Templated(Body):
    """A conversation for the chat template. `chat_template_kwargs`: additional template variables, as in vLLM."""

    chat_template_kwargs: Variables = {}

    @model_validator(mode="before")
    @classmethod
    def _no_variables(cls, values: Any) -> Any:
        null = isinstance(values, dict) and values.get("chat_template_kwargs", {}) is None
        return values | {"chat_template_kwargs": {}} if null else values


class StreamOptions(BaseModel):
    include_usage: bool = False
    include_obfuscation: bool = False


class Sampled(Body):
    """Parameters of chat and text completions. `top_k`, `min_p` and `ignore_eos` come from vLLM; OpenAI lacks them."""

    model: str = ""
    n: int = Field(1, ge=1, le=MOST_COMPLETIONS)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)  # -1 and 0: all
    min_p: float = Field(0.0, ge=0, le=1)
    ignore_eos: bool = False
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: Text | Annotated[list[Text], Field(max_length=MOST_STOPS)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_null(cls, values: Any) -> Any:
        """Treat `null` as the default, as OpenAI does."""
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None}

    def sampling(self, seed: int, limit: int, stop_token_ids: tuple[int, ...]) -> Sampling:
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            min_p=self.min_p,
            max_completion_length=limit,
            num_generations=self.n,
            stop_token_ids=() if self.ignore_eos else stop_token_ids,
            stop=self.stops,
            seed=seed,
        )

    @model_validator(mode="after")
    def _short_stops(self) -> Self:
        total = sum(map(len, self.stops))
        if total > MOST_STOP_CHARACTERS:
            raise ValueError(
                f"stop: the strings have {total:,} characters; a request takes up to {MOST_STOP_CHARACTERS:,} in total"
            )
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class Part(BaseModel):
    type: Literal["text"]
    text: str


class Schema(BaseModel):
    """The function that a tool is. Keys that are not checked here are for the chat template."""

    model_config = ConfigDict(extra="allow")
    name: Text
    description: str | None = None
    parameters: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _properties(self) -> Self:
        if not isinstance((self.parameters or {}).get("properties", {}), dict):
            raise ValueError(f"the properties of {self.name} must be an object")
        return self


class Tool(BaseModel):
    model_config = ConfigDict(extra="allow")
    type: Literal["function"] = "function"
    function: Schema


class Function(BaseModel):
    name: str
    arguments: str | dict[str, Any] | None = None

    @model_validator(mode="after")
    def _as_object(self) -> Self:
        if not isinstance(self.arguments, dict):
            try:
                self.arguments = json.loads(self.arguments or "{}")
            except (ValueError, RecursionError) as error:
                raise ValueError(f"the arguments of {self.name} are not JSON: {error}") from None
        if not isinstance(self.arguments, dict):
            raise ValueError(f"the arguments of {self.name} must be a JSON object")
        return self


class ToolCall(BaseModel):
    id: str | None = None
    type: Literal["function"] = "function"
    function: Function


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if name not in EMPTY or value not in EMPTY[name]}

    @model_validator(mode="after")
    def _with_content(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise ValueError("content: a message without tool_calls needs text")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls: only the assistant calls tools, not {self.role}")
        return self

    def turn(self) -> dict[str, Any]:
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        turn: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if self.reasoning_content is not None:
            turn["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            calls = [call.function for call in self.tool_calls]
            turn["tool_calls"] = tool_calls([(call.name, cast(dict[str, Any], call.arguments)) for call in calls])
        return turn


class RenderRequest(Templated):
    model: str = ""
    messages: list[Message] = Field(min_length=1)
    continue_final_message: bool = False  # continue the assistant's last message; not in OpenAI's API
    tools: list[Tool] = []
    tool_choice: Literal["auto", "none"] = "auto"

    @model_validator(mode="before")
    @classmethod
    def _no_tools(cls, values: Any) -> Any:
        unset = [name for name in ("tools", "tool_choice") if isinstance(values, dict) and values.get(name, 0) is None]
        return {name: value for name, value in values.items() if name not in unset} if unset else values

    @property
    def used_tools(self) -> list[Json]:
        return [tool.model_dump(exclude_none=True) for tool in self.tools] if self.tool_choice == "auto" else []

    def turns(self) -> list[dict[str, Any]]:
        """The messages for the chat template. A tool's result has the name of the call that it answers."""
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise DataError("continue_final_message needs the assistant's message at the end")
        if self.continue_final_message and self.used_tools:
            raise DataError("continue_final_message cannot be combined with tools")
        turns, names = [], dict[str, str]()
        for message in self.messages:
            names |= {call.id: call.function.name for call in message.tool_calls if call.id}
            turn = message.turn()
            if message.role == "tool" and (name := message.name or names.get(message.tool_call_id or "")):
                turn["name"] = name
            turns.append(turn)
        return turns


class ChatRequest(Sampled, RenderRequest):
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MOST_ALTERNATIVES)


class CompletionRequest(Sampled):
    prompt: str | Listed[str] | Listed[int] | Listed[Listed[int]]
    max_tokens: int = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=0, le=MOST_ALTERNATIVES)
    echo: bool = False

    def prompts(self) -> list[str | list[int]]:
        prompts: Any = self.prompt
        if not prompts or isinstance(prompts, str) or isinstance(prompts[0], int):
            return [prompts]
        if len(prompts) > MOST_PROMPTS:
            raise DataError(f"{len(prompts)} prompts; a request takes up to {MOST_PROMPTS}")
        return prompts


class ScoreRequest(Templated):
    """A prompt with a completion, or a conversation: the completion or the last message is scored token by token."""

    model: str = ""
    messages: list[Message] | None = Field(None, min_length=1)
    prompt: str = ""
    completion: str = ""
    top_logprobs: int = Field(0, ge=0, le=MOST_ALTERNATIVES)


class EpisodeReward(Body):
    """The end of a recorded episode. `columns`: what reward functions read of its row, such as the answer."""

    episode: Text
    reward: float | None = None
    columns: Json = {}


class RewardRequest(Body):
    """One or several conversations that end with the assistant's message, or prompts with completions."""

    model: str = ""
    messages: Listed[Message] | Listed[Listed[Message]] | None = Field(None, min_length=1)
    prompt: str | Listed[str] | None = None
    completion: str | Listed[str] | None = None
    truncated: bool | Listed[bool] = False  # whether a completion ended at its length limit


# --- replies ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Form:
    """The format of the objects that an endpoint returns."""

    chat: bool
    model: str
    alternatives: int | None  # most likely tokens to report at each position; None: no log-probabilities

    @property
    def kind(self) -> str:
        return "chat.completion" if self.chat else "text_completion"

    def head(self, chunk: bool = False) -> Json:
        name = "chat.completion.chunk" if self.chat and chunk else self.kind
        prefix = "chatcmpl" if self.chat else "cmpl"
        return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": name, "created": int(time.time()), "model": self.model}


class Replies:
    """Builds the replies to a request from engine events. `jobs`: one per prompt, in order, with `n` completions."""

    def __init__(
        self,
        form: Form,
        tokenizer: PreTrainedTokenizerBase,
        jobs: Sequence[Job],
        stop_token_ids: Sequence[int],
        codec: Codec | None = None,
    ):
        self.form, self.tokenizer, self.jobs, self.stop_token_ids = form, tokenizer, jobs, tuple(stop_token_ids)
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
            if isinstance(event, Token) and self.codec is not None:
                continue  # whether it belongs to a call is known at the end
            if self.codec is not None and isinstance(event, Ended):
                sampled += len(event.completion.tokens)
                yield {**head, "choices": [await asyncio.to_thread(self._in_one_chunk, index, event)], **extra}
            elif isinstance(event, Token):
                text, logprobs = texts[index].add(event.token), None
                if self.form.alternatives is not None:
                    token = reports[index].add(event.token, event.logprob, event.alternatives)
                    logprobs = self._logprobs([replace(token, offset=texts[index].clipped(token.offset))])
                if text or logprobs:
                    yield chunk(index, text, logprobs, None)
            else:
                sampled += len(event.completion.tokens)
                yield chunk(index, texts[index].end(), None, event.completion.finish_reason)
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
