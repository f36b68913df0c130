"""What all commands share: options are converted for typer, and errors become messages and exit statuses."""

import errno
import signal
import traceback
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, get_args, get_origin

import typer

from posttrain.base.errors import PosttrainError, UsageError, is_out_of_memory, message_of
from posttrain.base.options import Flag
from posttrain.base.signals import handling
from posttrain.base.terminal import say

FAILURE, USAGE, INTERRUPTED = 1, 2, 130


class Interrupted(Exception):
    """Ctrl-C with a message: typer turns a KeyboardInterrupt into an exit status and drops its message."""


def guarded(run: Callable[[], object], debug: bool) -> int:
    """Run a command; returns its exit status. An error is one message on stderr, preceded by its trace with `debug`."""
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
    except (KeyboardInterrupt, typer.Abort, Interrupted) as error:
        return _report(str(error) if isinstance(error, Interrupted) else "interrupted", INTERRUPTED, debug)
    except UsageError as error:
        return _report(str(error), USAGE, debug)
    except PosttrainError as error:
        return _report(message_of(error), FAILURE, debug)
    except typer.TyperException as error:  # typer's errors about the command line
        message = error.format_message()
        return _report(message, error.exit_code, debug) if message else error.exit_code  # no message: help was shown
    except Exception as error:
        if pressed:  # a library that is being imported may turn the interrupt into another error
            return _report("interrupted", INTERRUPTED, debug)
        return _report(_unexpected(error, debug), FAILURE, debug)


def _unexpected(error: Exception, debug: bool) -> str:
    """The message for an error that no command expects."""
    if is_out_of_memory(error):
        return message_of(error)
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return f"{str(error.filename)[:60]}… is too long for the name of a file or folder"
    text = " ".join(message_of(error).split())
    what = text if text.startswith(type(error).__name__) else f"{type(error).__name__}: {text}"
    return f"unexpected {what}{'' if debug else ' (run again with --debug for the stack trace)'}"


def _report(message: str, status: int, debug: bool) -> int:
    if debug:
        say(traceback.format_exc(), end="", error=True)
    say(message if status == INTERRUPTED else f"error: {message}", error=True)  # Ctrl-C is no error
    return status


def with_options(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Convert a verb for typer. A parameter that is a dataclass becomes one option per field; the verb receives an
    instance of the dataclass."""
    groups: dict[str, Any] = {}
    parameters: list[Parameter] = []
    for parameter in signature(verb, eval_str=True).parameters.values():
        if is_dataclass(parameter.annotation):
            groups[parameter.name] = parameter.annotation
            parameters += signature(groups[parameter.name], eval_str=True).parameters.values()
        else:
            parameters.append(parameter)
    made = [_for_typer(parameter) for parameter in parameters]
    converters = {parameter.name: convert for parameter, convert in made if convert is not None}

    def command(**values: Any) -> Any:
        values |= {name: convert(values[name]) for name, convert in converters.items()}
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        return verb(**values)

    return disguised(command, verb, [parameter for parameter, _ in made])


def disguised(command: Callable[..., Any], verb: Callable[..., Any], parameters: Sequence[Parameter]) -> Any:
    """Give `command` the name and help of `verb` and these parameters, from which typer makes options."""
    command.__name__, command.__doc__ = verb.__name__, verb.__doc__
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {}
    return command


def _for_typer(parameter: Parameter) -> tuple[Parameter, Callable[[Any], Any] | None]:
    """The parameter as typer reads it, and the function that converts typer's value, if they differ."""
    kind, *marks = get_args(parameter.annotation) if get_origin(parameter.annotation) is Annotated else [None]
    flag = next((mark for mark in marks if isinstance(mark, Flag)), None)
    if flag is None:
        return parameter.replace(kind=Parameter.KEYWORD_ONLY), None
    default, parse, convert = parameter.default, flag.parse, None
    if get_origin(kind) is Sequence:
        kind, default, convert = list[get_args(kind)[0]] | None, default or None, lambda values: tuple(values or ())
    elif parse is not None:
        kind, convert = str | None, lambda text: parse(text) if isinstance(text, str) else text
    names = flag.names.split()
    if not any(name.startswith("--") for name in names):
        names = [f"--{parameter.name.replace('_', '-')}", *names]
    option = typer.Option(*names, help=flag.help, min=flag.min, max=flag.max, metavar=flag.metavar, hidden=flag.hidden)
    return parameter.replace(kind=Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]), convert
