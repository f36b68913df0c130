"""`train CONFIG --method all`: compares every method that the data allows, from the same start, with the same budget.

The settings define the budget: the same prompts or examples in the same order, `training.batch_size` per step, the same
number of steps, seed and validation prompts. Methods are compared by the rewards of their validation completions.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from posttrain.base.console import PlainConsole
from posttrain.base.errors import ConfigError, DataError
from posttrain.config import RunConfig, Stage, load
from posttrain.models.load import load_tokenizer
from posttrain.runner.methods import write_comparison
from posttrain.runs.folder import run_folder
from posttrain.runs.summary import RunSummary
from posttrain.training.job import data_of

log = logging.getLogger("posttrain")


def methods_as_stages(
    config: str | None, overrides: Sequence[str], flags: Mapping[str, str], names: Sequence[str]
) -> tuple[Stage, ...]:
    """The settings with each method in turn, as independent stages.

    A method is dropped with a warning if its settings or the data do not allow it. Raises ConfigError if fewer than two
    remain, with the reasons.
    """
    stages: list[Stage] = []
    refused: dict[str, str] = {}
    for name in names:
        try:
            loaded = load(config, overrides, {**flags, "method.type": name})
            settings = loaded.config
            _check_comparable(settings)
            data_of(settings, settings.models[0], load_tokenizer(settings.models[0]))
        except (ConfigError, DataError) as error:
            refused[name] = str(error)
            continue
        stages.append(Stage(name, None, settings))
    reasons = list(dict.fromkeys(refused.values()))
    if not stages and len(reasons) == 1:
        raise ConfigError(reasons[0])
    if len(stages) < 2:
        found = "".join(f"\n  {name}: {reason}" for name, reason in refused.items())
        raise ConfigError(f"--method: fewer than two methods can be compared:{found}")
    for name, reason in refused.items():
        log.warning("dropped from the comparison: %s: %s", name, " ".join(reason.split()))
    return tuple(stages)


def _check_comparable(config: RunConfig) -> None:
    """Raise ConfigError if the runs would have nothing to compare."""
    if not (config.rewards and config.evaluates and config.rollout.save):
        raise ConfigError(
            "methods are compared by the rewards of their completions: set rewards, data.validation, e.g. {rows: 100}, "
            "and evaluation.eval_steps above 0, and leave rollout.save true"
        )


def compare(root: Path, stages: Sequence[Stage]) -> None:
    """Write `comparison/` for every model in the run's folder and print its tables. Failed runs are omitted."""
    models = stages[0].config.models
    for index, model in enumerate(models):
        folders = {stage.name: run_folder(root, stage, index, several_stages=True) for stage in stages}
        finished = {name: folder for name, folder in folders.items() if RunSummary(folder).state == "finished"}
        if not finished:
            continue
        folder = root / "comparison" / (model.folder_name if len(models) > 1 else "")
        write_comparison(folder, finished, PlainConsole())
        log.info("compared: %s", folder / "comparison.html")
