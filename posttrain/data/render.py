"""Renders conversations with a chat template, in a process of its own with limits on time, memory and output."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from transformers import PreTrainedTokenizerBase

from posttrain.errors import DataError

SECONDS = 2.0  # for one conversation
STARTUP_SECONDS = 120.0

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Job:
    """A conversation to render. `generate` adds the opening of the next assistant turn."""

    messages: Sequence[Message]
    tools: list[Any] | None = None
    generate: bool = False
    spans: bool = False


@dataclass(frozen=True, slots=True)
class Rendered:
    """The text, with the character spans of `{% generation %}` blocks; or why the template refused."""

    text: str
    spans: tuple[tuple[int, int], ...] = ()
    error: str | None = None


class Renderer:
    """A running template process for one tokenizer. `rendering()` makes and ends it."""

    def __init__(self, process: subprocess.Popen[str], tokenizer: PreTrainedTokenizerBase):
        self.process = process
        self.tokenizer = tokenizer
        self.answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._collect, daemon=True).start()
        self._answer(STARTUP_SECONDS)

    def render(self, jobs: Sequence[Job]) -> list[Rendered]:
        """Render each conversation as `apply_chat_template(tokenize=False)` would.

        Raises DataError when the template takes longer than two seconds for one of them or ends its process.
        """
        if not jobs:
            return []
        writer = threading.Thread(target=self._send, args=(jobs,), daemon=True)
        writer.start()
        answers = [json.loads(self._answer(SECONDS)) for _ in jobs]
        writer.join()
        return [
            Rendered("", error=answer["error"])
            if "error" in answer
            else Rendered(answer["text"], tuple((start, stop) for start, stop in answer["spans"]))
            for answer in answers
        ]

    def _send(self, jobs: Sequence[Job]) -> None:
        special_tokens = self.tokenizer.special_tokens_map
        stdin = _pipe(self.process.stdin)
        try:
            for job in jobs:
                # as apply_chat_template does: a key whose value is None is left out
                messages = [{key: value for key, value in m.items() if value is not None} for m in job.messages]
                stdin.write(
                    json.dumps(
                        {
                            "messages": messages,
                            "tools": job.tools,
                            "template": self.tokenizer.get_chat_template(None, job.tools),
                            "generate": job.generate,
                            "spans": job.spans,
                            "special_tokens": special_tokens,
                        }
                    )
                    + "\n"
                )
            stdin.flush()
        except BrokenPipeError:
            return  # the process has ended, which the reader of its answers reports

    def _collect(self) -> None:
        for line in _pipe(self.process.stdout):
            self.answers.put(line)
        self.answers.put("")

    def _answer(self, seconds: float) -> str:
        try:
            line = self.answers.get(timeout=seconds)
        except queue.Empty:
            self.process.kill()
            raise DataError(
                f"the chat template takes more than {seconds:g} seconds for one conversation: "
                "it is damaged or hostile; choose another with data.template"
            ) from None
        if not line:
            raise DataError(
                f"the process that renders the chat template has ended with status {self.process.wait()}; "
                "choose another template with data.template"
            )
        return line


@contextmanager
def rendering(tokenizer: PreTrainedTokenizerBase) -> Iterator[Renderer]:
    """A renderer with the tokenizer's chat template, ended on leaving."""
    process = subprocess.Popen(
        [sys.executable, "-P", str(Path(__file__).with_name("render_worker.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )
    try:
        yield Renderer(process, tokenizer)
    finally:
        process.kill()
        process.wait()
        _pipe(process.stdin).close()
        _pipe(process.stdout).close()


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None, "the process was started without a pipe"
    return stream
