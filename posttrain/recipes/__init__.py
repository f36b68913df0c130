"""One recipe a method, each a file that reads top to bottom: sft, reward, preference, reference_free, kto,
ppo, grpo.

`train` runs a configuration.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from posttrain.config import RunConfig, Stage, dump
from posttrain.errors import DamagedError, RunError, Stopped, is_out_of_memory, reason_of
from posttrain.memory import release_memory
from posttrain.models.load import determinism
from posttrain.output import enduring
from posttrain.recipes import grpo, kto, ppo, preference, reference_free, reward, sft
from posttrain.recipes.comparison import compare
from posttrain.recipes.finish import finish
from posttrain.recipes.inputs import is_whole_run, located, models_read, refuse_other_models
from posttrain.recipes.job import Job
from posttrain.recipes.pipeline import Pipeline, Task
from posttrain.recipes.plan import plan
from posttrain.recipes.resume import (
    memory_settings,
    refuse_changes,
    refuse_fewer_steps,
    report_lost,
    run_folder_of,
    saved_settings,
    smaller_packs,
)
from posttrain.recipes.state import problems_of
from posttrain.signals import handling, leave
from posttrain.store.checkpoint import has_saved, named_checkpoint, newest_complete, saved_step, unusable
from posttrain.store.run import Run
from posttrain.store.tracking import Tracking, require_trackers
from posttrain.threads import sharing_cores

__all__ = ["plan", "train"]

log = logging.getLogger("posttrain")

RECIPES = {
    "sft": sft.train,
    "reward": reward.train,
    "dpo": preference.train,
    "orpo": reference_free.train,
    "cpo": reference_free.train,
    "simpo": reference_free.train,
    "kto": kto.train,
    "ppo": ppo.train,
    "grpo": grpo.train,
    "rloo": grpo.train,
    "reinforce_plus_plus": grpo.train,
}


def train(
    config: RunConfig | Sequence[Stage],
    *,
    resume: bool | Path = False,
    overwrite: bool = False,
    model_index: int | None = None,
    skip: Collection[str] = (),
    compared: bool = False,
) -> int:
    """Train every model of the configuration at every stage in turn; the exit status is 0 when all of them finished.

    `resume` goes on where the run stopped: finished stages are left as they are, a begun one goes on from its newest
    checkpoint. As a path it names the folder of the whole run, or one run folder or checkpoint in it to go on with
    alone. A run that fails does not keep others from their turn that do not build on it; a single one raises its error.
    `compared` says that the stages are methods to be compared at the end (comparison.py). A closed pipe or terminal
    ends nothing: `training.log` has what was said.
    """
    with enduring():
        return _train(config, resume, overwrite, model_index, skip, compared)


def _train(
    config: RunConfig | Sequence[Stage],
    resume: bool | Path,
    overwrite: bool,
    model_index: int | None,
    skip: Collection[str],
    compared: bool,
) -> int:
    stages = (Stage("", None, config),) if isinstance(config, RunConfig) else tuple(config)
    for stage in stages:
        require_trackers(stage.config.tracking)
    if isinstance(resume, Path) and not is_whole_run(resume):
        return _resume_one(stages, resume)
    first, name = stages[0].config, stages[0].config.name
    folder = Path(first.output_dir).expanduser()
    if isinstance(resume, Path):
        folder, name = resume.parent, resume.name
    if name is None and (resume or skip):
        option = "--resume" if resume else "--skip"
        raise RunError(f"{option} needs to know the run: set name in the config, or give its folder to --resume")
    if name is None:
        kinds = "comparison" if compared else "-".join(stage.name or stage.config.method.type for stage in stages)
        name = f"{kinds}-{first.models[model_index or 0].folder_name}-{datetime.now():%Y%m%d-%H%M%S}"
    runs = Pipeline.of(stages, folder / name, skip, model_index)

    def train_task(task: Task, resume: bool, overwrite: bool) -> None:
        with _out_of_memory_is_answered(task.config, runs.root):
            train_one(task.config, task.folder, None, resume, overwrite, task.start_facts())

    try:
        return runs.run(train_task, bool(resume), overwrite)
    finally:
        if compared and not isinstance(sys.exception(), KeyboardInterrupt | SystemExit):
            compare(folder / name, stages)


@contextmanager
def _out_of_memory_is_answered(config: RunConfig, folder: Path) -> Iterator[None]:
    """Tell who runs out of memory the command that goes on with less of it; `folder` is what it resumes."""
    try:
        yield
    except BaseException as error:
        if is_out_of_memory(error):
            error.add_note(memory_settings(config))
            error.add_note(smaller_packs(config, folder))
        raise


@contextmanager
def _exits_are_failures() -> Iterator[None]:
    """`sys.exit` in a reward, or in any code that a run calls, is a failure of the run; a signal's end is its own."""
    try:
        yield
    except SystemExit as error:
        if isinstance(error, Stopped):
            raise
        raise RunError(f"{reason_of(error)}: code that a run calls must raise an error instead") from error


