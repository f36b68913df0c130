"""Models and tokenizers from the hub or a folder, loaded by transformers, with errors that name the remedy."""

from __future__ import annotations

import contextlib
import hashlib
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file
from transformers.utils import logging as hf_logging

from posttrain.config.schema.model import ModelConfig
from posttrain.errors import ModelError, WeightsError
from posttrain.extras import need
from posttrain.hub import stay_offline_without_network
from posttrain.models.attention import NAME as PACKED
from posttrain.models.families import FAMILIES, base_of
from posttrain.models.kernels import switch_on
from posttrain.models.lean import lean
from posttrain.models.optional import chains_for, check_attention, keep_storage, quantization, takes_triton
from posttrain.models.quantised import method_of
from posttrain.models.untrusted import (
    NEEDS_PICKLE,
    adapter_config,
    adapter_stops,
    check_adapter_weights,
    check_config,
    check_embedded_adapter,
    check_file,
    check_indexes,
    check_tokenizer,
    read_json,
)

if TYPE_CHECKING:  # importing it takes a second
    from peft import PeftModel

# transformers' progress bars appear on every load and save; ours cover long waits.
hf_logging.disable_progress_bar()
# PEFT uses a transformers name that will change, which users cannot influence.
warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)

Head = Literal["lm", "reward"]
BASE = "base"  # in a run folder, the base model of its adapters
# What transformers, tokenizers and PEFT raise for invalid files; running out of memory is not among them.
READING = (OSError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, AssertionError, ImportError)
READING += (RecursionError, StrictDataclassError)
# Every folder with a tokenizer has one of these files.
START = "start"  # the name of a frozen copy of an adapter as a run began
BASE_WEIGHTS = "base_weights.json"  # beside an adapter: the hash of the weights that it was trained on
SCORE = "base_model.model.score."  # a reward head in an adapter
DESCRIPTIONS = ("config.json", "adapter_config.json", "tokenizer_config.json")


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """The model's tokenizer, or that of its base if it is an adapter without one (with the adapter's chat template).

    It has the model's `new_tokens`.
    """
    if is_adapter(model) and not _has_tokenizer(Path(model.path)):
        tokenizer, template = load_tokenizer(base_settings(model)), Path(model.path) / "chat_template.jinja"
        if template.is_file():
            tokenizer.chat_template = template.read_text(encoding="utf-8")
        return tokenizer
    with _clear_errors(model, "tokenizer"):
        check_config(model.path, model.revision)  # transformers reads it here, too
        check_file(model.path, model.revision, "tokenizer_config.json")
        check_tokenizer(model.path, model.revision)
        tokenizer = AutoTokenizer.from_pretrained(model.path, **_source(model))
        tokenizer.add_tokens([*model.new_tokens])  # those that it has already keep their ids
        return tokenizer


def new_token_ids(model: ModelConfig) -> list[int]:
    """The ids of the model's `new_tokens`, ascending."""
    ids = cast(list[int], load_tokenizer(model).convert_tokens_to_ids([*model.new_tokens])) if model.new_tokens else []
    return sorted(ids)


def grow(loaded: PreTrainedModel, model: ModelConfig) -> None:
    """Give `new_tokens` that the tokenizer lacked the mean of the embeddings of all others, and so to the LM head.

    Embeddings are added if there are fewer than ids. A model that was saved with its tokens stays as it is.
    """
    if not model.new_tokens:
        return
    known = load_tokenizer(model.model_copy(update={"new_tokens": ()})).get_vocab()
    words, size = load_tokenizer(model).get_vocab(), len(cast(Any, loaded.get_input_embeddings()).weight)
    needed = max(words.values()) + 1
    new = {id for token, id in words.items() if token not in known or id >= size}
    if needed > size:
        with torch.random.fork_rng(devices=[]):  # else a resumed run would draw other numbers
            loaded.resize_token_embeddings(needed, mean_resizing=False)
    ends = [end for end in (loaded.get_input_embeddings(), loaded.get_output_embeddings()) if end is not None]
    old = sorted({id for id in known.values() if id < size} - new)
    tensors = {tensor for end in ends for tensor in end.parameters(recurse=False) if not tensor.is_meta}
    with torch.no_grad():
        for tensor in tensors if new else ():
            tensor[sorted(new)] = tensor[old].float().mean(0).to(tensor.dtype)


