"""The settings of a language model that judges completions behind an OpenAI-compatible API. Does not import torch."""

import re
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field

from posttrain.config.schema.base import Float, Folder, Int, Positive, Problems, Settings, Text

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
OWN_FIELDS = frozenset({"model", "messages", "stream", "n"})  # fields of a request that only the client sets


class JudgeSettings(Settings):
    """The address of a judge, and the settings of its requests."""

    base_url: Text = Field(description="Address of the server, such as https://api.openai.com/v1.")
    model: Text = Field(description="Name of the model on that server.")
    api_key_env: Text | None = Field(
        default=None, description="Name of the environment variable that holds the API key; null: no key is sent."
    )
    temperature: Annotated[Float, Field(ge=0)] = Field(default=0.0, description="Temperature of the judge.")
    max_tokens: Positive = Field(default=1024, description="Maximum number of tokens of a reply.")
    parameters: dict[Text, Any] = Field(
        default={}, description="Further fields of a request; null removes a field, e.g. {max_tokens: null}."
    )
    timeout: Annotated[Float, Field(gt=0, le=3600)] = Field(
        default=60.0, description="Timeout of a request in seconds, and the longest Retry-After that is obeyed."
    )
    retries: Annotated[Int, Field(ge=0, le=20)] = Field(
        default=4, description="Number of retries after a failure, with growing pauses."
    )
    concurrency: Annotated[Int, Field(ge=1, le=256)] = Field(
        default=8, description="Maximum number of concurrent requests."
    )
    requests_per_minute: Positive | None = Field(
        default=None, description="Maximum requests per minute; null: no limit."
    )
    tokens_per_minute: Positive | None = Field(
        default=None, description="Maximum tokens per minute, of prompts and replies; null: no limit."
    )
    cache: Folder | None = Field(
        default=None, description="Folder of stored replies; null: judge/ in the cache folder."
    )

    def check(self, problems: Problems) -> None:
        if not _is_address(self.base_url):
            problems.add(
                "base_url", "must be http://HOST[:PORT][/v1] or https://…, without user, password, query or fragment"
            )
        # The value is not shown: it may be the key itself.
        if self.api_key_env is not None and VARIABLE.fullmatch(self.api_key_env) is None:
            problems.add(
                "api_key_env", "must be the name of an environment variable, such as OPENAI_API_KEY, not the key"
            )
        if taken := sorted(OWN_FIELDS & self.parameters.keys()):
            problems.add("parameters", f"must not have {', '.join(taken)}, which the client sets")


class ScoreSettings(JudgeSettings):
    """A judge that scores one completion at a time."""

    prompt: Text | None = Field(
        default=None, description="Question to the judge, with {prompt}, {completion}, {answer}; null: built-in."
    )
    system_prompt: Text | None = Field(default=None, description="System message to the judge; null: none.")
    read: Literal["rating", "number", "json", "regex"] = Field(
        default="rating",
        description="Format of the score in a reply; rating: [[7]]; number: the last number; json: a field.",
    )
    field: Text | None = Field(default=None, description="Field of the JSON reply, with read: json; null: score.")
    pattern: Text | None = Field(
        default=None, description="Regular expression with one group, with read: regex; its last match counts."
    )
    min_score: Float = Field(default=1.0, description="Lowest score; a reply with a lower one gives no verdict.")
    max_score: Float = Field(default=10.0, description="Highest score; a reply with a higher one gives no verdict.")
    scale: bool = Field(default=True, description="Whether to map min_score to 0 and max_score to 1.")

    def check(self, problems: Problems) -> None:
        super().check(problems)
        if self.prompt is not None and "{completion}" not in self.prompt:
            problems.add("prompt", "must contain {completion}")
        if self.prompt is None and self.read != "rating":
            problems.add("prompt", f"is missing: the built-in prompt asks for [[rating]], but read is {self.read}")
        if self.min_score >= self.max_score:
            problems.add("max_score", f"must be above min_score, {self.min_score:g}")
        if self.field is not None and self.read != "json":
            problems.add("field", f"needs read: json, but read is {self.read}")
        if self.pattern is not None:
            if self.read != "regex":
                problems.add("pattern", f"needs read: regex, but read is {self.read}")
            if _groups(self.pattern) != 1:
                problems.add("pattern", "must be a regular expression with one group")
        if self.pattern is None and self.read == "regex":
            problems.add("pattern", "is missing; read: regex needs it")


def _groups(pattern: str) -> int:
    """Number of groups in a regular expression; -1 if the expression is invalid."""
    try:
        return re.compile(pattern).groups
    except re.error:
        return -1


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises ValueError if the port is not a number
    except ValueError:
        return False
    clean = url.isprintable() and " " not in url and not parts.query + parts.fragment and "@" not in parts.netloc
    return clean and parts.scheme in ("http", "https") and bool(parts.hostname)
