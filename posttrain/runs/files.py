"""Files that are safe to load: JSON with exact numbers, safetensors, and the state of the random number generators.

Each rank of a sharded run saves its tensors in one file:

    optimizer.safetensors                                      one process, or ranks that each hold the whole model
    optimizer-00001-of-00002.safetensors, …-00002-of-…         the rows of each rank

A tensor is the concatenation of its parts by rows, in the order of the files that contain it; a 0-dimensional tensor is
the same in every file that contains it.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from posttrain.base.errors import DamagedError, RunError
from posttrain.base.words import by_key
from posttrain.runs.atomic import open_itself, write_file, writing

if TYPE_CHECKING:  # reading a run folder must not import torch
    import torch

RowsOf = Callable[[str, int], slice]  # (name of a tensor, number of its rows) -> the rows to read


def save_json(path: Path, data: Any) -> None:
    """Write `data` as JSON, atomically. Floats read back bit for bit.
    Raises RunError for NaN and infinities (JSON has none) and for keys that are not strings."""
    _check_exact(data, path.name)
    text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    write_file(path, text.encode(errors="backslashreplace"))  # a lone surrogate becomes JSON's own escape


def save_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows of any data set as JSONL, atomically; creates the folder.

    Values without a JSON type, such as the dates and bytes of Parquet, become strings, and a lone surrogate becomes a
    JSON escape. Raises RunError if the file cannot be written.
    """
    make_folder(path.parent, path)
    lines = [json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows]
    write_file(path, "".join(lines).encode(errors="backslashreplace"))


def ready_to_write(path: Path, inputs: Iterable[Path] = (), overwrite: bool = False) -> None:
    """Check, before long work, that its output can be written without overwriting anything.

    Raises RunError if `path` is a folder, a device or a pipe, one of the `inputs` (files, or folders of files; even
    through a link), or an existing file without `overwrite`, or if its folder cannot be written to.
    """
    if path.is_dir():
        raise RunError(f"cannot write {path}: it is a folder; give the name of a file")
    if path.exists():
        read = (file for source in inputs for file in (source.iterdir() if source.is_dir() else [source]))
        if any(file.exists() and path.samefile(file) for file in read):
            raise RunError(f"cannot write {path}: it is an input file; give another one with --output")
        if not path.is_file():
            raise RunError(f"cannot write {path}: it is not a regular file; give the name of one")
    if os.path.lexists(path) and not overwrite:
        raise RunError(f"{path} exists: replace it with --overwrite, or give another file with --output")
    make_folder(path.parent, path)
    with writing(path):
        tempfile.TemporaryFile(dir=path.parent).close()


def make_folder(folder: Path, file: Path | None = None) -> None:
    """Make a folder. Raises RunError, which names the `file` that is to be written there, if the system refuses."""
    with writing(file or folder):
        folder.mkdir(parents=True, exist_ok=True)


def open_regular(path: Path, links: bool = False) -> BufferedReader:
    """Open a file of a run folder for reading. Raises OSError if it is unreadable or not regular (`open_itself`)."""
    return os.fdopen(open_itself(path, os.O_RDONLY, links), "rb")


def read_regular(path: Path) -> bytes:
    """The content of a file of a run folder. Raises OSError if it is unreadable or not regular (`open_itself`)."""
    with open_regular(path) as file:
        return file.read()


def is_regular(path: Path) -> bool:
    """Whether this is a file, not a link to one."""
    return path.is_file() and not path.is_symlink()


def check_database(path: Path) -> None:
    """Raise RunError if a database, or a file that SQLite opens with it, exists and is not a regular file."""
    for file in (path.with_name(path.name + ending) for ending in ("", "-wal", "-shm", "-journal")):
        if os.path.lexists(file) and not is_regular(file):
            raise RunError(f"{file} cannot be read: it is a link, a pipe or a device, not a file")


def storable(value: Any) -> Any:
    """A value as SQLite takes it: a mapping as JSON; lone surrogates, which UTF-8 cannot encode, as escapes."""
    value = json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, Mapping) else value
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value


def load_json(path: Path, links: bool = False) -> Any:
    """Read a JSON file. Raises RunError if it is missing or damaged, or is a link and `links` is not set."""
    try:
        with open_regular(path, links) as file:
            return parse_json(file.read())
    except FileNotFoundError:
        raise RunError(f"{path} is missing") from None
    except ValueError as error:  # bad JSON or bad UTF-8
        raise RunError(f"{path} is damaged: {error}") from None
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}") from None


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError if it is invalid or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def as_mapping(value: Any) -> Mapping[str, Any]:
    """The value if it is a mapping, otherwise an empty one: entries of a damaged file may have any type."""
    return value if isinstance(value, Mapping) else {}


def flat(data: Mapping[str, Any], lists: bool = False) -> dict[str, Any]:
    """Flatten nested mappings: {"a": {"b": 1}} becomes {"a.b": 1}. With `lists`, lists are flattened too, by index."""
    leaves: dict[str, Any] = {}
    for key, value in data.items():
        inner = dict(enumerate(value)) if lists and isinstance(value, list | tuple) else value
        nested = isinstance(inner, Mapping)
        leaves |= {f"{key}.{rest}": leaf for rest, leaf in flat(inner, lists).items()} if nested else {str(key): value}
    return leaves