def _has_tokenizer(folder: Path) -> bool:
    return any(any(folder.glob(names)) for names in ("tokenizer*", "vocab*", "*.model", "*.tiktoken"))


def load_model(
    model: ModelConfig,
    head: Head,
    dtype: torch.dtype,
    device: torch.device,
    stay: bool = False,
    dequantised: bool = False,
) -> PreTrainedModel:
    """The model with an LM head, or with one scalar output (`reward`), in evaluation mode on `device`.

    With `stay` it is left in CPU memory, ready to be moved to `device`. Its `new_tokens` are added.

    A folder with a LoRA adapter gives its base model with the adapter merged. A missing reward head is initialised from
    a normal distribution with standard deviation 0.02. With `load_in_4bit` linear layers have 4-bit weights. A folder
    with quantised weights is loaded as it is, or `dequantised`; on quantised weights an adapter is not merged.
    """
    check_attention(model, device)
    chains, stored = chains_for(model, device), quantization(model, dtype)
    base = base_settings(model)
    config = load_config(base)
    if head == "lm" and is_reward_model(model):
        raise ModelError(f"model {model.path}: is a reward model, which scores completions and does not generate")
    if head == "lm" and any(name.endswith("ForMaskedLM") for name in config.architectures or []):
        raise ModelError(f"model {model.path}: is a masked language model, which fills gaps and does not generate")
    auto: Any = AutoModelForCausalLM
    if head == "reward":
        auto, config.num_labels = AutoModelForSequenceClassification, 1
    source = _source(base) | {"use_safetensors": None if base.allow_pickle else True}
    already = method_of(config)
    if already == "bitsandbytes":
        need("bitsandbytes", "quant", f"model {base.path}: its weights are quantised, which")
    if stored is not None:
        source["quantization_config"] = stored
    if stored is not None or already is not None:
        source["device_map"] = {"": device}
    check_indexes(Path(base.path), base.path)
    check_embedded_adapter(base.path, base.revision, base.allow_pickle)
    check_file(base.path, base.revision, "generation_config.json")
    with _clear_errors(base, "weights"), _no_report():
        loaded, info = auto.from_pretrained(
            base.path,
            config=config,
            dtype=dtype,
            attn_implementation=_initial_attention(base),
            output_loading_info=True,
            **source,
        )
    missing = {name for name in info["missing_keys"] if not (head == "reward" and name.startswith("score."))}
    if missing:
        raise WeightsError(f"{base.path}: the weights lack {_some(missing)}, which {type(loaded).__name__} needs")
    if head == "reward" and "score.weight" in info["missing_keys"]:
        torch.nn.init.normal_(loaded.score.weight, std=0.02)
    if already is not None and dequantised:
        loaded, already = loaded.dequantize(dtype), None
        loaded._weight_conversions = None  # else it would be saved as 4-bit tensors
    quantised = stored is not None or already is not None
    if base is not model and not quantised:
        loaded = merged(with_adapter(loaded, model))
        loaded.name_or_path = model.path
    if quantised and model.new_tokens:
        raise ModelError(f"model {model.path}: model.new_tokens cannot be added to quantised weights")
    grow(loaded, model)
    if use_packed(model, loaded):
        loaded.set_attn_implementation(PACKED)
    lean(loaded, chains)
    if takes_triton(model, device):
        switch_on(loaded)
    if base is not model and quantised:  # merging would round the sum to 4 bits
        loaded = base_of(with_adapter(loaded, model)).requires_grad_(False)
        loaded.name_or_path = model.path
    if quantised:
        keep_storage(loaded)
    elif not stay:
        torch.nn.Module.to(loaded, device)
    return loaded.eval()


def check_embeddings(loaded: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: str) -> int:
    """The number of the model's embeddings. Raises ModelError if its tokenizer's own vocabulary is larger.

    Added tokens (a pad token, one for images) may lack an embedding as long as they do not occur.
    """
    embeddings = len(cast(torch.nn.Embedding, loaded.get_input_embeddings()).weight)  # PEFT's wrappers have it, too
    ends = cast(list[int | None], [tokenizer.bos_token_id, tokenizer.eos_token_id])
    largest = max([tokenizer.vocab_size - 1, *(id for id in ends if id is not None)])
    if largest >= embeddings:
        raise ModelError(
            f"{path}: its tokenizer has token ids up to {largest:,}, but the model has {embeddings:,} embeddings: use "
            "the tokenizer that it was trained with"
        )
    return embeddings


