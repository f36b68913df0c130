"""Environments, in which a model acts over several turns by calling tools or sending messages.

A class needs no base class: `reset(**row)` and tools are enough, as in TRL. `Environment` names what it may have
besides. An instance lives in a process of its own for one episode.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Environment", "Step", "ToolServer"]


class Environment(ABC):
    """Base of an environment whose public methods are tools, `contract: tools`.

    A tool needs type hints and a Google docstring, from which its JSON schema is made; it may be async. `get_reward()`
    without arguments, if defined, returns the episode's reward, or None if there is none. `turn_rewards()` without
    arguments, if defined, returns a reward for each of the model's replies: it says which reply earned what of the
    episode's reward. Without `get_reward`, the episode's reward is their sum.
    """

    @abstractmethod
    def reset(self, **row: Any) -> str | None:
        """Begin an episode with the columns of a row. The string, if any, is added to the last user message."""

    def done(self) -> bool:
        """Whether the episode has ended; asked after each turn."""
        return False

    def close(self) -> Any:  # noqa: B027 (most environments open nothing)
        """Release what `reset` has opened; may be async."""


class ToolServer(Environment):
    """Base of an environment whose tools are known only when it runs, such as those of a server."""

    @abstractmethod
    async def schemas(self) -> list[dict[str, Any]]:
        """The tools as JSON schemas: `{"type": "function", "function": {"name", "description", "parameters"}}`."""

    @abstractmethod
    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """The result of a tool."""


@dataclass(frozen=True)
class Step:
    """What an environment of `contract: messages` answers to a message."""

    messages: list[dict[str, Any]]
    reward: float = 0.0
    done: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
