"""`posttrain sweep`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from posttrain.base.console import PlainConsole
from posttrain.base.errors import ConfigError, UsageError
from posttrain.base.imports import quick_imports
from posttrain.base.options import Flag
from posttrain.base.redaction import redact
from posttrain.base.terminal import say
from posttrain.base.words import counted
from posttrain.cli.command import Interrupted
from posttrain.cli.settings import DRY_RUN, Config, Overrides, split_arguments
from posttrain.config import RunConfig, load
from posttrain.config.schema.types import EVAL_METRIC


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """Which trials are run, and how trials are ranked."""

    random: Annotated[int | None, Flag("Run N random trials instead of the whole grid.", min=1, metavar="N")] = None
    random_seed: Annotated[int, Flag("Random seed of --random; the same seed gives the same trials.")] = 0
    metric: Annotated[
        str | None, Flag("Evaluation metric that ranks trials, such as eval_loss; default: the method's main metric.")
    ] = None
    stopping: Annotated[
        Literal["median", "none"] | None,
        Flag("Rule that ends bad trials early; default: median, or none if seeds are swept."),
    ] = None
    dry_run: Annotated[bool, DRY_RUN] = False
    resume: Annotated[bool, Flag("Resume a sweep: finished trials are kept.")] = False
    overwrite: Annotated[bool, Flag("If the sweep exists, delete its trials first.")] = False


def sweep(
    config: Config = None, overrides: Overrides = None, *, options: SweepOptions, flags: Mapping[str, str]
) -> None:
    """Train one run for each combination of settings, and rank them by an evaluation metric.

    Give values as a list (method.beta=0.05,0.1,0.5) or a range: seed=0..4 (whole numbers) or, with --random N,
    training.learning_rate=1e-6..1e-4 (log-uniform). Other overrides and flags apply to all trials.

    Each trial is an ordinary run in {output_dir}/{name}/. --resume resumes a sweep that was interrupted
    at any time, even with further values. --dry-run lists the trials.
    """
    if options.resume and options.overwrite:
        raise UsageError("--resume continues a sweep and --overwrite deletes it; give one of them")
    from posttrain.runner.trials import NAME, Sweep, Trial, joined, planned, read_space, read_sweep, trials_of

    config, texts = split_arguments(config, overrides)
    space = read_space(texts)
    _refuse(space.swept, flags)
    settings = space.trials(options.random, options.random_seed)

    def config_of(trial: Mapping[str, str], folder: Mapping[str, str]) -> RunConfig:
        chosen = [*space.fixed, *(f"{path}={value}" for path, value in trial.items())]
        loaded = load(config, chosen, {**flags, **folder}).config
        if len(loaded.models) > 1:
            raise ConfigError("a sweep trains one model at a time: sweep over several with model=A,B")
        return loaded

    configs = [config_of(trial, {}) for trial in settings]  # a wrong setting is an error before the sweep starts
    first, (metric, lower) = configs[0], _metric(options.metric, configs)
    name = first.name or f"sweep-{first.method.type}-{first.models[0].folder_name}"
    root = Path(first.output_dir).expanduser() / name
    rule = options.stopping or ("none" if "seed" in space.swept else "median")
    plan = Sweep(root, metric, lower, rule, trials_of(settings))
    if options.dry_run:
        if options.resume and (root / NAME).is_file():
            plan = joined(read_sweep(root), plan)
        PlainConsole().print(planned(plan))
        better = "lower" if plan.lower_is_better else "higher"
        count = counted(len(plan.trials), "trial")
        say(f"{count} in {root}, ranked by {metric} ({better} is better), stopping: {rule}")
        return

    with quick_imports():
        from posttrain.runner.sweep import run_sweep  # imports torch, which takes seconds

    def config_in(trial: Trial) -> RunConfig:
        return config_of(trial.settings, {"name": trial.name, "output_dir": str(root)})

    try:
        run_sweep(plan, config_in, options.resume, options.overwrite)
    except KeyboardInterrupt as interrupt:
        raise Interrupted(f"interrupted; resume with --resume: finished trials in {root} are kept") from interrupt


def _refuse(swept: Mapping[str, object], flags: Mapping[str, str]) -> None:
    """Raise UsageError for a sweep without values, or over a setting that cannot be swept."""
    if not swept:
        raise UsageError("nothing is swept: give values such as method.beta=0.1,0.5, or a range such as seed=0..4")
    for path, values in swept.items():
        if isinstance(values, tuple) and redact(texts := [f"{path}: {value}" for value in values]) != texts:
            raise UsageError(f"{path} holds a secret and cannot be swept: folders of trials are named by their values")
        if path in flags:
            raise UsageError(f"{path} is swept and also given as a flag; give it once")
        if path in ("name", "output_dir"):
            raise UsageError(f"{path} cannot be swept: each trial has its own folder in {{output_dir}}/{{name}}")


def _metric(chosen: str | None, configs: Sequence[RunConfig]) -> tuple[str, bool]:
    """The metric that ranks the trials (default: the main metric of the method), and whether a lower value is better.
    Raises ConfigError if the trials do not evaluate, UsageError if the metric is unknown or ambiguous."""
    for config in configs:
        if not config.evaluates:
            raise ConfigError(
                "a sweep ranks its trials by an evaluation metric: set data.validation, e.g. {ratio: 0.05}, and "
                "evaluation.eval_steps above 0"
            )
    if chosen is not None and (chosen == "auto" or not re.fullmatch(EVAL_METRIC, chosen)):
        raise UsageError(f"--metric {chosen}: give a metric of the evaluation, such as eval_loss or eval_reward")
    mains = ("reward" if config.samples else config.method.headline for config in configs)
    metrics = {chosen or config.best_metric or f"eval_{main}" for config, main in zip(configs, mains, strict=True)}
    if len(metrics) > 1:
        raise UsageError(f"the trials have different main metrics ({', '.join(sorted(metrics))}): choose --metric")
    metric = metrics.pop()
    lower = configs[0].lower_is_better(metric)
    if lower is None:
        raise UsageError(f"--metric {metric}: its direction is unknown; set checkpoint.best_direction=higher or lower")
    return metric, lower
