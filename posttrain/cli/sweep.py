"""`posttrain sweep`."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from posttrain.base.console import PlainConsole
from posttrain.base.errors import ConfigError
from posttrain.base.imports import quick_imports
from posttrain.base.terminal import say
from posttrain.base.words import counted
from posttrain.cli.errors import Interrupted, UsageError
from posttrain.cli.settings import Config, Overrides, split_arguments
from posttrain.cli.train import DryRun
from posttrain.config import RunConfig, load
from posttrain.config.schema.base import EVAL_METRIC
from posttrain.runs.headline import OF_METHOD

Random = Annotated[
    int | None, typer.Option("--random", min=1, metavar="N", help="Run N random trials instead of the whole grid.")
]
RandomSeed = Annotated[int, typer.Option("--random-seed", help="Seed of --random: the same trials every time.")]
Metric = Annotated[
    str | None,
    typer.Option("--metric", help="Evaluation metric that ranks trials, such as eval_loss; default: the method's own."),
]
Stopping = Annotated[
    Literal["median", "none"] | None,
    typer.Option("--stopping", help="Rule that ends bad trials early; default: median, and none if seeds are swept."),
]
Resume = Annotated[bool, typer.Option("--resume", help="Resume a sweep: finished trials are kept.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Delete the sweep's trials first if it exists.")]


def sweep(
    config: Config = None,
    overrides: Overrides = None,
    random: Random = None,
    random_seed: RandomSeed = 0,
    metric: Metric = None,
    stopping: Stopping = None,
    dry_run: DryRun = False,
    resume: Resume = False,
    overwrite: Overwrite = False,
    *,
    flags: Mapping[str, str],
) -> None:
    """Train one run for each combination of settings, and rank them by an evaluation metric.

    Values are listed, method.beta=0.05,0.1,0.5, or are a range: seed=0..4 (whole numbers), or with --random N
    training.learning_rate=1e-6..1e-4 (log-uniform). Other overrides and flags are the same for all trials.

    Each trial is an ordinary run in {output_dir}/{name}/. --resume resumes a sweep that was interrupted
    at any time, also with further values. --dry-run lists the trials.
    """
    if resume and overwrite:
        raise UsageError("--resume continues a sweep and --overwrite deletes it; give one of them")
    from posttrain.runner.sweep_space import names_of, read_space

    config, given = split_arguments(config, overrides)
    space = read_space(given)
    _refuse(space.swept, flags)
    settings = space.trials(random, random_seed)

    def config_of(trial: Mapping[str, str], place: Mapping[str, str]) -> RunConfig:
        chosen = [*space.fixed, *(f"{path}={value}" for path, value in trial.items())]
        found = load(config, chosen, {**flags, **place}).config
        if len(found.models) > 1:
            raise ConfigError("a sweep trains one model at a time: sweep over several with model=A,B")
        return found

    first, *others = [config_of(trial, {}) for trial in settings]  # a wrong one ends the sweep before it starts
    metric = _metric(metric, [first, *others])
    name = first.name or f"sweep-{first.method.type}-{first.models[0].folder_name}"
    root = Path(first.output_dir).expanduser() / name
    from posttrain.runner.sweep_records import NAME, Sweep, Trial, joined, read_sweep
    from posttrain.runner.sweep_show import planned

    rule = stopping or ("none" if "seed" in space.swept else "median")
    trials = [Trial(name, one) for name, one in zip(names_of(settings), settings, strict=True)]
    lower = first.lower_is_better(metric)
    if lower is None:
        raise UsageError(f"--metric {metric}: set checkpoint.best_direction=higher or lower, which is not known for it")
    planned_sweep = Sweep(root, metric, lower, rule, trials)
    if dry_run:
        if resume and (root / NAME).is_file():
            planned_sweep = joined(read_sweep(root), planned_sweep, settings)
        PlainConsole().print(planned(planned_sweep))
        better = "lower" if planned_sweep.lower_is_better else "higher"
        count = counted(len(planned_sweep.trials), "trial")
        say(f"{count} in {root}, ranked by {metric} ({better} is better), stopping: {rule}")
        return
    with quick_imports():
        from posttrain.runner.sweep import run_sweep  # imports torch, which takes seconds

    try:
        run_sweep(
            planned_sweep,
            settings,
            lambda trial: config_of(trial.settings, {"name": trial.name, "output_dir": str(root)}),
            resume,
            overwrite,
        )
    except KeyboardInterrupt as interrupt:
        raise Interrupted(f"interrupted; resume with --resume: finished trials in {root} are kept") from interrupt


def _refuse(swept: Mapping[str, object], flags: Mapping[str, str]) -> None:
    """Raise UsageError for a sweep without values, or over what has one value."""
    if not swept:
        raise UsageError("nothing is swept: give values such as method.beta=0.1,0.5, or a range such as seed=0..4")
    for path in swept:
        if path in flags:
            raise UsageError(f"{path} is swept and also given as a flag; give it once")
        if path in ("name", "output_dir"):
            raise UsageError(f"{path} cannot be swept: each trial has a folder of its own in {{output_dir}}/{{name}}")


def _metric(given: str | None, configs: Sequence[RunConfig]) -> str:
    """The metric that ranks the trials; the default is that of their method. Raises ConfigError if none is measured."""
    for config in configs:
        if not config.evaluates:
            raise ConfigError(
                "a sweep ranks its trials by an evaluation metric: set data.validation, e.g. {ratio: 0.05}, and "
                "evaluation.eval_steps above 0"
            )
    if given is not None:
        if not re.fullmatch(EVAL_METRIC, given) or given == "auto":
            raise UsageError(f"--metric {given}: give a metric of the evaluation, such as eval_loss or eval_reward")
        return given
    metrics = {config.best_metric or f"eval_{_main(config)}" for config in configs}
    if len(metrics) > 1:
        raise UsageError(f"the trials have different main metrics ({', '.join(sorted(metrics))}): choose --metric")
    return metrics.pop()


def _main(config: RunConfig) -> str:
    return "reward" if config.samples else OF_METHOD.get(config.method.type, ("loss",))[0]
