"""Renders conversations with a chat template, in its own process with limits on time, memory and output."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from posttrain.base.child import Child, HelperPool
from posttrain.base.errors import DataError

SECONDS = 2.0  # time limit of one conversation
STARTUP_SECONDS = 120.0
FAILS = "the chat template fails: "  # prefix of a template's own error

Message = dict[str, Any]
PREFILL = "prefill"  # key of an assistant message at the end of a prompt, which the reply continues
WEIGHT = "loss weight"  # key of a message's loss weight if it is not 1: a pair of the row's key and the value
# Arguments of a call that show whether a template takes an object or concatenates a string.
PROBE = {"posttrain_probe": "value"}
PROBE_TEXT = json.dumps(PROBE)
PROBED = 10  # conversations with calls that are probed, among those rendered together


class Arguments(dict[str, Any]):
    """The arguments of a tool call that the row has as a JSON string, together with this string."""

    def __init__(self, value: dict[str, Any], text: str):
        super().__init__(value)
        self.text = text


@dataclass(frozen=True, slots=True)
class RenderRequest:
    """A conversation to render. `generate` adds the opening of the next assistant turn; `continued` leaves the last
    message open, like transformers' `continue_final_message`; `variables` are additional template variables."""

    messages: Sequence[Message]
    tools: list[Any] | None = None
    generate: bool = False
    spans: bool = False
    continued: bool = False
    variables: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Rendered:
    """The rendered text with the character spans of `{% generation %}` blocks, or the template's error."""

    text: str
    spans: tuple[tuple[int, int], ...] = ()
    error: str | None = None


class Process(Child):
    """The process that runs posttrain/data/render_worker.py: it reads one line per job and answers with one line."""

    is_free = Child.is_alive  # a process that still owes an answer has been ended

    def __init__(self) -> None:
        super().__init__([sys.executable, "-P", str(Path(__file__).with_name("render_worker.py"))], errors=False)
        self._answers(1, STARTUP_SECONDS)

    def exchange(self, lines: Sequence[bytes]) -> list[bytes]:
        """The answer to each line. Raises DataError if an answer takes too long or the process has ended."""
        self.send(lines)
        return self._answers(len(lines), SECONDS)

    def _answers(self, count: int, seconds: float) -> list[bytes]:
        try:
            return [self.line(seconds) for _ in range(count)]
        except TimeoutError:
            raise DataError(
                f"the chat template takes more than {seconds:g} seconds for one conversation: "
                "it is damaged or hostile; choose another with data.template"
            ) from None
        except EOFError:
            raise DataError(
                f"the process that renders the chat template has ended with status {self.status(seconds)}; "
                "choose another template with data.template"
            ) from None


class Renderer:
    """Renders conversations with one tokenizer's chat template; created by `rendering()`."""

    def __init__(self, process: Process, tokenizer: PreTrainedTokenizerBase, behavior_version: int, date: str | None):
        self._process = process
        self._tokenizer, self._date = tokenizer, date
        self._joins_arguments = None if behavior_version > 1 else False  # None: not known yet

    def render(self, jobs: Sequence[RenderRequest]) -> list[Rendered]:
        """Render each conversation as `apply_chat_template(tokenize=False)` would.

        Arguments of tool calls are passed as objects, or as JSON strings if the template concatenates them with text.
        Raises DataError if the template takes longer than two seconds for a conversation or ends its process.
        """
        calling = (job for job in jobs if any(message.get("tool_calls") for message in job.messages))
        for job in islice(calling, PROBED):
            if self._joins_arguments is None:
                self._joins_arguments = self._probe(job)
        if self._joins_arguments:
            jobs = [_with_arguments(job) for job in jobs]
        return self._render(jobs)

    def _probe(self, job: RenderRequest) -> bool | None:
        """Whether the template concatenates call arguments as strings; None if this conversation does not show it."""
        as_object, as_text = self._render([_with_arguments(job, probe) for probe in (PROBE, PROBE_TEXT)])
        if as_object.error is None and str(PROBE) not in as_object.text:
            return False if next(iter(PROBE)) in as_object.text else None
        return True if PROBE_TEXT in as_text.text else None

    def _render(self, jobs: Sequence[RenderRequest]) -> list[Rendered]:
        special_tokens = self._tokenizer.special_tokens_map
        answers = map(json.loads, self._process.exchange([self._line(job, special_tokens) for job in jobs]))
        return [
            Rendered(answer.get("text", ""), tuple(map(tuple, answer.get("spans", ()))), answer.get("error"))
            for answer in answers
        ]

    def _line(self, job: RenderRequest, special_tokens: dict[str, Any]) -> bytes:
        try:
            template = self._tokenizer.get_chat_template(None, job.tools)
        except ValueError as error:  # there are several templates, none of them the default
            raise DataError(f"the tokenizer's chat template cannot be chosen: {error}") from error
        # as in apply_chat_template: a key whose value is None is omitted
        messages = [{key: v for key, v in m.items() if v is not None} for m in without(job.messages, PREFILL, WEIGHT)]
        arguments = {
            **special_tokens,
            **(job.variables or {}),
            "conversations": [messages],
            "tools": job.tools,
            "chat_template": template,
            "add_generation_prompt": job.generate,
            "return_assistant_tokens_mask": job.spans,
            "continue_final_message": job.continued,
        }
        return json.dumps([arguments, self._date]).encode() + b"\n"


def without(messages: Sequence[Message], *keys: str) -> list[Message]:
    """The messages without these keys."""
    return [{key: value for key, value in message.items() if key not in keys} for message in messages]


def _with_arguments(job: RenderRequest, probe: Any = None) -> RenderRequest:
    """The request with the arguments of every tool call as strings, or replaced by `probe`."""

    def changed(call: Any) -> Any:
        if not isinstance(call, dict):
            return call
        if call.get("function"):
            return {**call, "function": changed(call["function"])}
        given = call.get("arguments")
        if not probe and not isinstance(given, str):
            given = given.text if isinstance(given, Arguments) else json.dumps(given, ensure_ascii=False)
        return {**call, "arguments": probe or given}

    messages = [
        {**m, "tool_calls": [*map(changed, m["tool_calls"])]} if isinstance(m.get("tool_calls"), list) else m
        for m in job.messages
    ]
    return replace(job, messages=messages)


_idle: HelperPool[Process] = HelperPool()


@contextmanager
def rendering(
    tokenizer: PreTrainedTokenizerBase,
    behavior_version: int = 2,
    idle_seconds: float | None = None,
    date: str | None = None,
) -> Iterator[Renderer]:
    """A renderer for the tokenizer's chat template, whose process the next renderer reuses. `strftime_now` formats
    `date` (YYYY-MM-DD), by default the current time; `behavior_version` 1 renders tool calls as they are."""
    process = _idle.take(None) or Process()
    try:
        yield Renderer(process, tokenizer, behavior_version, date)
    except BaseException:
        process.end()
        raise
    _idle.put(None, process, idle_seconds)


def rendered(
    tokenizer: PreTrainedTokenizerBase, jobs: Sequence[RenderRequest], idle_seconds: float | None = None
) -> list[str]:
    """The text of each conversation. Raises DataError if the template rejects one of them."""
    with rendering(tokenizer, idle_seconds=idle_seconds) as renderer:
        done = renderer.render(jobs)
    for result in done:
        if result.error:  # an error that the template raised, for example because roles do not alternate
            raise DataError(f"the chat template rejects the messages: {result.error.removeprefix(FAILS)}")
    return [result.text for result in done]
