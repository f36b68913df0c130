"""Environments of other packages: tools of an MCP server, clients of OpenEnv, environments of SkyRL-Gym.

Each needs its package (`mcp` 2, `openenv-core`, `skyrl-gym`); `make test-env` runs them. Settings may come from
strangers, so they name neither programs nor classes outside of the user's files.
"""

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from posttrain.base.functions import check_own_file, find_function
from posttrain.environments import Step, ToolServer

# Has the server killed with this process, also while it is stuck in a tool and does not see that its input has ended.
LAUNCH = (
    "import os, sys; from posttrain.grading.worker import die_with_parent; die_with_parent(); "
    "os.execvp(sys.argv[1], sys.argv[1:])"
)


class _Connected:
    """An environment whose attributes are connections, which rewards cannot read."""

    def __getstate__(self) -> dict[str, Any]:
        return {}


class Mcp(_Connected, ToolServer):
    """The tools of an MCP server, a Python file of yours, which is started for each episode and spoken to over stdio.

    For another program, write a class of your own that passes `command` to this one's `__init__`: settings alone may
    not name programs.
    """

    def __init__(self, server: str, *, command: Sequence[str] | None = None, env: Mapping[str, str] | None = None):
        from mcp import StdioServerParameters  # pyright: ignore[reportMissingImports]

        if command is None:
            check_own_file(server)
            command = (sys.executable, server)
        arguments = ["-c", LAUNCH, *command]
        environment = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")} | dict(env or {})
        self._server = StdioServerParameters(command=sys.executable, args=arguments, env=environment, cwd=os.getcwd())
        self._task: asyncio.Task[None] | None = None

    async def _client(self) -> Any:
        """The connection, made by a task that keeps it open: it has to be closed by the task that opens it."""
        if self._task is None:
            self._opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            self._over = asyncio.Event()
            self._task = asyncio.create_task(self._connection())
        done, _ = await asyncio.wait([self._opened, self._task], return_when=asyncio.FIRST_COMPLETED)
        if self._task in done:
            self._task.result()  # raises what went wrong
            raise ConnectionError("the MCP server has ended")
        return self._opened.result()

    async def _connection(self) -> None:
        from mcp import Client  # pyright: ignore[reportMissingImports]

        async with Client(self._server) as client:
            self._opened.set_result(client)
            await self._over.wait()

    async def schemas(self) -> list[dict[str, Any]]:
        client, made, cursor = await self._client(), [], None
        while True:
            page = await client.list_tools(cursor=cursor)
            for tool in page.tools:
                function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
                made.append({"type": "function", "function": function})
            cursor = page.next_cursor
            if cursor is None:
                return made

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        result = await (await self._client()).call_tool(name, arguments)
        texts = [getattr(part, "text", None) for part in result.content]
        if not all(isinstance(text, str) for text in texts):
            raise TypeError(f"{name} returned content that is no text")
        if result.is_error:
            raise RuntimeError("\n".join(map(str, texts)))
        return "\n".join(map(str, texts))

    def reset(self, **row: Any) -> None:
        """The server of the episode is new."""

    async def close(self) -> None:
        if self._task is not None:
            self._over.set()
            await self._task


class OpenEnv(_Connected):
    """`contract: messages`. A client of an OpenEnv server at `base_url`: a reply is the action `{field: reply}`.

    `shows`: the field of observations that the model reads; None: all of them as JSON. `columns`: the columns of a row
    that the server's `reset` receives.
    """

    def __init__(self, base_url: str, field: str = "message", shows: str | None = None, columns: Sequence[str] = ()):
        from openenv.core import GenericEnvClient  # pyright: ignore[reportMissingImports]

        self._client = GenericEnvClient(base_url=base_url)
        self._field, self._shows, self._columns = field, shows, columns

    async def reset(self, **row: Any) -> list[dict[str, Any]]:
        result = await self._client.reset(**{name: row[name] for name in self._columns if name in row})
        return self._messages(result.observation)

    async def step(self, message: dict[str, Any]) -> Step:
        result = await self._client.step({self._field: message["content"]})
        messages = [] if result.done else self._messages(result.observation)
        return Step(messages, float(result.reward or 0.0), bool(result.done))

    async def close(self) -> None:
        await self._client.close()

    def _messages(self, observation: Any) -> list[dict[str, Any]]:
        if self._shows is not None and self._shows not in observation:
            raise KeyError(f"an observation has {', '.join(observation)}, but no {self._shows}")
        shown = observation if self._shows is None else observation[self._shows]
        return [{"role": "user", "content": shown if isinstance(shown, str) else json.dumps(shown, default=str)}]


class SkyRL(_Connected):
    """`contract: messages`. An environment of SkyRL-Gym: the name of one that comes with it, or `FILE.py:CLASS`.

    `config` are its settings, a row's columns its `extras`. The column `prompt` begins the conversation; what `init`
    adds to it follows.
    """

    def __init__(self, environment: str, config: Mapping[str, Any] | None = None):
        self._name, self._config = environment, dict(config or {})

    def reset(self, prompt: Any = (), **row: Any) -> list[dict[str, Any]]:
        import skyrl_gym  # pyright: ignore[reportMissingImports]

        make: Any = partial(skyrl_gym.make, self._name)
        if ":" in self._name:
            make = find_function(self._name)
        given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        self._environment = make(env_config=_Config(self._config), extras=row)
        messages, _ = self._environment.init([dict(message) for message in given])
        if messages[: len(given)] != given:
            raise ValueError(f"init of {self._name} changes the prompt; it can only add to it")
        return messages[len(given) :]

    def step(self, message: dict[str, Any]) -> Step:
        made = self._environment.step(message["content"])
        metadata = made.get("metadata") or {}
        numbers = {name: float(value) for name, value in metadata.items() if isinstance(value, int | float)}
        return Step(list(made["observations"]), float(made["reward"]), bool(made["done"]), numbers)

    def close(self) -> None:
        self._environment.close()


class _Config(dict[str, Any]):
    """Settings whose items are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None
