"""`posttrain report`: a run, a pipeline or several runs as one self-contained page. Does not import torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from posttrain.base.errors import UsageError
from posttrain.base.options import Flag
from posttrain.base.terminal import say
from posttrain.runs.finding import runs_below

LONGEST = 100  # maximum characters of a file name that is made of the names of runs


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
    output_dir: Annotated[Path, Flag("Folder of runs, as in the settings.")] = Path("runs"),
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

    folders = {name: _folder(name, output_dir.expanduser()) for name in dict.fromkeys(runs)}
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


def _folder(name: str, output_dir: Path) -> Path:
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
