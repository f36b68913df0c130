"""The command tree. A verb is a function in a module of its own, which imports slow modules inside the function.

A command line imports only its verb's module: `runs list` does not need the settings, whose schema takes half a second.
Help, and an unknown verb, need all modules.
"""

from collections.abc import Callable
from importlib import import_module
from types import ModuleType

import typer

EPILOG = "--debug, anywhere on the command line, shows the stack trace of an error; --version, alone, the version."
HELP = "Post-training of language models: supervised fine-tuning, reward models, DPO and its variants, GRPO, PPO."
# Verb -> its module here, with a function of the same name. The help lists them in this order.
VERBS = {
    "train": "train",
    "launch": "launch",
    "plan": "train",
    "sweep": "sweep",
    "explore": "explore",
    "score": "score",
    "grade": "grade",
    "generate": "generate",
    "sample": "sample",
    "eval": "eval",
    "export": "export",
    "quantize": "quantize",
    "rollouts": "rollouts",
    "why": "rollouts",
    "regrade": "rollouts",
    "report": "report",
    "compare": "compare",
    "losses": "losses",
    "serve": "serve",
    "chat": "chat",
    "verify-resume": "verify",
    "ui": "ui",
    "quickstart": "quickstart",
    "doctor": "doctor",
}
TAKE_SETTINGS = ("train", "launch", "plan", "sweep", "explore", "verify-resume")  # every setting is a flag of theirs
GROUPS = {"config": "Settings", "data": "Settings", "runs": "Runs"}  # verbs with subcommands -> their panel in the help


def build(verb: str = "") -> typer.Typer:
    """The application: with this verb only, or with all if the verb is unknown."""
    app = typer.Typer(
        name="posttrain",
        help=HELP,
        epilog=EPILOG,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )
    app.callback()(lambda: None)  # typer would take an only verb for the application itself
    for name in [verb] if verb in VERBS or verb in GROUPS else [*VERBS, *GROUPS]:
        module = import_module(f"posttrain.cli.{VERBS.get(name, name)}")
        if name in GROUPS:
            app.add_typer(module.app, name=name, rich_help_panel=GROUPS[name])
        elif name in TAKE_SETTINGS:
            from posttrain.cli.flags import SettingsCommand, with_settings

            app.command(name, cls=SettingsCommand, epilog=EPILOG)(with_settings(_function(module, name)))
        else:
            app.command(name, epilog=EPILOG)(_function(module, name))
    return app


def _function(module: ModuleType, verb: str) -> Callable[..., None]:
    return getattr(module, verb.replace("-", "_"))
