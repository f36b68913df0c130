"""Sources of rows: local files and folders, data sets on the Hugging Face hub or in its cache, and built-in tasks.

`keep` saves a source for offline use: one file of rows per split, and a manifest with their hashes, which are verified
when the files are read. The folder is created by a single rename, so it is either complete or absent.
"""

import difflib
import gzip
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import DatasetCard, hf_hub_download, snapshot_download
from huggingface_hub import errors as hub

from posttrain.base.console import progress
from posttrain.base.errors import DataError
from posttrain.base.files import near, path_of, put_folder, settle, sha256_of
from posttrain.base.functions import GIVEN
from posttrain.base.hub import stay_offline_without_network
from posttrain.base.log import log
from posttrain.config.schema.datasets import KnownSet, known_set, known_sets
from posttrain.config.schema.types import is_own
from posttrain.data.given import Given, given_rows, own_rows
from posttrain.data.readers import READERS, Record, read_files
from posttrain.data.tasks import TASKS, Compose

T = TypeVar("T")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(/[\w.-]+)?")
MANIFEST, MANIFEST_FORMAT = "posttrain-data.json", 1
SAVED = ("state.json", "dataset_info.json", "dataset_dict.json")  # written next to the rows by datasets' `save_to_disk`


@dataclass(frozen=True)
class Files:
    """Local files, read in order."""

    paths: tuple[Path, ...]

    @property
    def digest(self) -> str:
        """SHA-256 over the files' names and contents."""
        whole = hashlib.sha256()
        for path in self.paths:
            try:
                whole.update(f"{path.name} {sha256_of(path)}\n".encode())
            except OSError as error:
                raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
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
            problem = next(iter(value.values()))  # the replies follow from the problem and the template
            yield Record(row, self.name, row + 1, value, identity=problem)


Source = Files | Task | Given  # each has a digest that changes with its content


def open_source(source: str, split: str, max_rows: int | None, seed: int, compose: Compose) -> Source:
    """Open the source that `source` names: `builtin:…`, a path, a `module:function`, a known data set, or a hub id.

    `split` selects files of a folder or hub data set; a single file has no splits and is read whole. `compose` writes
    the replies of a built-in task in the template's format. Raises DataError if there is no such source.
    """
    if source.startswith("builtin:"):
        if source not in TASKS:
            raise DataError(f"there is no built-in task {source!r}; the built-in tasks are {', '.join(TASKS)}")
        if split not in ("train", "test"):
            raise DataError(f"{source} has the splits train and test, not {split!r}")
        return Task(source, split, max_rows or (10_000 if split == "train" else 1_000), seed, compose)
    if source.startswith(GIVEN):
        return given_rows(source)
    path = path_of(source, DataError)
    if is_own(source) and not path.exists():
        return own_rows(source, split)
    if path.is_file():
        return Files((path,))
    if path.is_dir():
        saved = saved_files(path, split)
        if saved:
            return Files(saved)
        splits = _splits(path, source, None)
        root = path.resolve()
        read = {file.resolve() for files in splits.values() for file in files}
        present = (file for file in sorted(root.rglob("*")) if file.is_file() and set(file.suffixes) & set(READERS))
        unread = [str(f.relative_to(root)) for f in present if f.resolve() not in read and f.name not in SAVED]
        if unread and not (path / "README.md").is_file():  # which lists the files of the data
            more = f" and {len(unread) - 5} more" if len(unread) > 5 else ""
            log.warning("%s: files not read because of their names or types: %s%s", source, ", ".join(unread[:5]), more)
        return Files(tuple(_of_split(splits, "train" if _is_one_saved(path) else split, source)))
    if any(suffix in READERS for suffix in path.suffixes) and known_set(source) is None:
        raise DataError(_not_there(source))
    return Files(_hub_files(source, split))


def layout_of(source: str) -> KnownSet | None:
    """The known data set that a source, or a folder saved by `data save`, comes from, for its column mapping."""
    path = path_of(source, DataError)
    if path.is_dir():
        manifest = read_manifest(path)
        return known_sets().get(str(manifest["known"])) if manifest else None
    return None if path.is_file() else known_set(source)


def splits_of(source: str) -> list[str]:
    """The splits of a folder or hub data set, by the names that `split` accepts; files and functions have `train`."""
    path = path_of(source, DataError)
    if path.is_file() or is_own(source):
        return ["train"]
    if path.is_dir():
        manifest = read_manifest(path)
        return list(manifest["splits"] if manifest else _splits(path, source, None))
    known, hub_id = _on_hub(source)
    if known.files:
        return list(known.files)
    folder, subset = _snapshot(hub_id)
    ours = {theirs: name for name, theirs in known.splits.items()}
    return [ours.get(split, split) for split in _splits(folder, source, subset)]


