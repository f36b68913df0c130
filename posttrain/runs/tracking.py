"""Trackers: TensorBoard, Weights & Biases and trackio receive every line of `metrics.jsonl`.

Metrics are named as in transformers, `train/loss` and `eval/loss`, so that TRL's runs share the same charts. The run
folder is the source of truth: a tracker that fails is dropped with a warning, and training continues.
"""

import contextlib
import hashlib
import io
import netrc
import os
import re
import sys
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from posttrain.base.errors import RunError
from posttrain.base.imports import need, replaced
from posttrain.base.log import log
from posttrain.base.redaction import redact, redact_arguments
from posttrain.config.schema.run import RunConfig
from posttrain.config.schema.training import TrackingConfig
from posttrain.runs.atomic import refusing
from posttrain.runs.run import Run
from posttrain.runs.summary import read_run

EXTRA = "track"
MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio"}


class Tracker(ABC):
    """An open run in a tracker. `name`: the run's path from the folder of the whole run on, `hh` or `hh/gpt2/dpo`."""

    def __init__(self, config: RunConfig, run: Run):
        parts = run.folder.absolute().parts
        depth = parts[::-1].index(config.name) if config.name in parts else 0
        self.name = "/".join(parts[-depth - 1 :])
        base = config.tracking.logging_dir
        self.folder = run.folder / "tracking" if base is None else Path(base).expanduser().joinpath(self.name)
        self.settings = redact(config.model_dump(mode="json"))

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Record a step's values, all finite; `time` is Unix time in seconds."""

    def discard(self, step: int) -> bool:
        """Remove the values from this step on; return False if the tracker cannot."""
        return False

    @abstractmethod
    def close(self, failed: bool) -> None:
        """Flush and close; `failed`: the run did not finish."""


def require_trackers(tracking: TrackingConfig) -> None:
    """Raise ConfigError for a tracker of `report_to` that is not installed. Call this before any work."""
    for name in tracking.report_to:
        if name == "tensorboard":
            need("tensorboard", EXTRA, "tracking.report_to: tensorboard")  # torch's own message is unclear
        need(MODULES[name], EXTRA, f"tracking.report_to: {name}")


class Tracking(contextlib.AbstractContextManager["Tracking"]):
    """The trackers of one run, open while it runs. Use it as a context manager inside the run's own.

    `logged` has the lines of metrics that were sent before a resume and are computed again. While the new lines are
    equal, they are not sent twice. At the first line that differs (after a change of settings, say), trackers that can
    discard the old lines receive all lines since the resume; for other trackers, a warning names the steps.
    """

    def __init__(self, config: RunConfig, run: Run, logged: Iterable[Mapping[str, Any]] = ()):
        self._sent = {(line["step"], tag): value for line in logged for tag, value in tagged(line).items()}
        self._waiting = OrderedDict((key, self._sent[key]) for key in sorted(self._sent))  # not computed again yet
        self._again: list[Mapping[str, Any]] = []  # lines since the resume, as long as all equal those sent before
        self._cleared: set[str] = set()  # trackers that have discarded the lines sent before
        self._open: dict[str, Tracker] = {}
        try:
            for name in config.tracking.report_to:
                with replaced(sys, "argv", redact_arguments(sys.argv)):  # wandb saves the command line
                    self._open[name] = OPENERS[name](config, run)
        except BaseException:
            self._close(failed=True)
            raise
        if self._open:
            run.follow(self._log)

    def _log(self, line: Mapping[str, Any]) -> None:
        step, values = line["step"], tagged(line)
        if self._waiting:
            again = {tag: self._waiting.pop((step, tag), value) for tag, value in values.items()}
            if again != values or next(iter(self._waiting), (step,))[0] < step:
                self._discard()
            else:
                self._again.append(line)
        for name, tracker in list(self._open.items()):
            self._send(name, tracker, line)

    def _send(self, name: str, tracker: Tracker, line: Mapping[str, Any]) -> None:
        step, values = line["step"], tagged(line)
        if name not in self._cleared:
            values = {tag: value for tag, value in values.items() if (step, tag) not in self._sent}
        with self._dropped_on_failure(name):
            if values:
                tracker.log(step, values, line["time"])

    def _discard(self) -> None:
        """Let the trackers discard the lines sent before the resume, since the new lines differ."""
        steps, again = [step for step, _ in self._sent], self._again
        self._again = []
        self._waiting.clear()
        for name, tracker in list(self._open.items()):
            with self._dropped_on_failure(name):
                if tracker.discard(min(steps)):
                    self._cleared.add(name)
                else:
                    log.warning(
                        "%s cannot remove the values that it logged for steps %d to %d before the resume, and they "
                        "differ from the new ones (which metrics.jsonl has): delete that run there, or set another "
                        "tracking.project",
                        name, min(steps), max(steps),
                    )  # fmt: skip
            if name in self._cleared:
                for line in again:
                    self._send(name, tracker, line)

    @contextlib.contextmanager
    def _dropped_on_failure(self, name: str):
        """A context in which an error drops the tracker with a warning: it must not end the run."""
        try:
            yield
        except Exception as error:
            self._open.pop(name, None)
            log.warning("%s failed and is dropped (metrics.jsonl has everything): %s", name, error)

    def _close(self, failed: bool) -> None:
        if self._waiting and not failed:  # the run ended at an earlier step than before
            self._discard()
        for name, tracker in list(self._open.items()):
            with self._dropped_on_failure(name):
                tracker.close(failed)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._close(failed=error is not None)


