"""A conversation with a served model: asked, answered, taken back, changed; and several replies at once."""

import queue
import threading
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.base.errors import DataError
from posttrain.serving.client import Client

SETTINGS: dict[str, type[int] | type[float]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "max_tokens": int,
    "seed": int,
}


@dataclass
class Talk:
    """`settings` are those of a request. The system prompt, if there is one, is no turn."""

    client: Client
    settings: dict[str, Any] = field(default_factory=dict)
    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    @property
    def messages(self) -> list[dict[str, str]]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def ask(self, text: str) -> Iterator[str]:
        """The pieces of the reply to `text`. A reply that is not read to its end is kept as far as it was read."""
        self.turns.append({"role": "user", "content": text})
        yield from self._reply()

    def again(self) -> Iterator[str]:
        """Another reply to the last question. Raises DataError if there is none."""
        self._drop("assistant")
        if not self.turns:
            raise DataError("there is no question yet")
        yield from self._reply()

    def take_back(self) -> None:
        """Forget the last question with its reply."""
        self._drop("assistant")
        self._drop("user")

    def change(self, name: str, value: str) -> None:
        """Change a setting; an empty value is the default. Raises DataError for a wrong one."""
        if name not in SETTINGS:
            raise DataError(f"there is no setting {name}; there are {', '.join(SETTINGS)}")
        self.settings.pop(name, None)
        if value:
            try:
                self.settings[name] = SETTINGS[name](value)
            except ValueError:
                raise DataError(f"{name} is {value!r}; give a number") from None

    def prompt(self) -> str:
        """What the model reads before its next reply."""
        return self.client.rendered(self.messages or [{"role": "user", "content": ""}])

    def _reply(self) -> Iterator[str]:
        parts: list[str] = []
        try:
            for part in self.client.chat(self.messages, **self.settings):
                parts.append(part)
                yield part
        finally:
            if parts:
                self.turns.append({"role": "assistant", "content": "".join(parts)})
            else:
                self._drop("user")  # a question that was not answered: it can be asked again

    def _drop(self, role: str) -> None:
        if self.turns and self.turns[-1]["role"] == role:
            del self.turns[-1]


def together(replies: Sequence[Iterator[str]]) -> Generator[tuple[int, str]]:
    """The pieces of all replies with the number of theirs. Raises the first error of one, when the others are done.

    Closing this closes all replies.
    """
    found: queue.SimpleQueue[tuple[int, str | BaseException | None]] = queue.SimpleQueue()
    stop = threading.Event()

    def read(number: int, reply: Iterator[str]) -> None:
        error = None
        try:
            for piece in reply:
                found.put((number, piece))
                if stop.is_set():
                    break
        except BaseException as raised:
            error = raised
        finally:
            close = getattr(reply, "close", None)
            if close is not None:
                close()
            found.put((number, error))

    threads = [threading.Thread(target=read, args=one, daemon=True) for one in enumerate(replies)]
    for thread in threads:
        thread.start()
    left, errors = len(threads), []
    try:
        while left:
            number, piece = found.get()
            if isinstance(piece, str):
                yield number, piece
                continue
            left -= 1
            errors += [piece] if piece is not None else []
    finally:
        stop.set()
    if errors:
        raise errors[0]
