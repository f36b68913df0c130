"""Errors that a user can fix. Each message says what is wrong, where, and what to do."""

import re
import signal
import sysconfig
import traceback
from pathlib import Path


class PosttrainError(Exception):
    """Base class of errors that are reported as one short message and a non-zero exit status."""


class UsageError(PosttrainError):
    """An invalid command line."""


class ConfigError(PosttrainError):
    """A setting is unknown, of the wrong type, or in conflict with another."""


class DataError(PosttrainError):
    """A data source cannot be read, or its rows cannot be used."""


class ModelError(PosttrainError):
    """A model or tokenizer is missing, refused, or unsuitable for the method."""


class WeightsError(ModelError):
    """The weights of a model are damaged, incomplete, or have shapes that do not match its config.json."""


class RunError(PosttrainError):
    """A run folder or checkpoint is missing, damaged, or belongs to another run."""


class DamagedError(RunError):
    """A checkpoint cannot be loaded, or its parts do not belong together: no run can be resumed from it."""


class RankError(RunError):
    """In a run on several ranks, another rank has failed, has ended, or does not answer."""


class VitalSignError(PosttrainError):
    """A check that every healthy run passes has failed: training would be wrong, so it stops."""


class EngineError(PosttrainError):
    """An engine is missing, has died, does not answer in time, or runs another version."""


class EngineLostError(EngineError):
    """An engine's server has died, or has lost its model; the same requests can be sent to a new one."""


class RewardError(PosttrainError):
    """A reward function, its settings or its grader has an error."""


OUT_OF_MEMORY = "out of memory"

# Matches messages of a RuntimeError or OSError from the allocators of CUDA, ROCm and MPS, from an asynchronous CUDA
# error (AcceleratorError), the workspaces of cuBLAS and cuDNN, PyTorch's CPU allocator, or the operating system.
_NO_MEMORY = re.compile(
    r"(?:CUDA|HIP|MPS|XPU)\b.{0,40}out of memory|CU(?:BLAS|DNN|SOLVER|SPARSE)_STATUS_ALLOC_FAILED"
    r"|(?:can't|cannot) allocate memory",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error means that memory ran out, in any form, even inside an error of torch.compile."""
    if isinstance(error, PosttrainError):
        return False
    inner = getattr(error, "inner_exception", None) or error.__cause__
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"  # compared by name, because this module does not import torch
        or (isinstance(error, RuntimeError | OSError) and _NO_MEMORY.search(str(error)) is not None)
        or (isinstance(inner, BaseException) and inner is not error and is_out_of_memory(inner))
    )


class Stopped(SystemExit):
    """A signal has ended the run cleanly. The exit status is the one that a shell reports: 128 + the signal number."""

    def __init__(self, number: int):
        super().__init__(128 + number)
        self.name = signal.Signals(number).name


def reason_of(error: BaseException) -> str:
    """The reason for an error as one sentence: the message of a PosttrainError, otherwise type, message and line."""
    if isinstance(error, PosttrainError):
        return str(error)
    if isinstance(error, Stopped):
        return f"stopped by {error.name}"
    if isinstance(error, KeyboardInterrupt):
        return "stopped by Ctrl-C"
    if isinstance(error, SystemExit):
        return f"sys.exit({'' if error.code is None else repr(error.code)}) was called{_line_of(error)}"
    said, _, trace = str(error).partition("Traceback (most recent call last)")  # compilers put whole traces in messages
    text = " ".join([*said.split(), *"".join(trace.strip().splitlines()[-1:]).split()])
    return f"{type(error).__name__}{f': {text}' if text else ''}{_line_of(error)}"


def message_of(error: BaseException) -> str:
    """The message for the user: the reason, what to do, and the error's notes."""
    notes = getattr(error, "__notes__", ())
    text = OUT_OF_MEMORY if is_out_of_memory(error) else str(error) or type(error).__name__
    if text == OUT_OF_MEMORY and not notes:  # outside a run; a run adds a note with the settings to lower
        text += ": use shorter prompts and completions, or fewer at a time (see the options in --help)"
    return "\n".join([text, *notes])


def _line_of(error: BaseException) -> str:
    """The innermost line of the traceback outside installed packages, or the innermost line if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    installed = ("<", *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
    own = [frame for frame in frames if not frame.filename.startswith(installed)]
    frame = next(reversed(own or frames), None)
    return f" ({Path(frame.filename).name} line {frame.lineno})" if frame is not None else ""
