"""The settings of a language model that judges completions behind an OpenAI-compatible API. Does not import torch."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field

from posttrain.config.schema.base import Conflicts, Settings, setting
from posttrain.config.schema.types import Float, Folder, Int, NonNegative, Positive, Text, address

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
OWN_FIELDS = frozenset({"model", "messages", "stream", "n"})  # fields of a request that only the client sets


class JudgeSettings(Settings):
    """The address of a judge, and the settings of its requests."""

    base_url: Text = Field(description="Address of the server, such as https://api.openai.com/v1.")
    model: Text = Field(description="Name of the model on that server.")
    api_key_env: Text | None = setting(
        None, "Name of the environment variable that holds the API key; null: no key is sent."
    )
    temperature: NonNegative = setting(0.0, "Temperature of the judge.")
    max_tokens: Positive = setting(1024, "Maximum number of tokens of a reply.")
    parameters: dict[Text, Any] = setting(
        {}, "Further fields of a request; null removes a field, e.g. {max_tokens: null}."
    )
    timeout: Annotated[Float, Field(gt=0, le=3600)] = setting(
        60.0, "Timeout of a request in seconds, and the longest Retry-After that is obeyed."
    )
    retries: Annotated[Int, Field(ge=0, le=20)] = setting(4, "Number of retries after a failure, with growing pauses.")
    concurrency: Annotated[Int, Field(ge=1, le=256)] = setting(8, "Maximum number of concurrent requests.")
    requests_per_minute: Positive | None = setting(None, "Maximum requests per minute; null: no limit.")
    tokens_per_minute: Positive | None = setting(
        None, "Maximum tokens per minute, of prompts and replies; null: no limit."
    )
    cache: Folder | None = setting(None, "Folder of stored replies; null: judge/ in the cache folder.")

    def check(self) -> Conflicts:
        parts = address(self.base_url)
        if parts is None or "@" in parts.netloc or " " in self.base_url or not self.base_url.isprintable():
            yield "base_url", "must be http://HOST[:PORT][/v1] or https://…, without user, password, query or fragment"
        # The value is not shown: it may be the key itself.
        if self.api_key_env is not None and VARIABLE.fullmatch(self.api_key_env) is None:
            yield "api_key_env", "must be the name of an environment variable, such as OPENAI_API_KEY, not the key"
        if taken := sorted(OWN_FIELDS & self.parameters.keys()):
            yield "parameters", f"must not have {', '.join(taken)}, which the client sets"


class ScoreSettings(JudgeSettings):
    """A judge that scores one completion at a time."""

    prompt: Text | None = setting(None, "Question to the judge, with {prompt}, {completion}, {answer}; null: built-in.")
    system_prompt: Text | None = setting(None, "System message to the judge; null: none.")
    read: Literal["rating", "number", "json", "regex"] = setting(
        "rating", "Format of the score in a reply; rating: [[7]]; number: the last number; json: a field."
    )
    field: Text | None = setting(None, "Field of the JSON reply, with read: json; null: score.")
    pattern: Text | None = setting(None, "Regular expression with one group, with read: regex; its last match counts.")
    min_score: Float = setting(1.0, "Lowest score; a reply with a lower one gives no verdict.")
    max_score: Float = setting(10.0, "Highest score; a reply with a higher one gives no verdict.")
    scale: bool = setting(True, "Whether to map min_score to 0 and max_score to 1.")

    def check(self) -> Conflicts:
        yield from super().check()
        if self.prompt is not None and "{completion}" not in self.prompt:
            yield "prompt", "must contain {completion}"
        if self.prompt is None and self.read != "rating":
            yield "prompt", f"is missing: the built-in prompt asks for [[rating]], but read is {self.read}"
        if self.min_score >= self.max_score:
            yield "max_score", f"must be above min_score, {self.min_score:g}"
        if self.field is not None and self.read != "json":
            yield "field", f"needs read: json, but read is {self.read}"
        if self.pattern is not None:
            if self.read != "regex":
                yield "pattern", f"needs read: regex, but read is {self.read}"
            try:
                has_one = re.compile(self.pattern).groups == 1
            except re.error:
                has_one = False
            if not has_one:
                yield "pattern", "must be a regular expression with one group"
        if self.pattern is None and self.read == "regex":
            yield "pattern", "is missing; read: regex needs it"