def _resume_one(stages: Sequence[Stage], path: Path) -> int:
    """Go on with the one run whose folder or checkpoint is given."""
    folder = run_folder_of(path)
    levels = (len(stages) > 1) + (len(stages[0].config.models) > 1)
    root = folder if not levels else folder.absolute().parents[levels - 1]
    tasks = [task for task in Pipeline.of(stages, root).tasks if task.folder.absolute() == folder.absolute()]
    if not tasks:
        raise RunError(f"{folder} is a run of a model or stage that the given config does not have")
    settings = located(saved_settings(folder, tasks[0].config), folder)
    named = named_checkpoint(path, problems_of) if path != folder else None
    with _out_of_memory_is_answered(settings, folder):
        train_one(settings, folder, named, True, False, tasks[0].start_facts())
    return 0


@sharing_cores()
def train_one(
    config: RunConfig,
    folder: Path,
    checkpoint: Path | None,
    resume: bool,
    overwrite: bool = False,
    start_facts: Mapping[str, Any] | None = None,
) -> None:
    """Train the one model of `config` in `folder`, from the start or, with `resume`, from a checkpoint.

    A run that was stopped before its first checkpoint begins anew; a `best` that it has is set aside. A checkpoint that
    turns out to be damaged while it is loaded gives way to the one before it, unless it is the one asked for.
    """
    release_memory()  # of the model before
    facts = {"seed": config.seed, "threads": torch.get_num_threads(), **(start_facts or {})}
    named, rejected = checkpoint, dict[str, str]()
    said: list[str] = []
    models: dict[str, dict[str, str]] = {}

    def choose_checkpoint() -> None:
        nonlocal checkpoint, said, models
        if named is None:
            checkpoint, said = _newest(folder, rejected)
        if checkpoint is not None:
            refuse_changes(checkpoint, config)
            refuse_fewer_steps(checkpoint, config)
            models = models or refuse_other_models(folder, config)

    run = (
        Run.open(folder, choose_checkpoint) if resume else Run.create(folder, dump(config), facts, overwrite=overwrite)
    )
    with handling(leave, signal.SIGTERM), determinism(config.devices), run, _exits_are_failures():
        while True:
            for line in said:
                log.warning(line)
            try:
                return _train_from(checkpoint, config, run, {**facts, "models": models}, resume)
            except DamagedError as error:
                assert checkpoint is not None  # nothing else raises it
                if checkpoint == named:
                    raise unusable(checkpoint, [str(error)]) from error
                rejected[checkpoint.name] = str(error)
            release_memory()
            choose_checkpoint()


def _train_from(checkpoint: Path | None, config: RunConfig, run: Run, facts: Mapping[str, Any], resume: bool) -> None:
    """Train to the end, from the start or from a checkpoint. Raises DamagedError for a bad one, all left as it was."""
    step = saved_step(checkpoint) if checkpoint else -1  # 0 is the evaluation before training
    lines = run.read_metrics()
    logged = [line for line in lines if line["step"] > step]
    for line in report_lost(run.folder, checkpoint, config, lines) if checkpoint else ():
        log.warning(line)
    if resume and checkpoint is None:
        run.begin_anew(facts)
    if resume:
        run.write_config(dump(config))
    run.add_provenance({"models": facts["models"] or models_read(config, run.folder)})
    with Tracking(config, run, logged):
        job = Job.start(config, config.models[0], run, checkpoint)
        loop = RECIPES[config.method.type](job)
        loop.save_final()
        finish(job, loop)


def _newest(folder: Path, rejected: Mapping[str, str]) -> tuple[Path | None, list[str]]:
    """The checkpoint to go on from, None for a run that was stopped before its first one; and what there is to say.

    `rejected` has what is wrong with those that were tried.
    """
    if not has_saved(folder):
        return None, [f"{folder} has no checkpoint yet: it is begun anew"]
    checkpoint, skipped = newest_complete(folder, problems_of, rejected)
    return checkpoint, [f"{reason}: falling back to {checkpoint.name}" for reason in skipped]
