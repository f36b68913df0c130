"""Failures a user can mend. Each message says what was wrong, where, and what to do.

The command line prints it without a stack trace.
"""

import re
import signal
import sysconfig
import traceback
from pathlib import Path


class PosttrainError(Exception):
    """Base of every failure that is reported as one short message and a non-zero exit status."""


class ConfigError(PosttrainError):
    """A setting is unknown, of the wrong type, or at odds with another."""


class DataError(PosttrainError):
    """A data source cannot be read, or its rows cannot be used."""


class ModelError(PosttrainError):
    """A model or tokenizer is missing, refused, or unsuited to the method."""


class WeightsError(ModelError):
    """The weights of a model are damaged, incomplete, or of other shapes than its config.json says."""


class RunError(PosttrainError):
    """A run folder or checkpoint is missing, damaged, or belongs to another run."""


class DamagedError(RunError):
    """What was saved cannot be loaded, or does not belong together: no run can be resumed from that checkpoint."""


class VitalSignError(PosttrainError):
    """A check that must hold in every healthy run does not: training would be wrong, so it stops."""


class EngineError(PosttrainError):
    """What draws completions is absent, does not answer in time, has died, or is of another version."""


class RewardError(PosttrainError):
    """A reward function, its settings or the grader behind it does not work as a reward must."""


OUT_OF_MEMORY = "out of memory"


# How a RuntimeError or OSError says it: the allocators of CUDA, ROCm and MPS, an asynchronous CUDA error
# (AcceleratorError), cuBLAS and cuDNN, whose workspace found no room, PyTorch's allocator on a CPU, the system.
_NO_MEMORY = re.compile(
    r"(?:CUDA|HIP|MPS|XPU)\b.{0,40}out of memory|CU(?:BLAS|DNN|SOLVER|SPARSE)_STATUS_ALLOC_FAILED"
    r"|(?:can't|cannot) allocate memory",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, in any of its forms, also inside what torch.compile raises around it."""
    if isinstance(error, PosttrainError):
        return False
    inner = getattr(error, "inner_exception", None) or error.__cause__
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"  # not by class: this module imports no torch
        or (isinstance(error, RuntimeError | OSError) and _NO_MEMORY.search(str(error)) is not None)
        or (isinstance(inner, BaseException) and inner is not error and is_out_of_memory(inner))
    )


class Stopped(SystemExit):
    """A signal has ended the run in good order; the status is the shell's for that signal."""

    def __init__(self, number: int):
        super().__init__(128 + number)
        self.name = signal.Signals(number).name


def reason_of(error: BaseException) -> str:
    """Why something ended, in a sentence: the message of a failure; else the error's type, message and place."""
    if isinstance(error, PosttrainError):
        return str(error)
    if isinstance(error, Stopped):
        return f"stopped by {error.name}"
    if isinstance(error, KeyboardInterrupt):
        return "stopped by Ctrl-C"
    if isinstance(error, SystemExit):
        return f"sys.exit({'' if error.code is None else repr(error.code)}) was called{_place(error)}"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}{f': {text}' if text else ''}{_place(error)}"


def message_of(error: BaseException) -> str:
    """What the user is told of a failure: why, what to do, and the notes that were added on its way."""
    notes = getattr(error, "__notes__", ())
    text = OUT_OF_MEMORY if is_out_of_memory(error) else str(error) or type(error).__name__
    if text == OUT_OF_MEMORY and not notes:  # no run, whose settings would say what to lower
        text += ": ask for shorter texts or fewer of them at a time (see the lengths and numbers in --help)"
    return "\n".join([text, *notes])


def _place(error: BaseException) -> str:
    """Where: the innermost line that is no installed package's, or else the innermost."""
    frames = traceback.extract_tb(error.__traceback__)
    installed = ("<", *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
    own = [frame for frame in frames if not frame.filename.startswith(installed)]
    frame = next(reversed(own or frames), None)
    return f" ({Path(frame.filename).name} line {frame.lineno})" if frame is not None else ""
