"""Renders conversations with a chat template, in its own process with limits on time, memory and output."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from transformers import PreTrainedTokenizerBase

from posttrain.errors import DataError
from posttrain.helpers import HelperPool

SECONDS = 2.0  # for one conversation
STARTUP_SECONDS = 120.0

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RenderRequest:
    """A conversation to render. `generate` adds the opening of the next assistant turn."""

    messages: Sequence[Message]
    tools: list[Any] | None = None
    generate: bool = False
    spans: bool = False


@dataclass(frozen=True, slots=True)
class Rendered:
    """The text, with the character spans of `{% generation %}` blocks; or the template's error."""

    text: str
    spans: tuple[tuple[int, int], ...] = ()
    error: str | None = None


class Process:
    """The process of posttrain/data/render_worker.py: one line per job, one line per answer."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("render_worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        self._answers: queue.Queue[str] = queue.Queue()
        self._awaited = 1
        threading.Thread(target=self._collect, daemon=True).start()
        try:
            self._answer(STARTUP_SECONDS)
        except BaseException:
            self.end()
            raise

    @property
    def is_free(self) -> bool:
        """Whether it is alive and idle."""
        return self._process.poll() is None and not self._awaited

    def ask(self, lines: Sequence[str]) -> list[str]:
        """The answer to each line. Raises DataError when one takes too long or the process has ended."""
        self._awaited += len(lines)
        writer = threading.Thread(target=self._send, args=(lines,), daemon=True)
        writer.start()
        try:
            return [self._answer(SECONDS) for _ in lines]
        except BaseException:
            self._process.kill()
            raise
        finally:
            writer.join()

    def end(self) -> None:
        """Kill it. May be called again."""
        self._process.kill()
        self._process.wait()
        with suppress(OSError):  # unread input is discarded
            _pipe(self._process.stdin).close()
        _pipe(self._process.stdout).close()

    def _answer(self, seconds: float) -> str:
        try:
            line = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise DataError(
                f"the chat template takes more than {seconds:g} seconds for one conversation: "
                "it is damaged or hostile; choose another with data.template"
            ) from None
        if not line:
            raise DataError(
                f"the process that renders the chat template has ended with status {self._process.wait()}; "
                "choose another template with data.template"
            )
        self._awaited -= 1
        return line

    def _send(self, lines: Sequence[str]) -> None:
        stdin = _pipe(self._process.stdin)
        try:
            for line in lines:
                stdin.write(line)
            stdin.flush()
        except BrokenPipeError:
            return  # the process has ended, which the reader of its answers reports

    def _collect(self) -> None:
        for line in _pipe(self._process.stdout):
            self._answers.put(line)
        self._answers.put("")


class Renderer:
    """Renders with one tokenizer's chat template; made by `rendering()`."""

    def __init__(self, process: Process, tokenizer: PreTrainedTokenizerBase):
        self._process = process
        self._tokenizer = tokenizer

    def render(self, jobs: Sequence[RenderRequest]) -> list[Rendered]:
        """Render each conversation as `apply_chat_template(tokenize=False)` would.

        Raises DataError when the template takes longer than two seconds for one of them or ends its process.
        """
        special_tokens = self._tokenizer.special_tokens_map
        answers = map(json.loads, self._process.ask([self._line(job, special_tokens) for job in jobs]))
        return [
            Rendered("", error=answer["error"])
            if "error" in answer
            else Rendered(answer["text"], tuple((start, stop) for start, stop in answer["spans"]))
            for answer in answers
        ]

    def _line(self, job: RenderRequest, special_tokens: dict[str, Any]) -> str:
        # as in apply_chat_template: a key whose value is None is omitted
        messages = [{key: value for key, value in m.items() if value is not None} for m in job.messages]
        asked = {
            "messages": messages,
            "tools": job.tools,
            "template": self._tokenizer.get_chat_template(None, job.tools),
            "generate": job.generate,
            "spans": job.spans,
            "special_tokens": special_tokens,
        }
        return json.dumps(asked) + "\n"


_idle: HelperPool[Process] = HelperPool()


@contextmanager
def rendering(tokenizer: PreTrainedTokenizerBase) -> Iterator[Renderer]:
    """A renderer with the tokenizer's chat template."""
    process = _idle.take(None) or Process()
    try:
        yield Renderer(process, tokenizer)
    except BaseException:
        process.end()
        raise
    _idle.put(None, process)


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None, "the process was started without a pipe"
    return stream
