"""The settings of sampling: the engine, filters and limits; and of environments."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from posttrain.config.schema.base import Conflicts, Settings, setting
from posttrain.config.schema.types import (
    AboveZero,
    Float,
    Fraction,
    Natural,
    NonNegative,
    Positive,
    Text,
    Texts,
    ZeroToOne,
    address,
)

SERVER_ONLY = ("base_url", "servers", "gpus", "push", "timeout", "max_restarts")

EngineName = Literal["embedded", "transformers", "vllm"]
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


class Curriculum(Settings):
    """Prompts whose completions are all good or all bad rest: they teach little. Later they are sampled again."""

    easy_threshold: Float = setting(1.0, "Mean reward of a prompt's completions from which the prompt rests.")
    hard_threshold: Float = setting(0.0, "Mean reward of a prompt's completions up to which the prompt rests.")
    rest_epochs: Positive = setting(2, "Number of epochs for which a prompt rests.")

    def check(self) -> Conflicts:
        if self.hard_threshold >= self.easy_threshold:
            yield "hard_threshold", f"is {self.hard_threshold}, not below easy_threshold, {self.easy_threshold}"


class VllmConfig(Settings):
    """Where and how vLLM runs."""

    mode: Literal["colocate", "server"] = setting(
        "colocate", "Mode of vLLM; colocate: in the training process; server: in its own process."
    )
    gpu_memory_utilization: Fraction = setting(0.7, "Share of the GPU's memory for vLLM; on a CPU its cache has 2 GiB.")
    base_url: Texts | None = setting(
        None, "Addresses of running servers, http://HOST:PORT; null: the run starts and stops its own."
    )
    servers: Positive = setting(1, "Number of servers that the run starts on each machine.")
    gpus: tuple[Natural, ...] = setting(
        (), "Index of the GPU of each server that the run starts; empty: the first visible one."
    )
    push: Literal["http", "nccl"] = setting(
        "http", "Transport of the weights to servers; nccl: from GPU to GPU, without main memory."
    )
    timeout: AboveZero = setting(600.0, "Maximum seconds for a server to start or return, and between its heartbeats.")
    max_restarts: Natural = setting(3, "Number of times that a server may die and be restarted before the run fails.")

    def check(self) -> Conflicts:
        for field in SERVER_ONLY:
            if self.mode != "server" and not self.is_default(field):
                yield field, f"needs mode: server, but mode is {self.mode}"
        if self.base_url is not None:
            if wrong := next((url for url in self.base_url if not _is_server(url)), None):
                yield "base_url", f"has {wrong!r}; give only http://HOST:PORT"
            if not len({*self.base_url}) == len(self.base_url) > 0:
                yield "base_url", "needs at least one address, and each only once"
            for field in ("gpu_memory_utilization", "servers", "gpus"):
                if not self.is_default(field):
                    yield field, "applies to servers that the run starts, not to those at base_url"
        if len(self.gpus) not in (0, self.servers):
            yield "gpus", f"has {len(self.gpus)} GPUs for {self.servers} servers; give one for each"


def _is_server(url: str) -> bool:
    parts = address(url)
    return parts is not None and parts.scheme == "http" and parts.port is not None and parts.path in ("", "/")


class RolloutConfig(Settings):
    """Sampling completions."""

    engine: EngineName = setting(
        "embedded", "Engine; embedded: fast, for proven families; transformers: any architecture; vllm: vLLM."
    )
    vllm: VllmConfig = setting(VllmConfig(), "Where and how vLLM runs.")
    temperature: NonNegative = setting(1.0, "Sampling temperature; 0: greedy.")
    top_p: Fraction = setting(1.0, "Nucleus: sample from the likeliest tokens with this total probability; 1: all.")
    top_k: Natural = setting(0, "Number of likeliest tokens to sample from; 0: all.")
    min_p: ZeroToOne = setting(0.0, "Minimum probability of a token relative to the likeliest one; 0: all.")
    max_completion_length: Positive = setting(512, "Maximum number of tokens of a completion.")
    save: bool = setting(True, "Whether to store every completion in rollouts.sqlite.")
    max_database_gb: AboveZero = setting(
        20.0, "Maximum size of rollouts.sqlite; above it the oldest steps are deleted."
    )
    stop: Texts = setting((), "Stop strings that end a completion, besides the stop token.")
    max_turns: MaxTurns = None
    max_tool_calls: MaxToolCalls = None
    max_tool_result: MaxToolResult = None
    rewritten_turns: RewrittenTurns = "fork"
    environment_workers: Positive = setting(
        64, "Maximum number of episodes with a live environment at a time, on each rank."
    )

    def check(self) -> Conflicts:
        if self.engine != "vllm" and not self.is_default("vllm"):
            yield "vllm", f"needs engine: vllm, but engine is {self.engine}"


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
