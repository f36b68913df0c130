"""`posttrain runs` and `posttrain report`: listing, showing, naming and reporting runs; runs_disk.py deletes and copies
them. Does not import torch."""

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from posttrain.base.errors import RunError, UsageError
from posttrain.base.options import Flag
from posttrain.base.terminal import say
from posttrain.base.words import counted, in_units
from posttrain.cli import runs_disk
from posttrain.cli.runs_disk import RUNS, Force, Name, OutputDir, settled
from posttrain.runs.finding import links_in, named, runs_below, short
from posttrain.runs.folder import NOTES, Notes, read_notes, write_notes
from posttrain.runs.managing.listing import ORDERS, Column, filtered, ordered, table_lines
from posttrain.runs.managing.paths import rename as rename_run
from posttrain.runs.summary import RunSummary, summaries_below

HELP = """List, show and manage runs. Without a command, in a terminal: choose runs with the arrow keys.

RUN is a run folder, or its name below --output-dir. A run in progress is never changed."""
app = typer.Typer(help=HELP, invoke_without_command=True)
Filters = Annotated[
    list[str] | None,
    typer.Argument(metavar="[FILTER]…", help="Words, or FIELD=VALUE as in state=failed, step>100, size>1GB, tag=keep."),
]
Sort = Annotated[str, typer.Option("--sort", help=f"One of {', '.join(ORDERS)}.")]
Reverse = Annotated[bool, typer.Option("--reverse", "-r", help="Largest or last first.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object per line, for programs.")]
Tags = Annotated[list[str], typer.Argument(metavar="TAG…", help="Tags to give the run; -TAG removes one.")]
Text = Annotated[str | None, typer.Argument(metavar="[TEXT]", help="The new note; without it, the note is shown.")]
NewName = Annotated[str, typer.Argument(metavar="NAME", help="The new name of the folder.")]
LONGEST = 100  # maximum characters of a file name that is made of the names of runs
# Fields of a run in --json.
FACTS = (
    "name", "folder", "state", "problem", "method", "model", "data", "step", "metric", "result", "size", "started",
    "ended", "changed", "tags", "note",
)  # fmt: skip
COLUMNS = (
    Column("name", folds=True), Column("method"), Column("model", folds=True), Column("state"),
    Column("step", right=True), Column("result", folds=True), Column("size", right=True), Column("started"),
)  # fmt: skip


@app.callback()
def interactive(context: typer.Context, output_dir: OutputDir = RUNS) -> None:
    """Without a command: an interactive table of the runs, or a list of the runs if there is no terminal."""
    if context.invoked_subcommand is not None:
        if output_dir != RUNS:
            raise UsageError(f"give --output-dir after the command: posttrain runs {context.invoked_subcommand} …")
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        list_([], output_dir=output_dir)
        return
    from posttrain.runs.managing.screen import RunsApp

    RunsApp(settled(output_dir)).run()


@app.command("list")
def list_(
    filters: Filters = None,
    sort: Sort = "time",
    reverse: Reverse = False,
    as_json: AsJson = False,
    output_dir: OutputDir = RUNS,
) -> None:
    """List the runs, the latest last: state, main metric of the method, tags and size.

    Runs must match every FILTER. A word matches any text of the run. FIELD=VALUE (or !=) compares name, state, method,
    model, data, metric, tag or note, where * stands for anything; step, result, size and age also take < and >.

        posttrain runs list state=failed 'age>30d'
        posttrain runs list method=grpo --sort result --reverse
    """
    root = settled(output_dir)
    runs = summaries_below(root)
    shown = ordered(filtered(runs, filters or []), sort, reverse)
    for link in links_in(root) if root.is_dir() else ():
        say(f"{link}: a link, which is not followed", error=True)
    if as_json:
        for run in shown:
            say(json.dumps({name: getattr(run, name) for name in FACTS} | {"folder": str(run.folder)}))
        return
    if not runs:
        say(f"there are no runs in {output_dir}")
        return
    if shown:
        say("\n".join(table_lines(COLUMNS, [cells_of(run) for run in shown], shutil.get_terminal_size().columns)))
    of = f" of {len(runs):,}" if len(shown) < len(runs) else ""
    say(f"\n{counted(len(shown), 'run')}{of}, {in_units(sum(run.size for run in shown))}")
    for run in shown:
        if run.problem:
            say(f"{run.name}: {run.problem}", error=True)


def cells_of(run: RunSummary) -> list[str]:
    """A run's cells in the list."""
    started = f"{run.started_at:%m-%d %H:%M}" if run.started_at else ""
    name = f"{run.name} {run.hashtags}".rstrip()
    return [name, run.method, run.model, run.state, str(run.step), run.headline, in_units(run.size), started]


@app.command()
def show(run: Name, output_dir: OutputDir = RUNS) -> None:
    """Show one run: state, main settings, last metrics, saved models, provenance."""
    from rich.table import Table

    from posttrain.base.console import PlainConsole
    from posttrain.runs.managing.facts import facts_of

    summary = RunSummary(named(run, output_dir.expanduser()))
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, value in facts_of(summary):
        table.add_row(name, value)
    PlainConsole().print(table)


@app.command()
def diff(
    one: Annotated[str, typer.Argument(metavar="A", help="A run.")],
    other: Annotated[str, typer.Argument(metavar="B", help="Another run.")],
    output_dir: OutputDir = RUNS,
) -> None:
    """Show how two runs differ: settings, versions and data, and the latest value of each metric."""
    from posttrain.base.console import PlainConsole
    from posttrain.runs.managing.facts import difference_table

    root = output_dir.expanduser()
    PlainConsole().print(difference_table(named(one, root), named(other, root)))