def tagged(line: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a line of metrics.jsonl, by their names in trackers: `train/loss`, `eval/loss`."""
    return {
        f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}": value
        for name, value in line.items()
        if name not in ("step", "time") and value is not None
    }


class TensorBoard(Tracker):
    """TensorBoard's event files. Each resume adds a file; TensorBoard joins them."""

    def __init__(self, config: RunConfig, run: Run):
        super().__init__(config, run)
        with refusing(f"tensorboard cannot write to {self.folder}"):
            self._writer = self._file()
        self._writer.add_text("config", f"```yaml\n{run.config_yaml}```")
        log.info("tensorboard: %s (view it with: tensorboard --logdir %s)", self.folder, self.folder)

    def _file(self, purge_step: int | None = None):
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self.folder), purge_step=purge_step, flush_secs=10)

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step, walltime=time)

    def discard(self, step: int) -> bool:
        """Start a new file that hides the values of earlier files from this step on."""
        self._writer.close()
        earlier = sorted(self.folder.glob("*tfevents*"))
        self._writer = self._file(purge_step=step)
        # Files are read in the order of their names, which begin with a time, perhaps from a machine with a fast clock.
        if max(self.folder.glob("*tfevents*")) == earlier[-1]:
            for number, path in enumerate(earlier):
                path.rename(path.with_name(re.sub(r"tfevents\.\d+", f"tfevents.{number:010}", path.name)))
        return True

    def close(self, failed: bool) -> None:
        self._writer.close()


class WandB(Tracker):
    """A run of Weights & Biases, online, or offline in a folder that `wandb sync` uploads later. A resumed run has the
    same id, so that its parts, or their offline folders, become one run."""

    def __init__(self, config: RunConfig, run: Run):
        import wandb
        from wandb.errors import Error

        super().__init__(config, run)
        self.folder.mkdir(parents=True, exist_ok=True)
        facts = read_run(run.folder)
        born = f"{facts.started} {facts.provenance['host']} {facts.provenance['folder']} {self.name}"
        try:
            self._run = wandb.init(
                project=config.tracking.project,
                name=self.name,
                id=hashlib.sha256(born.encode()).hexdigest()[:12],
                dir=str(self.folder),
                config=self.settings,
                group=self.name.partition("/")[0] if "/" in self.name else None,
                job_type=config.method.type,
                mode=wandb_mode(config.tracking),
                resume="allow",
                settings=wandb.Settings(silent=True, console="off", save_code=False, disable_git=True),
            )
        except Error as error:
            raise RunError(
                f"wandb cannot start: {error}. Set WANDB_API_KEY (perhaps in .env), or write to a folder and upload it "
                "later: tracking.wandb_mode=offline"
            ) from error
        folder = Path(self._run.dir).parent
        log.info("wandb: %s", self._run.url or f"{folder} (upload it with: wandb sync {folder})")

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        self._run.log(dict(values) | {"_timestamp": time}, step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


def wandb_mode(tracking: TrackingConfig) -> Literal["online", "offline"] | None:
    """The mode of wandb. `auto`: WANDB_MODE if it is set (None: wandb reads it), otherwise online if there is a login
    key and offline if not."""
    if tracking.wandb_mode != "auto":
        return tracking.wandb_mode
    if os.environ.get("WANDB_MODE"):
        return None
    return "online" if has_wandb_key() else "offline"


def has_wandb_key() -> bool:
    """Whether there is a login key: WANDB_API_KEY, or the key that `wandb login` wrote to ~/.netrc."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return netrc.netrc().authenticators(host or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False


class Trackio(Tracker):
    """A run of trackio, in a local database in trackio's folder (TRACKIO_DIR) or in the Space TRACKIO_SPACE_ID."""

    def __init__(self, config: RunConfig, run: Run):
        import trackio

        super().__init__(config, run)
        with contextlib.redirect_stdout(io.StringIO()):  # trackio prints what the log line below says
            self._run = trackio.init(
                project=config.tracking.project,
                name=self.name,
                config=self.settings,
                resume="allow" if run.resumed else "never",
                embed=False,
                auto_log_cpu=False,
            )
        log.info("trackio: view it with: trackio show --project %s", config.tracking.project)

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        self._run.log(dict(values), step=step)

    def close(self, failed: bool) -> None:
        import trackio

        with contextlib.redirect_stdout(io.StringIO()):
            trackio.finish()  # not run.finish(), after which trackio would finish the run again at exit


OPENERS = {"tensorboard": TensorBoard, "wandb": WandB, "trackio": Trackio}
