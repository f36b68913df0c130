"""The command line."""

import atexit
import gc
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from posttrain import __version__
from posttrain.cli.app import build
from posttrain.cli.environment import load_tokens
from posttrain.cli.errors import guarded
from posttrain.output import enduring, quitting
from posttrain.store.logs import ConsoleLog
from posttrain.terminal import say

# Their results are files, so a closed output does not end them.
ENDURING = ("train", "sweep", "quickstart", "verify-resume", "score", "grade", "generate")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (that of the process by default); returns the exit status."""
    if argv is None:
        atexit.register(gc.freeze)  # else a process with torch spends a second on garbage collection at exit
    args = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in args
    args = [arg for arg in args if arg != "--debug"] or ["--help"]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a locale may lack characters of data and models
            stream.reconfigure(errors="backslashreplace")
    with enduring() if args[0] in ENDURING else quitting():
        if args == ["--version"]:
            say(f"posttrain {__version__}")
            return 0
        load_tokens(Path(".env"))
        console = ConsoleLog(debug)
        try:
            return guarded(lambda: build(args[0])(args, prog_name="posttrain", standalone_mode=False), debug)
        finally:
            console.close()
