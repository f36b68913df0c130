"""The settings of sampling: the engine, filters and limits."""

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from posttrain.config.schema.base import Float, Int, OneOrMore, Positive, Problems, Settings, Text

EngineName = Literal["embedded", "transformers", "vllm"]


class VllmConfig(Settings):
    """Where vLLM runs."""

    mode: Literal["colocate", "server"] = Field(
        default="colocate", description="Mode of vLLM; colocate: in the training process; server: in its own process."
    )
    gpu_memory_utilization: Annotated[Float, Field(gt=0, le=1)] = Field(
        default=0.7, description="Share of the GPU's memory for vLLM; on a CPU its cache has 2 GiB."
    )
    base_url: Text | None = Field(
        default=None, description="Address of a running server, http://HOST:PORT; null: the run starts and stops one."
    )
    timeout: Annotated[Float, Field(gt=0)] = Field(
        default=600.0, description="Seconds that a server may take to start, and between heartbeats."
    )

    @model_validator(mode="after")
    def _check(self) -> "VllmConfig":
        problems, defaults = Problems(), type(self).model_fields
        for field in ("base_url", "timeout"):
            problems.check(
                self.mode == "server" or getattr(self, field) == defaults[field].default,
                field,
                f"is read with mode: server only, not with {self.mode}",
            )
        if self.base_url is not None:
            problems.check(
                _is_address(self.base_url), "base_url", f"is {self.base_url!r}; give http://HOST:PORT and no more"
            )
            problems.check(
                self.gpu_memory_utilization == defaults["gpu_memory_utilization"].default,
                "gpu_memory_utilization",
                "is for a server that is started here; the one at base_url has its own",
            )
        problems.report()
        return self


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        named = bool(parts.hostname) and parts.port is not None
    except ValueError:  # a port that is no number
        return False
    return named and parts.scheme == "http" and parts.path in ("", "/") and not parts.query + parts.fragment


class RolloutConfig(Settings):
    """Sampling completions."""

    engine: EngineName = Field(
        default="embedded",
        description="Engine; embedded: fast, proven families; transformers: any architecture; vllm: vLLM.",
    )
    vllm: VllmConfig = Field(default=VllmConfig(), description="Where vLLM runs.")
    temperature: Annotated[Float, Field(ge=0)] = Field(default=1.0, description="Temperature of sampling; 0: greedy.")
    top_p: Annotated[Float, Field(gt=0, le=1)] = Field(
        default=1.0, description="Nucleus: sample from the likeliest tokens with this total probability; 1: all."
    )
    top_k: Annotated[Int, Field(ge=0)] = Field(
        default=0, description="Number of likeliest tokens to sample from; 0: all."
    )
    min_p: Annotated[Float, Field(ge=0, le=1)] = Field(
        default=0.0, description="Minimum probability of a token relative to the likeliest one; 0: all."
    )
    max_completion_length: Positive = Field(default=512, description="Maximum number of tokens of a completion.")
    save: bool = Field(default=True, description="Whether to store every completion in rollouts.sqlite.")
    max_database_gb: Annotated[Float, Field(gt=0)] = Field(
        default=20.0, description="Maximum size of rollouts.sqlite; above it the oldest steps are deleted."
    )
    stop: Annotated[tuple[Text, ...], OneOrMore] = Field(
        default=(), description="Stop strings that end a completion, besides the stop token."
    )

    @model_validator(mode="after")
    def _check(self) -> "RolloutConfig":
        problems = Problems()
        problems.check(
            self.engine == "vllm" or self.vllm == VllmConfig(),
            "vllm",
            f"is read by engine: vllm only, not {self.engine}",
        )
        problems.report()
        return self
