"""The command line."""

import io
import sys
from collections.abc import Sequence
from pathlib import Path

from posttrain import __version__
from posttrain.cli.app import build
from posttrain.cli.environment import load_tokens
from posttrain.cli.errors import guarded
from posttrain.store.logs import ConsoleLog
from posttrain.terminal import say


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (that of the process by default); returns the exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in args
    args = [arg for arg in args if arg != "--debug"] or ["--help"]
    if args == ["--version"]:
        say(f"posttrain {__version__}")
        return 0
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a locale may know fewer characters than data and models have
            stream.reconfigure(errors="backslashreplace")
    load_tokens(Path(".env"))
    console = ConsoleLog(debug)
    try:
        return guarded(lambda: build(args[0])(args, prog_name="posttrain", standalone_mode=False), debug)
    finally:
        console.close()
