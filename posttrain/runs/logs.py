"""Handlers of the logger `posttrain`: the console, and each open run's `training.log`."""

import logging
from pathlib import Path

from posttrain.base.log import log
from posttrain.base.terminal import harmless, say
from posttrain.runs.atomic import LineFile, writing

QUIET_LOGGER = "posttrain.progress"  # for training.log only: the console has a progress bar


class RunLog(logging.Handler):
    """Appends messages (INFO and up, with tracebacks, secrets redacted) to a file while it is attached.
    A log that cannot be written does not stop a run: it is dropped with one warning on stderr."""

    def __init__(self, path: Path):
        super().__init__(logging.INFO)
        self.path = path
        with writing(path):
            self._file = LineFile(path)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        attach(self)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._file.write(harmless(self.format(record)))
        except OSError as error:
            self.close()
            say(f"{self.path} is no longer written: {error.strerror}", error=True)

    def close(self) -> None:
        log.removeHandler(self)
        self._file.close()
        super().close()


class ConsoleLog(logging.Handler):
    """Prints messages on stderr without decoration; tracebacks only with `debug`.

    Looks up stderr for every message, so that a live progress bar, which replaces stderr, remains intact. While this
    handler is attached, messages do not propagate: a handler of the root logger, such as that of a user's basicConfig,
    would print them again.
    """

    def __init__(self, debug: bool = False):
        super().__init__(logging.DEBUG if debug else logging.INFO)
        self._debug = debug
        self._propagated = log.propagate
        attach(self)
        log.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == QUIET_LOGGER:
            return
        label = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        text = label + record.getMessage()
        if self._debug and record.exc_info:
            text += "\n" + logging.Formatter().formatException(record.exc_info)
        say(text, error=True)

    def close(self) -> None:
        log.removeHandler(self)
        log.propagate = self._propagated
        super().close()


def attach(handler: logging.Handler) -> None:
    """Add a handler to the logger `posttrain`, and lower the logger's level to the handler's if it is higher."""
    log.addHandler(handler)
    if log.level == logging.NOTSET or log.level > handler.level:
        log.setLevel(handler.level)
