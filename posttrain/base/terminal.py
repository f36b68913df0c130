"""Output to a terminal, a log or a page: untrusted strings are escaped, and output survives the loss of its reader."""

import errno
import os
import re
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO, cast

from posttrain.base.log import log
from posttrain.base.redaction import redact
from posttrain.base.signals import handling
from posttrain.base.system import HANGUP

# A character class for the brackets of a regular expression (in Python, Rust or JSON Schema): characters that move the
# cursor, set colours, beep, write to a clipboard (C0, DEL, C1), break lines invisibly, or change the text direction.
CONTROLS = r"\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
UNSAFE = re.compile(rf"(?![\t\n])[{CONTROLS}\ud800-\udfff]")


def visible(text: str) -> str:
    r"""Escape control characters, except tabs and line breaks, and lone surrogates (as `\x1b`)."""
    return UNSAFE.sub(lambda match: escaped(match[0]), text)


def escaped(text: str) -> str:
    r"""Escape everything except printable ASCII: `\x1b`, `\r`, `\u202e`."""
    return text.encode("unicode_escape").decode()


def harmless(text: str) -> str:
    """Text from any source (data, models, errors) for display: secrets hidden, control characters escaped."""
    return visible(redact(text))


def say(text: str, end: str = "\n", error: bool = False) -> None:
    """Print harmless text; with `error`, to stderr. Commands print through this function only; tables use a console."""
    print(harmless(text), end=end, file=sys.stderr if error else sys.stdout, flush=True)


# Error numbers of a lost pipe reader (EINVAL on Windows), a lost terminal and a lost socket peer.
GONE = {errno.EPIPE, errno.EIO, errno.ESHUTDOWN, errno.ECONNRESET} | ({errno.EINVAL} if os.name == "nt" else set())
QUIT = 141  # the exit status that a shell reports for a process ended by SIGPIPE


class _Stream:
    """A text stream that survives the loss of its reader; with `quits`, it ends the process instead. Once a write
    fails, the file descriptor is redirected to the null device, so that later writes do not fail."""

    def __init__(self, stream: TextIO, quits: bool):
        self._stream, self._quits = stream, quits

    def write(self, text: str) -> int:
        with self._survived():
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        with self._survived():
            self._stream.writelines(lines)

    def flush(self) -> None:
        with self._survived():
            self._stream.flush()

    @contextmanager
    def _survived(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in GONE:
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            if self._quits:
                raise SystemExit(QUIT) from None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def outliving(quits: bool) -> Iterator[None]:
    """Inside the block, output survives the loss of its reader; with `quits`, the process ends silently instead."""
    # A stream is None if the process was started without it.
    out, err = (cast(TextIO, stream and _Stream(stream, quits)) for stream in (sys.stdout, sys.stderr))
    with redirect_stdout(out), redirect_stderr(err):
        yield


@contextmanager
def enduring() -> Iterator[None]:
    """Inside the block, continue without output if the reader of a pipe ends (`… | head`) or the terminal closes."""
    message = "the terminal was closed: continuing without it"
    hang_up = [HANGUP] if HANGUP is not None and signal.getsignal(HANGUP) is signal.SIG_DFL else []
    with outliving(quits=False), handling(lambda number, frame: log.warning(message), *hang_up):
        yield
