"""Environments of other packages: tools of an MCP server, clients of OpenEnv, environments of SkyRL-Gym.

Each needs its package (`mcp`, `openenv-core`, `skyrl-gym`); `make test-env` runs them.
"""

import asyncio
import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.environments import Step, ToolServer


class Mcp(ToolServer):
    """The tools of an MCP server that is started for each episode and spoken to over stdio."""

    def __init__(self, command: str, args: Sequence[str] = (), env: Mapping[str, str] | None = None):
        from mcp import StdioServerParameters  # pyright: ignore[reportMissingImports]

        self._server = StdioServerParameters(command=command, args=[*args], env=dict(env) if env else None)
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

    def __getstate__(self) -> dict[str, Any]:
        return {}


class OpenEnv:
    """`contract: messages`. A client of an OpenEnv server at `base_url`: a reply is the action `{field: reply}`.

    With `client` and `action` (module:Class), these classes of the environment's package are used instead of OpenEnv's
    generic client. `shows`: the field of observations that the model reads; None: all of them as JSON. `columns`: the
    columns of a row that the server's `reset` receives.
    """

    def __init__(
        self,
        base_url: str,
        field: str = "message",
        shows: str | None = None,
        columns: Sequence[str] = (),
        client: str = "openenv.core:GenericEnvClient",
        action: str | None = None,
    ):
        self._client = _named(client)(base_url=base_url)
        self._action = None if action is None else _named(action)
        self._field, self._shows, self._columns = field, shows, columns

    async def reset(self, **row: Any) -> list[dict[str, Any]]:
        result = await self._client.reset(**{name: row[name] for name in self._columns if name in row})
        return self._messages(result.observation)

    async def step(self, message: dict[str, Any]) -> Step:
        given = {self._field: message["content"]}
        result = await self._client.step(given if self._action is None else self._action(**given))
        messages = [] if result.done else self._messages(result.observation)
        return Step(messages, float(result.reward or 0.0), bool(result.done))

    async def close(self) -> None:
        await self._client.close()

    def _messages(self, observation: Any) -> list[dict[str, Any]]:
        fields = observation if isinstance(observation, Mapping) else observation.model_dump()
        if self._shows is not None and self._shows not in fields:
            raise KeyError(f"an observation has {', '.join(fields)}, but no {self._shows}")
        shown = fields if self._shows is None else fields[self._shows]
        return [{"role": "user", "content": shown if isinstance(shown, str) else json.dumps(shown, default=str)}]

    def __getstate__(self) -> dict[str, Any]:
        return {}


class SkyRL:
    """`contract: messages`. An environment of SkyRL-Gym by its `environment`'s name; a row's columns are its `extras`.

    `module` is imported first, so that it can register environments of its own. The column `prompt` begins the
    conversation; what `init` adds to it follows.
    """

    def __init__(self, environment: str, config: Mapping[str, Any] | None = None, module: str | None = None):
        if module is not None:
            importlib.import_module(module)
        self._name, self._config = environment, dict(config or {})

    def reset(self, prompt: Any = (), **row: Any) -> list[dict[str, Any]]:
        import skyrl_gym  # pyright: ignore[reportMissingImports]

        given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        self._environment = skyrl_gym.make(self._name, env_config=_Config(self._config), extras=row)
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

    def __getstate__(self) -> dict[str, Any]:
        return {}


class _Config(dict[str, Any]):
    """Settings whose items are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def _named(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
