"""`posttrain quickstart` and `posttrain doctor`, the first commands after an installation. Does not import torch."""

import json
from pathlib import Path
from typing import Annotated

import typer

from posttrain.base.console import PlainConsole, progress
from posttrain.base.imports import quick_imports
from posttrain.base.options import Flag
from posttrain.base.terminal import say


def quickstart(
    output_dir: Annotated[Path, Flag("Folder for all files.")] = Path("runs/quickstart"),
    overwrite: Annotated[bool, Flag("Replace an earlier quickstart in that folder.")] = False,
    seed: Annotated[int, Flag("Random seed of model and data.", min=0, max=2**32 - 1)] = 0,
) -> None:
    """Run a whole pipeline in minutes, without a download: a small model, SFT, reward, DPO, PPO, GRPO, comparison."""
    say("Making a small model and data, training and comparing takes a few minutes.")
    import torch  # takes seconds

    with quick_imports():
        from posttrain.quickstart import quickstart as run

    # Such a small model gains little from more threads and loses much on shared cores; sums depend on their number.
    torch.set_num_threads(1)
    run(output_dir, seed=seed, overwrite=overwrite)


def doctor(
    checks: Annotated[
        list[str] | None, typer.Argument(metavar="[CHECK]…", help="Run only these checks, by their name in the table.")
    ] = None,
    output_dir: Annotated[Path, Flag("Folder of runs, as in the settings.")] = Path("runs"),
    as_data: Annotated[bool, Flag("Write JSON, with versions and platform, instead of the table.", "--json")] = False,
) -> None:
    """Show what is installed, what works, and how to fix the rest.

    Each check makes one real call, such as a backward pass, a quantised layer, a graded answer or a synced file, in a
    helper process with a deadline, so that a crash or a hang is one line of the table. `limited` means that a part
    works with a restriction, `absent` that an optional part is not installed.

    The exit status is 0 if everything that posttrain requires works, otherwise 1. Nothing is downloaded, no token is
    shown, and no file is left behind.
    """
    from posttrain.doctor import all_checks, as_json, chosen, examine, summary, table

    selected = chosen(all_checks(output_dir), checks or ())
    order = [check.name for check in selected]
    results = progress(examine(selected), "checks", len(selected))
    findings = sorted(results, key=lambda finding: order.index(finding.name))
    if as_data:
        say(json.dumps(as_json(findings), indent=2, ensure_ascii=False))
    else:
        console = PlainConsole()
        console.print(table(findings))
        console.print(f"\n{summary(findings)}", soft_wrap=False)
    if any(finding.is_fatal for finding in findings):
        raise typer.Exit(1)
