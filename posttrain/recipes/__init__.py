"""One recipe a method, each a file that reads top to bottom: sft, reward, preference, reference_free.

`train` runs a configuration.
"""

from __future__ import annotations

import logging
import signal
import time
from datetime import datetime
from pathlib import Path

import torch

from posttrain.config import ModelConfig, RunConfig, dump
from posttrain.errors import ConfigError, PosttrainError, RunError
from posttrain.recipes import preference, reference_free, reward, sft
from posttrain.recipes.finish import finish
from posttrain.recipes.job import Job
from posttrain.recipes.plan import plan
from posttrain.recipes.resume import refuse_changes, run_folder_of, saved_settings
from posttrain.recipes.signals import handling, leave
from posttrain.store.checkpoint import list_checkpoints, named_checkpoint, newest_complete
from posttrain.store.run import Run

__all__ = ["plan", "train"]

log = logging.getLogger("posttrain")

RECIPES = {
    "sft": sft.train,
    "reward": reward.train,
    "dpo": preference.train,
    "orpo": reference_free.train,
    "cpo": reference_free.train,
    "simpo": reference_free.train,
}


def train(
    config: RunConfig, *, resume: bool | Path = False, overwrite: bool = False, model_index: int | None = None
) -> int:
    """Train every model of the configuration in turn; the exit status is 0 when all of them finished.

    `resume` goes on from the newest checkpoint of each run folder, or from the one named (or the newest in the run
    folder named). A model that fails does not keep the next from its turn; a single one raises its error.
    """
    if isinstance(resume, Path):
        folder = run_folder_of(resume)
        train_one(saved_settings(folder, config), folder, named_checkpoint(resume) if resume != folder else None, True)
        return 0
    models = _chosen(config, model_index)
    if resume and config.name is None:
        raise RunError(
            "--resume needs to know the run: give its folder (--resume runs/NAME), or set name in the config"
        )
    name = config.name or f"{config.method.type}-{models[0].folder_name}-{datetime.now():%Y%m%d-%H%M%S}"
    failed = []
    for model in models:
        folder = Path(config.output_dir).expanduser() / name
        if len(config.models) > 1:
            folder = folder / model.folder_name
        one = config.model_copy(update={"models": (model,), "name": name})
        try:
            # Of many models, those that an interruption left without a checkpoint, or never reached, begin anew.
            begun = not resume or len(config.models) == 1 or bool(list_checkpoints(folder))
            train_one(one, folder, None, resume and begun, overwrite or (not begun and folder.exists()))
        except Exception as error:
            if len(models) == 1:
                raise
            failed.append(model.folder_name)
            expected = isinstance(error, PosttrainError)
            log.error("%s failed: %s", model.folder_name, error, exc_info=not expected)
    if failed:
        raise PosttrainError(
            f"{len(failed)} of {len(models)} models failed: {', '.join(failed)} (see the messages above)"
        )
    return 0


def train_one(config: RunConfig, folder: Path, checkpoint: Path | None, resume: bool, overwrite: bool = False) -> None:
    """Train the one model of `config` in `folder`, from the start or, with `resume`, from a checkpoint."""
    facts = {"seed": config.seed, "threads": torch.get_num_threads()}
    run = Run.open(folder) if resume else Run.create(folder, dump(config), facts, overwrite=overwrite)
    with handling(leave, signal.SIGTERM), run:
        began = time.perf_counter()
        if resume:
            checkpoint = checkpoint or _newest(folder)
            refuse_changes(checkpoint, config)
            run.rewind(int(checkpoint.name.rpartition("-")[2]))
            run.write_config(dump(config))
        job = Job.start(config, config.models[0], run, checkpoint)
        loop = RECIPES[config.method.type](job)
        loop.save_final()
        finish(job, loop, time.perf_counter() - began)


def _newest(folder: Path) -> Path:
    checkpoint, skipped = newest_complete(folder)
    for reason in skipped:
        log.warning("%s: falling back to %s", reason, checkpoint.name)
    return checkpoint


def _chosen(config: RunConfig, index: int | None) -> tuple[ModelConfig, ...]:
    if index is None:
        return config.models
    if not 0 <= index < len(config.models):
        raise ConfigError(f"--model-index {index}: the config has models 0 to {len(config.models) - 1}")
    return (config.models[index],)
