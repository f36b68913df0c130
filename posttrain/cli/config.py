"""`posttrain config`: starter files, imports, presets, the resolved settings, and the schema."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from posttrain.base.console import PlainConsole, text_table
from posttrain.base.errors import ConfigError
from posttrain.base.terminal import say
from posttrain.base.words import counted
from posttrain.cli.flags import SettingsCommand, with_settings
from posttrain.cli.settings import Config, Overrides, load_stages
from posttrain.config import dump, preset_names
from posttrain.config.foreign import SYSTEMS, parse
from posttrain.config.reading.explain import did_you_mean
from posttrain.config.reading.files import read_text
from posttrain.config.reading.load import PRESETS
from posttrain.config.render import EXAMPLES, json_schema, starter
from posttrain.runs.provenance import redact_yaml

app = typer.Typer(
    help="Starter files, imports from other systems, presets, the resolved settings, the schema.", no_args_is_help=True
)
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file, which must not exist.")]


@app.command()
def new(
    method: Annotated[str, typer.Argument(help=f"One of {', '.join(EXAMPLES)}.")],
    output: Output = None,
    full: Annotated[bool, typer.Option("--full", help="Write every setting, not only the usual ones.")] = False,
) -> None:
    """Write a commented settings file to start from."""
    if method not in EXAMPLES:
        raise ConfigError(f"there is no method {method}; {did_you_mean(method, EXAMPLES)}")
    _write(starter(method, everything=full), output)


def _write(text: str, output: Path | None, overwrite: bool = False, lacks: bool = False) -> None:
    if output is None:
        say(text, end="")
        return
    try:
        with output.open("w" if overwrite else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{output} exists; choose another name, or remove it first") from None
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror}") from error
    say(f"wrote {output}" if lacks else f"wrote {output}; start with: posttrain train {output}")


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="YAML or JSON file, shell script or text with a command; -: stdin.")],
    output: Output = None,
    system: Annotated[
        str | None,
        typer.Option("--from", help=f"System of the file: {', '.join(SYSTEMS)}; without: inferred from its names."),
    ] = None,
    method: Annotated[str | None, typer.Option("--method", help="Method, if the file does not say it.")] = None,
    devices: Annotated[
        int | None, typer.Option("--devices", min=1, help="Number of devices that the file was used on.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing output file.")] = False,
) -> None:
    """Write the settings file for a command or file of TRL, LLaMA-Factory, axolotl or another system.

    Comments say where a value means something else here, and which values are defaults of the other system. What is
    not carried is listed at the end, with reasons. For example:

    posttrain config import train.sh -o dpo.yaml

    echo "trl sft --model_name_or_path gpt2 --dataset_name trl-lib/Capybara" | posttrain config import -
    """
    from posttrain.config.importing import convert, settle, written

    if system is not None and system not in SYSTEMS:
        raise ConfigError(f"--from is {system!r}; {did_you_mean(system, SYSTEMS)}")
    name, text = ("stdin", sys.stdin.read()) if str(file) == "-" else (str(file), read_text(file))
    source = parse(text, name, system, file.suffix in (".yaml", ".yml", ".json"))
    source.devices = devices or source.devices
    draft = convert(source, method)
    settle(draft)
    _write(written(draft), output, overwrite, lacks=bool(draft.lacks))
    for lack in draft.lacks:
        say(f"still missing: {lack}", error=True)
    if draft.left:
        say(f"not carried: {counted(len(draft.left), 'name')}; the end of the file says why", error=True)


@app.command("list")
def list_() -> None:
    """List the presets: ready-made settings that name data and models on the hub."""
    columns = ("preset", "what it does")
    table = text_table(*columns, left=columns)
    for name in preset_names():
        first = (PRESETS / f"{name}.yaml").read_text(encoding="utf-8").partition("\n")[0]
        table.add_row(name, first.lstrip("# ").strip())
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
