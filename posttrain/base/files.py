"""Files: paths as users write them, files and folders that appear complete or not at all, and YAML as plain data.

Everything is written to a temporary sibling, synced to the disk, and renamed into place; a rename is atomic within one
file system. A crash leaves at most siblings named `*.tmp-*` (unfinished, or being deleted) and `*.old-*` (the previous
folder, moved aside while it is replaced). OSErrors of the operating system are raised unchanged.
"""

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from os.path import expanduser
from pathlib import Path
from typing import Any

from posttrain.base.errors import ConfigError, PosttrainError
from posttrain.base.system import sync
from posttrain.base.words import counted


def path_of(text: str, error: type[PosttrainError] = ConfigError) -> Path:
    """The path, with `~` expanded; it need not exist. Raises `error` if it is too long, or a folder is not readable."""
    path = Path(expanduser(text))
    try:
        path.exists()
    except OSError as problem:
        if problem.errno == errno.ENAMETOOLONG:
            raise error(f"{text[:60]}… is too long for the name of a file or folder") from problem
        raise error(f"{text} cannot be read: {problem.strerror}") from problem
    return path


def is_model(folder: Path) -> bool:
    """Whether a folder contains a model or an adapter."""
    return any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))


def final_model(path: str) -> str:
    """The path of a model as users write it, with `~` expanded; of a run folder, that of its final model."""
    path = expanduser(path)
    final = os.path.join(path, "final")
    return final if os.path.isdir(final) and not is_model(Path(path)) else path


def without_model(folder: Path) -> str:
    """What a folder without a model has instead, as the end of an error message."""
    if (folder / "run.json").is_file():
        return "is a run without a final model: finish it with --resume, or name the folder of a checkpoint"
    if finals := sorted(folder.glob("*/final")) or sorted(folder.glob("*/*/final")):
        return f"contains no model, but {counted(len(finals), 'run')}: name one, such as {finals[-1].parent}"
    names = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
    return f"contains no model (config.json), and is not a run; it has {names}"


def default_cache() -> Path:
    """The cache folder (tokenised data, judges' replies, …): `$POSTTRAIN_CACHE`, or by default `~/.cache/posttrain`."""
    return Path(os.environ.get("POSTTRAIN_CACHE") or Path.home() / ".cache" / "posttrain").expanduser()


def near(path: Path) -> str:
    """The end of an error message for a missing path: similar names, or the folder that was searched."""
    folder = path.parent
    while not folder.is_dir():
        path, folder = folder, folder.parent
    names = get_close_matches(path.name, [entry.name for entry in folder.iterdir()], n=3, cutoff=0.5)
    return f": did you mean {' or '.join(str(folder / name) for name in names)}?" if names else f" (in {folder})"


_settings_folders: dict[Path, None] = {}  # one list for the whole program, like `sys.path`


def remember_settings(path: Path) -> None:
    """Remember a settings file's folder, where functions named in settings may be; unless it is a run's own folder."""
    folder = path.resolve().parent
    if not (folder / "run.json").exists():
        _settings_folders[folder] = None


def settings_folders() -> list[Path]:
    """The folders of the settings files that were read, the most recent first."""
    return list(_settings_folders)[::-1]