def use_packed(model: ModelConfig, loaded: PreTrainedModel) -> bool:
    """Whether the model takes packs directly: its family is proven and no other attention is set."""
    family = FAMILIES.get(loaded.config.model_type)
    proven = family is not None and family.packed
    if model.attention == "packed" and not proven:
        names = ", ".join(name for name, facts in FAMILIES.items() if facts.packed)
        raise ModelError(
            f"{model.path}: attention `packed` is proven for {names}; {loaded.config.model_type} needs `auto`"
        )
    return proven and model.attention in ("auto", "packed")


def is_reward_model(model: ModelConfig) -> bool:
    """Whether a folder or hub id holds a sequence classifier, plain or as an adapter."""
    adapter = _adapter_config(model)
    if adapter is not None:
        return adapter.get("task_type") == "SEQ_CLS"
    architectures = load_config(model).architectures or []
    return any(name.endswith("ForSequenceClassification") for name in architectures)


def _initial_attention(model: ModelConfig) -> str | None:
    return None if model.attention in ("auto", "packed") else model.attention


def _source(model: ModelConfig) -> dict[str, Any]:
    return {"revision": model.revision or "main", "trust_remote_code": model.trust_remote_code}


def load_config(model: ModelConfig) -> PreTrainedConfig:
    """The model's config.json, for an adapter its base model's. Raises ModelError for models that are not text-only."""
    model = base_settings(model)
    with _clear_errors(model, "config.json"):
        check_config(model.path, model.revision)
        config = AutoConfig.from_pretrained(model.path, **_source(model))
    _refuse_vision(model, config)
    return config


def _refuse_vision(model: ModelConfig, config: PreTrainedConfig) -> None:
    for part in ("vision_config", "audio_config"):
        if getattr(config, part, None) is not None:
            raise ModelError(
                f"{model.path} ({config.model_type}) has a {part.split('_')[0]} part: posttrain trains text models only"
            )


def is_adapter(model: ModelConfig) -> bool:
    """Whether the path is a folder with a PEFT adapter rather than a full model."""
    return _adapter_config(model) is not None


def base_settings(model: ModelConfig) -> ModelConfig:
    """The settings of an adapter's base model; of any other model, its own.

    A base called `base` is the folder next to the adapter, if it exists: a run folder may have been moved with both.
    """
    adapter = _adapter_config(model)
    if adapter is None:
        return model
    path, beside = adapter["base_model_name_or_path"], Path(model.path).absolute().parent / BASE
    if Path(path).name == BASE and (beside / "config.json").is_file():
        path = str(beside)
    return model.model_copy(update={"path": path, "revision": adapter.get("revision") or model.revision})


def _adapter_config(model: ModelConfig) -> dict[str, Any] | None:
    with _clear_errors(model, "adapter_config.json"):
        return adapter_config(Path(model.path), model.path)


def with_adapter(
    base: PreTrainedModel | PeftModel, model: ModelConfig, name: str = "default", trainable: bool = False
) -> PeftModel:
    """`base` with the adapter of the folder `model.path`, not merged: its layers are added to those of `base`.

    A base that has adapters already gets one more, under its own `name`. The stop tokens in the generation_config.json
    of the adapter's folder are added to those of the base. Raises WeightsError for an adapter whose tensors are not
    those that its adapter_config.json describes for this base, or that was trained on other weights.
    """
    check_adapter_weights(Path(model.path), model.path, model.allow_pickle)
    _check_base(Path(model.path), str(base_of(base).name_or_path))
    with _clear_errors(model, "adapter"):
        adapted, differences = attach(base, model.path, name, trainable)
    if differences:
        raise WeightsError(
            f"model {model.path}: {differences}; the adapter was made for another base model, or its keys were renamed"
        )
    add_stops(base_of(adapted), model)
    return adapted


def add_stops(base: PreTrainedModel, adapter: ModelConfig) -> None:
    """Add the stop tokens of an adapter's folder to those of its base."""
    set_eos_token_ids(base, [*eos_token_ids(base), *adapter_stops(Path(adapter.path), adapter.path)])


