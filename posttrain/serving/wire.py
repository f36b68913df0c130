"""The bodies of requests, checked. Unsupported parameters are refused, except those that do not affect tokens."""

import json
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from posttrain.base.errors import DataError
from posttrain.config.schema.data import Variables
from posttrain.engines.protocol import Sampling

MOST_COMPLETIONS, MOST_STOPS, MOST_ALTERNATIVES, MOST_PROMPTS = 64, 16, 20, 64
MOST_STOP_CHARACTERS = 1024
MOST_REWARDED = 4096
IDLE = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
# Parameters of OpenAI that would change the tokens: accepted only with a value that changes nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "logit_bias": ({}, None),
    "best_of": (1, None),
    "suffix": ("", None),
    "response_format": ({"type": "text"}, None),
    "tools": ([], None),
    "tool_choice": ("none", "auto", None),
    "functions": ([], None),
    "function_call": ("none", None),
    "modalities": (["text"], None),
    "parallel_tool_calls": (True, False, None),
    "repetition_penalty": (1, None),
    "length_penalty": (1, None),
    "min_tokens": (0, None),
    "stop_token_ids": ([], None),
    "bad_words": ([], None),
    "use_beam_search": (False, None),
    "early_stopping": (False, None),
    "include_stop_str_in_output": (False, None),
    "skip_special_tokens": (True, None),
    "spaces_between_special_tokens": (True, None),
    "add_generation_prompt": (True, None),
    "echo": (False, None),
}
# Fields of a message that a reply's own `model_dump()` has, without content.
EMPTY: dict[str, tuple[Any, ...]] = {
    "refusal": (None,),
    "tool_calls": ([], None),
    "function_call": (None,),
    "annotations": ([], None),
    "audio": (None,),
    "reasoning_content": ("", None),
    "reasoning": ("", None),
}

Text = Annotated[str, Field(min_length=1)]
Item = TypeVar("Item")
Listed = Annotated[list[Item], Field(fail_fast=True)]  # one error is enough, where every item may have one


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_idle(cls, values: Any) -> Any:
        try:
            json.dumps(values, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("the text has half of a surrogate pair, which is no character") from None
        except RecursionError:
            raise ValueError("the body is nested too deeply") from None
        if not isinstance(values, dict):
            return values
        for name, neutral in NEUTRAL.items():
            if name in values and name not in cls.model_fields and values[name] not in neutral:
                raise ValueError(f"{name} is not supported: leave it out")
        idle = (IDLE | NEUTRAL.keys()) - cls.model_fields.keys()
        return {name: value for name, value in values.items() if name not in idle}


class Written(Body):
    """A conversation to render; `chat_template_kwargs` are more variables of the template, as in vLLM."""

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
    """Parameters of both kinds of completions; `top_k`, `min_p` and `ignore_eos` are vLLM's, not OpenAI's."""

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
        """`null` is the default, as for OpenAI."""
        return (
            {name: value for name, value in values.items() if value is not None} if isinstance(values, dict) else values
        )

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
                f"stop: the strings have {total:,} characters; a request takes up to {MOST_STOP_CHARACTERS:,}"
            )
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class Part(BaseModel):
    type: Literal["text"]
    text: str


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid")
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if name not in EMPTY or value not in EMPTY[name]}

    def turn(self) -> dict[str, str]:
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class RenderRequest(Written):
    model: str = ""
    messages: list[Message] = Field(min_length=1)
    continue_final_message: bool = False  # ours: the last message, the assistant's, is continued

    def turns(self) -> list[dict[str, str]]:
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise DataError("continue_final_message continues the assistant's last message, and the last is another's")
        return [message.turn() for message in self.messages]


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
        given: Any = self.prompt
        if not given or isinstance(given, str) or isinstance(given[0], int):
            return [given]
        if len(given) > MOST_PROMPTS:
            raise DataError(f"{len(given)} prompts; a request takes up to {MOST_PROMPTS}")
        return given


class ScoreRequest(Written):
    """A text whose completion, or a conversation whose last message is scored, token by token."""

    model: str = ""
    messages: list[Message] | None = Field(None, min_length=1)
    prompt: str = ""
    completion: str = ""
    top_logprobs: int = Field(0, ge=0, le=MOST_ALTERNATIVES)


class RewardRequest(Body):
    """Conversations that end with the assistant's message, or prompts with completions; one or several."""

    model: str = ""
    messages: Listed[Message] | Listed[Listed[Message]] | None = Field(None, min_length=1)
    prompt: str | Listed[str] | None = None
    completion: str | Listed[str] | None = None
    truncated: bool | Listed[bool] = False  # whether a completion ended at its length limit