LEFTOVER = re.compile(r"(?P<name>.+)\.(?P<kind>tmp|old)-\d+")
# A name made by `beside` ends with a process id and six digits. A shorter number or a date was written by a user.
MADE_HERE = re.compile(r".+-(?!(19|20)\d{6}$)\d{7,}")


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def put_file(path: Path, data: str | bytes) -> None:
    """Write `data` (a string as UTF-8) to `path`, replacing it atomically. On any exception the old file is kept."""
    temporary = beside(path, "tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def put_folder(target: Path, write: Callable[[Path], None], replace: bool = True) -> None:
    """Create the folder `target` from what `write(temporary_folder)` writes.

    An existing `target` is replaced; without `replace` it is kept (another process was faster). On an exception the
    existing `target` is kept and the temporary folder removed.
    """
    temporary = beside(target, "tmp")
    try:
        temporary.mkdir(parents=True)
        write(temporary)
        for path in (temporary, *temporary.rglob("*")):
            sync(path)
        if replace and target.exists():
            old = beside(target, "old")
            os.rename(target, old)
            try:
                os.rename(temporary, target)
            except OSError:
                os.rename(old, target)
                raise
            sync(target.parent)
            with contextlib.suppress(OSError):  # `target` is in place; leftovers are removed later
                take_away(old)
        else:
            try:
                os.rename(temporary, target)
            except OSError:
                if replace or not target.exists():
                    raise
        sync(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def take_away(path: Path) -> None:
    """Delete a file or a link; or a folder, so that a crash never leaves it in place with some of its files missing."""
    if not path.is_dir() or path.is_symlink():
        path.unlink()
        return
    temporary = beside(path, "tmp")
    os.rename(path, temporary)
    shutil.rmtree(temporary)


def beside(path: Path, kind: str) -> Path:
    """A path next to `path` with a name that no other process or thread uses."""
    return path.with_name(f"{path.name}.{kind}-{os.getpid()}{secrets.randbelow(10**6):06}")


def leftovers(folder: Path, name: str | None = None, ended: bool = True) -> list[Path]:
    """The leftovers of crashes directly in `folder`, for all targets or only for the target `name`.

    `ended` is for a folder that also contains users' files: only leftovers that `beside` named and whose process has
    ended, as far as this machine can tell.
    """
    return [
        path
        for path in sorted(folder.iterdir())
        if (leftover := LEFTOVER.fullmatch(path.name))
        and (name is None or leftover["name"] == name)
        and not (ended and (not MADE_HERE.fullmatch(path.name) or _is_written(path.name)))
    ]


def _is_written(name: str) -> bool:
    """Whether the process named by a leftover is alive."""
    from psutil import pid_exists  # imported here because it is rarely needed

    try:
        return pid_exists(int(name.rpartition("-")[2][:-6]))  # the last digits are random
    except (ValueError, OverflowError):
        return False


def settle(folder: Path, name: str | None = None, ended: bool = True) -> list[str]:
    """Remove or restore what crashes left in `folder` (see `leftovers`). Returns the names of these leftovers."""
    handled = []
    for path in leftovers(folder, name, ended):
        target = path.with_suffix("")
        if path.suffix.startswith(".old-") and not os.path.lexists(target):
            os.rename(path, target)
        else:
            take_away(path)
        handled.append(path.name)
    return handled


MOST_DEPTH = 100  # nested lists and mappings; deeper nesting would overflow the stack of the C library


def from_template(module: str, name: str, filters: Mapping[str, Callable[..., Any]], /, **values: Any) -> str:
    """The text of a Jinja template that lies beside a module (`__file__`), with these filters and values."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined)
    environment.filters |= filters
    return environment.from_string(Path(module).with_name(name).read_text(encoding="utf-8")).render(values)


def table_beside(module: str, name: str) -> Any:
    """The values of a YAML file of this package, which lies beside a module (`__file__`)."""
    return read_yaml(Path(module).with_name(name).read_text(encoding="utf-8"))


def read_yaml(text: str) -> Any:
    """The plain values of a document. Raises ValueError if it is not YAML, is nested too deeply, or has tags or aliases
    (aliases can grow without bound). posttrain writes neither tags nor aliases."""
    import yaml  # lists of runs rarely need it

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    depth = 0
    try:
        for event in yaml.parse(text, Loader=loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MOST_DEPTH:
                raise ValueError("it is nested too deeply")
            if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None) is not None:
                raise ValueError(f"it has a tag or alias on line {event.start_mark.line + 1}")
        return yaml.load(text, Loader=loader)
    except (yaml.YAMLError, RecursionError) as error:
        if is_too_deep(error):
            raise ValueError("it is nested too deeply") from error
        raise ValueError(f"it is not YAML: {' '.join(str(error).split())}") from error


def is_too_deep(error: Exception) -> bool:
    """Whether YAML could not be read because it is nested too deeply; PyYAML has a limit since 6.0.4."""
    return isinstance(error, RecursionError) or "maximum nesting depth" in str(error)