@app.command(context_settings={"ignore_unknown_options": True})
def tag(run: Name, tags: Tags, output_dir: OutputDir = RUNS) -> None:
    """Add tags to a run, or remove some: posttrain runs tag RUN keep paper -draft

    `posttrain runs list tag=keep` finds them. Tags are stored in the run folder's notes.json, which runs never read.
    """
    folder = named(run, output_dir.expanduser())
    before = read_notes(folder)
    removed = {word.removeprefix("-") for word in tags if word.startswith("-")}
    unknown = sorted(removed - set(before.tags))
    if unknown:
        raise RunError(f"{folder} has no tag {', '.join(unknown)}; it has {', '.join(before.tags) or 'none'}")
    added = [word for word in tags if not word.startswith("-")]
    kept = tuple(dict.fromkeys(word for word in (*before.tags, *added) if word not in removed))
    write_notes(folder, Notes(kept, before.note))
    say(f"{folder}: {' '.join(f'#{word}' for word in kept) or 'no tags'}")


@app.command()
def note(run: Name, text: Text = None, output_dir: OutputDir = RUNS) -> None:
    """Write a note about a run, or show it. An empty TEXT ('') deletes it."""
    folder = named(run, output_dir.expanduser())
    before = read_notes(folder)
    if text is None:
        say(before.note or f"{folder} has no note: write one with posttrain runs note {run} TEXT")
        return
    write_notes(folder, Notes(before.tags, text.strip()))
    say(f"{folder / NOTES}: {'note written' if text.strip() else 'note deleted'}")


@app.command()
def rename(run: Name, name: NewName, force: Force = False, output_dir: OutputDir = RUNS) -> None:
    """Rename a run. Its path is updated in the settings of other runs."""
    target = named(run, settled(output_dir, run), whole=True)
    done = rename_run(target, name, [output_dir.expanduser()], force)
    say(f"{target} is now {done.folder}")
    for path in done.updated:
        say(f"updated: {short(path)}")
    for what in done.left:
        say(f"still has the old path: {what}", error=True)


def report(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN…",
            help="A run or pipeline folder, or its name below --output-dir; several are compared.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path | None, Flag("File to write; default: RUN/report.html, or comparisons/A-B.html for several.", "-o")
    ] = None,
    overwrite: Annotated[bool, Flag("Replace the file that --output names.")] = False,
    output_dir: Annotated[Path, Flag("Folder of runs, as in the settings.")] = RUNS,
) -> None:
    """Write the report of a run, a pipeline or several runs: one HTML file, for mail or a wiki.

    The report shows the curves, the settings, the alarms with remedies, the best and the worst completions with each
    part of their rewards, and the provenance of the run; for several runs, their curves in one chart and the settings
    that differ. It makes no requests, has less than 2 MB, and works without scripts, on a phone and on paper. A run
    that is active, stopped or damaged is shown as far as it can be read, and the page says what is missing.

        posttrain report runs/grpo
        posttrain report runs/chain
        posttrain report runs/grpo runs/ppo --output grpo-ppo.html
    """
    from posttrain.reports.report import below, write_pipeline_report, write_report, write_runs_report
    from posttrain.runs.files import ready_to_write

    folders = {name: _reported(name, output_dir.expanduser()) for name in dict.fromkeys(runs)}
    single = {name: folder for name, folder in folders.items() if (folder / "run.json").is_file()}
    pipelines = {name: folder for name, folder in folders.items() if name not in single}
    if output is not None:
        output = output.expanduser()
        ready_to_write(output, overwrite=overwrite)
    if len(folders) == 1:
        (folder,) = folders.values()
        path = (write_report if single else write_pipeline_report)(folder, path=output)
    else:
        single |= {f"{name}/{run.name}": run.folder for name, root in pipelines.items() for run in below(root)}
        names = "-".join(Path(name).name for name in folders)
        path = output or Path("comparisons", f"{names if len(names) <= LONGEST else names[:LONGEST] + '…'}.html")
        write_runs_report(short_names(single), path)
    say(f"written: {path}")


def _reported(name: str, output_dir: Path) -> Path:
    """The folder of a run or a pipeline. If there is none, raises UsageError with the runs that exist."""
    for folder in (Path(name).expanduser(), output_dir / name):
        if folder.is_dir() and runs_below(folder):
            return folder
        if folder.is_dir():
            raise UsageError(f"{folder} is not a run and contains none: it has no run.json")
    known = [str(path.relative_to(output_dir)) for path in runs_below(output_dir)] if output_dir.is_dir() else []
    raise UsageError(f"there is no run {name}; in {output_dir} there are {', '.join(known[-8:]) or 'none'}")


def short_names(folders: Mapping[str, Path]) -> dict[str, Path]:
    """The runs, keyed by the shortest ends of their names that tell the runs apart."""
    parts = [Path(name).parts for name in folders]
    for count in range(1, max(map(len, parts)) + 1):
        short = dict(zip(("/".join(name[-count:]) for name in parts), folders.values(), strict=True))
        if len(short) == len(folders):
            return short
    return dict(folders)


for command in ("rm", "prune", "free", "snapshot", "snapshots", "restore", "export"):
    app.command()(getattr(runs_disk, command))
app.command("delete", hidden=True)(runs_disk.rm)
