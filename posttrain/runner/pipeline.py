"""The runs of a configuration: their order, their folders, and what happens after a failure.

A run is one model at one stage, in the folder {output_dir}/{name}/[{model}/][{stage}/]. The folder level of models or
stages exists only if there are several. A stage that starts from another stage uses that stage's `final/` as its model;
an adapter there is merged if the stage needs a full model.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import shorten
from typing import Any

from rich.table import Table

from posttrain.base.console import PlainConsole
from posttrain.base.errors import ConfigError, PosttrainError, RunError, is_out_of_memory, message_of
from posttrain.base.log import log
from posttrain.config import RunConfig, Stage, check_skip, dump, held_out_together, load
from posttrain.config.schema.rewards import ModelReward, Reward
from posttrain.reports.report import write_pipeline_report
from posttrain.runs.atomic import write_file
from posttrain.runs.checkpoint import verify
from posttrain.runs.files import load_json
from posttrain.runs.folder import never_stepped
from posttrain.runs.inputs import refuse_other_models
from posttrain.runs.metrics import headlines
from posttrain.runs.progress import duration
from posttrain.runs.provenance import redact_yaml
from posttrain.runs.summary import read_run
from posttrain.training.state import as_trained, refuse_changes

FINISHED, EARLIER, SKIPPED = "finished", "finished before", "skipped"
FAILED, NOT_RUN, STOPPED = "failed", "not run", "stopped"


@dataclass(slots=True)
class Task:
    """One model at one stage. `config` contains only that model, with the path that the run starts from."""

    model: str
    stage: str
    config: RunConfig
    folder: Path
    source: "Task | None"
    skip: bool
    outcome: str = NOT_RUN
    note: str = ""
    seconds: float = 0.0

    @property
    def title(self) -> str:
        return f"{self.stage} of {self.model}" if self.stage else self.model

    @property
    def final(self) -> Path:
        return self.folder / "final"

    def start_facts(self) -> dict[str, Any]:
        """The stage that this run starts from, for run.json."""
        return {} if self.source is None else {"init_from": {"stage": self.source.stage}}


class Pipeline:
    """All runs of a configuration in their order, in the folder `root`: model by model, stage by stage. `keeps_going`:
    whether independent runs are still trained after a failure. Raises ConfigError for an unknown stage or model."""

    def __init__(
        self,
        stages: Sequence[Stage],
        root: Path,
        skip: Collection[str] = (),
        model_index: int | None = None,
        keeps_going: bool = True,
    ):
        check_skip(skip, stages)
        models = stages[0].config.models
        if model_index is not None and not 0 <= model_index < len(models):
            raise ConfigError(f"--model-index {model_index}: the config has models 0 to {len(models) - 1}")
        self.root, self.stages, self.keeps_going = root, tuple(stages), keeps_going
        self.tasks: list[Task] = []
        for index in range(len(models)) if model_index is None else [model_index]:
            self._add_model(index, skip)
        self.active = [task for task in self.tasks if not task.skip]
        self.alone = len(stages) == len(models) == 1  # a single run, even without `--skip` and `--model-index`

    def _add_model(self, index: int, skip: Collection[str]) -> None:
        done: dict[str, Task] = {}
        for stage in held_out_together(self.stages):
            model = stage.config.models[index]
            folder = stage.folder(self.root, index, several_stages=len(self.stages) > 1)
            source = done[stage.init_from] if stage.init_from else None
            name = model.folder_name
            if source is not None:
                model = model.model_copy(update={"name": name, "path": str(source.final), "revision": None})
            config = _with_paths(stage.config, done, stage.name)
            config = config.model_copy(update={"models": (model,), "name": self.root.name})
            done[stage.name] = Task(name, stage.name, config, folder, source, stage.name in skip)
            self.tasks.append(done[stage.name])

    def check(self, resume: bool, overwrite: bool) -> None:
        """Check, before training for hours, that the models of skipped stages exist and that no folder is taken."""
        for task in self.active:
            if task.source is not None and task.source.skip:
                if problems := verify(task.source.final):
                    raise RunError(
                        f"--skip {task.source.stage}: {task.title} starts from its final model, but "
                        f"{task.source.final} cannot be used ({'; '.join(problems)}): train that stage first"
                    )
                log.info("%s starts from %s", task.title, task.source.final)
        started = [task.folder for task in self.active if (task.folder / "run.json").exists()]
        taken = [str(folder) for folder in started if not never_stepped(folder)]
        if taken and not self.alone and not resume and not overwrite:
            skip = ", skip stages (--skip)" if len(self.stages) > 1 else ""
            raise RunError(
                f"there are already runs in {', '.join(taken)}: resume them (--resume), replace them "
                f"(--overwrite){skip}, or choose another name"
            )

    def run(self, train_one: Callable[[Task, bool, bool], None], resume: bool, overwrite: bool) -> None:
        """Train every run with `train_one(task, resume, overwrite)`; at the end print the outcomes and write a report.

        After a failure, other models and independent stages are still trained if `keeps_going`. Raises PosttrainError
        at the end if any run failed; a single run raises its own error.
        """
        self.check(resume, overwrite)
        if not self.alone:  # `--resume FOLDER` reads the complete configuration next to the runs' folders
            self.root.mkdir(parents=True, exist_ok=True)
            name = {"name": self.root.name}
            stages = [replace(stage, config=stage.config.model_copy(update=name)) for stage in self.stages]
            write_file(self.root / "config.yaml", redact_yaml(dump(stages)))
        try:
            for number, task in enumerate(self.active, start=1):
                if len(self.active) > 1:
                    log.info("%s (%d of %d)", task.title, number, len(self.active))
                self._run_one(task, train_one, resume, overwrite)
        finally:
            if len(self.tasks) > 1:
                PlainConsole(stderr=True).print(self.table())
        if len(self.tasks) > 1:
            log.info("report: %s", write_pipeline_report(self.root))
        failed = [task for task in self.active if task.outcome == FAILED]
        if failed:
            waiting = [task.title for task in self.active if task.outcome == NOT_RUN]
            what = "runs" if len(self.stages) > 1 else "models"
            rest = f"; therefore not run: {', '.join(waiting)}" if waiting else ""
            raise PosttrainError(
                f"{len(failed)} of {len(self.active)} {what} failed: "
                f"{', '.join(task.title for task in failed)}{rest} (see the messages above)"
            )

    def _run_one(
        self, task: Task, train_one: Callable[[Task, bool, bool], None], resume: bool, overwrite: bool
    ) -> None:
        source = task.source
        if source is not None and not source.skip and source.outcome not in (FINISHED, EARLIER):
            task.note = f"needs {source.stage}, which {'failed' if source.outcome == FAILED else 'was not run'}"
            log.warning("%s is not run: it %s", task.title, task.note)
            return
        started_at = time.perf_counter()
        task.outcome = STOPPED
        try:
            # With --resume, a run that had not started before the interruption starts now.
            started = resume and (self.alone or (task.folder / "run.json").exists())
            if started and not self.alone:
                task.config = as_trained(task.config, task.folder)
            if started and not self.alone and is_finished(task):
                task.outcome = EARLIER
                log.info("%s has already finished", task.title)
                return
            train_one(task, started, overwrite)
            task.outcome = FINISHED
        except Exception as error:
            reason = message_of(error)
            task.outcome, task.note = FAILED, " ".join(reason.split())
            if len(self.active) == 1 or not self.keeps_going:
                raise
            expected = isinstance(error, PosttrainError) or is_out_of_memory(error)
            log.error("%s failed: %s", task.title, reason, exc_info=not expected)
        finally:
            task.seconds = time.perf_counter() - started_at

    def table(self) -> Table:
        """The table of the outcomes of all runs."""
        table = Table(title=str(self.root), title_justify="left", title_style="bold", box=None, pad_edge=False)
        for name in ("run", "outcome", "steps", "time", ""):
            table.add_column(name, justify="right" if name in ("steps", "time") else "left", overflow="fold")
        for task in self.tasks:
            steps, note = "", task.note
            results = task.folder / "results.json"
            if task.outcome in (FINISHED, EARLIER) and results.is_file():
                facts = load_json(results)
                values = headlines(facts["method"], facts["final"])  # the method's own metrics, and the loss
                steps, note = str(facts["steps"]), "  ".join(f"{name} {value:.4g}" for name, value in values.items())
            seconds = duration(task.seconds) if task.outcome in (FINISHED, FAILED, STOPPED) else ""
            outcome = SKIPPED if task.skip else task.outcome
            table.add_row(task.title, outcome, steps, seconds, shorten(note, 160, placeholder=" …"))
        return table


def _with_paths(config: RunConfig, done: Mapping[str, Task], stage: str) -> RunConfig:
    """The settings, with the folders of reward models that earlier stages train filled in."""

    def filled(rewards: Sequence[Reward] | None) -> tuple[Reward, ...] | None:
        return None if rewards is None else tuple(_with_path(reward, done, stage) for reward in rewards)

    sets = tuple(part.model_copy(update={"rewards": filled(part.rewards)}) for part in config.evaluation.datasets)
    evaluation = config.evaluation.model_copy(update={"datasets": sets})
    return config.model_copy(update={"rewards": filled(config.rewards), "evaluation": evaluation})


def _with_path(reward: Reward, done: Mapping[str, Task], stage: str) -> Reward:
    """The reward with the folder of the reward model that an earlier stage trains; other rewards are unchanged."""
    if not isinstance(reward, ModelReward) or reward.from_stage is None:
        return reward
    source = done.get(reward.from_stage)
    if source is None or source.config.method.head != "reward":
        trained = [name for name, task in done.items() if task.config.method.head == "reward"]
        raise ConfigError(
            f"stage {stage}: rewards: {reward.from_stage} is not an earlier stage that trains a reward model; known: "
            f"{', '.join(trained) or 'none'} (give another reward model by its path)"
            if stage
            else f"rewards: from: {reward.from_stage} names a stage, but the config has none: give the model's path"
        )
    return reward.model_copy(update={"path": str(source.final), "from_stage": None})


def is_finished(task: Task) -> bool:
    """Whether the run is finished with these settings, and its final model is intact.
    Raises RunError if the settings or the models differ."""
    if read_run(task.folder).state != "finished" or verify(task.final):
        return False
    refuse_changes(task.folder, task.config)
    refuse_other_models(task.folder, task.config)
    return is_as_long(task.folder, task.config)


def is_as_long(run: Path, config: RunConfig) -> bool:
    """Whether the run's settings have the same training length as `config`; a longer training continues the run."""
    saved, wanted = load(run / "config.yaml").config.training, config.training
    return (saved.max_steps, saved.num_train_epochs) == (wanted.max_steps, wanted.num_train_epochs)
