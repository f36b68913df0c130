"""`posttrain rollouts`, `posttrain why` and `posttrain regrade`: a run's stored completions, down to the tokens."""

from pathlib import Path
from typing import Annotated

import typer

from posttrain.cli.errors import UsageError

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder of a method that samples completions.")]
OneStep = Annotated[int | None, typer.Option("--step", min=1, help="The completions of one step; default: all steps.")]
Step = Annotated[int, typer.Option("--step", min=1, help="Which step.")]
Prompt = Annotated[int | None, typer.Option("--prompt", min=0, help="One prompt of the step: rewards by part.")]
Rollout = Annotated[int | None, typer.Option("--rollout", min=0, help="One completion of the prompt: its tokens.")]
Limit = Annotated[int, typer.Option("--limit", min=0, help="Maximum rows of the table; sign changes come first.")]
Rewards = Annotated[
    list[str],
    typer.Option(
        "--reward", help='A reward: its type, module:function, or settings such as "{type: length, target: 50}".'
    ),
]


def rollouts(run: Run, step: OneStep = None) -> None:
    """List the completions that a run was trained on, from its rollouts.sqlite: by step, or those of one step."""
    from posttrain.base.console import PlainConsole
    from posttrain.inspection.receipt import show_rollouts  # imports torch, which takes seconds

    show_rollouts(_folder(run), step, PlainConsole())


def why(run: Run, step: Step, prompt: Prompt = None, rollout: Rollout = None) -> None:
    """Explain a step: its metrics, its groups, a group's rewards by part, a completion's tokens.

    For each token: its log-probability under the engine, the old, the new and the reference policy, the advantage, the
    ratio, and whether it was clipped.
    """
    if rollout is not None and prompt is None:
        raise UsageError("--rollout needs --prompt: which prompt's?")
    from posttrain.base.console import PlainConsole
    from posttrain.inspection.receipt import why as explain_step

    explain_step(_folder(run), step, prompt, rollout, PlainConsole())


def regrade(run: Run, reward: Rewards, step: OneStep = None, limit: Limit = 50) -> None:
    """Compute other rewards for a run's stored completions, and list the advantages that change sign. Needs no GPU.

    Advantages that become 0, or were 0, are listed and counted separately.
    """
    from posttrain.base.console import PlainConsole
    from posttrain.cli.settings import rewards_from_flags
    from posttrain.inspection.receipt import regrade as regrade_run

    settings = rewards_from_flags(reward)
    regrade_run(_folder(run), settings, PlainConsole(), step, limit)


def _folder(run: Path) -> Path:
    if not run.is_dir():
        raise UsageError(f"{run}: no such folder")
    return run
