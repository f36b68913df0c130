"""Importing torch and transformers at the start of a command in less time."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Imports inside look for no garbage: a fifth of their time.

    They make hundreds of thousands of objects that stay, so that none would be found; afterwards none of these is
    looked at again. Where torch is there already, as in a program of the user's own, nothing changes.
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
