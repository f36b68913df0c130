"""Checks of a model's folder before transformers or PEFT use it.

A config of ten million layers costs hours and all memory before any weight is read; an index can name files elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from transformers.utils.hub import cached_file

from posttrain.errors import ModelError

# Names of sizes in config.json of all families -> the accepted maximum; no model comes near.
SIZES: dict[str, int] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2_000),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4_096),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_experts", "num_local_experts"), 4_096),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "head_dim", "word_embed_proj_dim"), 2**18),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "n_inner", "ffn_dim"), 2**22),
    "vocab_size": 2**24,
}
RANK = 2**14  # accepted maximum of an adapter
MOST_BYTES = 100_000_000  # of a JSON file that describes a model; an index of 100,000 tensors has 10 MB


def check_config(path: str, revision: str | None) -> None:
    """Raise ModelError for a config.json, of a folder or the hub, that is too deep or has sizes that no model has.

    The loader reports a file that is missing or cannot be fetched.
    """
    file = _found(path, "config.json", revision)
    if file is not None:
        config = read_json(file, path)
        if not isinstance(config, dict):
            raise ModelError(f"model {path}: config.json is not a model's settings, but a {type(config).__name__}")
        check_sizes(config, path)


def _found(path: str, name: str, revision: str | None) -> Path | None:
    """A file of a folder or of the hub; None if it is missing or cannot be fetched."""
    file = cached_file(
        path,
        name,
        revision=revision or "main",
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if file is None else Path(file)


def check_sizes(config: Mapping[str, Any], path: str) -> None:
    """Raise ModelError for a size in a model's config.json, or in a part of it, that no model has."""
    for name, value in config.items():
        if isinstance(value, dict):
            check_sizes(value, path)
        if name not in SIZES or value is None:
            continue
        for size in value if isinstance(value, list) else [value]:
            if type(size) is not int or not 1 <= size <= SIZES[name]:
                raise ModelError(
                    f"model {path}: config.json says {name}: {str(size)[:40]}; it must be a whole number from 1 to "
                    f"{SIZES[name]:,}"
                )


def check_indexes(folder: Path, path: str) -> None:
    """Raise ModelError for an index of weights in the folder that names files outside it, or no files."""
    for file in sorted(folder.glob("*.index.json")):
        index = read_json(file, path)
        names = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise ModelError(f"model {path}: {file.name} has no weight_map of tensors to files: download it again")
        for name in names.values():
            if "\\" in name or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise ModelError(f"model {path}: {file.name} names {name[:80]!r}, which is outside the model's folder")


def adapter_config(folder: Path, path: str) -> dict[str, Any] | None:
    """The adapter_config.json of a folder with a PEFT adapter, or None. Raises ModelError if it is invalid."""
    file = folder / "adapter_config.json"
    if not file.is_file():
        return None
    config = read_json(file, path)
    if not isinstance(config, dict) or not isinstance(config.get("base_model_name_or_path"), str):
        raise ModelError(f"model {path}: {file.name} names no base model (base_model_name_or_path)")
    ranks = [config.get("r"), *(config.get("rank_pattern") or {}).values()]
    for rank in ranks:
        if rank is not None and (type(rank) is not int or not 1 <= rank <= RANK):
            raise ModelError(
                f"model {path}: {file.name} gives the rank {str(rank)[:40]}; it must be a whole number from 1 to "
                f"{RANK:,}"
            )
    return config


def check_adapter_weights(folder: Path, path: str, allow_pickle: bool) -> None:
    """Raise ModelError for an adapter whose weights are missing, or pickled unless that is allowed."""
    if (folder / "adapter_model.safetensors").is_file():
        return
    if not (folder / "adapter_model.bin").is_file():
        raise ModelError(f"model {path}: the adapter's weights, adapter_model.safetensors, are missing")
    if not allow_pickle:
        raise ModelError(f"model {path}: {NEEDS_PICKLE}")


def check_embedded_adapter(path: str, revision: str | None, allow_pickle: bool) -> None:
    """Raise ModelError for a folder or hub model with a pickled adapter next to its weights, unless that is allowed:
    transformers loads both."""
    if allow_pickle or _found(path, "adapter_config.json", revision) is None:
        return
    safe, pickled = (_found(path, f"adapter_model.{kind}", revision) for kind in ("safetensors", "bin"))
    if safe is None and pickled is not None:
        raise ModelError(f"model {path}: {NEEDS_PICKLE}")


NEEDS_PICKLE = "has no safetensors weights; pickled ones can run code: if you trust them, set model.allow_pickle: true"


def read_json(file: Path, path: str) -> Any:
    """A file that describes a model. Raises ModelError if it is too large, too deeply nested, or not JSON."""
    try:
        if file.stat().st_size > MOST_BYTES:
            raise ModelError(f"model {path}: {file.name} has more than {MOST_BYTES:,} bytes")
        return json.loads(file.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ModelError(f"model {path}: {file.name} is nested too deeply") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"model {path}: {file.name} cannot be read: {error}") from error
