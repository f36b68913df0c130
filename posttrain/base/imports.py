"""Imports optional packages, speeds up the imports of torch and transformers, and replaces values in them."""

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from posttrain.base.errors import ConfigError
from posttrain.base.words import first_line

ROOT = Path(__file__).resolve().parents[2]


def installing(extra: str) -> str:
    """The command that installs an extra: from the clone that this package is part of, otherwise from the index."""
    if not (ROOT / "pyproject.toml").is_file():
        return f"pip install 'posttrain[{extra}]'"
    return f"pip install -e '{'.' if Path.cwd() == ROOT else ROOT}[{extra}]'"


def need(module: str, extra: str, setting: str) -> ModuleType:
    """Import the optional module that `setting` needs. Raises ConfigError if it is missing (with the command that
    installs it) or does not load."""
    package = module.partition(".")[0]
    try:
        importlib.import_module(package)
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            raise ConfigError(f"{setting} needs {package}, which is not installed: {installing(extra)}") from error
        what = f"{setting} needs {package}, which is installed but does not load here"
        raise ConfigError(f"{what}: {first_line(error)}") from error


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """A context in which an attribute of a module or an object has another value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def quick_imports() -> Iterator[None]:
    """Disable garbage collection inside the block, which makes its imports a fifth faster.

    Imports create hundreds of thousands of permanent objects, which a collection would scan in vain. They are frozen
    after the block. Does nothing if torch is already imported, as in a user's own program.
    """
    if "torch" in sys.modules:
        yield
        return
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
