"""`posttrain train`, `launch`, `plan` and `verify-resume`."""

import os
import shlex
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from posttrain.base.errors import RunError, UsageError
from posttrain.base.imports import quick_imports
from posttrain.base.options import Flag, values_of
from posttrain.base.redaction import HIDDEN
from posttrain.base.terminal import say
from posttrain.base.words import counted
from posttrain.cli.command import Interrupted
from posttrain.cli.settings import DRY_RUN, Config, Overrides, load_stages, split_arguments
from posttrain.config import Stage
from posttrain.config.reading.explain import did_you_mean
from posttrain.config.schema.methods import METHODS
from posttrain.config.schema.training import DEVICE_TYPES
from posttrain.parallel.rendezvous import is_rank
from posttrain.parallel.rendezvous import launch as start_ranks
from posttrain.planning import CARDS
from posttrain.runs.atomic import refusing
from posttrain.runs.files import flat
from posttrain.runs.progress import duration


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """Which runs of the settings are trained, resumed or skipped."""

    resume: Annotated[
        str | None, Flag("Resume from the newest checkpoint, or from the given one.", metavar="[PATH]")
    ] = None
    overwrite: Annotated[bool, Flag("Delete the run folder first if it exists.")] = False
    model_index: Annotated[int | None, Flag("Train only this model of the list, 0 for the first.", metavar="INT")] = (
        None
    )
    skip: Annotated[
        Sequence[str], Flag("Skip this stage and use its existing final model; repeatable.", metavar="STAGE")
    ] = ()

    def check(self) -> None:
        if self.overwrite and self.resume is not None:
            raise UsageError("--resume continues a run and --overwrite deletes it; give one of them")

    def arguments(self, config: str | None, overrides: Sequence[str] | None, flags: Mapping[str, str]) -> list[str]:
        """The arguments of `posttrain train` with these options."""
        arguments = [config] if config is not None else []
        arguments += [*(overrides or []), *(f"--{path}={text}" for path, text in flags.items())]
        if self.resume is not None:
            arguments += ["--resume", self.resume] if self.resume else ["--resume"]
        arguments += ["--overwrite"] if self.overwrite else []
        arguments += ["--model-index", str(self.model_index)] if self.model_index is not None else []
        return [*arguments, *(word for stage in self.skip for word in ("--skip", stage))]


def train(
    config: Config = None,
    overrides: Overrides = None,
    dry_run: Annotated[bool, DRY_RUN] = False,
    *,
    options: TrainOptions,
    flags: Mapping[str, str],
) -> None:
    """Train one or several models, in one or several stages: SFT, a reward model, DPO and its variants, PPO, GRPO.

    Precedence: flag, a.b=c, file, what the file extends, default. With `--resume PATH` the file is optional.
    `--method all` (or `dpo,grpo`) trains every method that the data allows, and compares their completions.
    """
    options.check()
    checkpoint = Path(options.resume) if options.resume else None
    stages = _stages(config, overrides, flags, checkpoint)
    ids = stages[0].config.devices.ids or ()
    if len(ids) > 1 and not is_rank() and not dry_run:
        start_ranks(options.arguments(config, overrides, flags), len(ids))
        return
    models = stages[0].config.models
    if options.model_index is not None and not 0 <= options.model_index < len(models):
        raise UsageError(f"--model-index {options.model_index}: there are models 0 to {len(models) - 1}")
    began = time.monotonic()
    if dry_run:
        with quick_imports():
            from posttrain.planning.plan import plan as print_plan  # imports torch, which takes seconds

        print_plan(stages, model_index=options.model_index, skip=options.skip)
        return
    with quick_imports():
        from posttrain.api import train_all  # imports torch, which takes seconds

    resume, compared = checkpoint or options.resume is not None, bool(several_methods(flags))
    try:
        train_all(stages, **values_of(options) | {"resume": resume, "compared": compared})
    except KeyboardInterrupt as interrupt:
        raise Interrupted(str(interrupt) or "interrupted") from interrupt
    if os.environ.get("RANK", "0") == "0":
        say(f"{duration(time.monotonic() - began)} in total, including loading, evaluation and saving", error=True)


