"""The files of a model folder or hub id: where they are, checks before they are used, errors that name the remedy.

Transformers and PEFT trust these files: a config with ten million layers costs hours and all memory before any weight
is read, and an index can name files outside the folder.
"""

import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, lru_cache
from itertools import pairwise, takewhile
from pathlib import Path, PurePosixPath
from re import _parser  # type: ignore[attr-defined]  # the parser of regular expressions has no public name
from typing import Any, Literal, Union

from huggingface_hub.errors import StrictDataclassError
from pydantic import ConfigDict, TypeAdapter, ValidationError, confloat, conint
from safetensors import SafetensorError
from transformers.utils.hub import cached_file

from posttrain.base.errors import ModelError, WeightsError
from posttrain.base.files import near, without_model
from posttrain.base.hub import stay_offline_without_network
from posttrain.base.words import first_line
from posttrain.config.schema.model import ModelConfig

# The errors that transformers, tokenizers and PEFT raise for invalid files. Running out of memory is not one of them.
READING = (OSError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, AssertionError, ImportError)
READING += (RecursionError, StrictDataclassError)
# Every folder with a tokenizer has one of these files.
DESCRIPTIONS = ("config.json", "adapter_config.json", "tokenizer_config.json")
MOST_BYTES = 100_000_000  # maximum size of a JSON file that describes a model; an index of 100,000 tensors has 10 MB
NEEDS_PICKLE = "has no safetensors weights; pickled ones can run code: if you trust them, set model.allow_pickle: true"

VOCABULARY, RANK = 2**24, 2**14  # maximum vocabulary of a model, maximum rank of an adapter
# Types of adapters that PEFT merges into the weights, like LoRA. Other types add prompt tokens, layers, or routers.
ADAPTERS = ("LORA", "ADALORA", "LOHA", "LOKR", "IA3", "OFT", "VERA", "TRAINABLE_TOKENS")
# Limits of regular expressions (a search for `.*a.*b.*c.*d` has 20 bits), and of a tokenizer's replacements.
MOST_BITS, MOST_PATTERN, SHORT_REPEAT, MOST_GROWTH = 26, 20_000, 3, 64

Rule = tuple[Any, str]  # the type of a value, and its name in messages


def _each(kind: Any) -> Any:
    """A value, or a list of them."""
    return Union[kind, list[kind]]  # noqa: UP007 (of a variable)


def _size(most: int) -> Rule:
    return _each(conint(ge=1, le=most)), f"a whole number from 1 to {most:,}"


_Rank, _Id, _Number = conint(ge=0, le=RANK), conint(ge=-1, le=VOCABULARY - 1), confloat(allow_inf_nan=False)
_Ids: Any = _each(_Id)
_IDS: Rule = (_Ids, "a token id or a list of them")
_NAMES: Rule = (_each(str), "a name or a list of them")
_NUMBER: Rule = (_Number, "a number")
_SHARE: Rule = (confloat(ge=0, le=1, allow_inf_nan=False), "a number from 0 to 1")
_FLAG: Rule = (bool, "true or false")
# Sizes in config.json, for all families. No model comes near the accepted maxima.
SIZES: dict[str, Rule] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), _size(2_000)),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), _size(4_096)),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_experts", "num_local_experts"), _size(4_096)),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "head_dim", "word_embed_proj_dim"), _size(2**18)),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "n_inner", "ffn_dim"), _size(2**22)),
    "vocab_size": _size(VOCABULARY),
}
_TOKENS = {"eos_token_id": _IDS, "bos_token_id": _IDS, "pad_token_id": (_Id, "a token id")}
# The rules, by file and field. Libraries do not check these fields, and fail far from the cause or compute nonsense.
FIELDS: dict[str, dict[str, Rule]] = {
    "config.json": {
        **_TOKENS,
        "architectures": (list[str], "a list of names"),
        "max_position_embeddings": (conint(ge=1), "a whole number above 0"),
    },
    "generation_config.json": {
        **_TOKENS,
        **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "repetition_penalty"), _NUMBER),
    },
    "tokenizer_config.json": {
        "model_max_length": (confloat(gt=0, allow_inf_nan=False), "a number above 0"),
        "chat_template": (str | list | dict, "a template"),
    },
    "adapter_config.json": {
        **dict.fromkeys(("r", "init_r", "target_r", "oft_block_size"), (_Rank, f"a whole number up to {RANK:,}")),
        **dict.fromkeys(("lora_alpha", "alpha"), _NUMBER),
        **dict.fromkeys(("lora_dropout", "module_dropout", "rank_dropout", "vera_dropout"), _SHARE),
        **dict.fromkeys(("target_modules", "modules_to_save", "exclude_modules", "layers_pattern"), _NAMES),
        **dict.fromkeys(("use_rslora", "use_dora", "fan_in_fan_out", "lora_bias", "ensure_weight_tying"), _FLAG),
        "bias": (Literal["none", "all", "lora_only"], "none, all or lora_only"),
        "revision": (str, "a branch, tag or commit"),
        "layers_to_transform": (_each(int), "a layer or a list of them"),
        # AdaLoRA's rank_pattern has a list for each module: which ranks are kept.
        "rank_pattern": (dict[str, _Rank | list], f"a mapping of modules to whole numbers up to {RANK:,}"),
        "alpha_pattern": (dict[str, _Number], "a mapping of modules to numbers"),
        "trainable_token_indices": (_Ids | dict[str, _Ids], "token ids, or a mapping of modules to them"),
    },
}


