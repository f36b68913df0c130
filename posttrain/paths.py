"""Paths as users write them."""

from __future__ import annotations

import errno
from os.path import expanduser
from pathlib import Path

from posttrain.errors import ConfigError, PosttrainError


def path_of(text: str, error: type[PosttrainError] = ConfigError) -> Path:
    """The path, with `~` expanded; it need not exist.

    Raises `error` if the system cannot look for it: its name is too long, or a folder above it may not be read.
    """
    path = Path(expanduser(text))
    try:
        path.exists()
    except OSError as problem:
        if problem.errno == errno.ENAMETOOLONG:
            raise error(f"{text[:60]}… is too long for the name of a file or folder") from problem
        raise error(f"{text} cannot be read: {problem.strerror}") from problem
    return path
