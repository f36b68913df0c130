"""Where caches lie: tokenised data, judges' replies, indexes of the pages."""

import os
from pathlib import Path


def default_folder() -> Path:
    """`$POSTTRAIN_CACHE`, or else `~/.cache/posttrain`."""
    return Path(os.environ.get("POSTTRAIN_CACHE") or Path.home() / ".cache" / "posttrain").expanduser()