def attach(
    base: PreTrainedModel | PeftModel, folder: str, name: str = "default", trainable: bool = False
) -> tuple[PeftModel, str]:
    """`base` with the adapter of a folder, and how the saved tensors differ from the described ones; empty if they do
    not: PEFT leaves missing ones at their initial values and ignores others.

    Trainable adapters, and their frozen copy START, have the dtype of the base. The head of the other kind of model (a
    reward head where a language model is loaded, a language model's where a reward model is) is not read; a reward
    model that is trained from a language model's adapter keeps its own.
    """
    from peft import MODEL_TYPE_TO_PEFT_MODEL_MAPPING, PeftConfig, PeftModel, PeftType, TaskType
    from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING
    from peft.utils import load_peft_weights, set_peft_model_state_dict

    config = PeftConfig.from_pretrained(folder)
    config.inference_mode = not trainable
    whole = base_of(base)
    own, other = (
        (TaskType.CAUSAL_LM, TaskType.SEQ_CLS) if whole.can_generate() else (TaskType.SEQ_CLS, TaskType.CAUSAL_LM)
    )
    tensors = load_peft_weights(folder, "cpu", key_mapping=getattr(whole, "_checkpoint_conversion_mapping", {}))
    if config.task_type == other:  # the backbones have the same names
        config.task_type = own if trainable else None
        if trainable and own == TaskType.SEQ_CLS:
            tensors[f"{SCORE}weight"] = whole.get_submodule("score").get_parameter("weight").detach()
    casts = not trainable and name != START
    modules = (whole.get_input_embeddings(), whole.get_output_embeddings())
    ends = tuple(f"base_model.model.{name}." for name, module in whole.named_modules() if module in modules)
    rows = _embeddings_of(tensors, ends, modules[0], getattr(config, "trainable_token_indices", None))
    if rows not in (0, cast(Any, modules[0]).weight.shape[0]) and name == "default" and base is whole:
        whole.resize_token_embeddings(rows, mean_resizing=False)
    if isinstance(base, PeftModel):
        adapted = base
        adapted.add_adapter(name, config, autocast_adapter_dtype=casts)
    else:
        kind = MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(config.task_type or "", PeftModel)
        adapted = kind(base, config, name, autocast_adapter_dtype=casts)
    try:
        found = set_peft_model_state_dict(adapted, tensors, name)
    except KeyError as error:  # PEFT looks up modules that are saved whole
        return adapted, f"the adapter lacks {error.args[0]}"
    prefix = PEFT_TYPE_TO_PREFIX_MAPPING[PeftType(config.peft_type)]
    lacking = [key for key in found.missing_keys if prefix in key and f".{name}" in key]
    missing, unexpected = ({key.replace(f".{name}", "") for key in keys} for keys in (lacking, found.unexpected_keys))
    read = ("",) if whole.can_generate() else (f"base_model.model.{whole.base_model_prefix}.", SCORE)
    unexpected = {key for key in unexpected if key.startswith(read) and not (whole.can_generate() and SCORE in key)}
    unexpected = {
        key for key in unexpected if not (key.startswith(ends) and key in tensors and _is_twice(key, tensors))
    }
    parts = [
        f"the adapter lacks {_some(missing)}, which its adapter_config.json describes" if missing else "",
        f"the adapter has {_some(unexpected)}, which {type(whole).__name__} does not" if unexpected else "",
    ]
    return adapted, " and ".join(part for part in parts if part)


def eos_token_ids(model: PreTrainedModel) -> list[int]:
    """The stop tokens of the model's generation_config.json."""
    given = getattr(getattr(model, "generation_config", None), "eos_token_id", None)  # a classifier has no such config
    return [int(id) for id in (given if isinstance(given, list) else [given]) if id is not None]


def set_eos_token_ids(model: PreTrainedModel, ids: Iterable[int]) -> None:
    """Set the stop tokens that are saved in generation_config.json, where transformers' `generate` reads them."""
    generation, ids = getattr(model, "generation_config", None), list(dict.fromkeys(ids))
    if generation is None or ids == eos_token_ids(model):
        return
    generation.eos_token_id = ids
    generation._from_model_config = False  # else `generate` would derive it from config.json again
    try:
        generation.validate(strict=True)
    except ValueError:  # some published models have a temperature without do_sample, which cannot be saved
        generation.do_sample = True


