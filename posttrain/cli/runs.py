"""`posttrain runs`: listing runs, showing one, deleting some. Imports no torch."""

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from posttrain.console import PlainConsole
from posttrain.errors import RunError
from posttrain.reports.listing import Summary, in_units, runs_below, summarise
from posttrain.reports.progress import duration
from posttrain.store.runs import remove_run
from posttrain.terminal import say, visible
from posttrain.words import counted

app = typer.Typer(help="List runs, show one, delete some.", no_args_is_help=True)
OutputDir = Annotated[Path, typer.Option("--output-dir", help="Where the runs are, as in the settings.")]
Name = Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or its name below --output-dir.")]
Names = Annotated[list[str], typer.Argument(metavar="RUN…", help="Run folders, or their names below --output-dir.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")]
RUNS = Path("runs")


@app.command("list")
def list_(output_dir: OutputDir = RUNS) -> None:
    """List the runs, the latest last: state, main metric of the method, and size."""
    folders = runs_below(output_dir.expanduser())
    if not folders:
        say(f"there are no runs in {output_dir}")
        return
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("name", overflow="fold", style="bold", ratio=3)
    table.add_column("method", no_wrap=True)
    table.add_column("model", overflow="fold", ratio=2)
    table.add_column("state", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("result", overflow="fold", ratio=2)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("started", no_wrap=True)
    for folder in folders:
        run = summarise(folder)
        name = str(folder.relative_to(output_dir.expanduser()))
        started = f"{_local(run.info.started):%m-%d %H:%M}" if run.info else ""
        table.add_row(name, run.method, run.model, run.state, str(run.step), run.headline, in_units(run.size), started)
    PlainConsole().print(table)


@app.command()
def show(run: Name, output_dir: OutputDir = RUNS) -> None:
    """Show one run: state, main settings, last metrics, saved models, provenance."""
    found = summarise(_folder(run, output_dir))
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, value in _facts(found):
        table.add_row(name, value)
    PlainConsole().print(table)


@app.command()
def rm(runs: Names, yes: Yes = False, output_dir: OutputDir = RUNS) -> None:
    """Delete runs with their checkpoints and models, for good. Asks first, unless --yes.

    Only run folders are deleted (there is a run.json), none in which a process runs, and links are not followed.
    """
    found = [summarise(_folder(run, output_dir)) for run in runs]  # all of them before the first deletion
    for run in found:
        what = f"{run.folder}: {run.method} of {run.model}, {run.state} at step {run.step}, {in_units(run.size)}"
        if not yes:
            try:
                if not typer.confirm(visible(f"delete {what}?")):
                    say(f"kept {run.folder}")
                    continue
            except typer.Abort:
                raise RunError(f"not confirmed, so {run.folder} is kept: give --yes to delete it") from None
        remove_run(run.folder)
        say(f"deleted {what}")


def _folder(run: str, output_dir: Path) -> Path:
    """The run folder that the user names. Raises RunError, which lists the existing runs."""
    places = [Path(run).expanduser(), output_dir.expanduser() / run]
    for place in places:
        if (place / "run.json").is_file():
            return place
    for place in places:
        if place.is_dir() and (below := runs_below(place)):
            raise RunError(f"{place} contains {counted(len(below), 'run')}: name one, such as {below[-1]}")
    if places[0].is_dir():
        raise RunError(f"{run} is not a run folder: it has no run.json")
    known = [str(path.relative_to(output_dir.expanduser())) for path in runs_below(output_dir.expanduser())]
    raise RunError(f"there is no run {run}; in {output_dir} there are {', '.join(known[-8:]) or 'none'}")


def _facts(run: Summary) -> list[tuple[str, str]]:
    """Names and values of one run, most important first."""
    facts = [("run", str(run.folder)), ("state", run.state)]
    if run.problem:
        facts.append(("problem", run.problem))
    facts += [("method", run.method), ("model", run.model), ("data", run.data)]
    if run.info:
        if run.info.reason:
            facts.insert(2, ("reason", run.info.reason))
        facts += _times(run.info.started, run.info.ended)
    epoch = f", epoch {run.metrics['epoch']:.2f}" if "epoch" in run.metrics else ""
    facts.append(("step", f"{run.step:,}{epoch}"))
    for name, value in run.metrics.items():
        if name not in ("step", "epoch", "time"):
            facts.append((name, _number(value)))
    facts.append(("size", in_units(run.size)))
    facts += [(name, in_units(size)) for name, size in run.models.items()]
    if run.info:
        facts += [(name.replace("_", " "), _number(value)) for name, value in run.info.counters.items()]
        came_from = run.info.provenance
        facts += [(name, str(came_from[name])) for name in ("command", "folder", "host") if came_from.get(name)]
        versions = came_from.get("versions") or {}
        facts.append(("versions", ", ".join(f"{name} {version}" for name, version in versions.items() if version)))
    return facts


def _times(started: str, ended: str | None) -> list[tuple[str, str]]:
    facts = [("started", f"{_local(started):%Y-%m-%d %H:%M:%S}")]
    if ended:
        seconds = (_local(ended) - _local(started)).total_seconds()
        facts.append(("ended", f"{_local(ended):%Y-%m-%d %H:%M:%S}, {duration(seconds)} later"))
    return facts


def _local(time: str) -> datetime:
    return datetime.fromisoformat(time).astimezone()


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
