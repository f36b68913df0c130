"""Imports: of optional packages, and faster ones of torch and transformers."""

import importlib
from types import ModuleType

from posttrain.base.errors import ConfigError
from posttrain.base.words import first_line


def need(module: str, extra: str, setting: str) -> ModuleType:
    """The optional module that `setting` needs. If it is missing, raises ConfigError with the command to install it."""
    package = module.partition(".")[0]
    try:
        importlib.import_module(package)
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            raise ConfigError(
                f"{setting} needs {package}, which is not installed: pip install 'posttrain[{extra}]'"
            ) from error
        what = f"{setting} needs {package}, which is installed but does not load here"
        raise ConfigError(f"{what}: {first_line(error)}") from error
