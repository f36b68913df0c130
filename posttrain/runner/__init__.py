"""Runs a configuration: trains every model at every stage, resumes on request, and compares several methods."""

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from posttrain.base.errors import RankError, RunError, is_out_of_memory
from posttrain.base.redaction import redact
from posttrain.base.terminal import enduring
from posttrain.config import RunConfig, Stage
from posttrain.parallel.ranks import Ranks, joined
from posttrain.recipes import check_functions
from posttrain.runner.comparison import compare_methods
from posttrain.runner.one import follow, train_one
from posttrain.runner.pipeline import Pipeline, Task
from posttrain.runs.checkpoint import named_checkpoint
from posttrain.runs.files import flat
from posttrain.runs.finding import is_whole_run
from posttrain.runs.inputs import located
from posttrain.runs.provenance import environment
from posttrain.runs.tracking import require_trackers
from posttrain.training import state
from posttrain.training.best import Watch

__all__ = ["train"]
OWN = ("name",)  # settings that may differ between ranks: an unnamed run is named after the time


def train(
    config: RunConfig | Sequence[Stage],
    *,
    resume: bool | Path = False,
    overwrite: bool = False,
    model_index: int | None = None,
    skip: Collection[str] = (),
    compared: bool = False,
    watch: Watch | None = None,
) -> int:
    """Train every model of the configuration at every stage in turn. Returns the exit status, 0 if all finished.

    `resume` continues where the run stopped: finished stages are kept, an unfinished one continues from its newest
    checkpoint. If `resume` is a path, it names the folder of the whole run, or a single run folder or checkpoint in it.
    If a run fails, the runs that do not depend on it are still trained; a single run raises its error. `compared`: the
    stages are methods to compare at the end (comparison.py). `watch` receives every evaluation and may end a run early.
    A closed pipe or terminal does not end the run; `training.log` contains all messages. Several ranks must be started
    with the same settings; the first rank decides what is trained next, and the others follow.
    """
    stages = (Stage("", None, config),) if isinstance(config, RunConfig) else tuple(config)
    options = {"--resume": resume, "--overwrite": overwrite, "--model-index": model_index, "--skip": sorted(skip)}
    with enduring(), joined() as ranks:
        try:
            refuse_differences(ranks, stages, options)
        except RankError:
            if ranks.local:  # the first rank of each machine reports it
                return 1
            raise
        if not ranks.is_first:
            return follow(ranks)
        for stage in stages:
            require_trackers(stage.config.tracking)
            check_functions(stage.config)
        if isinstance(resume, Path) and not is_whole_run(resume):
            _resume_one(stages, resume, ranks)
        else:
            root = root_of(stages, resume, skip, model_index, compared)
            if resume:
                stages = tuple(replace(stage, config=state.as_started(stage.config, root)) for stage in stages)

            def train_task(task: Task, resume: bool, overwrite: bool) -> None:
                with _out_of_memory_advice(task.config, root):
                    train_one(task.config, task.folder, None, resume, overwrite, task.start_facts(), watch, ranks)

            pipeline = Pipeline(stages, root, skip, model_index, keeps_going=ranks.size == 1)
            try:
                pipeline.run(train_task, bool(resume), overwrite)
            finally:
                if compared and not isinstance(sys.exception(), KeyboardInterrupt | SystemExit):
                    compare_methods(root, stages)
        ranks.gather(None)
        return 0


def root_of(
    stages: Sequence[Stage],
    resume: bool | Path = False,
    skip: Collection[str] = (),
    model_index: int | None = None,
    compared: bool = False,
) -> Path:
    """The folder of all runs of a configuration, as `train` chooses it. A run without a name is named after its methods
    or stages, its model and the time. Raises RunError if the run has no name but an existing run is needed."""
    if isinstance(resume, Path):
        return resume.parent / resume.name
    first, name = stages[0].config, stages[0].config.name
    if name is None and (resume or skip):
        option = "--resume" if resume else "--skip"
        raise RunError(f"{option} needs the run's folder: set name in the config, or give the folder to --resume")
    if name is None:
        kinds = "comparison" if compared else "-".join(stage.name or stage.config.method.type for stage in stages)
        name = f"{kinds}-{first.models[model_index or 0].folder_name}-{datetime.now():%Y%m%d-%H%M%S}"
    return Path(first.output_dir).expanduser() / name


def folders_of(
    stages: Sequence[Stage], root: Path, resume: bool | Path, skip: Collection[str], model_index: int | None
) -> list[Path]:
    """The run folders that `train` uses with these arguments, in order; `root` is the folder of all runs."""
    if isinstance(resume, Path) and not is_whole_run(resume):
        return [state.run_folder_of(resume)]
    return [task.folder for task in Pipeline(stages, root, skip, model_index).active]


@contextmanager
def _out_of_memory_advice(config: RunConfig, folder: Path) -> Iterator[None]:
    """Add advice to out-of-memory errors: the settings to lower, and the command that resumes `folder`."""
    try:
        yield
    except BaseException as error:
        if is_out_of_memory(error):
            error.add_note(state.memory_settings(config))
            error.add_note(state.smaller_packs(config, folder))
        raise


def _resume_one(stages: Sequence[Stage], path: Path, ranks: Ranks) -> None:
    """Resume the single run that `path` names, as a run folder or a checkpoint."""
    folder = state.run_folder_of(path)
    levels = (len(stages) > 1) + (len(stages[0].config.models) > 1)
    root = folder if not levels else folder.absolute().parents[levels - 1]
    stages = tuple(replace(stage, config=state.as_started(stage.config, folder)) for stage in stages)
    tasks = [task for task in Pipeline(stages, root).tasks if task.folder.absolute() == folder.absolute()]
    if not tasks:
        raise RunError(f"{folder} is a run of a model or stage that is not in the config")
    settings = located(state.saved_settings(folder, tasks[0].config), folder)
    named = named_checkpoint(path, state.problems_of) if path != folder else None
    with _out_of_memory_advice(settings, folder):
        train_one(settings, folder, named, True, False, tasks[0].start_facts(), ranks=ranks)


def refuse_differences(ranks: Ranks, stages: Sequence[Stage], options: Mapping[str, Any]) -> None:
    """Raise RankError on every rank, before anything is written, if a rank was not started like the first one.
    `options` are the command's options. training/job.py compares the data of the ranks after reading it."""
    if ranks.size == 1:
        return
    facts: dict[str, Any] = {}
    for stage in stages:  # every setting by its key, which begins with the name of the stage, if it has one
        prefix = f"stage {stage.name}: " if stage.name else ""
        values = flat(stage.config.model_dump(mode="json"), lists=True) | {"init_from": stage.init_from}
        facts |= {f"{prefix}{key}": value for key, value in values.items() if key not in OWN}
    here = environment()
    facts |= {**options, "Python": here["python"], **here["versions"], "commit of posttrain": here["git_commit"]}
    facts["processes on the machine (--nproc)"] = ranks.locals
    if lines := ranks.differences(facts):
        raise RankError(
            redact("\n  ".join(["the ranks were not started alike:", *lines]))
            + "\nStart every machine with the same command and settings, and install the same versions on each"
        )
