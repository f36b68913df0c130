"""The requests of OpenAI's API as validated bodies."""

import json
from typing import Annotated, Any, Literal, Self, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, model_validator

from posttrain.base.errors import DataError
from posttrain.base.files import table_beside
from posttrain.config.schema.data import Variables
from posttrain.data.calls import tool_calls
from posttrain.engines.protocol import Sampling

MOST_COMPLETIONS, MOST_STOPS, MOST_ALTERNATIVES, MOST_PROMPTS = 64, 16, 20, 64
MOST_STOP_CHARACTERS = 1024
MOST_REWARDED = 4096
Json = dict[str, Any]
_KNOWN = table_beside(__file__, "wire.yaml")
IDLE, NEUTRAL, EMPTY = frozenset(_KNOWN["idle"]), _KNOWN["neutral"], _KNOWN["empty"]

Text = Annotated[str, Field(min_length=1)]
Item = TypeVar("Item")
Listed = Annotated[list[Item], Field(fail_fast=True)]  # reports the first error instead of one for every item


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _given(cls, values: Any) -> Any:
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
        # `null` is the default, as in OpenAI's API.
        return {name: value for name, value in values.items() if value is not None and name not in idle}


class Templated(Body):
    """A conversation for the chat template. `chat_template_kwargs`: additional template variables, as in vLLM."""

    chat_template_kwargs: Variables = {}


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
