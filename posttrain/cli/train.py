"""`posttrain train` and `posttrain plan`."""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from posttrain.base.errors import RunError
from posttrain.base.imports import quick_imports
from posttrain.base.terminal import say
from posttrain.cli.errors import Interrupted, UsageError
from posttrain.cli.settings import Config, Overrides, load_stages, split_arguments
from posttrain.config import Stage
from posttrain.config.reading.explain import did_you_mean
from posttrain.config.schema.methods import METHOD_NAMES, METHODS
from posttrain.config.schema.training import DEVICE_TYPES
from posttrain.parallel.launch import is_rank, launch
from posttrain.planning.cards import CARDS
from posttrain.runs.files import flat
from posttrain.runs.progress import duration
from posttrain.runs.provenance import HIDDEN

DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what the run would do, and do nothing.")]
Resume = Annotated[
    str | None,
    typer.Option("--resume", metavar="[PATH]", help="Resume from the newest checkpoint, or from the given one."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Delete the run folder first if it exists.")]
ModelIndex = Annotated[
    int | None, typer.Option("--model-index", metavar="INT", help="Train only this model of the list, 0 for the first.")
]
Probe = Annotated[
    bool,
    typer.Option("--probe", help="Also find the largest tokens_per_pack that fits, by real steps: loads the model."),
]
MemoryLimit = Annotated[
    float | None,
    typer.Option(
        "--memory-limit", metavar="GIB", help="For --probe: memory limit of the run; default: all that is free."
    ),
]


PlannedProcesses = Annotated[
    int | None,
    typer.Option("--nproc", min=1, help="Plan for this many processes; default: one, or as many as devices.ids."),
]
Skip = Annotated[
    list[str] | None,
    typer.Option("--skip", metavar="STAGE", help="Skip this stage and use its existing final model; repeatable."),
]


def train(
    config: Config = None,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    resume: Resume = None,
    overwrite: Overwrite = False,
    model_index: ModelIndex = None,
    skip: Skip = None,
    *,
    flags: Mapping[str, str],
) -> int:
    """Train one or several models, in one or several stages: SFT, a reward model, DPO and its variants, PPO, GRPO.

    Precedence: flag, a.b=c, file, what the file extends, default. With `--resume PATH` the file is optional.
    `--method all` (or `dpo,grpo`) trains every method that the data allows, and compares their completions.
    """
    if overwrite and resume is not None:
        raise UsageError("--resume continues a run and --overwrite deletes it; give one of them")
    checkpoint, given = Path(resume) if resume else None, flags
    file, rest = split_arguments(config, overrides)
    compared = several_methods(flags)
    if compared:
        flags = {path: text for path, text in flags.items() if path != "method.type"}
    if file is None and checkpoint is not None:  # saved settings have the methods as stages
        saved = saved_config(checkpoint)
        stages = load_stages(str(saved), rest, flags)
        warn_of_secrets(stages, saved)
    elif compared:
        with quick_imports():
            from posttrain.runner.comparison import methods_as_stages  # imports torch, which takes seconds

        stages = methods_as_stages(file, rest, flags, compared)
    else:
        stages = load_stages(file, rest, flags)
    ids = stages[0].config.devices.ids or ()
    if len(ids) > 1 and not is_rank() and not dry_run:
        launch(as_given(config, overrides, given, resume, overwrite, model_index, skip), len(ids))
        return 0
    models = stages[0].config.models
    if model_index is not None and not 0 <= model_index < len(models):
        raise UsageError(f"--model-index {model_index}: there are models 0 to {len(models) - 1}")
    began = time.monotonic()
    if dry_run:
        with quick_imports():
            from posttrain.planning.plan import plan as print_plan  # imports torch, which takes seconds

        print_plan(stages, model_index=model_index, skip=skip or ())
        return 0
    with quick_imports():
        from posttrain.api import train_all  # imports torch, which takes seconds

    try:
        train_all(
            stages,
            resume=checkpoint or resume is not None,
            overwrite=overwrite,
            model_index=model_index,
            skip=skip or (),
            compared=bool(compared),
        )
    except KeyboardInterrupt as interrupt:
        raise Interrupted(str(interrupt) or "interrupted") from interrupt
    if os.environ.get("RANK", "0") == "0":
        say(f"{duration(time.monotonic() - began)} in all, with loading, evaluation and saving", error=True)
    return 0


def as_given(
    config: str | None,
    overrides: Sequence[str] | None,
    flags: Mapping[str, str],
    resume: str | None,
    overwrite: bool,
    model_index: int | None,
    skip: Sequence[str] | None,
) -> list[str]:
    """The arguments of `posttrain train` that it was given."""
    arguments = [*([config] if config is not None else []), *(overrides or [])]
    arguments += [f"--{path}={text}" for path, text in flags.items()]
    arguments += ["--resume", *([resume] if resume else [])] if resume is not None else []
    arguments += ["--overwrite"] if overwrite else []
    arguments += ["--model-index", str(model_index)] if model_index is not None else []
    return [*arguments, *(word for stage in skip or () for word in ("--skip", stage))]


def several_methods(flags: Mapping[str, str]) -> tuple[str, ...]:
    """The methods of `--method`, if it names several or all."""
    given = flags.get("method.type", "")
    if given != "all" and "," not in given:
        return ()
    writing = [name for name in METHOD_NAMES if name != "reward"]  # methods whose model generates
    if given == "all":
        return tuple(name for name in writing if name in METHODS)
    names = dict.fromkeys(name.strip() for name in given.split(",") if name.strip())
    for name in names:
        if name not in writing:
            raise UsageError(f"--method {given}: {name!r} cannot be compared; {did_you_mean(name, writing)}")
    return tuple(names)


def plan(
    config: Config = None,
    overrides: Overrides = None,
    probe: Probe = False,
    memory_limit: MemoryLimit = None,
    nproc: PlannedProcesses = None,
    *,
    flags: Mapping[str, str],
) -> None:
    """Print a run's examples, tokens, steps and memory, and do nothing: `train --dry-run`.

    With --nproc, what each of several processes would hold and exchange; --device may also name GPUs that are not here.

        posttrain plan grpo.yaml --nproc 8 --device h100
        posttrain plan grpo.yaml --nproc 8 --device h100 --strategy fsdp
    """
    card = flags.get("devices.type")
    if card not in CARDS:
        if card not in (None, *DEVICE_TYPES):
            raise UsageError(f"--device {card}: it is one of {', '.join((*DEVICE_TYPES, *CARDS))}")
        card = None
    flags = {path: value for path, value in flags.items() if card is None or path != "devices.type"}
    if memory_limit is not None and not (probe and memory_limit > 0):
        raise UsageError("--memory-limit is for --probe, a number of GiB above 0")
    stages = load_stages(config, overrides, flags)
    ranks = nproc or max(len(stage.config.devices.ids or (0,)) for stage in stages)
    if probe and (ranks > 1 or card is not None):
        raise UsageError(
            "--probe takes real steps in one process on this machine: give it without --nproc, several devices.ids or "
            "the name of a GPU"
        )
    with quick_imports():
        from posttrain.planning.plan import plan as print_plan  # imports torch, which takes seconds

    limit = None if memory_limit is None else int(memory_limit * 2**30)
    print_plan(stages, probed=probe, memory_limit=limit, ranks=nproc, card=card)


def warn_of_secrets(stages: Sequence[Stage], saved: Path) -> None:
    """Say which settings that a run goes on with were saved without their secrets."""
    settings = [flat(stage.config.model_dump(mode="json"), lists=True) for stage in stages]
    hidden = {path for one in settings for path, value in one.items() if isinstance(value, str) and HIDDEN in value}
    if hidden and not is_rank():
        given = "give the settings file with --resume if the run needs it"
        say(f"{saved} has {HIDDEN} for what was secret in {', '.join(sorted(hidden))}: {given}", error=True)


def saved_config(checkpoint: Path) -> Path:
    """The config.yaml of the run that a checkpoint (or run folder) belongs to."""
    for folder in (checkpoint, *checkpoint.absolute().parents[:3]):
        if (folder / "config.yaml").is_file():
            return folder / "config.yaml"
    raise RunError(f"{checkpoint}: no config.yaml there or above it; is it a run folder or a checkpoint in one?")