def _on_hub(source: str) -> tuple[KnownSet, str]:
    """A known data set, or one of which only the hub id is known, and this id with the subset. Raises DataError for a
    source that is neither."""
    known = known_set(source)
    if known is None and not HUB_ID.fullmatch(source):
        raise DataError(_not_there(source))
    known = known or KnownSet("", source, "", format="auto")
    return known, source if source.count("/") == 2 else known.source


def _hub_files(source: str, split: str) -> tuple[Path, ...]:
    """The files of one split of a data set on the hub."""
    known, hub_id = _on_hub(source)
    if not known.files:
        folder, subset = _snapshot(hub_id)
        return tuple(_of_split(_splits(folder, hub_id, subset), known.splits.get(split, split), hub_id))
    pattern = _of_split(known.files, split, source)
    folder, _ = _snapshot(known.repo, [pattern])
    files = tuple(sorted(folder.glob(pattern)))
    if not files:
        raise DataError(f"{source}: the local cache has no {pattern} of {known.repo}: connect to the network and retry")
    return files


def _not_there(source: str) -> str:
    if known := difflib.get_close_matches(source, known_sets(), n=1, cutoff=0.6):
        return f"{source} is neither a file or folder here nor a known data set: did you mean {known[0]}?"
    return f"{source} does not exist{near(path_of(source, DataError))}"


def _of_split(splits: Mapping[str, T], split: str, name: str | Path) -> T:
    """What the data set `name` has of one split. Raises DataError if it has no such split."""
    if split not in splits:
        raise DataError(f"{name} has no split {split!r}: it has {', '.join(splits) or 'none'}")
    return splits[split]


def _is_one_saved(folder: Path) -> bool:
    """Whether the folder is a single Dataset saved by datasets' `save_to_disk`, which has no splits."""
    return all((folder / name).is_file() for name in SAVED[:2])


def _shards(folder: Path) -> list[Path]:
    """The Arrow files of a saved Dataset, in order."""
    try:
        names = [str(file["filename"]) for file in json.loads((folder / "state.json").read_bytes())["_data_files"]]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{folder / 'state.json'} cannot be read ({error!r}): save the data set again") from error
    if outside := next((name for name in names if Path(name).name != name), None):
        raise DataError(f"{folder / 'state.json'} names a file outside its folder: {outside}")
    return [folder / name for name in names]


def _splits(folder: Path, name: str, subset: str | None) -> dict[str, list[Path]]:
    """The data files of each split: as written by datasets' `save_to_disk`, as listed in the folder's README, or as
    the datasets library infers them from the file names."""
    if _is_one_saved(folder):
        return {"train": _shards(folder)}
    if (folder / "dataset_dict.json").is_file():
        saved = sorted(split.name for split in folder.iterdir() if _is_one_saved(split))
        return {split: _shards(folder / split) for split in saved}
    # this import takes half a second, and a single file does not need it
    from datasets import get_dataset_config_names, load_dataset_builder
    from datasets.exceptions import DataFilesNotFoundError, DatasetNotFoundError

    path = str(folder.absolute())  # a folder named `json` would otherwise select the loader of that name
    try:
        builder = load_dataset_builder(path, name=subset)
    except (DataFilesNotFoundError, DatasetNotFoundError, FileNotFoundError) as error:
        raise DataError(f"{name} contains no data files ({', '.join(READERS)}, each also with .gz)") from error
    except ValueError as error:  # no subset was named, or the one named does not exist
        try:
            subsets = get_dataset_config_names(path)
        except ValueError:  # no subset at all can be read
            raise DataError(f"cannot infer the splits of {name} from its files: {error}. Name one file") from error
        raise DataError(
            f"{name} needs the name of a subset, as in owner/name/{subsets[0]}; it has {', '.join(subsets)}"
        ) from error
    return {str(split): [Path(file) for file in files] for split, files in (builder.config.data_files or {}).items()}


def _snapshot(source: str, patterns: list[str] | None = None) -> tuple[Path, str | None]:
    """The folder of a hub data set in the local hub cache, downloaded if missing, and the subset that `source` names.

    `datasets` cannot load a data set offline from the hub's own cache, and reports no line numbers; so the repository's
    snapshot is downloaded and read like a folder.
    """
    owner, name, *rest = source.split("/")
    repo, subset = f"{owner}/{name}", rest[0] if rest else None
    stay_offline_without_network()
    try:
        folder = Path(snapshot_download(repo, repo_type="dataset", allow_patterns=patterns or _patterns(repo, subset)))
    except hub.GatedRepoError as error:
        raise DataError(
            f"{repo} is gated: accept its terms at https://huggingface.co/datasets/{repo} and set HF_TOKEN"
        ) from error
    except (hub.RepositoryNotFoundError, hub.RevisionNotFoundError, hub.HFValidationError) as error:
        raise DataError(
            f"{repo} is not a data set on the hub, or it is private (set HF_TOKEN){near(Path(source))}"
        ) from error
    except (hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled, ConnectionError) as error:
        raise DataError(
            f"{source} is not a file or folder here{near(Path(source))}, and as a hub data set it is not in the "
            "local cache and the hub cannot be reached: connect to the network, or download it first with "
            f"`hf download --repo-type dataset {repo}`"
        ) from error
    except hub.HfHubHTTPError as error:
        raise DataError(f"{repo} cannot be downloaded from the hub: {error}") from error
    return folder, subset


