"""The settings of an environment."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from posttrain.config.schema.base import Conflicts, Settings, setting
from posttrain.config.schema.types import AboveZero, Positive, Text

MaxTurns = Annotated[
    Positive | None, Field(description="Maximum number of replies of an episode; null: as many as its tokens allow.")
]
MaxToolCalls = Annotated[Positive | None, Field(description="Maximum number of tool calls of an episode.")]
MaxToolResult = Annotated[
    Positive | None,
    Field(description="Maximum tokens of a tool's result, cut beyond; null: one without room ends the episode."),
]

RewrittenTurns = Annotated[
    Literal["fork", "keep", "refuse"],
    Field(description="Turns that the template rewrites later; fork: branch there; keep: as sampled; refuse: error."),
]


class EnvironmentConfig(Settings):
    """A class whose instances a model acts in over several turns."""

    model_config = ConfigDict(populate_by_name=True)
    name: Text = Field(description="Name; the column `environment` of a row chooses one of several by it.")
    class_: Text = Field(
        alias="class",
        description="Class, FILE.py:CLASS or module:CLASS, or one built in: calculator, guess, python, search, mcp, "
        "openenv or skyrl.",
    )
    args: dict[str, Any] = setting({}, "Arguments of the class.")
    contract: Literal["tools", "messages"] = setting(
        "tools", "Contract; tools: public methods are tools, as in TRL; messages: `step` answers a message."
    )
    timeout: AboveZero = setting(30.0, "Maximum seconds of a call of the environment; then its episode ends.")


def check_tools(environments: Sequence[EnvironmentConfig], tools: Sequence[str]) -> Conflicts:
    """What environments and tools need of one another."""
    if tools and any(each.contract == "messages" for each in environments):
        yield "tools", "cannot be combined with an environment of contract: messages, which makes no calls"
    names = [each.name for each in environments]
    if twice := next((name for name in names if names.count(name) > 1), None):
        yield "environments", f"has two called {twice!r}; give one of them a different `name`"
