"""A conversation with a served model: asked, answered, taken back, changed."""

from collections.abc import Iterator
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
