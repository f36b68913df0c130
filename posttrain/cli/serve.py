"""`posttrain serve`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from posttrain.base.child import end_with_parent
from posttrain.base.extras import need
from posttrain.base.imports import quick_imports
from posttrain.base.system import is_loopback
from posttrain.base.terminal import say
from posttrain.cli.errors import UsageError
from posttrain.cli.score import Dtype, Template, Variables
from posttrain.cli.settings import Device, devices_from_flag, from_flags, variables_from_flag
from posttrain.config import ModelConfig

KEY = "POSTTRAIN_API_KEY"

Model = Annotated[str, typer.Argument(help="Hub id or folder: a causal model, a LoRA adapter, a run, a reward model.")]
Host = Annotated[str, typer.Option("--host", help="Address to listen on; other than this machine's needs a key.")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0: a free one.")]
Key = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        help=f"Secret that requests must send, which other users see in the list of processes: prefer ${KEY}.",
    ),
]
Adapter = Annotated[
    list[str] | None, typer.Option("--adapter", metavar="NAME=FOLDER", help="LoRA adapter by its name; repeatable.")
]
RewardModel = Annotated[str | None, typer.Option("--reward-model", help="Reward model for POST /reward.")]
MaxRows = Annotated[int, typer.Option("--max-rows", min=1, max=512, help="Completions that are generated together.")]
MaxWaiting = Annotated[
    int, typer.Option("--max-waiting", min=1, help="Prompts in the queue; further requests get status 429.")
]
Context = Annotated[
    int | None, typer.Option("--context", min=2, help="Longest prompt with its completion, in tokens. [default: 4096]")
]
Attached = Annotated[bool, typer.Option("--attached", hidden=True, help="End with the parent process.")]


def serve(
    model: Model,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key: Key = None,
    adapter: Adapter = None,
    reward_model: RewardModel = None,
    template: Template = None,
    chat_template_kwargs: Variables = None,
    max_rows: MaxRows = 64,
    max_waiting: MaxWaiting = 256,
    context: Context = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    attached: Attached = False,
) -> None:
    """Serve a model with OpenAI's chat and completions interface, for any client of it.

    Concurrent requests are generated together, and their tokens do not depend on each other. Adapters are chosen by
    name as the request's `model`; any other name is the model itself.

        posttrain serve runs/sft
        posttrain serve Qwen/Qwen3-0.6B --adapter sft=runs/sft/final --reward-model runs/reward/final
        curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "Once"}'
    """
    from posttrain.runs.finding import locate_model
    from posttrain.serving.guard import Guard
    from posttrain.serving.listening import listen

    if attached:
        end_with_parent()
    key = api_key or os.environ.get(KEY) or None
    if api_key:
        say(f"--api-key is visible to other users of this machine: set {KEY} instead", error=True)
    if not is_loopback(host) and key is None:
        raise UsageError(f"--host {host} is reachable from other machines: set {KEY}, or give --api-key")
    adapters, given = _adapters(adapter or ()), variables_from_flag(chat_template_kwargs)
    need("uvicorn", "serve", "posttrain serve")
    need("fastapi", "serve", "posttrain serve")
    socket = listen(host, port)  # a port in use is an error before the model is loaded
    path, name, _ = locate_model(model)
    say(f"loading {name} …", error=True)
    reward = None if reward_model is None else locate_model(reward_model)[0]
    settings = from_flags(ModelConfig, {"path": path, "dtype": dtype})
    with quick_imports():
        from posttrain.serving.app import make_app
        from posttrain.serving.host import Host as Hosted
        from posttrain.serving.host import Served
        from posttrain.serving.listening import run

    served = Served(
        settings, name, adapters, reward, template, devices_from_flag(device), max_rows, max_waiting, context, given
    )
    run(
        lambda: Hosted.start(served),
        lambda hosted: Guard(make_app(hosted), key),
        socket,
        lambda url: say(f"serving {name} at {url}/v1 (Ctrl-C stops)"),
    )


def _adapters(given: list[str] | tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in given:
        name, equals, folder = text.partition("=")
        if not equals or not name or not folder:
            raise UsageError(f"--adapter {text}: write NAME=FOLDER, such as sft=runs/sft/final")
        if name in found:
            raise UsageError(f"--adapter names {name} twice")
        if not Path(folder).is_dir():
            raise UsageError(f"--adapter {text}: there is no folder {folder}")
        found[name] = folder
    return found
