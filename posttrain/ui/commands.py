"""posttrain's commands as child processes, because they import libraries that the UI server never imports."""

import atexit
import contextlib
import hashlib
import os
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.base.child import Child
from posttrain.base.errors import ConfigError
from posttrain.base.files import put_file

DEADLINE_S = 600.0  # seconds for one command: data may have to be downloaded
KEPT, KEPT_SIZE = 50, 32_000_000  # maximum number of outputs kept, and of their characters in total
LONGEST = 4_000_000  # maximum characters of an output
LONGEST_ERROR = 20_000  # maximum characters of an error
COLUMNS = 58  # line width of errors
SECRETS = ("POSTTRAIN_UI_TOKEN",)  # environment variables that only the UI server needs
LOG_END = 3_000  # characters shown of the end of a log
CONFIGS = "configs"  # in the folder of runs: settings and output of the runs started from the UI


@dataclass(frozen=True, slots=True)
class Output:
    """The output of a command, or its error. `code`: its exit status; None while the command runs."""

    text: str = ""
    code: int | None = None


class Commands:
    """Runs commands on settings, one at a time and with a deadline. A command is run once for the same settings."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._outputs: OrderedDict[str, Output] = OrderedDict()
        self._run_with: set[str] = set()  # keys of command and settings, without arguments
        self._turn, self._lock = threading.Lock(), threading.Lock()
        self._child: Child | None = None
        atexit.register(self.close)

    def find(self, verb: str, text: str, arguments: Sequence[str] = ()) -> Output | None:
        return self._outputs.get(_key(verb, text, arguments))

    def has_run(self, verb: str, text: str) -> bool:
        """Whether the command was started with these settings, whatever its arguments."""
        return _key(verb, text) in self._run_with

    def start(self, verb: str, text: str, arguments: Sequence[str] = ()) -> None:
        """Start `posttrain VERB FILE ARGUMENTS` with these settings in FILE, unless it is running or has succeeded."""
        key = _key(verb, text, arguments)
        with self._lock:
            before = self._outputs.get(key)
            if before is not None and before.code in (None, 0):
                return
            self._run_with.add(_key(verb, text))
            self._outputs[key] = Output()
            self._outputs.move_to_end(key)
            while len(self._outputs) > KEPT or sum(len(each.text) for each in self._outputs.values()) > KEPT_SIZE:
                self._outputs.popitem(last=False)
        threading.Thread(target=self._work, args=[key, verb, text, arguments], daemon=True).start()

    def close(self) -> None:
        if self._child is not None:
            self._child.end()

    def _work(self, key: str, verb: str, text: str, arguments: Sequence[str]) -> None:
        file = self._folder / f"{key}.yaml"
        with self._turn:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                put_file(file, text)
                output = self._run([verb, str(file), *arguments])
            except OSError as error:
                output = Output(f"the command did not start: {error}", 1)
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
        self._outputs[key] = output

    def _run(self, arguments: Sequence[str]) -> Output:
        with Child(command(arguments), environment=environment() | {"COLUMNS": str(COLUMNS)}, session=True) as child:
            self._child = child
            try:
                printed, code = child.output(DEADLINE_S), child.status(DEADLINE_S)
            except TimeoutError:
                return Output(f"no result in {DEADLINE_S:g} s; run it in a terminal: posttrain {arguments[0]} FILE", 1)
            if code == 0:
                return Output(printed.decode(errors="replace")[:LONGEST], 0)
            return Output(child.last_words()[-LONGEST_ERROR:].rpartition("error: ")[2].strip(), code or 1)


@dataclass(frozen=True, slots=True)
class Launch:
    """A training process: the text of its settings (empty if it resumes a run), and the file with its output."""

    log: Path
    text: str
    process: subprocess.Popen[bytes]

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def output(self) -> str:
        """The end of what the process printed."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-LOG_END:] if self.log.is_file() else ""


class Launches:
    """Runs started or resumed from the UI, by name. They continue after the UI server stops."""

    def __init__(self, root: Path):
        self.root = root
        self._started: dict[str, Launch] = {}
        self._lock = threading.Lock()

    def find(self, name: str) -> Launch | None:
        return self._started.get(name)

    def start(self, name: str, text: str) -> Launch:
        """Start `posttrain train configs/NAME.yaml`. Raises ConfigError if the run exists or cannot be started."""
        with self._lock:
            if (self.root / name).exists() or self._is_starting(name):
                raise ConfigError(f"a run named {name} already exists: give another name")
            return self._launch(name, text, ["train", str(self.root / CONFIGS / f"{name}.yaml")])

    def resume(self, name: str, folder: Path) -> Launch:
        """Start `posttrain train --resume FOLDER` for a run. Raises ConfigError if it is being started."""
        with self._lock:
            if self._is_starting(name):
                raise ConfigError(f"{name} is being resumed already")
            return self._launch(name, "", ["train", "--resume", str(folder.resolve())])

    def _is_starting(self, name: str) -> bool:
        return name in self._started and not self._started[name].ended

    def _launch(self, name: str, text: str, arguments: Sequence[str]) -> Launch:
        log = self.root / CONFIGS / f"{name.replace('/', ' ')}.log"
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            if text:
                put_file(log.with_suffix(".yaml"), text)
            with log.open("wb") as output:
                process = subprocess.Popen(
                    command(arguments), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                    env=environment(), start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            raise ConfigError(f"the run cannot be started from {log.parent}: {error.strerror or error}") from error
        launch = self._started[name] = Launch(log, text, process)
        return launch


def command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "posttrain", *arguments]


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in SECRETS}


def _key(verb: str, text: str, arguments: Sequence[str] = ()) -> str:
    return hashlib.sha256("\n".join([verb, *arguments, text]).encode()).hexdigest()[:24]
