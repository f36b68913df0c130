"""One run: one model, one method, one folder, from the start or from a checkpoint."""

import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager, redirect_stderr
from dataclasses import replace
from datetime import date
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any, cast

import torch

from posttrain.base.errors import DamagedError, RankError, RunError, Stopped, reason_of
from posttrain.base.log import log
from posttrain.base.memory import peak_memory, release_memory
from posttrain.base.signals import handling, leave
from posttrain.base.terminal import say
from posttrain.base.threads import sharing_cores
from posttrain.base.words import counted
from posttrain.config import RunConfig, dump
from posttrain.models.devices import determinism, own_device
from posttrain.parallel.ranks import ALONE, Ranks
from posttrain.planning.estimate import start_job
from posttrain.planning.largest import with_room
from posttrain.recipes import recipe_of
from posttrain.reports.curves import write_curves
from posttrain.reports.report import write_report
from posttrain.runs.checkpoint import has_saved, newest_complete, saved_step, unusable
from posttrain.runs.inputs import as_recorded, models_read, refuse_other_models
from posttrain.runs.metrics import read_metrics
from posttrain.runs.progress import duration
from posttrain.runs.run import Follower, Run, own_log
from posttrain.runs.tracking import Tracking
from posttrain.training.best import Watch
from posttrain.training.loop import Loop
from posttrain.training.state import problems_of, refuse_changes, refuse_fewer_steps, report_lost

# The first rank's message to the others: the settings, the folder and the checkpoint of a run that they train too.
Order = tuple[RunConfig, Path, Path | None]


@sharing_cores()
def train_one(
    config: RunConfig,
    folder: Path,
    checkpoint: Path | None,
    resume: bool,
    overwrite: bool = False,
    start_facts: Mapping[str, Any] | None = None,
    watch: Watch | None = None,
    ranks: Ranks = ALONE,
) -> None:
    """Train the single model of `config` in `folder`, from the start or, with `resume`, from a checkpoint.

    A run that stopped before its first checkpoint starts over, and its `best` is set aside. If a checkpoint turns out
    to be damaged, the previous one is used, unless the user named the checkpoint. `watch` may end the run early.
    """
    release_memory()  # memory of the previous model
    folder = folder.absolute()  # a reward may change the working directory at any time
    facts = {"seed": config.seed, "threads": torch.get_num_threads(), "ranks": ranks.size, **(start_facts or {})}
    if not resume and config.behavior_version > 1:
        facts["date"] = config.data.date or date.today().isoformat()
    named, rejected = checkpoint, dict[str, str]()  # rejected: damaged checkpoints, with their problems
    messages: list[str] = []
    models: dict[str, dict[str, str]] = {}

    def choose_checkpoint() -> None:
        nonlocal checkpoint, messages, models
        if named is None and not has_saved(folder):
            checkpoint, messages = None, [f"{folder} has no checkpoint yet: the run starts over"]
        elif named is None:
            checkpoint, skipped = newest_complete(folder, problems_of, rejected)
            messages = [f"{reason}: falling back to {checkpoint.name}" for reason in skipped]
        if checkpoint is not None:
            refuse_changes(checkpoint, config)
            refuse_fewer_steps(checkpoint, config)
            models = models or refuse_other_models(folder, config)

    run = (
        Run.open(folder, choose_checkpoint) if resume else Run.create(folder, dump(config), facts, overwrite=overwrite)
    )
    with handling(leave, signal.SIGTERM), determinism(config.devices), run, _exits_are_failures(), chdir("."):
        while True:
            for line in messages:
                log.warning(line)
            try:
                ranks.gather((as_recorded(config, folder), folder, checkpoint))
                ranks.on_lost(lambda error: run.__exit__(type(error), error, None))
                with ranks.naming_lost():
                    return _train_from(checkpoint, config, run, {**facts, "models": models}, resume, watch, ranks)
            except DamagedError as error:
                assert checkpoint is not None  # only reading a checkpoint raises DamagedError
                if checkpoint == named or ranks.size > 1:  # other ranks read it too
                    raise unusable(checkpoint, [str(error)]) from error
                rejected[checkpoint.name] = str(error)
            release_memory()
            choose_checkpoint()


