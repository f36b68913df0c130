"""What is installed, what of it works by one real call each, and how to mend the rest. Imports nothing slow."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from posttrain.base.words import counted
from posttrain.doctor.checks import Finding, all_checks, chosen
from posttrain.doctor.process import examine
from posttrain.runs.provenance import environment, redact

__all__ = ["Finding", "all_checks", "as_json", "chosen", "examine", "summary", "table"]
STYLES = {"ok": "green", "limited": "yellow", "absent": "dim", "broken": "bold red"}


def table(findings: Sequence[Finding]) -> Table:
    """A row per finding: state, name, detail, and how to mend it on lines of its own."""
    shown = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    shown.add_column("state", no_wrap=True)
    shown.add_column("what", no_wrap=True, style="bold")
    shown.add_column("", overflow="fold")
    for one in findings:
        detail = Text(redact(one.detail))
        if one.mend:
            detail.append(f"\n-> {redact(one.mend)}", style="cyan")
        state = f"{one.state}{'' if one.required or one.state != 'broken' else '*'}"
        shown.add_row(Text(state, STYLES[one.state]), Text(one.name), detail)
    return shown


def summary(findings: Sequence[Finding]) -> str:
    """One sentence: does everything that is required work, and what else does not."""
    fatal = [one.name for one in findings if one.is_fatal]
    optional = [one.name for one in findings if one.state == "broken" and not one.required]
    limited = [one.name for one in findings if one.state == "limited"]
    absent = sum(one.state == "absent" for one in findings)
    parts = [f"Required and broken: {', '.join(fatal)}." if fatal else "Everything that posttrain requires works."]
    parts += [f"Optional and broken (*): {', '.join(optional)}."] if optional else []
    parts += [f"Limited: {', '.join(limited)}."] if limited else []
    parts += [f"{counted(absent, 'optional part')} {'is' if absent == 1 else 'are'} absent."] if absent else []
    return " ".join(parts)


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """The findings with the versions and the platform of this process; secrets are redacted."""
    rows = [
        {
            "name": one.name,
            "state": one.state,
            "required": one.required,
            "detail": one.detail,
            "mend": one.mend or None,
            "seconds": one.seconds,
        }
        for one in findings
    ]
    return redact({"works": not any(one.is_fatal for one in findings), "checks": rows, "environment": environment()})
