"""Paths as users write them, and the folder of caches."""

import errno
import os
from os.path import expanduser
from pathlib import Path

from posttrain.base.errors import ConfigError, PosttrainError


def path_of(text: str, error: type[PosttrainError] = ConfigError) -> Path:
    """The path, with `~` expanded; it need not exist.

    Raises `error` if its name is too long, or if a folder above it may not be read.
    """
    path = Path(expanduser(text))
    try:
        path.exists()
    except OSError as problem:
        if problem.errno == errno.ENAMETOOLONG:
            raise error(f"{text[:60]}… is too long for the name of a file or folder") from problem
        raise error(f"{text} cannot be read: {problem.strerror}") from problem
    return path


def default_cache() -> Path:
    """The folder of caches (tokenised data, judges' replies, …): `$POSTTRAIN_CACHE`, or else `~/.cache/posttrain`."""
    return Path(os.environ.get("POSTTRAIN_CACHE") or Path.home() / ".cache" / "posttrain").expanduser()


_settings_folders: dict[Path, None] = {}  # of the whole program, like `sys.path`


def remember_settings(path: Path) -> None:
    """Remember a settings file's folder: functions named in settings may come from Python files there.

    A run's own folder is not remembered.
    """
    folder = path.resolve().parent
    if not (folder / "run.json").exists():
        _settings_folders[folder] = None


def settings_folders() -> list[Path]:
    """The folders of the settings files that were read, the latest first."""
    return list(_settings_folders)[::-1]
