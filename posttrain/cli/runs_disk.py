"""`posttrain runs`: deleting, pruning, snapshots and archives. Does not import torch."""

import shutil
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from posttrain.base.errors import RunError
from posttrain.base.terminal import say, visible
from posttrain.base.words import counted, in_units
from posttrain.runs.atomic import remove
from posttrain.runs.finding import SNAPSHOTS, checked_name, named, short
from posttrain.runs.managing import copies, removing
from posttrain.runs.managing.copies import COPY, pack_run, read_snapshot
from posttrain.runs.managing.listing import Column, bound, filtered, table_lines
from posttrain.runs.managing.paths import described as needed_by
from posttrain.runs.managing.paths import refuse_needed
from posttrain.runs.managing.removing import Plan, left_over, plan_prune, spare_needed
from posttrain.runs.summary import summaries_below

RUNS = Path("runs")
OutputDir = Annotated[Path, typer.Option("--output-dir", help="Folder of runs, as in the settings.")]
Name = Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or its name below --output-dir.")]
Names = Annotated[list[str], typer.Argument(metavar="RUN…", help="Run folders, or their names below --output-dir.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")]
Force = Annotated[bool, typer.Option("--force", help="Proceed even if other runs need it.")]
KeepLast = Annotated[int, typer.Option("--keep-last", min=0, help="Number of newest intact checkpoints to keep.")]
KeepBest = Annotated[bool, typer.Option("--keep-best", help="Also keep the checkpoint of the step of best/.")]
OlderThan = Annotated[
    str | None, typer.Option("--older-than", help="Only runs that ended at least this long ago: 30d.")
]
Filters = Annotated[
    list[str] | None, typer.Argument(metavar="[FILTER]…", help="Only these runs, as in `posttrain runs list`.")
]
SnapshotName = Annotated[str, typer.Option("--name", help="Name of the snapshot; default: run name and time.")]
Note = Annotated[str, typer.Option("--note", help="A note that `snapshots` shows.")]
SnapshotArgument = Annotated[str, typer.Argument(metavar="SNAPSHOT", help="A name that `runs snapshots` shows.")]
To = Annotated[str | None, typer.Option("--to", help="Another name for the restored run, in the same folder.")]
Replace = Annotated[bool, typer.Option("--replace", help="Replace the existing run; asks first, unless --yes.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="The archive; by default RUN.tar.gz here.")]
NoCheckpoints = Annotated[bool, typer.Option("--no-checkpoints", help="Leave out files that only a resume reads.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing archive.")]


def settled(output_dir: Path, *runs: str) -> Path:
    """Finish or undo what interrupted commands left in the folder of runs or next to `runs`; returns the folder."""
    root = output_dir.expanduser()
    for line in removing.settle_runs(root, [path for run in runs if (path := Path(run).expanduser()).parent.is_dir()]):
        say(line, error=True)
    return root


def rm(runs: Names, yes: Yes = False, force: Force = False, output_dir: OutputDir = RUNS) -> None:
    """Delete runs with their checkpoints and models, for good. Asks first, unless --yes.

    Only folders with a run.json are deleted, or whole runs and sweeps with everything in them, but no folder that a
    process uses or (unless --force) another run needs. Links are not followed. Snapshots are kept;
    `posttrain runs rm .snapshots/NAME` deletes one.
    """
    root = settled(output_dir, *runs)
    targets = [_snapshot(run, root) or named(run, root, whole=True) for run in runs]
    if not force:  # all of them together, and before the first deletion: one may need another
        refuse_needed(targets, [root], f"{', '.join(map(str, targets))}: not deleted")
    for target in targets:
        what = removing.described(target)
        if not yes and not _confirmed(f"delete {what}?", f"{target} is kept: give --yes to delete it"):
            say(f"kept {target}")
            continue
        if _snapshot(str(target), root):
            remove(target)
        else:
            removing.delete(target, force=True)  # `refuse_needed` has checked
        say(f"deleted {what}")


def prune(
    runs: Names,
    keep_last: KeepLast = 1,
    keep_best: KeepBest = False,
    yes: Yes = False,
    force: Force = False,
    output_dir: OutputDir = RUNS,
) -> None:
    """Delete old checkpoints of runs: all but the newest intact one, which a resume needs. Asks first, unless --yes.

    best/ and final/ are kept. Folders that a resume set aside and leftovers of crashes are deleted too. With
    --keep-last 0 a run can no longer be resumed.
    """
    root = settled(output_dir, *runs)
    plans = [plan_prune(run, keep_last, keep_best) for run in [named(run, root) for run in runs]]
    if not force:
        spare_needed(plans, [root])
        for plan in plans:
            if plan.needs:
                what = needed_by(plan.needs)
                raise RunError(f"{plan.run} is not pruned: {what}. Keep it, remove what needs it, or use --force")
    _carry_out(plans, yes)


def free(
    filters: Filters = None,
    keep_last: KeepLast = 1,
    keep_best: KeepBest = False,
    older_than: OlderThan = None,
    yes: Yes = False,
    force: Force = False,
    output_dir: OutputDir = RUNS,
) -> None:
    """Free disk space by a rule: prune the checkpoints of all runs, or of those that match. Shows the plan, then asks.

    Runs in progress are skipped; a checkpoint that another run needs is kept, unless --force.

        posttrain runs free --keep-last 1 --keep-best --older-than 30d
        posttrain runs free state=failed --keep-last 0
    """
    root = output_dir.expanduser()
    terms = [*(filters or []), *([f"age>{older_than}"] if older_than is not None else [])]
    if older_than is not None:
        bound("age", older_than)
    plans: list[Plan] = [] if terms else left_over(root)
    for run in filtered(summaries_below(root), terms):
        if run.state == "running":
            say(f"in progress: {run.folder}", error=True)
            continue
        try:
            plans.append(plan_prune(run.folder, keep_last, keep_best))
        except (RunError, OSError) as error:
            say(f"skipped: {error}", error=True)
    if not force:
        spare_needed(plans, [root])
    _carry_out(plans, yes)


def _carry_out(plans: Sequence[Plan], yes: bool) -> None:
    """Show what the plans delete, ask, and delete it. A failure for one run does not stop the others."""
    for plan in plans:
        for need in plan.needs:
            say(f"kept: {short(need.path)}, needed by {need}", error=True)
    plans = [plan for plan in plans if plan.items]
    items = [item for plan in plans for item in plan.items]
    if not items:
        say("there is nothing to delete")
        return
    for item in items:
        say(f"{in_units(item.size):>7}  {item.path}  ({item.why})")
    size = in_units(sum(item.size for item in items))
    what = f"{counted(len(items), 'folder or file', 'folders and files')} of {counted(len(plans), 'run')}, {size}"
    if not yes and not _confirmed(f"delete {what}?", "nothing is deleted: give --yes to delete it"):
        say("nothing is deleted")
        return
    freed, failed = 0, 0
    for plan in plans:
        try:
            freed += removing.prune(plan)
        except RunError as error:
            failed += 1
            say(f"not pruned: {error}", error=True)
    say(f"freed {in_units(freed)}")
    if failed:
        raise RunError(f"{counted(failed, 'run')} of {len(plans)} could not be pruned (see above)")


def snapshot(run: Name, name: SnapshotName = "", note: Note = "", output_dir: OutputDir = RUNS) -> None:
    """Copy a run to .snapshots next to it, where pruning and deleting do not reach it.

    RUN may be the folder of a whole run with its models and stages.
    """
    folder = copies.take(named(run, settled(output_dir, run), whole=True), name, note)
    say(f"{short(folder)}: restore it with posttrain runs restore {folder.name}")


def snapshots(output_dir: OutputDir = RUNS) -> None:
    """List the snapshots, the latest last."""
    stored = [read_snapshot(path) for path in copies.snapshots_of(settled(output_dir))]
    if not stored:
        say(f"there are no snapshots in {output_dir}")
        return
    columns = [Column("snapshot", folds=True), Column("run", folds=True), Column("made"), Column("size", right=True)]
    rows = []
    for copy in stored:
        made = f"{datetime.fromisoformat(copy.made).astimezone():%Y-%m-%d %H:%M}" if copy.made else ""
        rows.append([copy.folder.name, copy.run.name, made, in_units(copy.size), copy.problem or copy.note])
    say("\n".join(table_lines([*columns, Column("note", folds=True)], rows, shutil.get_terminal_size().columns)))


def restore(
    snapshot: SnapshotArgument, to: To = None, replace: Replace = False, yes: Yes = False, output_dir: OutputDir = RUNS
) -> None:
    """Copy a snapshot back to the folder of its run, after verifying every file.

    An existing run in that folder is kept, unless --replace.
    """
    folder = _snapshot(snapshot, settled(output_dir, snapshot))
    if folder is None:
        raise RunError(f"there is no snapshot {snapshot} in {output_dir}: posttrain runs snapshots lists them")
    target = read_snapshot(folder).run
    target = target.with_name(checked_name(to)) if to else target
    asks = replace and target.exists() and not yes
    if asks and not _confirmed(f"replace {removing.described(target)}?", f"{target} is kept: give --yes to replace it"):
        say(f"kept {target}")
        return
    say(f"verified and restored: {short(copies.restore(folder, target, replace))}")


def export(
    run: Name,
    output: Output = None,
    no_checkpoints: NoCheckpoints = False,
    overwrite: Overwrite = False,
    output_dir: OutputDir = RUNS,
) -> None:
    """Write a run as one archive (.tar.gz, .tar), for another machine. `posttrain export` is for models.

    tar -xzf unpacks it; the run is then listed, resumed and read like any other.
    """
    target = named(run, settled(output_dir, run), whole=True)
    path = (output or Path(f"{target.resolve().name}.tar.gz")).expanduser()
    sizes = pack_run(target, path, not no_checkpoints, overwrite)
    say(f"{path}: {counted(len(sizes), 'file')}, {in_units(sum(sizes))}, packed {in_units(path.stat().st_size)}")


def _snapshot(name: str, root: Path) -> Path | None:
    """The snapshot folder that a name or a path means; None if there is none."""
    folders = [Path(name), root / name, root / SNAPSHOTS / name]
    return next((path for path in folders if path.parent.name == SNAPSHOTS and (path / COPY).is_dir()), None)


def _confirmed(question: str, otherwise: str) -> bool:
    """Whether the user agrees. Raises RunError if no one can answer."""
    try:
        return typer.confirm(visible(question))
    except typer.Abort:
        raise RunError(f"not confirmed, so {otherwise}") from None
