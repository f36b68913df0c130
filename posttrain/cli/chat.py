"""`posttrain chat`."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

import typer

from posttrain.base.errors import PosttrainError, UsageError
from posttrain.base.extras import need
from posttrain.base.options import Flag, values_of
from posttrain.base.terminal import say
from posttrain.config.options import TalkOptions

DEFAULTS: dict[str, Any] = {"temperature": 0.7, "max_tokens": 512}
SERVER = ("template", "chat_template_kwargs", "dtype", "device")  # options of the model's server
HELP = """/again           another reply to the last question
/back            forget the last question with its reply
/system TEXT     set the system prompt; without TEXT, none
/set NAME VALUE  change temperature, top_p, top_k, min_p, max_tokens or seed;
                 without VALUE, to its default
/prompt          show what the model reads
/save FILE       append the conversation to FILE, as a row for posttrain train
/quit            leave (also Ctrl-D); Ctrl-C stops a reply"""


def chat(
    model: Annotated[
        str, typer.Argument(help="Hub id or folder: a causal model, a LoRA adapter, a checkpoint, a run.")
    ],
    terminal: Annotated[bool, Flag("Talk here instead of in a browser.")] = False,
    *,
    options: TalkOptions,
    folder: Annotated[Path, Flag("Folder of runs that the page offers, too.", "--runs", metavar="DIR")] = Path("runs"),
    port: Annotated[int, Flag("Port of the page.", min=1, max=65535)] = 7860,
    no_browser: Annotated[bool, Flag("Print the page's address only.")] = False,
) -> None:
    """Talk to a model: on a page, or with --terminal here, with the conversation so far as its context.

    The page (the extra `ui`) also has two models side by side, rewards, votes, and each token's log-probability; its
    controls have the settings. In the terminal, lines from a pipe are questions, too, and /help lists what else can be
    typed.

        posttrain chat runs/sft
        posttrain chat runs/sft --terminal
        echo "What is 7 times 8?" | posttrain chat runs/sft --terminal --temperature 0
    """
    for package in ("uvicorn", "fastapi"):
        need(package, "serve", "posttrain chat")
    given = {name: value for name, value in values_of(options).items() if value is not None}
    if terminal:
        _in_terminal(model, given)
        return
    if unread := next(iter(given), None):
        raise UsageError(f"--{unread.replace('_', '-')} is for --terminal: the page has its own settings")
    need("gradio", "ui", "posttrain chat without --terminal")
    from posttrain.ui.app import serve

    root = folder.expanduser()
    root.mkdir(parents=True, exist_ok=True)
    serve(root, "127.0.0.1", port, None, not no_browser, f"/chat?{urlencode({'a': model})}")


def _in_terminal(model: str, given: dict[str, Any]) -> None:
    from posttrain.serving.process import ModelServer
    from posttrain.serving.talk import Talk

    server = {f"--{name.replace('_', '-')}": given[name] for name in SERVER if name in given}
    settings = DEFAULTS | {name: value for name, value in given.items() if name not in (*SERVER, "system_prompt")}
    say(f"loading {model} …", error=True)
    with ModelServer(model, list(chain(*server.items()))) as server:
        _converse(Talk(server.client, settings, given.get("system_prompt")), sys.stdin.isatty())


def _converse(talk: Any, asks: bool) -> None:
    """Read questions until the end of the input. `asks`: someone types them."""
    if asks:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (arrow keys, and the questions so far, for `input`)
        say("/help lists commands, Ctrl-D leaves")
    while True:
        try:
            text = input("> " if asks else "").strip()
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
            if not asks:
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
        raise UsageError(f"there is no /{name}; /help lists what there is")
    commands[name]()


def _stream(reply: Iterator[str]) -> None:
    """Print a reply as it comes. Ctrl-C ends it; what was said stays in the conversation."""
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
