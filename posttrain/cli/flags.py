"""Every setting as a flag, generated from the schema: `--max-steps 200`, or in full `--training.max-steps 200`."""

import re
from collections.abc import Callable, Collection
from difflib import get_close_matches
from functools import cache
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel
from rich.markup import escape
from typer.core import TyperCommand

from posttrain.base.errors import UsageError
from posttrain.base.words import by_key
from posttrain.cli.command import disguised, with_options
from posttrain.config.reading.fields import Setting, all_settings, choices, options
from posttrain.config.reading.hints import hint
from posttrain.config.reading.load import FlagText, preset_path
from posttrain.config.render import HEADINGS, described, flow
from posttrain.config.schema.evaluation import SAMPLING

# Flags that do not follow the rule (the path without its section), where it would give unclear or ambiguous names.
SHORT = {"model.path": "model", "model.name": "model-name", "method.type": "method", "devices.type": "device"}
SHORT |= {"devices.ids": "device-ids", "evaluation.num_generations": "eval-num-generations"}
SHORT |= {f"evaluation.{name}": f"eval-{name}" for name in SAMPLING}
TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@cache
def short_names() -> dict[str, str]:
    """Dotted path of each setting -> its flag without the dashes: the path without its section, `-` for `_` and `.`."""
    names: dict[str, str] = {}
    for path in _by_path():
        short = SHORT.get(path, path.partition(".")[2] or path)
        short = short.replace("_", "-").replace(".", "-")
        assert short not in names.values(), f"two settings would have the flag --{short}: name one in SHORT"
        names[path] = short
    return names


@cache
def _by_path() -> dict[str, list[Setting]]:
    """The settings by path; a path has several if methods declare it differently."""
    return by_key((setting.path, setting) for setting in all_settings())


@cache
def _spellings() -> dict[str, str]:
    """Every accepted spelling of a setting's flag -> the declared spelling."""
    names = short_names()
    whole = {path.replace("_", "-"): short for path, short in names.items()}
    return whole | {short: short for short in names.values()} | {"data": names["data.source"]}


@cache
def _switches() -> frozenset[str]:
    """Flags whose value is optional, because the setting may be true or false."""
    return frozenset(short_names()[setting.path] for setting in all_settings() if setting.switch)


def with_settings(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Give a verb a flag for every setting. The verb's parameter `flags` receives the given ones by dotted path."""
    verb = with_options(verb)
    own = [parameter for parameter in signature(verb).parameters.values() if parameter.name != "flags"]
    paths = {path.replace(".", "__"): path for path in short_names()}
    generated = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=_option(_by_path()[path]), annotation=str)
        for name, path in paths.items()
    ]

    def command(**values: Any) -> Any:
        flags = {path: values.pop(name, None) for name, path in paths.items()}
        return verb(**values, flags={path: text for path, text in flags.items() if text is not None})

    return disguised(command, verb, [*own, *generated])


def _option(variants: list[Setting]) -> Any:
    setting = variants[0]
    several = len(variants) > 1
    texts = [f"{', '.join(v.methods)}: {described(v)}{_default(v)}" if several else described(v) for v in variants]
    return typer.Option(
        None,
        f"--{short_names()[setting.path]}",
        help=escape(" ".join(texts) + ("" if several else _default(setting))),
        metavar=_metavar(setting),
        rich_help_panel=_panel(variants),
        show_default=False,
    )


def _default(setting: Setting) -> str:
    shown = not (setting.required or setting.default is None or isinstance(setting.default, BaseModel))
    return f" [{flow(setting.default)}]" if shown else ""


def _metavar(setting: Setting) -> str:
    kinds = options(setting.annotation)
    if setting.group and setting.switch:
        return "[YAML]"
    if setting.group or any(kind is not str and str(kind).startswith(("tuple", "dict")) for kind in kinds):
        return "YAML"
    if choices(setting.annotation) and choices(setting.annotation)[0] != "true":
        return "WORD"
    if bool in kinds:
        return "[BOOL]"
    return "INT" if int in kinds else "FLOAT" if float in kinds else "TEXT"


def _panel(variants: list[Setting]) -> str:
    setting = variants[0]
    heading = HEADINGS[setting.section]
    owners = [method for variant in variants for method in variant.methods]
    only = f": {', '.join(owners)}" if owners else ""
    return f"{heading}{only} (--{setting.section}.…)" if setting.section != "run" else heading