def found_file(path: str, name: str, revision: str | None) -> Path | None:
    """Return the path of a file in a folder or on the hub, or None if it is missing or cannot be fetched."""
    quiet = {f"_raise_exceptions_for_{what}": False for what in ("gated_repo", "missing_entries", "connection_errors")}
    file = cached_file(path, name, revision=revision or "main", **quiet)
    return None if file is None else Path(file)


def read_json(file: Path, path: str) -> Any:
    """Read a JSON file of the model `path`. Raises ModelError if it is too large, too deeply nested, or not JSON."""
    try:
        if file.stat().st_size > MOST_BYTES:
            raise ModelError(f"model {path}: {file.name} has more than {MOST_BYTES:,} bytes")
        return json.loads(file.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ModelError(f"model {path}: {file.name} is nested too deeply") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"model {path}: {file.name} cannot be read: {error}") from error


def some(names: set[str]) -> str:
    """Return the first three names, and how many more there are."""
    listed = sorted(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")


@contextmanager
def clear_errors(model: ModelConfig, part: str) -> Iterator[None]:
    """Turn errors of transformers and the hub into one sentence that names the remedy."""
    path = model.path
    folder = Path(path).expanduser()
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if looks_local and not folder.is_dir():
        raise ModelError(f"model {path}: no such folder{near(folder)}")
    described = ("config.json",) if part in ("config.json", "weights") else DESCRIPTIONS
    if folder.is_dir() and not any((folder / name).is_file() for name in described):
        raise ModelError(f"model {path}: {without_model(folder)}")
    if not folder.is_dir():
        stay_offline_without_network()
    try:
        yield
    except (SafetensorError, *READING) as error:
        kind = WeightsError if isinstance(error, SafetensorError) else ModelError
        run = Path("runs", path)
        meant = f"; did you mean the run {run}?" if not folder.is_dir() and run.is_dir() else ""
        raise kind(f"model {path}: {_explain(model, part, error)}{meant}") from error
    except RuntimeError as error:
        text = str(error)
        if "ignore_mismatched_sizes" in text:
            what = "weights and config.json have different shapes (see the report above)"
        elif part == "adapter" and "size mismatch" in text:
            what = f"the adapter's tensors have other shapes than its base model: {text.splitlines()[1].strip()}"
        else:  # other errors, such as a lack of memory, are not the model's fault
            raise
        raise WeightsError(f"model {path}: {what}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # raised by libraries in Rust; it is not an Exception
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
            "is neither a folder nor in the local hub cache, and the hub cannot be reached: give a folder, or connect "
            "once"
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


def check_file(path: str, revision: str | None, name: str) -> None:
    """Check a file of a model, in a folder or on the hub. Raises ModelError for a field of a wrong type, a config.json
    with sizes that no model has, or a tokenizer.json whose regular expressions or replacements may take forever.

    A file that is missing or cannot be fetched is reported by the loader.
    """
    file = found_file(path, name, revision)
    if file is None:
        return
    if name == "tokenizer.json":
        _check_tokenizer(file, file.stat().st_mtime_ns, path)
        return
    values = read_json(file, path)
    if name == "config.json":
        if not isinstance(values, dict):
            raise ModelError(f"model {path}: config.json contains a {type(values).__name__}, not a model's settings")
        _check_sizes(values, path)
    if isinstance(values, dict):
        _check_fields(values, path, name, FIELDS[name])


def _check_fields(values: Mapping[str, Any], path: str, file: str, rules: Mapping[str, Rule]) -> None:
    for name, (kind, what) in rules.items():
        if values.get(name) is None:
            continue
        try:
            _adapter(kind).validate_python(values[name])
        except ValidationError:
            shown = f'"{values[name]}"' if isinstance(values[name], str) else str(values[name])  # "16" is not 16
            raise ModelError(f"model {path}: {file} says {name}: {shown[:40]}; it must be {what}") from None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind, config=ConfigDict(strict=True))


def _check_sizes(config: Mapping[str, Any], path: str) -> None:
    """Check the sizes of a config and of its parts."""
    _check_fields(config, path, "config.json", SIZES)
    for value in config.values():
        if isinstance(value, dict):
            _check_sizes(value, path)


def check_indexes(path: str) -> None:
    """Raise ModelError if an index of weights in the folder names files outside the folder, or no files."""
    for file in sorted(Path(path).glob("*.index.json")):
        index = read_json(file, path)
        names = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise ModelError(f"model {path}: {file.name} has no weight_map of tensors to files: download it again")
        for name in names.values():
            if "\\" in name or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise ModelError(f"model {path}: {file.name} names {name[:80]!r}, which is outside the model's folder")


def adapter_config(path: str) -> dict[str, Any] | None:
    """Return the adapter_config.json of a folder with a PEFT adapter, or None. Raises ModelError if it is invalid."""
    file = Path(path) / "adapter_config.json"
    if not file.is_file():
        return None
    config = read_json(file, path)
    if not isinstance(config, dict) or not isinstance(config.get("base_model_name_or_path"), str):
        raise ModelError(f"model {path}: {file.name} names no base model (base_model_name_or_path)")
    _check_fields(config, path, file.name, FIELDS[file.name])
    if config.get("peft_type") not in ADAPTERS:
        raise ModelError(
            f"model {path}: {file.name} says peft_type: {str(config.get('peft_type'))[:40]}; only adapters that can be "
            f"merged into their base are supported: {', '.join(ADAPTERS)}"
        )
    listed = ("layers_pattern", "rank_pattern", "alpha_pattern")  # in other fields, only a string is a pattern
    for field in ("target_modules", "exclude_modules", "target_parameters", *listed):
        value = config.get(field) or ()
        patterns = [value] if isinstance(value, str) else [*value] if field in listed else []
        _check_patterns(patterns, field, path, file.name)
    if config.get("layer_replication") is not None:
        raise ModelError(f"model {path}: {file.name} has layer_replication, which is not supported")
    return config


@lru_cache(maxsize=32)
def _check_tokenizer(file: Path, changed: int, path: str) -> None:
    values = read_json(file, path)
    for field in ("normalizer", "pre_tokenizer", "decoder", "post_processor") if isinstance(values, dict) else ():
        growth = 1.0
        for part in _parts(values.get(field)):
            pattern: Any = part.get("pattern") if isinstance(part.get("pattern"), dict) else {}
            if isinstance(expression := pattern.get("Regex"), str):
                _check_patterns([expression], field, path, "tokenizer.json", searched=True)
            literal = pattern.get("String")
            if isinstance(content := part.get("content"), str):
                growth *= max(1.0, len(content) / max(1, len(literal) if isinstance(literal, str) else 1))
        if growth > MOST_GROWTH:
            raise ModelError(
                f"model {path}: tokenizer.json: the replacements of its {field} make a text up to {growth:.3g} times "
                f"as long; at most {MOST_GROWTH} times is accepted"
            )


def _parts(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every object in a part of tokenizer.json."""
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _parts(item)
    if isinstance(value, dict):
        yield value


def _check_patterns(patterns: list[Any], field: str, path: str, file: str, searched: bool = False) -> None:
    """Raise ModelError for a pattern that may take forever. `searched`: a match may end anywhere in a text."""
    for pattern in patterns:
        if not isinstance(pattern, str) or _backtracking(pattern, searched) > MOST_BITS:
            raise ModelError(
                f"model {path}: {file}: {field} has {str(pattern)[:60]!r}, a regular expression that may take forever: "
                "repetitions within repetitions, or too many of them"
            )


def _backtracking(pattern: str, searched: bool = False) -> float:
    """Return the binary logarithm of the number of ways to try a regular expression on a name of 64 characters."""
    if len(pattern) > MOST_PATTERN:
        return math.inf
    plain = re.sub(r"\\[pP](?:\{[^{}]*\}|\w)", r"\\w", pattern)  # Unicode classes, which Python lacks
    try:
        with warnings.catch_warnings(action="ignore"):
            return _bits(_parser.parse(plain), last=searched)
    except (re.error, OverflowError, RecursionError):
        # A dialect different from Python's: check only what is visible without parsing.
        counts = [int(count) for count in re.findall(r"(\d{1,9})\}", pattern)]
        nested = re.search(r"[+*}]\)+[+*{]", pattern)
        return math.inf if nested or math.prod(counts) > MOST_PATTERN else 0.0


def _bits(items: Any, times: int = 1, last: bool = False) -> float:
    """`times`: the minimum number of repetitions of the enclosing expression. `last`: nothing follows that could fail
    to match, so a repetition at the end is never retried: if one round fails, the earlier rounds are the match."""
    total = 0.0
    for number, (kind, value) in enumerate(items, 1):
        name, ends = str(kind), last and number == len(items)
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
            distinct = not any(longer.startswith(shorter) for shorter, longer in pairwise(begins))
            choices = 0.0 if distinct else math.log2(len(begins))
            total += max(_bits(branch, times, ends) for branch in value[1]) + choices
        elif name.startswith("ASSERT"):
            total = max(total, _bits(value[1], times))
        elif name in ("SUBPATTERN", "ATOMIC_GROUP"):
            total += _bits(value[-1] if name == "SUBPATTERN" else value, times, ends)
    return total


def _literal(items: Any) -> str:
    """Return the literal characters with which an alternative begins."""
    return "".join(chr(value) for _, value in takewhile(lambda item: str(item[0]) == "LITERAL", items))


def adapter_stops(path: str) -> list[int]:
    """Return the stop tokens in an adapter's generation_config.json, if any. Raises ModelError if it is invalid."""
    file = Path(path) / "generation_config.json"
    config = read_json(file, path) if file.is_file() else {}
    config = config if isinstance(config, dict) else {"eos_token_id": [config]}
    _check_fields(config, path, file.name, {"eos_token_id": (_each(conint(ge=0)), _IDS[1])})
    value = config.get("eos_token_id")
    return value if isinstance(value, list) else [] if value is None else [value]


def check_adapter_weights(path: str, revision: str | None, allow_pickle: bool) -> None:
    """Raise ModelError for an adapter whose weights are missing, or pickled unless that is allowed."""
    if found_file(path, "adapter_model.safetensors", revision) is not None:
        return
    if found_file(path, "adapter_model.bin", revision) is None:
        raise ModelError(f"model {path}: the adapter's weights, adapter_model.safetensors, are missing")
    if not allow_pickle:
        raise ModelError(f"model {path}: {NEEDS_PICKLE}")