def _train_from(
    checkpoint: Path | None,
    config: RunConfig,
    run: Run,
    facts: Mapping[str, Any],
    resume: bool,
    watch: Watch | None,
    ranks: Ranks,
) -> None:
    """Train to the end, from the start or `checkpoint`. A damaged checkpoint raises DamagedError, changing nothing."""
    step = saved_step(checkpoint) if checkpoint else -1  # 0 is the evaluation before training
    lines = read_metrics(run.folder)
    logged = [line for line in lines if line["step"] > step]
    for line in report_lost(run.folder, checkpoint, config, lines) if checkpoint else ():
        log.warning(line)
    if resume and checkpoint is None:
        run.start_over(facts)
    if resume:
        run.write_config(dump(config))
    run.add_provenance({"models": facts["models"] or models_read(config, run.folder)})
    with Tracking(config, run, logged):
        loop = _steps(checkpoint, as_recorded(config, run.folder), run, watch, ranks)
        Thread(target=import_module, args=["matplotlib.backends.backend_agg"], daemon=True).start()  # for `finish`
        loop.save_final()
        finish(loop)


def _steps(checkpoint: Path | None, config: RunConfig, run: Run, watch: Watch | None, ranks: Ranks) -> Loop:
    """Make every step of a run on this rank."""
    config = config.model_copy(update={"devices": own_device(config.devices, ranks.local, ranks.size)})
    job = start_job(config, config.models[0], run, checkpoint, ranks)
    data = job.data()
    return recipe_of(config.method).train(replace(with_room(job, data), watch=watch), data)


def follow(ranks: Ranks) -> int:
    """Train each run that the first rank announces, until there are no more. Returns the exit status.

    This rank's log records why a run ended. The first rank reports the reason to the user; a lost rank is also reported
    by the first rank of each other machine.
    """
    terminal = sys.stderr  # a run's log replaces sys.stderr

    def report(error: BaseException) -> None:
        if ranks.local == 0 or not isinstance(error, RankError):
            with redirect_stderr(terminal):
                say(f"rank {ranks.index} ended: {reason_of(error)}", error=True)

    ranks.on_lost(report)
    try:
        while (order := ranks.gather(cast(Order | None, None))[0]) is not None:
            config, folder, checkpoint = order
            release_memory()
            with (
                own_log(folder, ranks.index),
                handling(leave, signal.SIGTERM),
                determinism(config.devices),
                Follower(folder) as run,
                ranks.naming_lost(),
            ):
                _steps(checkpoint, config, run, None, ranks).save_final()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:  # any code of the run may raise; the log of this rank has the stack trace
        if not ranks.ended_together or not isinstance(error, RankError):
            report(error)
        return 1
    return 0


@contextmanager
def _exits_are_failures() -> Iterator[None]:
    """Turn `sys.exit` in a reward, or in other code that a run calls, into a failure, unless a signal caused it."""
    try:
        yield
    except SystemExit as error:
        if isinstance(error, Stopped):
            raise
        raise RunError(f"{reason_of(error)}: code that a run calls must raise an error instead") from error


def finish(loop: Loop) -> None:
    """Write results.json, curves.png and report.html of a finished run, and log a summary."""
    job, run, state = loop.job, loop.job.run, loop.state
    lines = read_metrics(run.folder)
    results = {
        "method": job.config.method.type,
        "model": job.model.path,
        "steps": state.step,
        "num_tokens": state.num_tokens,
        "skipped_steps": state.skipped,
        "train_runtime": round(state.seconds, 3),
        "save_seconds": round(state.save_seconds, 3),
        "tokens_per_second": round(state.num_tokens / state.seconds, 1) if state.seconds else 0.0,
        "peak_memory_gib": round(peak_memory(job.device) / 2**30, 3),
        "start": last_values(lines[::-1]),
        "final": last_values(lines),
    }
    if (graphs := loop.optimizer.graphs) is not None:
        results |= {"replayed_passes": graphs.replays, "eager_passes": graphs.eager}
        log.info("CUDA graphs replayed %d of %d passes", graphs.replays, graphs.replays + graphs.eager)
    if state.best is not None:
        results["best"] = {str(job.config.best_metric): state.best}
    run.write_results(results)
    if job.config.method.head == "reward":
        run.write_final_results(results)
    run.set_counters({"skipped_steps": state.skipped})
    run.set_state("finished")
    title = f"{job.config.method.type} of {job.model.folder_name}"
    write_curves(run.folder, run.folder / "curves.png", title)
    write_report(run.folder, title)
    log.info("done, %s in %s: %s", counted(state.step, "step"), duration(state.seconds), run.folder)


def last_values(lines: list[dict[str, Any]]) -> dict[str, float]:
    """The last value of every metric except step, epoch and time."""
    return {k: v for line in lines for k, v in line.items() if k not in ("step", "epoch", "time") and v is not None}
