"""Optional packages: imported when a setting needs them; the error for a missing one names its extra."""

import importlib
from types import ModuleType

from posttrain.base.errors import ConfigError
from posttrain.base.words import first_line


def need(module: str, extra: str, setting: str) -> ModuleType:
    """The optional module. Raises ConfigError with the command to install it if it is missing or does not load."""
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
