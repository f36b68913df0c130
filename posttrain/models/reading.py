"""The files of a model's folder or hub id: where they are, their JSON, and one sentence with the remedy for errors."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers.utils.hub import cached_file

from posttrain.base.errors import ModelError, WeightsError
from posttrain.base.hub import stay_offline_without_network
from posttrain.base.words import first_line
from posttrain.config.schema.model import ModelConfig

# What transformers, tokenizers and PEFT raise for invalid files; running out of memory is not among them.
READING = (OSError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, AssertionError, ImportError)
READING += (RecursionError, StrictDataclassError)
# Every folder with a tokenizer has one of these files.
DESCRIPTIONS = ("config.json", "adapter_config.json", "tokenizer_config.json")
MOST_BYTES = 100_000_000  # of a JSON file that describes a model; an index of 100,000 tensors has 10 MB
NEEDS_PICKLE = "has no safetensors weights; pickled ones can run code: if you trust them, set model.allow_pickle: true"


def found_file(path: str, name: str, revision: str | None) -> Path | None:
    """A file of a folder or of the hub; None if it is missing or cannot be fetched."""
    quiet = {f"_raise_exceptions_for_{what}": False for what in ("gated_repo", "missing_entries", "connection_errors")}
    file = cached_file(path, name, revision=revision or "main", **quiet)
    return None if file is None else Path(file)


def read_json(file: Path, path: str) -> Any:
    """A file that describes the model `path`. Raises ModelError if it is too large, too deeply nested, or not JSON."""
    try:
        if file.stat().st_size > MOST_BYTES:
            raise ModelError(f"model {path}: {file.name} has more than {MOST_BYTES:,} bytes")
        return json.loads(file.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ModelError(f"model {path}: {file.name} is nested too deeply") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"model {path}: {file.name} cannot be read: {error}") from error


def some(names: set[str]) -> str:
    """The first names, and how many more there are."""
    listed = sorted(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")


@contextmanager
def clear_errors(model: ModelConfig, part: str) -> Iterator[None]:
    """Turn errors of transformers and the hub into one sentence with the remedy."""
    path = model.path
    folder = Path(path).expanduser()
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if looks_local and not folder.is_dir():
        raise ModelError(f"model {path}: no such folder")
    described = ("config.json",) if part in ("config.json", "weights") else (*DESCRIPTIONS,)
    if folder.is_dir() and not any((folder / name).is_file() for name in described):
        found = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
        raise ModelError(f"model {path}: the folder has no config.json (it has {found})")
    if not folder.is_dir():
        stay_offline_without_network()
    try:
        yield
    except (SafetensorError, *READING) as error:
        kind = WeightsError if isinstance(error, SafetensorError) else ModelError
        raise kind(f"model {path}: {_explain(model, part, error)}") from error
    except RuntimeError as error:
        text = str(error)
        if "ignore_mismatched_sizes" in text:
            what = "weights and config.json have different shapes (see the report above)"
        elif part == "adapter" and "size mismatch" in text:
            what = f"the adapter's tensors have other shapes than its base model: {text.splitlines()[1].strip()}"
        else:  # other errors, such as memory, are not the model's fault
            raise
        raise WeightsError(f"model {path}: {what}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of libraries in Rust, which is no Exception
            raise
        raise ModelError(f"model {path}: the {part} cannot be read: {str(error).splitlines()[0]:.200}") from error


def _explain(model: ModelConfig, part: str, error: Exception) -> str:
    chain, cause = [], error
    while cause is not None and len(chain) < 8:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    kinds = {type(e).__name__ for e in chain}
    text = " ".join(str(e) for e in chain)
    if "GatedRepoError" in kinds or "access a gated repo" in text:
        return "is gated: ask for access on its hub page, then set HF_TOKEN to your token"
    if "trust_remote_code" in text:
        return "comes with its own Python code; if you trust it, set model.trust_remote_code: true"
    if "safetensors" in text and not model.allow_pickle and part == "weights":
        return NEEDS_PICKLE
    if "RepositoryNotFoundError" in kinds:
        return "not found on the hub (or private: set HF_TOKEN); for a folder, check the path"
    if kinds & {"LocalEntryNotFoundError", "OfflineModeIsEnabled"}:
        return (
            "is not a folder and is not in the local cache of the hub, and the hub cannot be reached: give a folder, "
            "or connect once"
        )
    if "backend tokenizer" in text:
        return "has no tokenizer: it needs tokenizer.json, or the files to build it, next to the weights"
    if isinstance(error, StrictDataclassError):
        return f"config.json is invalid: {' '.join(str(error).split())}"
    if isinstance(error, RecursionError):
        return f"{part} is nested too deeply"
    if isinstance(error, SafetensorError):
        return f"the weights are damaged or incomplete ({error}): download them again"
    if part == "tokenizer" and "config.json" not in text:
        return f"has no tokenizer that transformers can load ({first_line(error)})"
    return f"{part} cannot be loaded: {first_line(error)}"
