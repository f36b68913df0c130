"""How completions are drawn: the engine and its sampling."""

from typing import Annotated, Literal

from pydantic import Field

from posttrain.config.base import Float, Int, OneOrMore, Positive, Settings, Text

EngineName = Literal["embedded", "transformers"]


class RolloutConfig(Settings):
    """Drawing completions."""

    engine: EngineName = Field(
        default="embedded", description="embedded: fast, for proven families; transformers: any architecture."
    )
    temperature: Annotated[Float, Field(ge=0)] = Field(default=1.0, description="Of sampling; 0: greedy.")
    top_p: Annotated[Float, Field(gt=0, le=1)] = Field(
        default=1.0, description="Draw from the likeliest tokens that have this share together; 1: from all."
    )
    top_k: Annotated[Int, Field(ge=0)] = Field(default=0, description="Draw from so many likeliest tokens; 0: all.")
    min_p: Annotated[Float, Field(ge=0, le=1)] = Field(
        default=0.0, description="Draw from tokens at least so likely as this share of the likeliest; 0: all."
    )
    max_completion_length: Positive = Field(default=512, description="Longest completion in tokens.")
    save: bool = Field(default=True, description="Keep every completion of an online run in rollouts.sqlite.")
    max_database_gb: Annotated[Float, Field(gt=0)] = Field(
        default=20.0, description="When rollouts.sqlite would grow beyond this, its oldest steps make room."
    )
    stop: Annotated[tuple[Text, ...], OneOrMore] = Field(
        default=(), description="Texts that end a completion, beside the stop token."
    )
