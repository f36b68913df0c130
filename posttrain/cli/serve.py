"""`posttrain serve`, `chat` and `ui`: serve a model, or pages, from this machine."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

import typer

from posttrain.base.child import end_with_parent
from posttrain.base.errors import PosttrainError, UsageError
from posttrain.base.files import final_model
from posttrain.base.imports import need, quick_imports
from posttrain.base.options import Flag, values_of
from posttrain.base.system import is_loopback
from posttrain.base.terminal import say
from posttrain.cli.settings import devices_from_flag
from posttrain.config import ModelConfig, load
from posttrain.config.options import ServeOptions, TalkOptions, from_flags
from posttrain.runs.finding import locate_model

KEY = "POSTTRAIN_API_KEY"
RUNS = Path("runs")


def serve(
    model: Annotated[
        str, typer.Argument(help="Hub id or folder: a causal model, a LoRA adapter, a run, a reward model.")
    ],
    options: ServeOptions,
) -> None:
    """Serve a model with OpenAI's chat and completions interface.

    Completions of concurrent requests are generated together, but do not depend on each other. A request's `model` may
    name an adapter; any other name means the model itself.

        posttrain serve runs/sft
        posttrain serve Qwen/Qwen3-0.6B --adapter sft=runs/sft --reward-model runs/reward
        posttrain serve runs/sft --record agent --config grpo.yaml
        curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "Once"}'
    """
    for package in ("uvicorn", "fastapi"):
        need(package, "serve", "posttrain serve")
    from posttrain.serving.listening import Guard, listen, run

    if options.attached:
        end_with_parent()
    key = options.api_key or os.environ.get(KEY) or None
    if options.api_key:
        say(f"--api-key is visible to other users of this machine: set {KEY} instead", error=True)
    if not is_loopback(options.host) and key is None:
        raise UsageError(f"--host {options.host} is reachable from other machines: set {KEY}, or give --api-key")
    adapters = _adapters(options.adapter)
    if options.config is not None and options.record is None:
        raise UsageError("--config has the rewards of recorded episodes: give --record FOLDER too")
    graded_by = None if options.config is None else load(options.config).config
    socket = listen(options.host, options.port)  # a port in use is an error before the model is loaded
    path, name, _ = locate_model(model)
    say(f"loading {name} …", error=True)
    reward = None if options.reward_model is None else locate_model(options.reward_model)[0]
    settings, devices = from_flags(ModelConfig, options, path=path), devices_from_flag(options.device)
    with quick_imports():
        from posttrain.serving.app import make_app
        from posttrain.serving.host import Host, Served

    limits = options.max_rows, options.max_waiting, options.context, options.chat_template_kwargs or {}
    served = Served(settings, name, adapters, reward, options.template, devices, *limits, options.record, graded_by)
    run(lambda: Host.start(served), lambda host: Guard(make_app(host), key), socket, name)


def _adapters(texts: Sequence[str]) -> dict[str, str]:
    """The folder of each adapter by its name, from NAME=FOLDER."""
    folders: dict[str, str] = {}
    for text in texts:
        name, _, folder = text.partition("=")
        if not name or not folder:
            raise UsageError(f"--adapter {text}: write NAME=FOLDER, such as sft=runs/sft")
        if name in folders:
            raise UsageError(f"--adapter names {name} twice")
        if not Path(folder).is_dir():
            raise UsageError(f"--adapter {text}: there is no folder {folder}")
        folders[name] = final_model(folder)
    return folders


DEFAULTS: dict[str, Any] = {"temperature": 0.7, "max_tokens": 512}
OF_SERVER = ("template", "chat_template_kwargs", "dtype", "device")  # options of `serve`; all others belong to requests
HELP = Path(__file__).with_name("chat.txt").read_text(encoding="utf-8").rstrip()


def chat(
    model: Annotated[
        str, typer.Argument(help="Hub id or folder: a causal model, a LoRA adapter, a checkpoint, a run.")
    ],
    terminal: Annotated[bool, Flag("Talk in this terminal instead of a browser.")] = False,
    *,
    options: TalkOptions,
    folder: Annotated[Path, Flag("Folder of runs that the page offers too.", "--runs", metavar="DIR")] = RUNS,
    port: Annotated[int, Flag("Port of the page.", min=1, max=65535)] = 7860,
    no_browser: Annotated[bool, Flag("Only print the page's address.")] = False,
) -> None:
    """Talk to a model on a page, or with --terminal in this terminal. The model sees the conversation so far.

    The page (which needs the `ui` extra) also compares two models side by side, shows rewards and each token's
    log-probability, and collects votes; its controls have the settings. In the terminal, /help lists commands, and
    lines from a pipe are read as questions.

        posttrain chat runs/sft
        posttrain chat runs/sft --terminal
        echo "What is 7 times 8?" | posttrain chat runs/sft --terminal --temperature 0
    """
    for package in ("uvicorn", "fastapi"):
        need(package, "serve", "posttrain chat")
    settings = {name: value for name, value in values_of(options).items() if value is not None}
    if terminal:
        from posttrain.serving.client import ModelServer, Talk

        of_server = {f"--{name.replace('_', '-')}": settings.pop(name) for name in OF_SERVER if name in settings}
        system = settings.pop("system_prompt", None)
        say(f"loading {model} …", error=True)
        with ModelServer(model, list(chain(*of_server.items()))) as server:
            _converse(Talk(server.client, DEFAULTS | settings, system), sys.stdin.isatty())
        return
    if unread := next(iter(settings), None):
        raise UsageError(f"--{unread.replace('_', '-')} is for --terminal: the page has its own settings")
    need("gradio", "ui", "posttrain chat without --terminal")
    from posttrain.ui.app import serve

    root = folder.expanduser()
    root.mkdir(parents=True, exist_ok=True)
    serve(root, "127.0.0.1", port, None, not no_browser, f"/chat?{urlencode({'a': model})}")


def _converse(talk: Any, interactive: bool) -> None:
    """Read questions until the input ends. `interactive`: a user types the input."""
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (arrow keys, and the questions so far, for `input`)
        say("/help lists commands, Ctrl-D leaves")
    while True:
        try:
            text = input("> " if interactive else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            say("")
            continue
        try:
            if text in ("/quit", "/exit"):
                return
            if text:
                _answer(talk, text)
        except PosttrainError as error:
            if not interactive:
                raise
            say(f"error: {error}", error=True)


def _answer(talk: Any, text: str) -> None:
    if not text.startswith("/"):
        _stream(talk.ask(text))
        return
    name, _, rest = text[1:].partition(" ")
    rest = rest.strip()
    commands: dict[str, Callable[[], object]] = {
        "help": lambda: say(HELP),
        "again": lambda: _stream(talk.again()),
        "back": talk.take_back,
        "system": lambda: setattr(talk, "system", rest or None),
        "set": lambda: talk.change(*[*rest.split(maxsplit=1), "", ""][:2]),
        "prompt": lambda: say(talk.prompt()),
        "save": lambda: _save(talk, rest),
    }
    if name not in commands:
        raise UsageError(f"there is no /{name}; /help lists the commands")
    commands[name]()


def _stream(reply: Iterator[str]) -> None:
    """Print a reply as it is generated. Ctrl-C ends the reply; its text so far is kept in the conversation."""
    try:
        for part in reply:
            say(part, end="")
    except KeyboardInterrupt:
        with contextlib.suppress(AttributeError):
            reply.close()  # pyright: ignore[reportAttributeAccessIssue]
        say(" [stopped]", end="")
    finally:
        say("")


def _save(talk: Any, name: str) -> None:
    if not name:
        raise UsageError("give a file: /save talks.jsonl")
    if not talk.turns:
        raise UsageError("there is nothing to save yet")
    try:
        with Path(name).expanduser().open("a", encoding="utf-8") as file:
            file.write(json.dumps({"messages": talk.messages}) + "\n")
    except OSError as error:
        raise UsageError(f"cannot write {name}: {error.strerror or error}") from error
    say(f"written: {name}")


def ui(
    folder: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="The folder of runs, as output_dir in the settings.")
    ] = RUNS,
    host: Annotated[str, Flag("Address to listen on; one that other machines can reach needs a token.")] = "127.0.0.1",
    port: Annotated[int, Flag("Port to listen on.", min=1, max=65535)] = 7860,
    token: Annotated[
        str | None,
        typer.Option(
            "--token",
            envvar="POSTTRAIN_UI_TOKEN",
            show_envvar=False,
            help="Token that every browser must send once. POSTTRAIN_UI_TOKEN keeps the token out of the process list.",
        ),
    ] = None,
    no_browser: Annotated[bool, Flag("Only print the address.")] = False,
) -> None:
    """Show runs in a browser: curves, rollouts down to the token, evaluations. Ctrl-C stops the server.

    The pages follow runs in progress, and change a run only if you press a button. They are served only to this machine
    (http://127.0.0.1:7860); to see them from elsewhere, forward the port (ssh -L 7860:127.0.0.1:7860 HOST), or give
    --host and a --token. Nothing is loaded from, or sent to, any other host.
    """
    need("gradio", "ui", "posttrain ui")
    from posttrain.ui.app import serve

    serve(folder.expanduser(), host, port, token, browser=not no_browser)
