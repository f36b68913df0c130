"""Checks of a model's folder before transformers or PEFT use it.

A config of ten million layers costs hours and all memory before any weight is read; an index can name files elsewhere.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import pairwise, takewhile
from pathlib import Path, PurePosixPath
from re import _parser  # type: ignore[attr-defined]  # of regular expressions, which has no public name
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
# Adapters that PEFT merges into the weights as it does LoRA; others add tokens to the prompt, layers, or routers.
ADAPTERS = ("LORA", "ADALORA", "LOHA", "LOKR", "IA3", "OFT", "VERA", "TRAINABLE_TOKENS")
# Of regular expressions: a search for `.*a.*b.*c.*d` has 20 bits. Replacements of a tokenizer: a space becomes a few.
MOST_BITS, MOST_PATTERN, SHORT_REPEAT, MOST_GROWTH = 26, 20_000, 3, 64
MOST_BYTES = 100_000_000  # of a JSON file that describes a model; an index of 100,000 tensors has 10 MB


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_id(value: Any) -> bool:
    return type(value) is int and -1 <= value < SIZES["vocab_size"]


def _each(value: Any, right: Callable[[Any], bool]) -> bool:
    """Whether a value, or every item of a list, is right."""
    return all(map(right, value)) if isinstance(value, list) else right(value)


def _is_mapping(value: Any, right: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(map(right, value.values()))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_rank(value: Any) -> bool:
    return type(value) is int and 0 <= value <= RANK


Rule = tuple[Callable[[Any], bool], str]
_ID: Rule = (_is_id, "a token id")
_IDS: Rule = (lambda value: _each(value, _is_id), "a token id or a list of them")
_NAMES: Rule = (lambda value: _each(value, _is_text), "a name or a list of them")
_FLAG: Rule = (lambda value: type(value) is bool, "true or false")
_NUMBER: Rule = (_is_number, "a number")
_SHARE: Rule = (lambda value: _is_number(value) and 0 <= value <= 1, "a number from 0 to 1")
_RANK: Rule = (_is_rank, f"a whole number up to {RANK:,}")
_TOKENS = {"eos_token_id": _IDS, "bos_token_id": _IDS, "pad_token_id": _ID}
# File -> field -> what it must be. Libraries check neither, and fail far from the cause or compute nonsense.
FIELDS: dict[str, dict[str, Rule]] = {
    "config.json": {
        **_TOKENS,
        "architectures": (lambda value: isinstance(value, list) and _each(value, _is_text), "a list of names"),
        "max_position_embeddings": (lambda value: type(value) is int and value > 0, "a whole number above 0"),
    },
    "generation_config.json": {
        **_TOKENS,
        **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "repetition_penalty"), _NUMBER),
    },
    "tokenizer_config.json": {
        "model_max_length": (lambda value: _is_number(value) and value > 0, "a number above 0"),
        "chat_template": (lambda value: isinstance(value, str | list | dict), "a template"),
    },
    "adapter_config.json": {
        **dict.fromkeys(("r", "init_r", "target_r", "oft_block_size"), _RANK),
        **dict.fromkeys(("lora_alpha", "alpha"), _NUMBER),
        **dict.fromkeys(("lora_dropout", "module_dropout", "rank_dropout", "vera_dropout"), _SHARE),
        **dict.fromkeys(("target_modules", "modules_to_save", "exclude_modules", "layers_pattern"), _NAMES),
        **dict.fromkeys(("use_rslora", "use_dora", "fan_in_fan_out", "lora_bias", "ensure_weight_tying"), _FLAG),
        "bias": (lambda value: value in ("none", "all", "lora_only"), "none, all or lora_only"),
        "revision": (_is_text, "a branch, tag or commit"),
        "layers_to_transform": (lambda value: _each(value, lambda one: type(one) is int), "a layer or a list of them"),
        "rank_pattern": (  # AdaLoRA's has a list for each module: which ranks are kept
            lambda value: _is_mapping(value, lambda rank: isinstance(rank, list) or _is_rank(rank)),
            f"a mapping of modules to whole numbers up to {RANK:,}",
        ),
        "alpha_pattern": (lambda value: _is_mapping(value, _is_number), "a mapping of modules to numbers"),
        "trainable_token_indices": (
            lambda value: all(_each(of, _is_id) for of in (value.values() if isinstance(value, dict) else [value])),
            "token ids, or a mapping of modules to them",
        ),
    },
}


def check_file(path: str, revision: str | None, name: str) -> None:
    """Raise ModelError for a file of a model, in a folder or on the hub, with a field that is of the wrong kind."""
    file = _found(path, name, revision)
    values = None if file is None else read_json(file, path)
    if isinstance(values, dict):
        _check_fields(values, path, name)


def _check_fields(values: Mapping[str, Any], path: str, file: str) -> None:
    for name, (right, what) in FIELDS[file].items():
        if values.get(name) is not None and not right(values[name]):
            raise ModelError(f"model {path}: {file} says {name}: {str(values[name])[:40]}; it must be {what}")


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
        _check_fields(config, path, "config.json")


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
    _check_fields(config, path, file.name)
    if config.get("peft_type") not in ADAPTERS:
        raise ModelError(
            f"model {path}: {file.name} says peft_type: {str(config.get('peft_type'))[:40]}; adapters that can be "
            f"merged into their base are read: {', '.join(ADAPTERS)}"
        )
    for field in ("target_modules", "exclude_modules", "layers_pattern", "target_parameters"):
        given = config.get(field)  # a string is a regular expression; of a list, only layers_pattern is one
        if isinstance(given, str) or (field == "layers_pattern" and given):
            _check_patterns([given] if isinstance(given, str) else given, field, path, file.name)
    for field in ("rank_pattern", "alpha_pattern"):
        _check_patterns(list(config.get(field) or {}), field, path, file.name)
    if config.get("layer_replication") is not None:
        raise ModelError(f"model {path}: {file.name} has layer_replication, which is not supported")
    return config


def check_tokenizer(path: str, revision: str | None) -> None:
    """Raise ModelError for a tokenizer.json whose regular expressions or replacements may take forever."""
    file = _found(path, "tokenizer.json", revision)
    if file is not None:
        _check_tokenizer(file, file.stat().st_mtime_ns, path)


@lru_cache(maxsize=32)
def _check_tokenizer(file: Path, changed: int, path: str) -> None:
    values = read_json(file, path)
    for field in () if not isinstance(values, dict) else ("normalizer", "pre_tokenizer", "decoder", "post_processor"):
        growth = 1.0
        for part in _parts(values.get(field)):
            pattern = part.get("pattern")
            given = pattern.get("Regex") if isinstance(pattern, dict) else None
            if isinstance(given, str):
                _check_patterns([given], field, path, "tokenizer.json", found=True)
            literal = pattern.get("String") if isinstance(pattern, dict) else None
            if isinstance(content := part.get("content"), str):
                growth *= max(1.0, len(content) / max(1, len(literal) if isinstance(literal, str) else 1))
        if growth > MOST_GROWTH:
            raise ModelError(
                f"model {path}: tokenizer.json: the replacements of its {field} make a text up to {growth:.3g} times "
                f"as long; at most {MOST_GROWTH} times is accepted"
            )


def _parts(value: Any) -> Iterator[dict[str, Any]]:
    """Every object in a part of tokenizer.json."""
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _parts(item)
    if isinstance(value, dict):
        yield value


def _check_patterns(patterns: list[Any], field: str, path: str, file: str, found: bool = False) -> None:
    """`found`: texts are searched for the patterns, so that the end of a pattern matches whatever follows."""
    for pattern in patterns:
        if not isinstance(pattern, str) or _backtracking(pattern, found) > MOST_BITS:
            raise ModelError(
                f"model {path}: {file}: {field} has {str(pattern)[:60]!r}, a regular expression that may take forever: "
                "repetitions within repetitions, or too many of them"
            )


def _backtracking(pattern: str, found: bool = False) -> float:
    """Binary logarithm of the number of ways in which a regular expression may be tried on a name of 64 characters."""
    if len(pattern) > MOST_PATTERN:
        return math.inf
    plain = re.sub(r"\\[pP](?:\{[^{}]*\}|\w)", r"\\w", pattern)  # classes of Unicode, which Python lacks
    try:
        with warnings.catch_warnings(action="ignore"):
            return _bits(_parser.parse(plain), last=found)
    except (re.error, OverflowError, RecursionError):
        # Not Python's dialect: what can be seen without reading it.
        counts = [int(count) for count in re.findall(r"(\d{1,9})\}", pattern)]
        nested = re.search(r"[+*}]\)+[+*{]", pattern)
        return math.inf if nested or math.prod(counts) > MOST_PATTERN else 0.0


def _bits(items: Any, times: int = 1, last: bool = False) -> float:
    """`times`: how often the expression around it is repeated, at least. `last`: nothing follows that may not match, so
    that a repetition at its end is never tried again: where one round fails, those before it are the match."""
    total = 0.0
    for place, (kind, value) in enumerate(items, 1):
        name, ends = str(kind), last and place == len(items)
        if name.endswith("_REPEAT"):
            low, high, body = int(value[0]), int(value[1]), value[2]
            free = ends and low <= 1
            inner, high = _bits(body, times * max(1, low), free), min(high, 1) if free else high
            if (inner and high > SHORT_REPEAT) or times * low > MOST_PATTERN:
                return math.inf
            choices = 0.0 if name == "POSSESSIVE_REPEAT" else math.log2(min(high, 64) - min(low, 64) + 1)
            total += inner * max(1, high) + choices
        elif name == "BRANCH":
            begins = sorted(map(_literal, value[1]))
            distinct = not any(other.startswith(one) for one, other in pairwise(begins))
            total += max(_bits(one, times, ends) for one in value[1]) + (0.0 if distinct else math.log2(len(begins)))
        elif name.startswith("ASSERT"):
            total = max(total, _bits(value[1], times))
        elif name in ("SUBPATTERN", "ATOMIC_GROUP"):
            total += _bits(value[-1] if name == "SUBPATTERN" else value, times, ends)
    return total


def _literal(items: Any) -> str:
    """The characters with which an alternative begins."""
    return "".join(chr(value) for _, value in takewhile(lambda item: str(item[0]) == "LITERAL", items))


def adapter_stops(folder: Path, path: str) -> list[int]:
    """The stop tokens in the generation_config.json of an adapter's folder, which may lack it. Raises ModelError if it
    is invalid."""
    file = folder / "generation_config.json"
    config = read_json(file, path) if file.is_file() else {}
    given = config.get("eos_token_id") if isinstance(config, dict) else [config]
    ids = given if isinstance(given, list) else [] if given is None else [given]
    for id in ids:
        if type(id) is not int or id < 0:
            raise ModelError(
                f"model {path}: {file.name} gives eos_token_id: {str(given)[:40]}; it must be a token id or a list of "
                "them"
            )
    return ids


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
