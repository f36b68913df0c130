"""`posttrain serve`."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from posttrain.base.child import end_with_parent
from posttrain.base.errors import UsageError
from posttrain.base.extras import need
from posttrain.base.imports import quick_imports
from posttrain.base.system import is_loopback
from posttrain.base.terminal import say
from posttrain.cli.settings import devices_from_flag
from posttrain.config import ModelConfig
from posttrain.config.options import ServeOptions, from_flags

KEY = "POSTTRAIN_API_KEY"


def serve(
    model: Annotated[
        str, typer.Argument(help="Hub id or folder: a causal model, a LoRA adapter, a run, a reward model.")
    ],
    options: ServeOptions,
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

    if options.attached:
        end_with_parent()
    key = options.api_key or os.environ.get(KEY) or None
    if options.api_key:
        say(f"--api-key is visible to other users of this machine: set {KEY} instead", error=True)
    if not is_loopback(options.host) and key is None:
        raise UsageError(f"--host {options.host} is reachable from other machines: set {KEY}, or give --api-key")
    adapters = _adapters(options.adapter)
    need("uvicorn", "serve", "posttrain serve")
    need("fastapi", "serve", "posttrain serve")
    socket = listen(options.host, options.port)  # a port in use is an error before the model is loaded
    path, name, _ = locate_model(model)
    say(f"loading {name} …", error=True)
    reward = None if options.reward_model is None else locate_model(options.reward_model)[0]
    settings, devices = from_flags(ModelConfig, options, path=path), devices_from_flag(options.device)
    with quick_imports():
        from posttrain.serving.app import make_app
        from posttrain.serving.host import Host as Hosted
        from posttrain.serving.host import Served
        from posttrain.serving.listening import run

    limits = options.max_rows, options.max_waiting, options.context, options.chat_template_kwargs or {}
    served = Served(settings, name, adapters, reward, options.template, devices, *limits)
    run(
        lambda: Hosted.start(served),
        lambda hosted: Guard(make_app(hosted), key),
        socket,
        lambda url: say(f"serving {name} at {url}/v1 (Ctrl-C stops)"),
    )


def _adapters(given: Sequence[str]) -> dict[str, str]:
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
