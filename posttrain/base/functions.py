"""A user's own code that settings name: functions and classes, as `module:function`, and those given to the Python API.
Settings may come from strangers, so only Python files of the user and functions that a package offers are imported."""

import functools
import importlib
import inspect
import sys
import sysconfig
from collections.abc import Callable, Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from posttrain.base.errors import RewardError
from posttrain.base.files import settings_folders

ENTRY_POINTS = "posttrain.functions"  # group of entry points in which packages offer functions
GIVEN = "given:"  # begins the names of functions and rows that a program gives to the Python API in memory
_given: dict[str, Callable[..., Any]] = {}
OFFERED = frozenset({"posttrain.evaluation.mmlu:rows"})  # functions of this package that settings may name


def give(functions: Sequence[Callable[..., Any]]) -> list[str]:
    """Make functions of the running program known under the returned names, `given:NAME`, for settings. The names
    follow from the functions' own and their places, so that a resumed run has the same ones."""
    names = list[str]()
    for place, function in enumerate(functions):
        own = getattr(function, "__name__", "")
        name = GIVEN + (own if own.isidentifier() else "function")  # a lambda has no name of its own
        names.append(f"{name}_{place}" if name in names else name)
    _given.update(zip(names, functions, strict=True))
    return names


def as_module(name: str) -> str:
    """`folder/my.py:function` as `folder.my:function`; any other name unchanged. Raises RewardError for an absolute
    path, or one with `..`, to a file that is neither below the current folder nor below that of a settings file."""
    file, colon, attribute = name.rpartition(":")
    if not file.endswith(".py"):
        return name
    path = Path(file)
    if path.is_absolute() or ".." in path.parts:
        folders = [folder.resolve() for folder in (Path.cwd(), *settings_folders())]
        own = next((folder for folder in folders if path.resolve().is_relative_to(folder)), None)
        if own is None:
            raise RewardError(
                f"{name}: the file is neither in the current folder nor next to the settings file: move it, or start "
                "the command in its folder"
            )
        path = path.resolve().relative_to(own)
    return f"{'.'.join(path.with_suffix('').parts)}{colon}{attribute}"


def find_function(name: str) -> Callable[..., Any]:
    """Find `module:function` or `FILE.py:function` in a user's Python file. Raises RewardError if there is none.

    The file must be in the current folder, or next to the user's script or a settings file that was read. Settings may
    come from strangers, so functions of Python itself and of installed packages are rejected, unless an entry point of
    the package names them.
    """
    if name.startswith(GIVEN):
        if name not in _given:
            raise RewardError(f"{name} was given to the Python API in memory: give the function again, as rewards=[…]")
        return _given[name]
    name = as_module(name)
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise RewardError(f"a function is named module:function, such as my_rewards:brevity, not {name!r}")
    from importlib.metadata import entry_points  # help and lists do not need it

    allowed = name in {point.value.split("[")[0].strip() for point in entry_points(group=ENTRY_POINTS)} | OFFERED
    program = Path(getattr(sys.modules["__main__"], "__file__", None) or sys.executable).resolve()
    own = [] if _is_library(program) else [program.parent]  # the folder of a user's script
    folders = [Path.cwd(), *settings_folders(), *own]
    top = module.partition(".")[0]
    here = next((folder for folder in folders if PathFinder.find_spec(top, [str(folder)]) is not None), None)
    if here is not None and str(here) not in sys.path and not (here == Path.cwd() and "" in sys.path):
        sys.path.insert(0, str(here))  # the `posttrain` command does not search these folders by itself
    try:
        spec = find_spec(top)  # unlike an import, this runs no code
    except (ImportError, ValueError, AttributeError):
        spec = None
    if spec is not None and not allowed:
        for origin in (spec.origin, *(spec.submodule_search_locations or ())):
            _check_origin(name, module, origin, folders)
        mine = PathFinder.find_spec(top, [str(here)]) if here is not None else None
        if mine is not None and mine.origin != spec.origin:
            raise RewardError(
                f"{name}: {top} was already imported from {spec.origin}, not {mine.origin}: rename one of them"
            )
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and not (module + ".").startswith(error.name + "."):
            raise RewardError(f"{name}: the module {module} needs {error.name}, which is not installed") from error
        raise RewardError(f"{name}: there is no module {module} in {Path.cwd()} or on Python's path") from error
    except Exception as error:
        raise RewardError(f"{name}: importing {module} failed with {type(error).__name__}: {error}") from error
    function = getattr(imported, attribute, None)
    if not callable(function):
        functions = [key for key, value in vars(imported).items() if callable(value) and not key.startswith("_")]
        raise RewardError(f"{name}: {module} has no function {attribute}; it has {', '.join(functions) or 'none'}")
    if not allowed:  # a user's file may import functions from elsewhere
        _check_origin(name, module, getattr(imported, "__file__", None), folders)
        _check_origin(name, module, _file_of(function), folders, imported=True)
    return function


def _check_origin(name: str, module: str, origin: str | None, folders: Sequence[Path], imported: bool = False) -> None:
    """Raise RewardError unless a file or folder is the user's. `imported`: the file of a function that it imports."""
    if origin is None:
        return  # a package without a file: its folders are checked
    path = Path(origin).resolve()
    if origin in ("built-in", "frozen") or (not imported and not path.exists()) or _is_library(path):
        raise RewardError(
            f"{name} belongs to Python or to an installed package ({origin}): a function must be in a Python file in "
            "the current folder or next to the settings file, or in a package that names it as an entry point of the "
            f"group {ENTRY_POINTS} (docs/rewards.md)"
        )
    if not imported and not any(path.is_relative_to(folder.resolve()) for folder in folders):
        raise RewardError(
            f"{name}: {module} is found at {origin}, which is neither in the current folder nor next to the settings "
            "file or the program: move it, or start the command in its folder"
        )


def check_own_file(file: str) -> None:
    """Raise RewardError unless a Python file is in the current folder or next to a settings file."""
    path, folders = Path(file).resolve(), [Path.cwd(), *settings_folders()]
    if not path.is_file() or _is_library(path) or not any(path.is_relative_to(each.resolve()) for each in folders):
        raise RewardError(f"{file} is no file in the current folder or next to the settings file")


def _is_library(path: Path) -> bool:
    """Whether a file belongs to Python, to an installed package or to this package."""
    folders = {Path(folder).resolve() for folder in (*sysconfig.get_paths().values(), Path(__file__).parents[1])}
    installed = not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
    return installed or any(path.is_relative_to(folder) for folder in folders - {Path(sys.prefix).resolve()})


def _file_of(function: Any) -> str | None:
    """The file in which a function or class was defined, also of a partial; None for any other object."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    if inspect.isbuiltin(function):
        return "built-in"
    if isinstance(function, type):
        return getattr(sys.modules.get(function.__module__), "__file__", None) or "built-in"
    code = getattr(function, "__code__", None)  # methods have it, too
    return code.co_filename if code else None
