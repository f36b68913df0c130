"""`posttrain verify-resume`."""

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from posttrain.base.errors import RunError
from posttrain.base.options import Flag
from posttrain.base.terminal import say
from posttrain.base.words import counted
from posttrain.cli.settings import Config, Overrides, load_stages


def verify_resume(
    config: Config = None,
    overrides: Overrides = None,
    kills: Annotated[int, Flag("Number of kills of the second run.", min=1)] = 5,
    keep: Annotated[bool, Flag("Keep the scratch folder also when both runs are equal.")] = False,
    *,
    flags: Mapping[str, str],
) -> None:
    """Verify, for your own settings, that a killed and resumed run equals an uninterrupted one, bit for bit.

    Trains twice in a scratch folder below output_dir: once uninterrupted, once killed (SIGKILL) at random moments,
    about half of them inside a save, and resumed each time. Then compares weights, optimizer, random states, learning
    rates, the order of the rows and all metrics, and reports the first differences: step, file, tensor, index, both
    values.

    Every step is logged, with at least ten checkpoints per run. Without training.max_steps it has 40 steps. To cross
    the end of epochs quickly, train on few rows: --max-rows 50 --batch-size 4 --max-steps 40.

    Exit status 0: identical. 1: they differ, or a run failed by itself. On a GPU the order of sums may vary between
    runs; --device cpu is exact.
    """
    stages = load_stages(config, overrides, flags)
    say("importing torch …")
    from posttrain.base.console import PlainConsole  # these import torch, which takes seconds
    from posttrain.runner import verify

    stages, console = verify.prepared(stages), PlainConsole()
    for stage in stages:
        settings, of = stage.config, f"stage {stage.name}: " if stage.name else ""
        console.print(
            f"{of}{settings.method.type} of {', '.join(model.folder_name for model in settings.models)}: "
            f"{counted(settings.training.max_steps or 0, 'step')}, a checkpoint every {settings.checkpoint.save_steps}",
            highlight=False,
        )
    folder = _scratch(Path(stages[0].config.output_dir).expanduser())
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


def _scratch(output_dir: Path) -> Path:
    """A new folder in output_dir, where there is space for checkpoints."""
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="verify-resume-", dir=output_dir))
    except OSError as error:
        raise RunError(f"cannot make a scratch folder in {output_dir}: {error.strerror}") from error
