"""Sources of rows: a local file or folder, a data set of the Hugging Face hub or its cache, a built-in task.

`keep` saves one to a folder for offline use.
"""

import difflib
import hashlib
import itertools
import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from huggingface_hub import DatasetCard, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from posttrain.base.errors import DataError
from posttrain.base.hub import stay_offline_without_network
from posttrain.base.paths import path_of
from posttrain.config.schema.datasets import KNOWN, KnownSet, known_set, name_of
from posttrain.data.readers import READERS, Record, read_files
from posttrain.data.saved import SavedSplit, read_manifest, save, saved_files
from posttrain.data.tasks import TASKS, Compose

log = logging.getLogger("posttrain")

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(/[\w.-]+)?")


SAVED = ("state.json", "dataset_info.json", "dataset_dict.json")  # what `save_to_disk` of datasets writes beside rows


class Source(Protocol):
    """A source of rows, with a digest that changes with its content."""

    @property
    def digest(self) -> str: ...

    def read(self) -> Iterator[Record]: ...


@dataclass(frozen=True)
class Files:
    """Local files, read one after another."""

    paths: tuple[Path, ...]

    @property
    def digest(self) -> str:
        """SHA-256 over the files' names and contents."""
        whole = hashlib.sha256()
        for path in self.paths:
            try:
                with path.open("rb") as stream:
                    content = hashlib.file_digest(stream, "sha256").hexdigest()
            except OSError as error:
                raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
            whole.update(f"{path.name} {content}\n".encode())
        return whole.hexdigest()

    def read(self) -> Iterator[Record]:
        return read_files(self.paths)


@dataclass(frozen=True)
class Task:
    """Rows of a built-in task, generated from the seed."""

    name: str
    split: str
    rows: int
    seed: int
    compose: Compose

    @property
    def digest(self) -> str:
        return f"{self.name} {self.split} {self.rows} {self.seed}"

    def read(self) -> Iterator[Record]:
        for row, value in enumerate(TASKS[self.name](self.split, self.rows, self.seed, self.compose)):
            problem = next(iter(value.values()))  # the replies follow from it, and from the template
            yield Record(row, self.name, row + 1, value, identity=problem)


def open_source(source: str, split: str, max_rows: int | None, seed: int, compose: Compose) -> Source:
    """The source of a `source` setting: `builtin:…`, a path, a known data set, or a hub id `owner/name[/subset]`.

    `split` selects files of a folder or hub data set; a single file has no splits and is read whole. `compose` writes
    the replies of a built-in task in the template's form. Raises DataError if there is no such source.
    """
    if source.startswith("builtin:"):
        if source not in TASKS:
            raise DataError(f"there is no built-in task {source!r}: there are {', '.join(TASKS)}")
        if split not in ("train", "test"):
            raise DataError(f"{source} has the splits train and test, not {split!r}")
        return Task(source, split, max_rows or (10_000 if split == "train" else 1_000), seed, compose)
    path = path_of(source, DataError)
    if path.is_file():
        return Files((path,))
    if path.is_dir():
        saved = saved_files(path, split)
        if saved:
            return Files(saved)
        splits = _splits(path, source, None)
        _tell_unread(path, source, splits)
        return Files(_of_split(splits, "train" if _is_one_saved(path) else split, source))
    known = known_set(source)
    if known is not None:
        return Files(_known_files(source, known, split))
    if HUB_ID.fullmatch(source) and not any(suffix in READERS for suffix in path.suffixes):
        return Files(_hub_files(source, split))
    raise DataError(_not_there(source))


def layout_of(source: str) -> KnownSet | None:
    """The known data set of a source, also of a folder made by `data save`, for its column mapping."""
    path = path_of(source, DataError)
    if path.is_dir():
        manifest = read_manifest(path)
        return KNOWN.get(str(manifest["known"])) if manifest else None
    return None if path.is_file() else known_set(source)


def splits_of(source: str) -> list[str]:
    """The splits of a folder or hub data set, by the names that `split` accepts; a file has one."""
    path = path_of(source, DataError)
    if path.is_file():
        return ["train"]
    if path.is_dir():
        manifest = read_manifest(path)
        return list(manifest["splits"] if manifest else _splits(path, source, None))
    known = known_set(source)
    if known is None and not HUB_ID.fullmatch(source):
        raise DataError(_not_there(source))
    if known is not None and known.files:
        return list(known.files)
    folder, subset = _snapshot(_with_subset(source, known) if known else source)
    ours = {theirs: name for name, theirs in known.splits.items()} if known else {}
    return [ours.get(split, split) for split in _splits(folder, source, subset)]