def _stages(
    config: str | None, overrides: list[str] | None, flags: Mapping[str, str], checkpoint: Path | None
) -> tuple[Stage, ...]:
    """The stages to train: those of the settings, those of the run that is resumed, or one for each compared method."""
    file, rest = split_arguments(config, overrides)
    compared = several_methods(flags)
    if compared:
        flags = {path: text for path, text in flags.items() if path != "method.type"}
    if file is None and checkpoint is not None:  # saved settings have the methods as stages
        saved = saved_config(checkpoint)
        stages = load_stages(str(saved), rest, flags)
        _warn_of_secrets(stages, saved)
        return stages
    if not compared:
        return load_stages(file, rest, flags)
    with quick_imports():
        from posttrain.runner.comparison import methods_as_stages  # imports torch, which takes seconds

    return methods_as_stages(file, rest, flags, compared)


def launch(
    config: Config = None,
    overrides: Overrides = None,
    nproc: Annotated[int, Flag("Processes on this machine: one per GPU; on a CPU, they share its cores.", min=1)] = 1,
    nodes: Annotated[int, Flag("Number of machines; run the same command on each.", min=1)] = 1,
    node_rank: Annotated[int, Flag("Index of this machine, 0 for the first.", min=0)] = 0,
    address: Annotated[str | None, Flag("A free port on the first machine, for --nodes.", metavar="HOST:PORT")] = None,
    *,
    options: TrainOptions,
    flags: Mapping[str, str],
) -> None:
    """Train on several devices or machines: `posttrain train` in several processes that share every step.

    The other arguments are those of `posttrain train`. The number of processes does not change the gradients:
    batch_size counts the examples of all processes together.

        posttrain launch grpo.yaml --nproc 8
        posttrain launch grpo.yaml --nproc 8 --nodes 2 --node-rank 1 --address 10.0.0.1:29500
    """
    if nodes > 1 and address is None:
        raise UsageError("--nodes needs --address HOST:PORT, a free port on the first machine")
    host, _, port = (address or "127.0.0.1:1").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f"--address {address}: it must be HOST:PORT with a port from 1 to 65535, e.g. 10.0.0.1:29500")
    if node_rank >= nodes:
        raise UsageError(f"--node-rank {node_rank}: the machines have the numbers 0 to {nodes - 1}")
    options.check()
    if options.resume is None and not several_methods(flags):
        stages = load_stages(config, overrides, flags)  # reports an error once, not in every process
        ids = stages[0].config.devices.ids
        if ids and len(ids) != nproc:
            raise UsageError(f"devices.ids names {len(ids)} GPUs: give --nproc {len(ids)}, or other ids")
    arguments = options.arguments(config, overrides, flags)
    if nodes > 1:
        say(f"machine {node_rank} of {nodes}: posttrain train {shlex.join(arguments)}", error=True)
    start_ranks(arguments, nproc, nodes, node_rank, address)


