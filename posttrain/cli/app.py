"""The command tree. A verb is a function in a module of its own, which imports what is slow inside the function."""

import typer

from posttrain.cli import (
    config,
    data,
    explore,
    generate,
    grade,
    quickstart,
    rollouts,
    runs,
    sample,
    score,
    train,
    verify,
)
from posttrain.cli.flags import SettingsCommand, with_settings

EPILOG = "--debug, anywhere on the command line, shows the stack trace of an error."


def build() -> typer.Typer:
    """The application with all its verbs."""
    app = typer.Typer(
        name="posttrain",
        help="Post-training of language models: supervised fine-tuning, reward models, DPO and its kin.",
        epilog=EPILOG,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )
    app.command("train", cls=SettingsCommand, epilog=EPILOG)(with_settings(train.train))
    app.command("plan", cls=SettingsCommand, epilog=EPILOG)(with_settings(train.plan))
    app.command("explore", cls=SettingsCommand, epilog=EPILOG)(with_settings(explore.explore))
    app.command("score", epilog=EPILOG)(score.score)
    app.command("grade", epilog=EPILOG)(grade.grade)
    app.command("generate", epilog=EPILOG)(generate.generate)
    app.command("sample", epilog=EPILOG)(sample.sample)
    app.command("rollouts", epilog=EPILOG)(rollouts.rollouts)
    app.command("why", epilog=EPILOG)(rollouts.why)
    app.command("regrade", epilog=EPILOG)(rollouts.regrade)
    app.command("verify-resume", cls=SettingsCommand, epilog=EPILOG)(with_settings(verify.verify_resume))
    app.command("quickstart", epilog=EPILOG)(quickstart.quickstart)
    app.add_typer(config.app, name="config", rich_help_panel="Settings")
    app.add_typer(data.app, name="data", rich_help_panel="Settings")
    app.add_typer(runs.app, name="runs", rich_help_panel="Runs")
    return app
