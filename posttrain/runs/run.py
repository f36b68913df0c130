"""The run folder: one run's settings, state, metrics, log, checkpoints and results.

    run.json  config.yaml  metrics.jsonl  training.log  results.json  curves.png  report.html
    final_results.json (of reward models)
    checkpoint-{step}/   best/   ema/   final/

Importing this module and creating or reading a run folder do not import torch.
"""

import logging
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, Self

from posttrain.base.errors import PosttrainError, RunError, Stopped, message_of, reason_of
from posttrain.base.files import settle
from posttrain.base.log import log
from posttrain.base.redaction import redact
from posttrain.base.signals import deferring
from posttrain.runs import checkpoint
from posttrain.runs import folder as folders
from posttrain.runs.atomic import recover, write_file, writing
from posttrain.runs.checks import Finding
from posttrain.runs.files import read_regular, save_json
from posttrain.runs.logs import RunLog
from posttrain.runs.metrics import MetricsFile
from posttrain.runs.provenance import environment, now, redact_yaml

LOGS = "logs"  # folder for the output of the ranks after the first
State = Literal["running", "finished", "interrupted", "failed"]


class Run(AbstractContextManager["Run"]):
    """An open run folder, locked against other processes. Use it as a context manager:

        with Run.create(folder, config_yaml, {"seed": 0}) as run: ...

    Leaving the block records the outcome in `run.json`: finished, interrupted (Ctrl-C, a signal) or failed, with the
    reason in a sentence. While the run is open, messages of the logger `posttrain` also go to `training.log`.
    """

    def __init__(self, folder: Path, lock: folders.FolderLock, facts: dict[str, Any]):
        """Use `Run.create` or `Run.open`."""
        self.folder = folder
        self._lock = lock
        self._facts = facts
        self._metrics = MetricsFile(folder)
        self._log = RunLog(folder / "training.log")
        self._follower: Callable[[dict[str, Any]], None] = lambda line: None
        self._save_after: Callable[[BaseException], None] = lambda error: None

    @classmethod
    def create(cls, folder: Path, config_yaml: str, provenance: Mapping[str, Any], *, overwrite: bool = False) -> Self:
        """Start a run in a new or empty folder.

        `provenance` adds the caller's facts (seed, threads …) to those collected here (versions, platform, command
        line, commit). With `overwrite`, an existing run folder is emptied first; without it, only a folder whose run
        ended before the first step. Raises RunError if the folder contains anything else, or a process runs in it.
        """
        if folder.exists() and not folder.is_dir():
            raise RunError(f"{folder} is a file: give the run another name or output_dir")
        folders.refuse_occupied(folder, overwrite)
        with writing(folder):
            if folder.parent.is_dir() and not folder.exists():
                settle(folder.parent, folder.name)  # restores a run that a killed command had moved aside
            folder.mkdir(parents=True, exist_ok=True)
        lock = folders.FolderLock(folder)
        try:
            folders.refuse_occupied(folder, overwrite)  # again: another process may have come first
            restarted = folders.never_stepped(folder)
            if overwrite or restarted:
                folders.empty(folder, keep=() if overwrite else (folders.NOTES,))
            recover(folder)
            facts = {
                "format": folders.FORMAT, "state": "running", "reason": None, "started": now(), "ended": None,
                "resumes": [], "provenance": redact(environment() | dict(provenance)), "counters": {}, "checks": {},
            }  # fmt: skip
            save_json(folder / "run.json", facts)
            write_file(folder / "config.yaml", redact_yaml(config_yaml))
            run = cls(folder, lock, facts)
        except BaseException:
            lock.release()
            raise
        if restarted and not overwrite:
            log.info("%s has a run that ended before its first step: it starts again", folder)
        return run

    @classmethod
    def open(cls, folder: Path, check: Callable[[], None] = lambda: None) -> Self:
        """Open an existing run to resume it: leftovers of a crash are removed, and the resume is recorded.

        `check` is called before the resume is recorded, so that its errors leave the run's state unchanged. Raises
        RunError if the folder is not a run folder, is damaged, or another process runs in it.
        """
        folders.check_run_folder(folder)
        lock = folders.FolderLock(folder)
        try:
            cleared = recover(folder)
            facts = folders.read_facts(folder)
            check()
            facts["resumes"].append(redact({"time": now(), **environment()}))
            facts |= {"state": "running", "reason": None, "ended": None}
            save_json(folder / "run.json", facts)
            MetricsFile(folder).truncate(sys.maxsize)  # an incomplete line must not be joined to the next one
            run = cls(folder, lock, facts)
        except BaseException:
            lock.release()
            raise
        if cleared:
            log.info("removed leftovers of a crash: %s", ", ".join(cleared))
        return run

    # Paths and state

    @property
    def best(self) -> Path:
        return self.folder / "best"

    @property
    def final(self) -> Path:
        return self.folder / "final"

    @property
    def config_yaml(self) -> str:
        """The content of `config.yaml`."""
        return read_regular(self.folder / "config.yaml").decode()

    def write_config(self, config_yaml: str) -> None:
        """Replace `config.yaml`: a resumed run may have different step counts and intervals."""
        write_file(self.folder / "config.yaml", redact_yaml(config_yaml))

    @property
    def state(self) -> State:
        return self._facts["state"]

    @property
    def resumed(self) -> bool:
        return bool(self._facts["resumes"])

    def set_state(self, state: State, reason: str | None = None) -> None:
        """Record the run's state in `run.json`; every state but `running` sets the end time."""
        self._facts |= {"state": state, "reason": redact(reason), "ended": None if state == "running" else now()}
        save_json(self.folder / "run.json", self._facts)

    def set_counters(self, counters: Mapping[str, int]) -> None:
        """Record counters (rows dropped, steps skipped …) in `run.json`; other counters there are kept."""
        self._facts["counters"] |= counters
        save_json(self.folder / "run.json", self._facts)

    def record_check(self, finding: Finding) -> None:
        """Record the result of a check in `run.json`: the largest `value` so far, or a failure.

        A failure ends the run, and remains recorded until the check passes after a resume. The file is written when the
        check is new or fails; later values are written with the next checkpoint and at the end.
        """
        checks = self._facts.setdefault("checks", {})
        before, facts = checks.get(finding.check, {}), finding.facts()
        if before.get("failed") and not finding.failed:
            before = {}
        earlier, value = before.get("value"), facts.get("value")
        larger = earlier is not None and value is not None and earlier > value
        kept = before if larger and not finding.failed else facts
        checks[finding.check] = {**kept, "times": before.get("times", 0) + 1}
        if not before or finding.failed:
            save_json(self.folder / "run.json", self._facts)

    def add_provenance(self, facts: Mapping[str, Any]) -> None:
        """Add provenance that was not known at the start to `run.json`, such as the data's fingerprint."""
        self._facts["provenance"] |= redact(dict(facts))
        save_json(self.folder / "run.json", self._facts)

    def write_results(self, results: Mapping[str, Any]) -> None:
        """Write `results.json`, the run's final numbers. Raises RunError if one is not finite."""
        save_json(self.folder / "results.json", redact(dict(results)))

    def write_final_results(self, results: Mapping[str, Any]) -> None:
        """Write `final_results.json`: a reward model's last and best metrics, in one flat dictionary."""
        facts = {name: results[name] for name in ("method", "model", "steps")} | dict(results["final"])
        facts |= {f"best_{name}": value for name, value in results.get("best", {}).items()}
        save_json(self.folder / "final_results.json", redact(facts))

    # Metrics

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append a line to `metrics.jsonl` (`MetricsFile.append`). Metrics are named as in TRL; validation metrics have
        the prefix `eval_`."""
        self._follower(self._metrics.append(step, metrics))

    def follow(self, follower: Callable[[dict[str, Any]], None]) -> None:
        """Also pass every further line of metrics to `follower`."""
        self._follower = follower

    # Checkpoints

    def save_checkpoint(self, step: int, write: Callable[[Path], None], limit: int | None) -> Path:
        """`checkpoint.save_checkpoint` in this folder, after syncing the metrics to the disk."""
        self._metrics.sync()
        save_json(self.folder / "run.json", self._facts)
        return checkpoint.save_checkpoint(self.folder, step, write, limit)

    def save_model(self, folder: Path, step: int, write: Callable[[Path], None]) -> None:
        """Create or replace a saved model of the run atomically, with the files of `write(temporary_folder)`."""
        checkpoint.save_folder(folder, step, write)

    def rewind(self, step: int, evaluated: bool = True) -> None:
        """Restore the folder to its state right after `step` (unless `evaluated`: before its validation), to resume
        there. Later checkpoints and saved models become `….set-aside`; later metrics are removed."""
        self._keep_until(step, f"later than step {step}", evaluated)

    def start_over(self, provenance: Mapping[str, Any]) -> None:
        """Restore the folder to the state of a new run with the same date: `best` is set aside, metrics are removed."""
        self._keep_until(-1, "of the previous run")  # step 0 is the evaluation before training
        day = {name: value for name, value in self._facts["provenance"].items() if name == "date"}
        self._facts["provenance"] = redact(environment() | day | dict(provenance))
        self._facts["checks"] = {}
        save_json(self.folder / "run.json", self._facts)

    def _keep_until(self, step: int, rest: str, evaluated: bool = True) -> None:
        """Set aside or remove everything later than `step`; messages call it `rest`."""
        moved = checkpoint.set_aside_after(self.folder, step)
        cut = self._metrics.truncate(step, evaluated)
        if moved:
            log.warning("set aside, %s: %s", rest, ", ".join(path.name for path in moved))
        if cut:
            log.info("removed %d lines of metrics.jsonl, %s: they will be written again", cut, rest)

    # The end

    def close(self) -> None:
        """Close the files and release the folder lock; the state is unchanged."""
        self._metrics.close()
        self._log.close()
        self._lock.release()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            if error is None:
                if self.state == "running":
                    self.set_state("finished")
            else:
                self._record_end(error)
        except RunError as second:
            if error is None:
                raise
            error.add_note(f"run.json could not be updated either: {second}")
        finally:
            self.close()

    def on_failure(self, save: Callable[[BaseException], None]) -> None:
        """Call `save(error)` when an exception leaves the block; the run ends with `error` even if the save fails. A
        signal during the save takes effect after it, and then replaces the error."""
        self._save_after = save

    def _record_end(self, error: BaseException) -> None:
        """Save the finished steps; record in run.json and training.log, but not on the console, why the run ended."""
        reason = reason_of(error)  # before its traceback is cleared
        interrupted = isinstance(error, KeyboardInterrupt | Stopped)
        if not interrupted:
            trace = None if isinstance(error, PosttrainError) else (type(error), error, error.__traceback__)
            self._log.handle(log.makeRecord(log.name, logging.ERROR, __file__, 0, "%s", (reason,), trace))
        with deferring("saving the last finished step") as signals:
            try:
                self._save_after(error)
            except BaseException as second:
                note = "the steps since the last checkpoint are not saved"
                if (why := reason_of(second)) != reason:  # a full disk stops both the step's save and this one
                    note += f": {why}"
                if interrupted:  # Ctrl-C shows no notes
                    log.warning(note)
                else:
                    self._log.handle(log.makeRecord(log.name, logging.WARNING, __file__, 0, note, (), None))
                    error.add_note(note)
            self.set_state("interrupted" if interrupted else "failed", reason)
        if signals and not interrupted:  # the signal now ends the process before another run starts
            log.error("the run failed: %s", message_of(error))
            raise KeyboardInterrupt if signals[0] == signal.SIGINT else Stopped(signals[0])


class Follower(Run):
    """The run for the ranks after the first: they read the folder, and write only their log (`own_log`)."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._facts = {"state": "running", "resumes": []}
        self._save_after = lambda error: None

    def _nothing(self, *args: Any, **kwargs: Any) -> None: ...

    write_config = set_state = set_counters = record_check = add_provenance = write_results = _nothing
    write_final_results = log = follow = save_model = rewind = start_over = close = _nothing

    def save_checkpoint(self, step: int, write: Callable[[Path], None], limit: int | None) -> Path:
        return self.folder / f"checkpoint-{step}"

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            log.error("%s", reason_of(error), exc_info=error)
            self._save_after(error)


@contextmanager
def scratch_run(config_yaml: str) -> Iterator[Run]:
    """A run in a temporary folder, which is removed at the end of the block."""
    with TemporaryDirectory(prefix="posttrain-") as folder, Run.create(Path(folder) / "run", config_yaml, {}) as run:
        yield run


@contextmanager
def own_log(folder: Path, rank: int) -> Iterator[None]:
    """Send the output of this process to `logs/rank-N.log` in the run folder."""
    path = folder / LOGS / f"rank-{rank}.log"
    path.parent.mkdir(exist_ok=True)
    with path.open("a", encoding="utf-8", buffering=1) as file, redirect_stdout(file), redirect_stderr(file):
        yield
