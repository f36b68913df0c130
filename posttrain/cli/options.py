"""Commands as typer takes them: what is marked as a flag becomes an option."""

from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from posttrain.base.options import Flag


def with_options(verb: Callable[..., Any]) -> Callable[..., Any]:
    """The verb for typer. A parameter of a dataclass stands for its fields; the verb receives an instance of it."""
    groups: dict[str, Any] = {}
    parameters: list[Parameter] = []
    for parameter in signature(verb, eval_str=True).parameters.values():
        if is_dataclass(group := parameter.annotation):
            groups[parameter.name] = group
            parameters += _fields(group)
        else:
            parameters.append(parameter)
    read = {one.name: convert for one in parameters if (convert := _conversion(one)) is not None}

    def command(**given: Any) -> Any:
        given |= {name: convert(given[name]) for name, convert in read.items()}
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        return verb(**given)

    command.__name__, command.__doc__ = verb.__name__, verb.__doc__
    command.__signature__ = Signature([_for_typer(one) for one in parameters])  # type: ignore[attr-defined]
    command.__annotations__ = {}
    return command


def _fields(group: Any) -> list[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    defaults = {field.name: Parameter.empty if field.default is MISSING else field.default for field in fields(group)}
    return [
        Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hints[name])
        for name, default in defaults.items()
    ]


def _flag(parameter: Parameter) -> Flag | None:
    marks = get_args(parameter.annotation)[1:] if get_origin(parameter.annotation) is Annotated else ()
    return next((mark for mark in marks if isinstance(mark, Flag)), None)


def _repeats(parameter: Parameter) -> bool:
    return get_origin(get_args(parameter.annotation)[0]) is Sequence


def _conversion(parameter: Parameter) -> Callable[[Any], Any] | None:
    """What makes the value from that of typer, if it is another."""
    flag = _flag(parameter)
    if flag is None:
        return None
    if _repeats(parameter):
        return lambda values: tuple(values or ())
    parse = flag.parse
    return parse and (lambda text: parse(text) if isinstance(text, str) else text)


def _for_typer(parameter: Parameter) -> Parameter:
    flag = _flag(parameter)
    if flag is None:
        return parameter.replace(kind=Parameter.KEYWORD_ONLY)
    kind, default = get_args(parameter.annotation)[0], parameter.default
    if _repeats(parameter):
        kind, default = list[get_args(kind)[0]] | None, default or None
    elif flag.parse is not None:
        kind = str | None
    names = flag.names.split()
    if not any(name.startswith("--") for name in names):
        names = [f"--{parameter.name.replace('_', '-')}", *names]
    option = typer.Option(*names, help=flag.help, min=flag.min, max=flag.max, metavar=flag.metavar, hidden=flag.hidden)
    return parameter.replace(kind=Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])
