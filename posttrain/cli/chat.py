"""`posttrain chat`."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from posttrain.cli.errors import UsageError
from posttrain.cli.score import Dtype, Template
from posttrain.cli.settings import Device
from posttrain.errors import PosttrainError
from posttrain.extras import need
from posttrain.terminal import say

Model = Annotated[str, typer.Argument(help="Hub id or folder: a causal model, a LoRA adapter, a checkpoint, a run.")]
Terminal = Annotated[bool, typer.Option("--terminal", help="Talk here instead of in a browser.")]
System = Annotated[str | None, typer.Option("--system-prompt", help="What is said before the conversation.")]
Temperature = Annotated[float, typer.Option("--temperature", min=0, help="Sampling temperature; 0: greedy.")]
TopP = Annotated[float, typer.Option("--top-p", min=0, max=1, help="Probability of the tokens that are sampled from.")]
Tokens = Annotated[int, typer.Option("--max-tokens", min=1, help="Longest reply in tokens.")]
Seed = Annotated[int | None, typer.Option("--seed", min=0, help="The same seed gives the same replies.")]

HELP = """/again           another reply to the last question
/back            forget the last question with its reply
/system TEXT     set the system prompt; without TEXT, none
/set NAME VALUE  change temperature, top_p, top_k, min_p, max_tokens or seed; without VALUE, its default
/prompt          show what the model reads
/save FILE       append the conversation to FILE as a row of `messages`, which posttrain train reads
/quit            leave (also Ctrl-D); Ctrl-C stops a reply"""


def chat(
    model: Model,
    terminal: Terminal = False,
    system_prompt: System = None,
    temperature: Temperature = 0.7,
    top_p: TopP = 1.0,
    max_tokens: Tokens = 512,
    seed: Seed = None,
    template: Template = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Talk to a model: in the terminal, with the conversation so far as its context.

    Lines from a pipe are questions, too. /help lists what else can be typed.

        posttrain chat runs/sft --terminal
        echo "What is 7 times 8?" | posttrain chat runs/sft --terminal --temperature 0
    """
    from posttrain.serving.process import ModelServer
    from posttrain.serving.talk import Talk

    need("uvicorn", "serve", "posttrain chat")
    need("fastapi", "serve", "posttrain chat")
    options = ["--dtype", dtype, "--device", device, *(["--template", template] if template else [])]
    say(f"loading {model} …", error=True)
    with contextlib.closing(ModelServer(model, options)) as server:
        settings: dict[str, Any] = {"temperature": temperature, "top_p": top_p}
        settings |= {} if seed is None else {"seed": seed}
        client = server.client
        _converse(Talk(client, settings | {"max_tokens": max_tokens}, system_prompt), sys.stdin.isatty())


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