def _check_exact(data: Any, where: str) -> None:
    """Raise RunError for values that JSON cannot store exactly; the message names their position, from `where` on."""
    if isinstance(data, float) and not math.isfinite(data):
        raise RunError(f"{where} is {data}: only finite numbers can be saved")
    if isinstance(data, Mapping):
        for key, value in data.items():
            if not isinstance(key, str):
                raise RunError(f"{where} has the key {key!r}: keys in a saved file must be strings")
            _check_exact(value, f"{where}: {key}" if ":" not in where else f"{where}.{key}")
    elif isinstance(data, list | tuple):
        for index, value in enumerate(data):
            _check_exact(value, f"{where}[{index}]")


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write named tensors of any dtype and device as safetensors. Views, transposed tensors and shared tensors (tied
    weights) are written as independent copies."""
    from safetensors.torch import save_file

    storages: set[int] = set()
    ready: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().contiguous()
        if tensor.numel() and tensor.untyped_storage().data_ptr() in storages:
            tensor = tensor.clone()
        storages.add(tensor.untyped_storage().data_ptr())
        ready[name] = tensor
    with writing(path):
        save_file(ready, path)


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read a safetensors file to the CPU. Raises DamagedError if it is missing or damaged."""
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except FileNotFoundError:
        raise DamagedError(f"{path} is missing") from None
    except (OSError, SafetensorError) as error:
        raise DamagedError(f"{path} is damaged: {error}") from None


def rng_state(device: torch.device) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The state of the global generators of Python, NumPy and PyTorch, on the CPU and the run's GPU: tensors, for
    `save_tensors`, and the rest, for `save_json`. All names start with `rng.`."""
    import numpy
    import torch

    version, words, python_gauss = random.getstate()
    _, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
    tensors = {
        "rng.python": torch.tensor(words, dtype=torch.int64),
        "rng.numpy": torch.from_numpy(numpy.asarray(keys).astype(numpy.int64)),
        "rng.torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        tensors["rng.cuda"] = torch.cuda.get_rng_state(device)
    facts = {
        "rng.python": {"version": version, "gauss": python_gauss},
        "rng.numpy": {"position": int(position), "has_gauss": int(has_gauss), "gauss": float(gauss)},
    }
    return tensors, facts


def restore_rng(tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any], device: torch.device) -> None:
    """Restore every generator to a saved `rng_state`; other names in the two mappings are ignored. A saved GPU state is
    restored on the GPU that the run uses now. Raises DamagedError if a state is missing or invalid."""
    import numpy
    import torch

    missing = {"rng.python", "rng.numpy", "rng.torch"} - tensors.keys() | {"rng.python", "rng.numpy"} - facts.keys()
    if missing:
        raise DamagedError(f"the random state lacks {', '.join(sorted(missing))}")
    python, legacy = facts["rng.python"], facts["rng.numpy"]
    try:
        random.setstate((python["version"], tuple(tensors["rng.python"].tolist()), python["gauss"]))
        keys = tensors["rng.numpy"].numpy().astype(numpy.uint32)
        numpy.random.set_state(("MT19937", keys, legacy["position"], legacy["has_gauss"], legacy["gauss"]))
        torch.set_rng_state(tensors["rng.torch"].cpu())
        # Checkpoints of earlier versions have the state of every GPU, by number.
        saved = tensors.get("rng.cuda", tensors.get(f"rng.cuda.{device.index}"))
        if device.type == "cuda" and saved is not None:
            torch.cuda.set_rng_state(saved.cpu(), device)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:  # each generator raises its own type
        raise DamagedError(f"the random state is invalid: {error}") from error


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor as flat integers of the same width; the integers are equal if the bits are equal."""
    import torch

    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().flatten().view(words[tensor.element_size()])


def part_file(folder: Path, name: str, rank: int = 0, ranks: int = 1) -> Path:
    return folder / (f"{name}-{rank + 1:05d}-of-{ranks:05d}.safetensors" if ranks > 1 else f"{name}.safetensors")


def load_parts(folder: Path, name: str, rows_of: RowsOf) -> dict[str, torch.Tensor]:
    """The rows of every tensor that `rows_of` chooses. Raises DamagedError if a file is missing or damaged."""
    files = _part_files(folder, name)
    try:
        with ExitStack() as opened:
            parts = [opened.enter_context(safe_open(file, "pt")) for file in files]
            parts_of = by_key((tensor, part) for part in parts for tensor in part.keys())  # noqa: SIM118 (no mapping)
            return {tensor: _rows(tensor, some, rows_of) for tensor, some in parts_of.items()}
    except (OSError, SafetensorError) as error:
        raise DamagedError(f"{folder / files[0].name} or another part of it is damaged: {error}") from None


def _part_files(folder: Path, name: str) -> list[Path]:
    parts = sorted(folder.glob(f"{name}-*-of-*.safetensors"))
    if not parts:
        if not (only := part_file(folder, name)).is_file():
            raise DamagedError(f"{only} is missing")
        return [only]
    match = re.fullmatch(r".*-of-(\d+)\.safetensors", parts[0].name)
    count = int(match[1]) if match else 0
    expected = [part_file(folder, name, rank, count) for rank in range(count)]
    for file in expected:
        if file not in parts:
            raise DamagedError(f"{file} is missing: {count} ranks each saved a part")
    if len(parts) != count:
        raise DamagedError(f"{folder} has {len(parts)} parts of {name}, but {count} ranks saved them: {parts[-1].name}")
    return expected


def _rows(name: str, parts: Sequence[Any], rows_of: RowsOf) -> torch.Tensor:
    """The chosen rows of one tensor, read from the parts that contain them."""
    slices = [part.get_slice(name) for part in parts]
    if not slices[0].get_shape():
        return parts[0].get_tensor(name)
    import torch

    lengths = [part.get_shape()[0] for part in slices]
    rows, start, read = rows_of(name, sum(lengths)), 0, []
    for part, length in zip(slices, lengths, strict=True):
        first, last = max(rows.start - start, 0), min(rows.stop - start, length)
        if first < last:
            read.append(part[first:last])
        start += length
    return torch.cat(read) if len(read) != 1 else read[0]
