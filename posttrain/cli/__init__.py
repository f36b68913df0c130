"""The command line. Each verb is a function of a module in this package and imports slow modules inside the function.

A command imports only its verb's module: `runs list` does not need the schema of the settings, which takes half a
second to import. Help and unknown verbs need all modules.
"""

import atexit
import gc
import io
import os
import sys
from collections.abc import Sequence
from contextlib import closing
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path

import typer

from posttrain import __version__
from posttrain.base.errors import UsageError
from posttrain.base.terminal import enduring, outliving, say
from posttrain.cli.command import guarded, with_options
from posttrain.runs.logs import ConsoleLog

# Verbs whose results are files: they continue if the program that reads their output ends.
ENDURING = ("train", "sweep", "quickstart", "verify-resume", "score", "grade", "generate")
EPILOG = "--debug, anywhere on the command line, shows an error's stack trace; posttrain --version shows the version."
HELP = "Post-training of language models: supervised fine-tuning, reward models, DPO and its variants, GRPO, PPO."
# Verb -> the module that has a function of the same name, in the order of the help.
VERBS = {
    "train": "train", "launch": "train", "plan": "train", "sweep": "sweep", "explore": "data", "score": "rows",
    "grade": "rows", "generate": "rows", "sample": "rows", "eval": "eval", "export": "eval", "quantize": "eval",
    "rollouts": "rollouts", "why": "rollouts", "regrade": "rollouts", "report": "runs", "compare": "compare",
    "losses": "rollouts", "serve": "serve", "chat": "serve", "verify-resume": "train", "ui": "serve",
    "quickstart": "start", "doctor": "start",
}  # fmt: skip
TAKE_SETTINGS = ("train", "launch", "plan", "sweep", "explore", "verify-resume")  # with a flag for every setting
GROUPS = {"config": "Settings", "data": "Settings", "runs": "Runs"}  # verbs with subcommands -> their panel in the help
# Commands of other tools -> those of this one.
OTHERS = {
    **dict.fromkeys(["finetune", "fine-tune", "fit", "run"], "train"),
    **{method: f"train --method {method}" for method in ("sft", "dpo", "kto", "ppo", "grpo", "reward", "distill")},
    **dict.fromkeys(["evaluate", "test", "benchmark"], "eval"),
    **dict.fromkeys(["inference", "infer", "predict", "complete"], "generate"),
    **dict.fromkeys(["merge", "upload", "push"], "export"),
    **{"webui": "ui", "webchat": "ui", "studio": "ui", "api": "serve", "env": "doctor", "resume": "train --resume"},
    **{"list": "runs list", "show": "runs show", "download": "data save", "cli": "--help"},
}
TOKENS = ("HF_TOKEN", "HUGGINGFACE_TOKEN", "WANDB_API_KEY")  # read from `.env`, never written


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default the arguments of the process; returns the exit status."""
    if argv is None:
        atexit.register(gc.freeze)  # otherwise, a process with torch spends a second on garbage collection at exit
    args = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in args
    args = [arg for arg in args if arg != "--debug"] or ["--help"]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a locale may lack characters of data and models
            stream.reconfigure(errors="backslashreplace")
    with enduring() if args[0] in ENDURING else outliving(quits=True):
        if args == ["--version"]:
            say(f"posttrain {__version__}")
            return 0
        load_tokens(Path(".env"))
        with closing(ConsoleLog(debug)):
            return guarded(lambda: build(args[0])(args, prog_name="posttrain", standalone_mode=False), debug)


def build(verb: str = "") -> typer.Typer:
    """The application with this verb, or with all verbs if it is none. Raises UsageError for an unknown verb."""
    if verb and not verb.startswith("-") and verb not in VERBS | GROUPS:
        near = get_close_matches(verb, [*VERBS, *GROUPS], n=1)
        meant = f"write posttrain {OTHERS[verb]}" if verb in OTHERS else f"did you mean {near[0]}?" if near else ""
        raise UsageError(f"there is no command {verb}; {meant or 'posttrain --help lists all commands'}")
    app = typer.Typer(
        name="posttrain",
        help=HELP,
        epilog=EPILOG,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )
    app.callback()(lambda: None)  # without it, typer takes a single verb for the application itself
    for name in [verb] if verb in VERBS or verb in GROUPS else [*VERBS, *GROUPS]:
        module = import_module(f"posttrain.cli.{VERBS.get(name, name)}")
        if name in GROUPS:
            app.add_typer(module.app, name=name, rich_help_panel=GROUPS[name])
            continue
        verb_function = getattr(module, name.replace("-", "_"))
        if name in TAKE_SETTINGS:
            from posttrain.cli.flags import SettingsCommand, with_settings

            app.command(name, cls=SettingsCommand, epilog=EPILOG)(with_settings(verb_function))
        else:
            app.command(name, epilog=EPILOG)(with_options(verb_function))
    return app


def load_tokens(file: Path) -> None:
    """Set the variables of TOKENS from the file's `NAME=value` lines, unless the environment already has them."""
    if file.is_file():
        try:
            text = file.read_text(encoding="utf-8-sig", errors="replace")
        except OSError as error:
            say(f"warning: {file} cannot be read: {error.strerror}", error=True)
            text = ""
        for line in text.splitlines():
            name, separator, value = line.removeprefix("export ").partition("=")
            if separator and name.strip() in TOKENS:
                os.environ.setdefault(name.strip(), value.strip().strip("'\""))
    if token := os.environ.get("HUGGINGFACE_TOKEN"):
        os.environ.setdefault("HF_TOKEN", token)  # the name that the hub's library reads
