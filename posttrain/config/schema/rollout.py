"""The settings of sampling: the engine, filters and limits."""

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field

from posttrain.config.schema.base import Float, Int, OneOrMore, Positive, Problems, Settings, Text
from posttrain.config.schema.environments import MaxToolCalls, MaxToolResult, MaxTurns

SERVER_ONLY = ("base_url", "servers", "gpus", "push", "timeout", "max_restarts")

EngineName = Literal["embedded", "transformers", "vllm"]


class VllmConfig(Settings):
    """Where and how vLLM runs."""

    mode: Literal["colocate", "server"] = Field(
        default="colocate", description="Mode of vLLM; colocate: in the training process; server: in its own process."
    )
    gpu_memory_utilization: Annotated[Float, Field(gt=0, le=1)] = Field(
        default=0.7, description="Share of the GPU's memory for vLLM; on a CPU its cache has 2 GiB."
    )
    base_url: Annotated[tuple[Text, ...] | None, OneOrMore] = Field(
        default=None,
        description="Addresses of running servers, http://HOST:PORT; null: the run starts and stops its own.",
    )
    servers: Positive = Field(default=1, description="Number of servers that the run starts on each machine.")
    gpus: tuple[Annotated[Int, Field(ge=0)], ...] = Field(
        default=(), description="Index of the GPU of each server that the run starts; empty: the first visible one."
    )
    push: Literal["http", "nccl"] = Field(
        default="http", description="Transport of the weights to servers; nccl: from GPU to GPU, without main memory."
    )
    timeout: Annotated[Float, Field(gt=0)] = Field(
        default=600.0, description="Maximum seconds for a server to start or return, and between its heartbeats."
    )
    max_restarts: Annotated[Int, Field(ge=0)] = Field(
        default=3, description="Number of times that a server may die and be restarted before the run fails."
    )

    def check(self, problems: Problems) -> None:
        for field in SERVER_ONLY:
            if self.mode != "server" and not self.is_default(field):
                problems.add(field, f"needs mode: server, but mode is {self.mode}")
        if self.base_url is not None:
            if wrong := next((url for url in self.base_url if not _is_address(url)), None):
                problems.add("base_url", f"has {wrong!r}; give only http://HOST:PORT")
            if not len({*self.base_url}) == len(self.base_url) > 0:
                problems.add("base_url", "needs at least one address, and each only once")
            for field in ("gpu_memory_utilization", "servers", "gpus"):
                if not self.is_default(field):
                    problems.add(field, "applies to servers that the run starts, not to those at base_url")
        if len(self.gpus) not in (0, self.servers):
            problems.add("gpus", f"has {len(self.gpus)} GPUs for {self.servers} servers; give one for each")


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        named = bool(parts.hostname) and parts.port is not None
    except ValueError:  # a port that is not a number
        return False
    return named and parts.scheme == "http" and parts.path in ("", "/") and not parts.query + parts.fragment


class RolloutConfig(Settings):
    """Sampling completions."""

    engine: EngineName = Field(
        default="embedded",
        description="Engine; embedded: fast, for proven families; transformers: any architecture; vllm: vLLM.",
    )
    vllm: VllmConfig = Field(default=VllmConfig(), description="Where and how vLLM runs.")
    temperature: Annotated[Float, Field(ge=0)] = Field(default=1.0, description="Sampling temperature; 0: greedy.")
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
    max_turns: MaxTurns = None
    max_tool_calls: MaxToolCalls = None
    max_tool_result: MaxToolResult = None
    environment_workers: Positive = Field(
        default=64, description="Maximum number of episodes with a live environment at a time, on each rank."
    )

    def check(self, problems: Problems) -> None:
        if self.engine != "vllm" and not self.is_default("vllm"):
            problems.add("vllm", f"needs engine: vllm, but engine is {self.engine}")
