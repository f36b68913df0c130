"""`posttrain chat`."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

import typer

from posttrain.base.errors import PosttrainError
from posttrain.base.extras import need
from posttrain.base.terminal import say
from posttrain.cli.errors import UsageError
from posttrain.cli.score import Template, Variables

Model = Annotated[str, typer.Argument(help="Hub id or folder: a causal model, a LoRA adapter, a checkpoint, a run.")]
Terminal = Annotated[bool, typer.Option("--terminal", help="Talk here instead of in a browser.")]
System = Annotated[str | None, typer.Option("--system-prompt", help="What is said before the conversation.")]
Temperature = Annotated[
    float | None, typer.Option("--temperature", min=0, help="Sampling temperature; 0: greedy. [default: 0.7]")
]
TopP = Annotated[
    float | None, typer.Option("--top-p", min=0, max=1, help="Probability of the tokens that are sampled from.")
]
Tokens = Annotated[int | None, typer.Option("--max-tokens", min=1, help="Longest reply in tokens. [default: 512]")]
Seed = Annotated[int | None, typer.Option("--seed", min=0, help="The same seed gives the same replies.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="auto, float32 or bfloat16.")]
Device = Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda, a GPU by number (cuda:1), or mps.")]
Folder = Annotated[Path, typer.Option("--runs", metavar="DIR", help="Folder of runs that the page offers, too.")]
Port = Annotated[int, typer.Option("--port", min=1, max=65535, help="Port of the page.")]
NoBrowser = Annotated[bool, typer.Option("--no-browser", help="Print the page's address only.")]

DEFAULTS: dict[str, Any] = {"temperature": 0.7, "max_tokens": 512}
SERVER = ("--template", "--chat-template-kwargs", "--dtype", "--device")  # options of the model's server
HELP = """/again           another reply to the last question
/back            forget the last question with its reply
/system TEXT     set the system prompt; without TEXT, none
/set NAME VALUE  change temperature, top_p, top_k, min_p, max_tokens or seed;
                 without VALUE, to its default
/prompt          show what the model reads
/save FILE       append the conversation to FILE, as a row for posttrain train
/quit            leave (also Ctrl-D); Ctrl-C stops a reply"""


def chat(
    model: Model,
    terminal: Terminal = False,
    system_prompt: System = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    max_tokens: Tokens = None,
    seed: Seed = None,
    template: Template = None,
    chat_template_kwargs: Variables = None,
    dtype: Dtype = None,
    device: Device = None,
    folder: Folder = Path("runs"),
    port: Port = 7860,
    no_browser: NoBrowser = False,
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
    given = {
        "--system-prompt": system_prompt,
        "--temperature": temperature,
        "--top-p": top_p,
        "--max-tokens": max_tokens,
        "--seed": seed,
        "--template": template,
        "--chat-template-kwargs": chat_template_kwargs,
        "--dtype": dtype,
        "--device": device,
    }
    if terminal:
        _in_terminal(model, {name: value for name, value in given.items() if value is not None})
        return
    if unread := next((name for name, value in given.items() if value is not None), None):
        raise UsageError(f"{unread} is for --terminal: the page has its own settings")
    need("gradio", "ui", "posttrain chat without --terminal")
    from posttrain.ui.app import serve

    root = folder.expanduser()
    root.mkdir(parents=True, exist_ok=True)
    serve(root, "127.0.0.1", port, None, not no_browser, f"/chat?{urlencode({'a': model})}")


def _in_terminal(model: str, given: dict[str, Any]) -> None:
    from posttrain.serving.process import ModelServer
    from posttrain.serving.talk import Talk

    options = [word for name in SERVER if name in given for word in (name, given[name])]
    names = {name: name.removeprefix("--").replace("-", "_") for name in given if name not in SERVER}
    settings = DEFAULTS | {key: given[name] for name, key in names.items() if key != "system_prompt"}
    say(f"loading {model} …", error=True)
    with ModelServer(model, options) as server:
        _converse(Talk(server.client, settings, given.get("--system-prompt")), sys.stdin.isatty())


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
