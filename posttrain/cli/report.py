"""`posttrain report`: a run, a pipeline or several runs on one self-contained page. Imports no torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from posttrain.base.errors import UsageError
from posttrain.base.options import Flag
from posttrain.base.terminal import say

LONGEST = 100  # characters of a file's name made of names


def report(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN…",
            help="A run folder, the folder of a pipeline, or several of them to compare; or names below --output-dir.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path | None, Flag("File to write; default: RUN/report.html, of several comparisons/A-B.html.", "-o")
    ] = None,
    overwrite: Annotated[bool, Flag("Replace the file that --output names.")] = False,
    output_dir: Annotated[Path, Flag("Where the runs are, as in the settings.")] = Path("runs"),
) -> None:
    """Write the report of a run again, or one of a pipeline or of several runs: one HTML file, for mail or a wiki.

    It has the curves, the settings, the alarms with what helps, the best and the worst completions with each part of
    their rewards, and where the run comes from; of several runs their curves over one another and the settings that
    differ. It makes no request, works without scripts, is good on a phone and on paper, and stays under 2 MB. A run
    that is active, cut short or damaged is shown as far as it can be read, and the page says what is missing.

        posttrain report runs/grpo
        posttrain report runs/chain
        posttrain report runs/grpo runs/ppo --output grpo-ppo.html
    """
    from posttrain.reports.report import below, write_pipeline_report, write_report, write_runs_report
    from posttrain.runs.files import ready_to_write

    folders = {name: _folder(name, output_dir.expanduser()) for name in dict.fromkeys(runs)}
    if output is not None:
        output = output.expanduser()
        ready_to_write(output, overwrite=overwrite)
    if len(folders) == 1:
        (folder,) = folders.values()
        path = (write_report if _is_run(folder) else write_pipeline_report)(folder, path=output)
    else:
        single = {name: one for name, one in folders.items() if _is_run(one)}
        single |= {
            f"{name}/{run.name}": run.folder for name, one in folders.items() if not _is_run(one) for run in below(one)
        }
        path = output or Path("comparisons") / _file_name(list(folders))
        write_runs_report(short_names(single), path)
    say(f"written: {path}")


def _is_run(folder: Path) -> bool:
    return (folder / "run.json").is_file()


def _folder(name: str, output_dir: Path) -> Path:
    """The folder of a run or a pipeline. Raises UsageError, with the runs that exist."""
    from posttrain.runs.finding import runs_below

    for place in (Path(name).expanduser(), output_dir / name):
        if place.is_dir() and runs_below(place):
            return place
        if place.is_dir():
            raise UsageError(f"{place} is no run, and has none: it has no run.json")
    known = [str(path.relative_to(output_dir)) for path in runs_below(output_dir)] if output_dir.is_dir() else []
    raise UsageError(f"there is no run {name}; in {output_dir} there are {', '.join(known[-8:]) or 'none'}")


def short_names(folders: Mapping[str, Path]) -> dict[str, Path]:
    """The runs by the last parts of their names, as many as tell them apart."""
    parts = {name: Path(name).parts for name in folders}
    for count in range(1, max(map(len, parts.values())) + 1):
        short = {name: "/".join(of[-count:]) for name, of in parts.items()}
        if len(set(short.values())) == len(short):
            return {short[name]: folder for name, folder in folders.items()}
    return dict(folders)


def _file_name(names: Sequence[str]) -> str:
    whole = "-".join(Path(name).name for name in names)
    return (whole if len(whole) <= LONGEST else f"{whole[:LONGEST]}…") + ".html"