def _with_subset(source: str, known: KnownSet) -> str:
    return source if source.count("/") == 2 else known.source


def _known_files(source: str, known: KnownSet, split: str) -> tuple[Path, ...]:
    if not known.files:
        return _hub_files(_with_subset(source, known), known.splits.get(split, split))
    if split not in known.files:
        raise DataError(f"{source} has no split {split!r}: it has {', '.join(known.files)}")
    folder, _ = _snapshot(known.repo, [known.files[split]])
    found = tuple(sorted(folder.glob(known.files[split])))
    if not found:
        raise DataError(
            f"{source}: the local cache has no {known.files[split]} of {known.repo}: connect to the network and retry"
        )
    return found


def _not_there(source: str) -> str:
    near = difflib.get_close_matches(source, KNOWN, n=1, cutoff=0.6)
    known = f"{source} is neither a file or folder here nor a known data set: did you mean {near[0]}?" if near else ""
    return known or f"{source} does not exist{_near(path_of(source, DataError))}"


def _near(path: Path) -> str:
    """Similar names in the folder of a missing path."""
    folder = path.parent
    while not folder.is_dir():
        path, folder = folder, folder.parent
    names = difflib.get_close_matches(path.name, [entry.name for entry in folder.iterdir()], n=3, cutoff=0.5)
    return f": did you mean {' or '.join(str(folder / name) for name in names)}?" if names else f" (in {folder})"


def _of_split(files: dict[str, list[Path]], split: str, name: str) -> tuple[Path, ...]:
    """The data files of one split."""
    if split not in files:
        raise DataError(f"{name} has no split {split!r}: it has {', '.join(files) or 'none'}")
    return tuple(files[split])


def _tell_unread(folder: Path, name: str, splits: dict[str, list[Path]]) -> None:
    """Log the data files of a folder without a README that belong to no split, or have another type than the rest."""
    place = folder.resolve()
    read = {file.resolve() for files in splits.values() for file in files}
    there = (file for file in sorted(place.rglob("*")) if file.is_file() and set(file.suffixes) & set(READERS))
    unread = [str(f.relative_to(place)) for f in there if f.resolve() not in read and f.name not in SAVED]
    if unread and not (folder / "README.md").is_file():
        more = f" and {len(unread) - 5} more" if len(unread) > 5 else ""
        log.warning("%s: not read, by its name or kind: %s%s", name, ", ".join(unread[:5]), more)


def _is_one_saved(folder: Path) -> bool:
    """Whether the folder is a Dataset of the datasets library, saved by `save_to_disk`: it has no splits."""
    return all((folder / name).is_file() for name in SAVED[:2])


def _shards(folder: Path) -> list[Path]:
    """The Arrow files of a saved Dataset in order."""
    try:
        names = [str(one["filename"]) for one in json.loads((folder / "state.json").read_bytes())["_data_files"]]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{folder / 'state.json'} of save_to_disk cannot be read ({error!r}): save it again") from error
    if outside := next((name for name in names if Path(name).name != name), None):
        raise DataError(f"{folder / 'state.json'} names a file outside its folder: {outside}")
    return [folder / name for name in names]


def _splits(folder: Path, name: str, subset: str | None) -> dict[str, list[Path]]:
    """The data files of each split: as `save_to_disk` of the datasets library wrote them, by the folder's own README,
    or by the file names, as this library finds them."""
    if _is_one_saved(folder):
        return {"train": _shards(folder)}
    if (folder / "dataset_dict.json").is_file():
        saved = sorted(place.name for place in folder.iterdir() if _is_one_saved(place))
        return {split: _shards(folder / split) for split in saved}
    from datasets import (
        get_dataset_config_names,
        load_dataset_builder,
    )  # takes half a second to import, and a single file needs none of it
    from datasets.exceptions import DataFilesNotFoundError, DatasetNotFoundError

    place = str(folder.absolute())  # a folder named `json` would otherwise select the loader of that name
    try:
        builder = load_dataset_builder(place, name=subset)
    except (DataFilesNotFoundError, DatasetNotFoundError, FileNotFoundError) as error:
        raise DataError(f"{name} holds no data files ({', '.join(READERS)}, also .gz)") from error
    except ValueError as error:  # a subset must be named, or does not exist
        try:
            subsets = get_dataset_config_names(place)
        except ValueError:  # no subset at all can be read
            raise DataError(f"the splits of {name} do not follow from its files: {error}. Name one file") from error
        raise DataError(
            f"{name} must name one of its subsets, as owner/name/{subsets[0]}: {', '.join(subsets)}"
        ) from error
    return {str(key): [Path(file) for file in found] for key, found in (builder.config.data_files or {}).items()}


