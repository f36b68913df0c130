"""Models and tokenizers from the hub or a folder, loaded by transformers, with errors that name the remedy."""

import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, cast

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as hf_logging

from posttrain.base.errors import ModelError, WeightsError
from posttrain.base.imports import need
from posttrain.config.schema.model import ModelConfig
from posttrain.models import attention
from posttrain.models.adapters import base_settings, is_adapter, merged, saved_config, with_adapter
from posttrain.models.attention import NAME as PACKED
from posttrain.models.families import FAMILIES, UNKNOWN, base_of, use_triton
from posttrain.models.files import check_adapter_weights, check_file, check_indexes, clear_errors, found_file, some
from posttrain.models.lean import TORCH, Kernels, lean
from posttrain.models.matmul import place
from posttrain.models.quantised import check_int8, method_of, nf4

# transformers' progress bars appear on every load and save; ours cover long waits.
hf_logging.disable_progress_bar()
# PEFT uses a deprecated name of transformers. Users cannot change that.
warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)

Head = Literal["lm", "reward"]


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer (an adapter without one has its base's, with its own template); add `new_tokens`."""
    kinds = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
    if is_adapter(model) and not any(any(Path(model.path).glob(kind)) for kind in kinds):
        tokenizer, template = load_tokenizer(base_settings(model)), Path(model.path) / "chat_template.jinja"
        if template.is_file():
            tokenizer.chat_template = template.read_text(encoding="utf-8")
        return tokenizer
    with clear_errors(model, "tokenizer"):
        for name in ("config.json", "tokenizer_config.json", "tokenizer.json"):  # transformers also reads the first
            check_file(model.path, model.revision, name)
        tokenizer = AutoTokenizer.from_pretrained(model.path, **_source(model))
        tokenizer.add_tokens([*model.new_tokens])  # known tokens keep their ids
        return tokenizer


def new_token_ids(model: ModelConfig) -> list[int]:
    """Return the ids of the model's `new_tokens`, ascending."""
    ids = cast(list[int], load_tokenizer(model).convert_tokens_to_ids([*model.new_tokens])) if model.new_tokens else []
    return sorted(ids)


def grow(loaded: PreTrainedModel, model: ModelConfig) -> None:
    """Initialise embeddings and LM head rows of `new_tokens` that the tokenizer lacked, to the mean of all others.

    Embeddings are added if there are fewer than token ids. A model that was saved with its new tokens is not changed.
    """
    if not model.new_tokens:
        return
    known = load_tokenizer(model.model_copy(update={"new_tokens": ()})).get_vocab()
    words, size = load_tokenizer(model).get_vocab(), len(cast(Any, loaded.get_input_embeddings()).weight)
    needed = max(words.values()) + 1
    new = {id for token, id in words.items() if token not in known or id >= size}
    if needed > size:
        with torch.random.fork_rng(devices=[]):  # otherwise a resumed run would have different random numbers
            loaded.resize_token_embeddings(needed, mean_resizing=False)
    ends = [end for end in (loaded.get_input_embeddings(), loaded.get_output_embeddings()) if end is not None]
    old = sorted({id for id in known.values() if id < size} - new)
    tensors = {tensor for end in ends for tensor in end.parameters(recurse=False) if not tensor.is_meta}
    with torch.no_grad():
        for tensor in tensors if new else ():
            tensor[sorted(new)] = tensor[old].float().mean(0).to(tensor.dtype)


def load_model(
    model: ModelConfig,
    head: Head,
    dtype: torch.dtype,
    device: torch.device,
    stay: bool = False,
    dequantised: bool = False,
) -> PreTrainedModel:
    """Load the model with an LM head, or with one scalar output (`reward`), in evaluation mode on `device`.

    With `stay` it is left in CPU memory, ready to be moved to `device`. Its `new_tokens` are added.

    From a folder with a LoRA adapter, the base model is loaded and the adapter merged. A missing reward head is
    initialised from a normal distribution with standard deviation 0.02. `load_in_4bit` quantises linear layers to 4
    bits (NF4 with double quantisation). Quantised weights are loaded unchanged, or `dequantised`; an adapter is added
    to quantised weights but not merged.
    """
    check_attention(model, device)
    chains, settings = chains_for(model, device), None
    if model.load_in_4bit:
        need("bitsandbytes", "quant", "model.load_in_4bit")
        settings = nf4(dtype)
    base = base_settings(model)
    loaded, method = _as_published(model, head, dtype, device, settings)
    if method is not None and dequantised:
        loaded, method = loaded.dequantize(dtype), None
        loaded._weight_conversions = None  # otherwise it would be saved as 4-bit tensors
    quantised = settings is not None or method is not None
    if base is not model and not quantised:
        loaded = merged(with_adapter(loaded, model))
    if quantised and model.new_tokens:
        raise ModelError(f"model {model.path}: model.new_tokens cannot be added to quantised weights")
    grow(loaded, model)
    if use_packed(model, loaded):
        loaded.set_attn_implementation(PACKED)
    lean(loaded, chains)
    if takes_triton(model, device):
        use_triton(loaded)
    if base is not model and quantised:  # merging would round the sum to 4 bits
        loaded = base_of(with_adapter(loaded, model)).requires_grad_(False)
    loaded.name_or_path = model.path
    if quantised:
        keep_storage(loaded)
    elif not stay:
        torch.nn.Module.to(loaded, device)
        if device.type == "cuda":
            place(loaded, bases=True)
    return loaded.eval()


def _as_published(
    model: ModelConfig, head: Head, dtype: torch.dtype, device: torch.device, quantisation: BitsAndBytesConfig | None
) -> tuple[Any, str | None]:
    """Load a model, or the base of an adapter, as published. Also return the quantisation method of the published
    weights, or None. `quantisation`: settings for quantising the weights while loading."""
    base = base_settings(model)
    config = load_config(base)
    if head == "lm" and is_reward_model(model):
        raise ModelError(f"model {model.path}: is a reward model, which scores completions and cannot generate them")
    if head == "lm" and any(name.endswith("ForMaskedLM") for name in config.architectures or []):
        raise ModelError(
            f"model {model.path}: is a masked language model, which predicts masked tokens and cannot generate"
        )
    auto: Any = AutoModelForCausalLM
    if head == "reward":
        auto, config.num_labels = AutoModelForSequenceClassification, 1
    source = _source(base) | {"use_safetensors": None if base.allow_pickle else True}
    source["attn_implementation"] = None if base.attention in ("auto", "packed") else base.attention
    method = method_of(config)
    if method == "bitsandbytes":
        need("bitsandbytes", "quant", f"model {base.path}: its weights are quantised, which")
        if cast(Any, config).quantization_config.get("load_in_8bit"):
            check_int8(device)
    if quantisation is not None:
        source["quantization_config"] = quantisation
    if quantisation is not None or method is not None:
        source["device_map"] = {"": device}
    check_indexes(base.path)
    if found_file(base.path, "adapter_config.json", base.revision) is not None:  # transformers also loads it
        check_adapter_weights(base.path, base.revision, base.allow_pickle)
    check_file(base.path, base.revision, "generation_config.json")
    with clear_errors(base, "weights"), ExitStack() as quiet:
        quiet.callback(hf_logging.set_verbosity, hf_logging.get_verbosity())
        hf_logging.set_verbosity_error()  # no table of missing and unexpected weights: they are checked here
        loaded, info = auto.from_pretrained(base.path, config=config, dtype=dtype, output_loading_info=True, **source)
    missing = {name for name in info["missing_keys"] if not (head == "reward" and name.startswith("score."))}
    if missing:
        raise WeightsError(f"{base.path}: the weights lack {some(missing)}, which {type(loaded).__name__} needs")
    if head == "reward" and "score.weight" in info["missing_keys"]:
        torch.nn.init.normal_(loaded.score.weight, std=0.02)
    return loaded, method


def check_embeddings(loaded: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: str) -> int:
    """Return the number of the model's embeddings. Raises ModelError if its tokenizer's own vocabulary is larger.

    Added tokens (a pad token, one for images) may lack an embedding as long as they do not occur.
    """
    embeddings = len(cast(torch.nn.Embedding, loaded.get_input_embeddings()).weight)  # PEFT's wrappers have it too
    ends = cast(list[int | None], [tokenizer.bos_token_id, tokenizer.eos_token_id])
    largest = max([tokenizer.vocab_size - 1, *(id for id in ends if id is not None)])
    if largest >= embeddings:
        raise ModelError(
            f"{path}: its tokenizer has token ids up to {largest:,}, but the model has {embeddings:,} embeddings: use "
            "the tokenizer that it was trained with"
        )
    return embeddings


def use_packed(model: ModelConfig, loaded: PreTrainedModel) -> bool:
    """Whether the model takes packs directly: its family is proven, and no other attention is set. Raises ModelError if
    `packed` is set for a family that is not proven."""
    proven = FAMILIES.get(loaded.config.model_type, UNKNOWN).packed
    if model.attention == "packed" and not proven:
        names = ", ".join(name for name, facts in FAMILIES.items() if facts.packed)
        raise ModelError(
            f"{model.path}: attention `packed` is proven for {names}; {loaded.config.model_type} needs `auto`"
        )
    return proven and model.attention in ("auto", "packed")


def is_reward_model(model: ModelConfig) -> bool:
    """Whether a folder or hub id holds a sequence classifier, plain or as an adapter."""
    adapter = saved_config(model)
    if adapter is not None:
        return adapter.get("task_type") == "SEQ_CLS"
    return any(name.endswith("ForSequenceClassification") for name in load_config(model).architectures or [])


def _source(model: ModelConfig) -> dict[str, Any]:
    return {"revision": model.revision or "main", "trust_remote_code": model.trust_remote_code}


def load_config(model: ModelConfig) -> PreTrainedConfig:
    """Load the config.json of a model, or of an adapter's base. Raises ModelError for models that are not text-only."""
    model = base_settings(model)
    with clear_errors(model, "config.json"):
        check_file(model.path, model.revision, "config.json")
        config = AutoConfig.from_pretrained(model.path, **_source(model))
    for part in ("vision_config", "audio_config"):
        if getattr(config, part, None) is not None:
            raise ModelError(
                f"{model.path} ({config.model_type}) has a {part.split('_')[0]} part: posttrain trains text models only"
            )
    return config


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


def keep_storage(loaded: PreTrainedModel) -> None:
    """Prevent bitsandbytes from converting 4-bit weights to another layout on the first forward on a CPU with bfloat16.

    That layout is for generation: it has no backward, and the frozen weights of a run must not change.
    """
    for module in loaded.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.__dict__["support_avx512bf16_for_cpu"] = False  # a plain attribute that nn.Module does not type


def chains_for(model: ModelConfig, device: torch.device) -> Kernels:
    """Return the element-wise chains: Liger's if set, otherwise ours in Triton on a GPU, otherwise PyTorch's.

    Norms and gated MLPs come from Liger (arXiv 2410.10989), but not its cross-entropy: no full logits are computed.
    """
    own = TORCH
    if takes_triton(model, device):
        from posttrain.models.kernels import layers  # needs Triton, which comes with PyTorch for CUDA

        own = Kernels.of(layers)
    if not model.use_liger_kernel:
        return own
    if device.type != "cuda":
        raise ModelError(
            f"model.use_liger_kernel: its kernels are for GPUs, but this run computes on {device.type}: set it to false"
        )
    norm = need("liger_kernel.ops.rms_norm", "liger", "model.use_liger_kernel").LigerRMSNormFunction
    swiglu = need("liger_kernel.ops.swiglu", "liger", "model.use_liger_kernel").LigerSiLUMulFunction
    how = 0.0, "llama", False  # offset of the weight, casting mode, in place
    return Kernels(lambda x, weight, eps: norm.apply(x, weight, eps, *how), swiglu.apply, own.rotated, None)


def takes_triton(model: ModelConfig, device: torch.device) -> bool:
    """Whether a model on this device uses the kernels of models/kernels."""
    can_compile = not torch.cuda.is_available() or attention.lacking_for_triton() is None  # a plan has no GPU
    return model.triton_kernels and device.type == "cuda" and can_compile


def check_attention(model: ModelConfig, device: torch.device) -> None:
    """Check that flash_attention_2 has its package and a GPU, with a clearer message than transformers gives. Warn if
    attention over packs on a GPU runs without FlexAttention."""
    if device.type == "cuda" and model.attention != "flash_attention_2":
        attention.announce_without_flex()
    if model.attention == "flash_attention_2":
        need("flash_attn", "flash-attn", "model.attention: flash_attention_2")
        if device.type != "cuda":
            raise ModelError(
                f"model.attention: flash_attention_2 is for GPUs, but this run computes on {device.type}: set auto"
            )