def _embeddings_of(tensors: Mapping[str, torch.Tensor], ends: tuple[str, ...], embeddings: Any, trained: Any) -> int:
    """The size of the vocabulary that an adapter was trained with, at least; 0 if nothing in it tells."""
    sizes = [0]
    for key, tensor in tensors.items():
        if key.startswith(ends) and key.endswith((".weight", "lora_embedding_A")) and "lora_A" not in key:
            sizes.append(tensor.shape[1] if key.endswith("lora_embedding_A") else tensor.shape[0])
    ids = [id for of in (trained.values() if isinstance(trained, dict) else [trained or []]) for id in of]
    return max(*sizes, max(ids) + 1 if ids and max(ids) >= len(embeddings.weight) else 0)


def _is_twice(key: str, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether a tensor of an adapter is also there under another name, as PEFT saves those of a resized vocabulary."""
    same = (other for name, other in tensors.items() if name != key and other.shape == tensors[key].shape)
    return any(torch.equal(other, tensors[key]) for other in same)


def _check_base(adapter: Path, base: str) -> None:
    """Raise WeightsError if an adapter that names the weights of its base is loaded on others.

    Not checked on a base with another adapter merged, which is no file.
    """
    file, folder = adapter / BASE_WEIGHTS, Path(base)
    if not file.is_file() or (folder / "adapter_config.json").is_file():
        return
    facts = read_json(file, str(adapter))
    if not folder.is_dir():
        folder = Path(str(cached_file(base, "config.json"))).parent
    found = {}
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as content:
            found[path.name] = hashlib.file_digest(content, "sha256").hexdigest()
    if not isinstance(facts, dict) or facts.get("sha256") != _hash_of(found):
        raise WeightsError(
            f"model {adapter}: was trained on other weights than those of {base} (SHA-256 in {BASE_WEIGHTS}): load it "
            "on the base that it was trained on, which is `base` in its run's folder"
        )


def name_base(adapter: Path, base: str) -> None:
    """Write the hash of the base's weights beside an adapter, if posttrain wrote them: then a manifest has it."""
    manifest = Path(base) / "manifest.json"
    if manifest.is_file():
        files = read_json(manifest, base)["files"]
        facts = {"sha256": _hash_of({name: entry["sha256"] for name, entry in files.items()})}
        (adapter / BASE_WEIGHTS).write_text(json.dumps(facts), encoding="utf-8")


def _hash_of(hashes: Mapping[str, str]) -> str:
    """One hash of a model's weights from the SHA-256 of its files."""
    weights = sorted((name, value) for name, value in hashes.items() if name.endswith(".safetensors"))
    return hashlib.sha256(json.dumps(weights).encode()).hexdigest()


def merged(adapted: PeftModel) -> PreTrainedModel:
    """The base model with its adapter added to its weights.

    Tied embeddings are untied if only one of them has the adapter, or each has its own: merging would change both.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    base = base_of(adapted)
    ends: list[Any] = [base.get_input_embeddings(), base.get_output_embeddings()]
    first, last = (cast(Any, end.get_base_layer() if isinstance(end, BaseTunerLayer) else end) for end in ends)
    shared = getattr(last, "weight", None) is first.weight
    if shared and any(isinstance(end, BaseTunerLayer) for end in ends):
        last.weight = torch.nn.Parameter(last.weight.detach().clone())
    whole = cast(PreTrainedModel, adapted.merge_and_unload())
    embeddings, head = (cast(Any, end) for end in (whole.get_input_embeddings(), whole.get_output_embeddings()))
    if shared and head.weight is not embeddings.weight:
        if getattr(adapted.peft_config["default"], "ensure_weight_tying", False):
            head.weight = embeddings.weight
        whole.config.tie_word_embeddings = head.weight is embeddings.weight
    return whole.requires_grad_(True)  # PEFT froze it; the merged model is fully trainable


def to_dtype(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Convert the weights, except those that transformers keeps in float32 for this dtype."""
    kept = set(model._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        kept |= set(model._keep_in_fp32_modules or ())
    for name, module in model.named_modules():
        if not kept & set(name.split(".")):
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                if tensor.is_floating_point():
                    tensor.data = tensor.data.to(dtype)


def _some(names: set[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")


@contextlib.contextmanager
def _no_report() -> Iterator[None]:
    """Context without transformers' table of missing and unexpected weights, which we check ourselves."""
    before = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()
    try:
        yield
    finally:
        hf_logging.set_verbosity(before)


@contextlib.contextmanager
def _clear_errors(model: ModelConfig, part: str) -> Iterator[None]:
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
        return f"has no tokenizer that transformers can load ({_first_line(error)})"
    return f"{part} cannot be loaded: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
