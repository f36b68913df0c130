"""The one place that turns exceptions into messages and exit statuses."""

import errno
import signal
import traceback
from collections.abc import Callable

import typer

from posttrain.base.errors import PosttrainError, UsageError, is_out_of_memory, message_of
from posttrain.base.signals import handling
from posttrain.base.terminal import say
from posttrain.runs.logs import harmless

FAILURE, USAGE, INTERRUPTED = 1, 2, 130


class Interrupted(Exception):
    """Ctrl-C with a message: typer turns a KeyboardInterrupt into an exit status and drops its message."""


def guarded(run: Callable[[], object], debug: bool) -> int:
    """Run a command; returns its exit status. An error is one message on stderr, after the trace with `debug`."""
    pressed: list[int] = []

    def note(number: int, frame: object) -> None:
        pressed.append(number)
        raise KeyboardInterrupt

    numbers = [signal.SIGINT] if signal.getsignal(signal.SIGINT) is signal.default_int_handler else []
    try:
        with handling(note, *numbers):
            status = run()
        if status == INTERRUPTED:  # typer's trace of a KeyboardInterrupt
            raise KeyboardInterrupt
        return status if isinstance(status, int) else 0
    except Interrupted as error:
        return _report(str(error), INTERRUPTED, debug)
    except (KeyboardInterrupt, typer.Abort):
        return _report("interrupted", INTERRUPTED, debug)
    except UsageError as error:
        return _report(str(error), USAGE, debug)
    except PosttrainError as error:
        return _report(message_of(error), FAILURE, debug)
    except typer.TyperException as error:  # typer's errors about the command line
        message = error.format_message()
        return _report(message, error.exit_code, debug) if message else error.exit_code  # no message: help was shown
    except Exception as error:
        if pressed:  # libraries may turn it into another error while they are imported
            return _report("interrupted", INTERRUPTED, debug)
        if is_out_of_memory(error):
            return _report(message_of(error), FAILURE, debug)
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            return _report(f"{str(error.filename)[:60]}… is too long for the name of a file or folder", FAILURE, debug)
        text = " ".join(message_of(error).split())
        what = text if text.startswith(type(error).__name__) else f"{type(error).__name__}: {text}"
        hint = "" if debug else " (run again with --debug for the stack trace)"
        return _report(f"unexpected {what}{hint}", FAILURE, debug)


def _report(message: str, status: int, debug: bool) -> int:
    if debug:
        say(harmless(traceback.format_exc()), end="", error=True)
    say(f"error: {harmless(message)}", error=True)
    return status