def _hub_files(source: str, split: str) -> tuple[Path, ...]:
    """The files of a split of a hub data set."""
    folder, subset = _snapshot(source)
    return _of_split(_splits(folder, source, subset), split, source)


def _snapshot(source: str, patterns: list[str] | None = None) -> tuple[Path, str | None]:
    """A hub data set's folder in the hub's local cache, downloaded if it is missing, and the named subset.

    `datasets` cannot load a data set offline from the hub's own cache, and reports no line numbers; so the repository's
    snapshot is downloaded and read like a folder.
    """
    owner, name, *rest = source.split("/")
    repo, subset = f"{owner}/{name}", rest[0] if rest else None
    stay_offline_without_network()
    try:
        folder = Path(snapshot_download(repo, repo_type="dataset", allow_patterns=patterns or _patterns(repo, subset)))
    except GatedRepoError as error:
        raise DataError(
            f"{repo} is gated: accept its terms at https://huggingface.co/datasets/{repo} and set HF_TOKEN"
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        near = _near(Path(source))
        raise DataError(f"{repo} is not a data set on the hub, or a private one (set HF_TOKEN){near}") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, ConnectionError) as error:
        raise DataError(
            f"{source} is not a file or folder here{_near(Path(source))}, and as a hub data set it is not in the "
            "local cache and the hub cannot be reached: connect to the network, or download it first with "
            f"`hf download --repo-type dataset {repo}`"
        ) from error
    except HfHubHTTPError as error:
        raise DataError(f"{repo} cannot be downloaded from the hub: {error}") from error
    return folder, subset


def _patterns(repo: str, subset: str | None) -> list[str]:
    """The files to download: those that the README lists for the subset, else every data file."""
    every = [f"*{suffix}{end}" for suffix in READERS for end in ("", ".gz")]
    try:
        card = DatasetCard.load(hf_hub_download(repo, "README.md", repo_type="dataset"), ignore_metadata_errors=True)
    except LocalEntryNotFoundError:
        return ["README.md", *every]
    except EntryNotFoundError:
        return every
    configs: list[dict[str, Any]] = card.data.to_dict().get("configs") or []
    for config in configs:
        if config.get("config_name", "default") == (subset or "default") and config.get("data_files"):
            return ["README.md", *_paths(config["data_files"])]
    return ["README.md", *every]


def _paths(data_files: str | list[Any] | dict[str, Any]) -> list[str]:
    if isinstance(data_files, str):
        return [data_files]
    if isinstance(data_files, dict):
        return (
            _paths(data_files["path"]) if "path" in data_files else [p for v in data_files.values() for p in _paths(v)]
        )
    return [path for entry in data_files for path in _paths(entry)]


def keep(
    source: str, folder: Path, splits: Sequence[str] | None = None, max_rows: int | None = None
) -> list[SavedSplit]:
    """Write the splits (by default all) of a `source` setting to a new folder."""
    known = layout_of(source)

    def rows() -> Iterator[tuple[str, Iterator[Record], str | None]]:
        for split in splits or splits_of(source):
            found = open_source(source, split, max_rows, 0, lambda working, answer: working)
            parts = (
                found.paths[0].parts if isinstance(found, Files) else ()
            )  # in the hub's cache …/snapshots/{commit}/…
            revision = parts[parts.index("snapshots") + 1] if "snapshots" in parts[:-1] else None
            yield split, itertools.islice(found.read(), max_rows), revision

    return save(folder, rows(), {"source": source, "known": name_of(known), "repo": known.repo if known else None})
