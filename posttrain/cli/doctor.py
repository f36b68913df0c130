"""`posttrain doctor`. Imports no torch."""

import json
from pathlib import Path
from typing import Annotated

import typer

from posttrain.base.console import PlainConsole
from posttrain.base.options import Flag
from posttrain.base.progress import progress
from posttrain.base.terminal import say
from posttrain.doctor import all_checks, as_json, chosen, examine, summary, table


def doctor(
    checks: Annotated[
        list[str] | None, typer.Argument(metavar="[CHECK]…", help="Only these checks, by their name in the table.")
    ] = None,
    output_dir: Annotated[Path, Flag("Where runs are written, as in the settings.")] = Path("runs"),
    as_data: Annotated[bool, Flag("Write JSON, with versions and platform, instead of the table.", "--json")] = False,
) -> None:
    """Show what is installed, what of it works, and how to mend the rest.

    Each check makes one real call, such as a backward, a quantised layer, a graded answer or a synced file, in a helper
    process with a deadline, so that a crash or a hang is one line of the table. `limited` works with a restriction,
    `absent` is optional and not installed.

    The exit status is 0 if everything that posttrain requires works, 1 if not; optional parts do not count. Nothing is
    downloaded, no token is shown, and no file is left behind.
    """
    asked = chosen(all_checks(output_dir), checks or ())
    order = [check.name for check in asked]
    findings = sorted(progress(examine(asked), "checks", len(asked)), key=lambda one: order.index(one.name))
    if as_data:
        say(json.dumps(as_json(findings), indent=2, ensure_ascii=False))
    else:
        console = PlainConsole()
        console.print(table(findings))
        console.print(f"\n{summary(findings)}", soft_wrap=False)
    if any(one.is_fatal for one in findings):
        raise typer.Exit(1)
