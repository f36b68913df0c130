"""The settings of an environment."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from posttrain.config.schema.base import Float, Positive, Settings, Text

MaxTurns = Annotated[
    Positive | None,
    Field(description="Maximum number of replies of an episode; null: as many as its tokens allow."),
]
MaxToolCalls = Annotated[Positive | None, Field(description="Maximum number of tool calls of an episode.")]
MaxToolResult = Annotated[
    Positive | None,
    Field(description="Maximum tokens of a tool's result, cut beyond; null: one without room ends the episode."),
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
    args: dict[str, Any] = Field(default={}, description="Arguments of the class.")
    contract: Literal["tools", "messages"] = Field(
        default="tools",
        description="Contract; tools: public methods are tools, as in TRL; messages: `step` answers a message.",
    )
    timeout: Annotated[Float, Field(gt=0)] = Field(
        default=30.0, description="Maximum seconds of a call of the environment; then its episode ends."
    )
