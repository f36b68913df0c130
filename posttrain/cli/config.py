"""`posttrain config`: starter files, presets, the resolved settings, and the schema."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from posttrain.base.console import PlainConsole
from posttrain.base.errors import ConfigError
from posttrain.base.terminal import say
from posttrain.cli.flags import SettingsCommand, with_settings
from posttrain.cli.settings import Config, Overrides, load_stages
from posttrain.config import dump, preset_names
from posttrain.config.reading.explain import did_you_mean
from posttrain.config.reading.load import preset_summary
from posttrain.config.render import EXAMPLES, json_schema, starter
from posttrain.runs.provenance import redact_yaml

app = typer.Typer(help="Starter files, presets, the resolved settings, the schema.", no_args_is_help=True)


@app.command()
def new(
    method: Annotated[str, typer.Argument(help=f"One of {', '.join(EXAMPLES)}.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to this file, which must not exist.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Write every setting, not only the usual ones.")] = False,
) -> None:
    """Write a commented settings file to start from."""
    if method not in EXAMPLES:
        raise ConfigError(f"there is no method {method}; {did_you_mean(method, EXAMPLES)}")
    text = starter(method, everything=full)
    if output is None:
        say(text, end="")
        return
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{output} exists; choose another name, or remove it first") from None
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror}") from error
    say(f"wrote {output}; start with: posttrain train {output}")


@app.command("list")
def list_() -> None:
    """List the presets: ready-made settings that name data and models on the hub."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("preset", no_wrap=True, style="bold")
    table.add_column("what it does", overflow="fold")
    for name in preset_names():
        table.add_row(name, preset_summary(name))
    console = PlainConsole()
    console.print(table)
    console.print("Start one with: posttrain train PRESET       See it with: posttrain config show PRESET")


@app.command(cls=SettingsCommand)
@with_settings
def show(config: Config = None, overrides: Overrides = None, *, flags: dict[str, str]) -> None:
    """Print all settings of a file or preset as a run would read them, including defaults; secrets as `***`."""
    say(redact_yaml(dump(load_stages(config, overrides, flags))), end="")


@app.command()
def schema() -> None:
    """Print the JSON Schema of settings files, for editors."""
    say(json.dumps(json_schema(), indent=2))