class SettingsCommand(TyperCommand):
    """A command with settings' flags: full names and underscores are accepted, and a switch needs no value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # `opts` also has arguments, by their bare names
        declared = {opt[2:]: p.name for p in self.params for opt in p.opts if opt.startswith("--")}
        typed: dict[str, str] = {}
        bare = {p.name for p in self.params if getattr(p, "is_flag", False)}
        rest = super().parse_args(ctx, plain(args, set(declared), typed, bare=bare))
        for name, spelling in typed.items():
            if name in _spellings() and isinstance(value := ctx.params[declared[name]], str):
                ctx.params[declared[name]] = FlagText(value, f"--{spelling}")
        return rest


def plain(
    args: list[str], declared: set[str], spelt: dict[str, str] | None = None, bare: Collection[str | None] = ()
) -> list[str]:
    """The arguments with every flag as `--declared=value`. Raises UsageError, which names all unknown flags.

    `declared` are the names, without dashes, of all flags of the command, and `bare` the names of flags that take no
    value. The value of `--resume` is optional unless it is in `bare`. `spelt` receives the typed form of each name.
    """
    result: list[str] = []
    rest, unknown = list(args), list[str]()
    while rest:
        arg = rest.pop(0)
        if arg == "--":
            result += [arg, *rest]
            break
        if not arg.startswith("--"):
            result.append(arg)
            continue
        typed, equals, value = arg[2:].partition("=")
        name, negated = _declared(typed.replace("_", "-"), declared)
        if name is None:
            unknown.append(_unknown_flag(typed, declared))
            if not equals and rest and not rest[0].startswith("-"):
                rest.pop(0)  # its value
            continue
        _refuse_foreign(typed, name, declared)
        if spelt is not None:
            spelt[name] = typed
        if name in _switches():
            result.append(f"--{name}={_switch_value(typed, equals, value, negated, rest)}")
        elif name == "resume" and name not in bare and not equals:
            result.append(f"--resume={rest.pop(0) if rest and _is_folder_name(rest[0]) else ''}")
        elif equals:
            result.append(f"--{name}={value}")
        elif name in _spellings():
            if not rest:
                raise UsageError(f"--{typed} needs a value")
            result.append(f"--{name}={rest.pop(0)}")
        else:
            result.append(f"--{name}")
    if unknown:
        raise UsageError("\n".join(unknown))
    return result


def _declared(typed: str, declared: set[str]) -> tuple[str | None, bool]:
    """The declared name of a flag, and whether it was typed in its `no-` form."""
    if typed in declared or typed == "help":
        return typed, False
    if typed in _spellings():
        return _spellings()[typed], False
    positive = _spellings().get(typed.replace("no-", "", 1))
    return (positive, True) if "no-" in typed and positive in _switches() else (None, False)


def _switch_value(typed: str, equals: str, value: str, negated: bool, rest: list[str]) -> str:
    if negated:
        if equals:
            raise UsageError(f"--{typed} takes no value")
        return "false"
    if not equals:  # a word that is not a value is an argument, such as the file
        is_value = bool(rest) and (rest[0].startswith("{") or rest[0].lower() in (*TRUE, *FALSE, "null", "auto"))
        value = rest.pop(0) if is_value else "true"
    return "true" if value.lower() in TRUE else "false" if value.lower() in FALSE else value


def _is_folder_name(text: str) -> bool:
    if text.startswith("-") or "=" in text or Path(text).is_file() or preset_path(text) is not None:
        return False
    return Path(text).is_dir() or "/" in text or text.startswith("checkpoint-")


def _refuse_foreign(typed: str, name: str, declared: set[str]) -> None:
    """Raise UsageError for a flag spelt with `_` that has another meaning in another system."""
    message = hint(typed) if "_" in typed else None
    path = next((path for path, short in short_names().items() if short == name), None)
    if message is not None and path is not None and path not in message:
        raise UsageError(f"--{typed} is a flag of another system: {_with_flags(message, declared)}; --{name} is {path}")


def _unknown_flag(typed: str, declared: set[str]) -> str:
    path = typed.replace("-", "_").split(".")
    message = hint(path[-1]) or hint(path[-1].removeprefix("no_")) or hint("_".join(path[-2:]))
    if message is not None:
        return f"there is no flag --{typed}; {_with_flags(message, declared)}"
    near = get_close_matches(typed.replace("_", "-"), [*declared, *_spellings()], n=1, cutoff=0.7)
    return f"there is no flag --{typed}" + (f"; did you mean --{near[0]}?" if near else "; see --help")


def _with_flags(hint: str, declared: set[str]) -> str:
    """A hint with the command's flags for settings: `write model.dtype: bfloat16` as `write --dtype bfloat16`."""
    flags = {path: f"--{short}" for path, short in short_names().items() if short in declared}
    name = r"([a-z_]+(?:\.\w+)+|(?<=write )[a-z_]+)(: (?=[\w-]+([;,]|$)|[{\[]))?"
    return re.sub(name, lambda at: flags[at[1]] + " " * bool(at[2]) if at[1] in flags else at[0], hint)