def _patterns(repo: str, subset: str | None) -> list[str]:
    """The files to download: those that the README lists for the subset, or otherwise every data file."""
    every = ["README.md", *(f"*{suffix}{end}" for suffix in READERS for end in ("", ".gz"))]
    try:
        card = DatasetCard.load(hf_hub_download(repo, "README.md", repo_type="dataset"), ignore_metadata_errors=True)
    except hub.EntryNotFoundError:
        return every
    configs: list[dict[str, Any]] = card.data.to_dict().get("configs") or []
    for config in configs:
        if config.get("config_name", "default") == (subset or "default") and config.get("data_files"):
            return ["README.md", *_paths(config["data_files"])]
    return every


def _paths(data_files: str | list[Any] | dict[str, Any]) -> list[str]:
    if isinstance(data_files, str):
        return [data_files]
    if isinstance(data_files, dict):
        data_files = [data_files["path"]] if "path" in data_files else list(data_files.values())
    return [path for entry in data_files for path in _paths(entry)]


@dataclass(frozen=True, slots=True)
class SavedSplit:
    """What was saved of one split: the numbers of rows, bytes, and dropped rows (malformed, too long)."""

    name: str
    rows: int
    malformed: int
    longer: int
    bytes: int


def keep(
    source: str,
    folder: Path,
    splits: Sequence[str] | None = None,
    max_rows: int | None = None,
    fits: Callable[[object], bool] | None = None,
) -> list[SavedSplit]:
    """Write splits of a `source` setting, all of them by default, and a manifest to a new folder; of a split, the rows
    that `fits` accepts. Raises DataError if the folder exists or cannot be written, or if a split has no such row."""
    taken = DataError(f"{folder} already exists: choose another folder, or remove it first")
    if folder.exists():
        raise taken
    known, done = layout_of(source), list[SavedSplit]()

    def write(work: Path) -> None:
        entries = {}
        for name in splits or splits_of(source):
            opened = open_source(source, name, max_rows, 0, lambda working, answer: working)
            parts = opened.paths[0].parts if isinstance(opened, Files) else ()
            # paths in the hub cache: …/snapshots/{commit}/…
            revision = parts[parts.index("snapshots") + 1] if "snapshots" in parts[:-1] else None
            file = work / f"{name}.jsonl.gz"
            rows, malformed, longer = _write(file, progress(opened.read(), f"saving {name}"), max_rows, fits)
            if not rows:
                raise DataError(f"the split {name} has no readable row{' below the length' if longer else ''}")
            done.append(SavedSplit(name, rows, malformed, longer, file.stat().st_size))
            entries[name] = {"file": file.name, "rows": rows, "revision": revision, "sha256": sha256_of(file)}
        facts = {"source": source, "known": known and known.name, "repo": known and known.repo}
        manifest = {"format": MANIFEST_FORMAT, **facts, "splits": entries}
        (work / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        if folder.exists():  # created meanwhile: `put_folder` would replace it
            raise taken

    try:
        if folder.absolute().parent.is_dir():
            settle(folder.absolute().parent, folder.name)  # the leftovers of a killed command
        put_folder(folder.absolute(), write)
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error.strerror or error}") from error
    return done


def _write(
    file: Path, records: Iterable[Record], max_rows: int | None, fits: Callable[[object], bool] | None
) -> tuple[int, int, int]:
    """Write up to `max_rows` rows; returns how many are written, malformed, and too long."""
    rows = malformed = longer = 0
    # without a name and a time, the same rows give the same bytes
    with file.open("wb") as raw, gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as stream:
        for record in records:
            if record.value is None:
                malformed += 1
            elif fits is None or fits(record.value):
                stream.write(json.dumps(record.value, default=str).encode() + b"\n")
                rows += 1
            else:
                longer += 1
            if rows + malformed == max_rows:
                break
    return rows, malformed, longer


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder written by `keep`; None for any other folder. Raises DataError if it is damaged."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}): save the data set again") from error
    if not isinstance(manifest, dict) or manifest.get("format") != MANIFEST_FORMAT:
        raise DataError(f"{path} is damaged or was written by another version of posttrain: save the data set again")
    return manifest


def saved_files(folder: Path, split: str) -> tuple[Path, ...] | None:
    """The verified file of a split in a folder written by `keep`; None for any other folder."""
    manifest = read_manifest(folder)
    if manifest is None:
        return None
    entry = _of_split(manifest["splits"], split, folder)
    path = folder / entry["file"]
    if not path.is_file():
        raise DataError(f"{path} is missing: save the data set again")
    if sha256_of(path) != entry["sha256"]:
        raise DataError(f"{path} is damaged or was changed since it was saved: save the data set again")
    return (path,)