def several_methods(flags: Mapping[str, str]) -> tuple[str, ...]:
    """The methods of `--method`, if it names several or all."""
    text = flags.get("method.type", "")
    if text != "all" and "," not in text:
        return ()
    generating = [name for name, method in METHODS.items() if method.head == "lm"]
    if text == "all":
        return tuple(generating)
    comparable = [*generating, "ipo"]
    names = dict.fromkeys(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in comparable:
            raise UsageError(f"--method {text}: {name!r} cannot be compared; {did_you_mean(name, comparable)}")
    return tuple(names)


def plan(
    config: Config = None,
    overrides: Overrides = None,
    probe: Annotated[
        bool, Flag("Also find the largest tokens_per_pack that fits, by running real steps; loads the model.")
    ] = False,
    memory_limit: Annotated[
        float | None, Flag("For --probe: memory limit of the run; default: all free memory.", metavar="GIB")
    ] = None,
    nproc: Annotated[
        int | None, Flag("Plan for this many processes; default: one for each of devices.ids, or one.", min=1)
    ] = None,
    *,
    flags: Mapping[str, str],
) -> None:
    """Print a run's examples, tokens, steps and memory, and do nothing else, like `train --dry-run`.

    With --nproc, it also prints what each process would hold and exchange. --device may name a GPU that this machine
    lacks.

        posttrain plan grpo.yaml --nproc 8 --device h100
        posttrain plan grpo.yaml --nproc 8 --device h100 --strategy fsdp
    """
    card = flags.get("devices.type")
    if card not in CARDS:
        if card not in (None, *DEVICE_TYPES):
            raise UsageError(f"--device {card}: it must be one of {', '.join((*DEVICE_TYPES, *CARDS))}")
        card = None
    flags = {path: value for path, value in flags.items() if card is None or path != "devices.type"}
    if memory_limit is not None and not (probe and memory_limit > 0):
        raise UsageError("--memory-limit needs --probe, and a number of GiB above 0")
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


def _warn_of_secrets(stages: Sequence[Stage], saved: Path) -> None:
    """Warn of settings of a resumed run that were saved without their secrets."""
    hidden = {
        path
        for stage in stages
        for path, value in flat(stage.config.model_dump(mode="json"), lists=True).items()
        if isinstance(value, str) and HIDDEN in value
    }
    if hidden and not is_rank():
        advice = f"give the settings file with --resume if the run needs {', '.join(sorted(hidden))}"
        say(f"{saved} has {HIDDEN} in place of secrets; {advice}", error=True)


def saved_config(checkpoint: Path) -> Path:
    """The config.yaml of a run folder, or of the run that a checkpoint belongs to."""
    for folder in (checkpoint, *checkpoint.absolute().parents[:3]):
        if (folder / "config.yaml").is_file():
            return folder / "config.yaml"
    raise RunError(f"{checkpoint}: no config.yaml there or above it; is it a run folder, or a checkpoint of a run?")


def verify_resume(
    config: Config = None,
    overrides: Overrides = None,
    kills: Annotated[int, Flag("Number of times to kill the second run.", min=1)] = 5,
    keep: Annotated[bool, Flag("Keep the scratch folder even if both runs are equal.")] = False,
    *,
    flags: Mapping[str, str],
) -> None:
    """Verify, for your own settings, that a killed and resumed run equals an uninterrupted one, bit for bit.

    Trains twice in a scratch folder below output_dir: once uninterrupted, once killed (SIGKILL) at random moments,
    about half of them inside a save, and resumed each time. Then compares weights, optimizer, random states, learning
    rates, the order of the rows and all metrics, and reports the first differences: step, file, tensor, index, both
    values.

    Every step is logged, and each run has at least ten checkpoints. Without training.max_steps, a run has 40 steps. To
    reach the end of epochs quickly, train on few rows: --max-rows 50 --batch-size 4 --max-steps 40.

    Exit status 0: the runs are identical; 1: they differ, or a run failed by itself. On a GPU the order of sums may
    vary between runs; --device cpu is exact.
    """
    stages = load_stages(config, overrides, flags)
    say("importing torch …")
    from posttrain.base.console import PlainConsole  # these import torch, which takes seconds
    from posttrain.runner import verify

    stages, console = verify.prepared(stages), PlainConsole()
    for stage in stages:
        settings, prefix = stage.config, f"stage {stage.name}: " if stage.name else ""
        console.print(
            f"{prefix}{settings.method.type} of {', '.join(model.folder_name for model in settings.models)}: "
            f"{counted(settings.training.max_steps or 0, 'step')}, a checkpoint every {settings.checkpoint.save_steps}",
            highlight=False,
        )
    runs = Path(stages[0].config.output_dir).expanduser()  # where there is space for checkpoints
    with refusing(f"cannot make a scratch folder in {runs}"):
        runs.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="verify-resume-", dir=runs))
    try:
        outcome = verify.verify_resume(stages, folder, kills, console)
    except KeyboardInterrupt:
        shutil.rmtree(folder)
        raise
    for line in outcome.lines():
        console.print(line)
    if not outcome.identical:
        raise RunError(f"the resumed run differs from the uninterrupted one; both are kept in {folder}")
    if keep:
        console.print(f"kept: {folder}", soft_wrap=True)
    else:
        shutil.rmtree(folder)
