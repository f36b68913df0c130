"""Low-rank adapters with PEFT, with target modules chosen per family."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from posttrain.base.errors import DamagedError, ModelError
from posttrain.config.schema.model import LoraConfig, ModelConfig
from posttrain.config.schema.run import RunConfig
from posttrain.models.adapters import START, attach, name_base
from posttrain.models.families import FAMILIES, UNKNOWN, backbone_of, base_of, is_adapted
from posttrain.models.files import adapter_config
from posttrain.models.load import Head, grow, load_config, new_token_ids
from posttrain.models.matmul import apart
from posttrain.models.quantised import CLASSES, weight_of

if TYPE_CHECKING:
    from peft import PeftModel

# Entries of adapter_config.json that describe where an adapter comes from, not what it computes.
ABOUT = ("base_model_name_or_path", "revision", "task_type", "inference_mode", "auto_mapping", "peft_version")


def add_lora(
    model: PreTrainedModel, lora: LoraConfig, head: Head, revision: str | None = None, tokens: Sequence[int] = ()
) -> PeftModel:
    """Add trainable adapters to `model` and freeze everything else. A reward model's head is trained and saved too.

    The rows of `tokens` in the embeddings and the LM head are trained; modules to save are trained whole. The adapters
    name the model, at its `revision`, as their base. Raises ModelError if a target module matches no module, or one
    that cannot have adapters.
    """
    from peft import LoraConfig as PeftLoraConfig
    from peft import PeftModel, TaskType, get_peft_model

    targets, saved = target_modules(model, lora), _saved_whole(model, lora)
    tied = model.config.tie_word_embeddings and model.get_output_embeddings() is not None
    config = PeftLoraConfig(
        revision=revision,
        r=lora.r,
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]  (PEFT annotates int; the scale is a quotient)
        lora_dropout=lora.dropout,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        target_modules=targets,
        exclude_modules=routers(model) or None,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        task_type=TaskType.CAUSAL_LM if head == "lm" else TaskType.SEQ_CLS,
        modules_to_save=saved or None,
        ensure_weight_tying=tied and bool(_ends(model) & {*saved}),
        trainable_token_indices=_trained_rows(model, tokens, saved),
    )
    # The adapters take the model's dtype; the optimizer holds their float32 masters.
    try:
        adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
    except (TypeError, ValueError) as error:
        if not saved:
            raise
        raise ModelError(f"lora.modules_to_save: {error}") from error
    assert isinstance(adapted, PeftModel)
    return adapted


def _ends(model: PreTrainedModel) -> set[str]:
    """Return the last component of the names of the embeddings and, unless tied to them, of the LM head."""
    head = None if model.config.tie_word_embeddings else model.get_output_embeddings()
    ends = [end for end in (model.get_input_embeddings(), head) if end is not None]
    return {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if any(module is end for end in ends)}


def _saved_whole(model: PreTrainedModel, lora: LoraConfig) -> list[str]:
    """Return PEFT's modules to save. The embeddings replace a tied LM head, because PEFT ties the head to them."""
    _match("lora.modules_to_save", lora.modules_to_save, model)
    head = model.get_output_embeddings()
    if head is None or not model.config.tie_word_embeddings:
        return [*lora.modules_to_save]
    tied = {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if module is head}
    [embeddings] = _ends(model)
    return list(dict.fromkeys(embeddings if name in tied else name for name in lora.modules_to_save))


def _trained_rows(model: PreTrainedModel, tokens: Sequence[int], saved: Sequence[str]) -> dict[str, list[int]] | None:
    """Return the rows to train, in PEFT's format, of embeddings and LM head, unless these are trained whole."""
    ends = sorted(_ends(model) - {*saved})
    if not tokens or not ends:
        return None
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise ModelError(
            f"model.new_tokens: the LM head of {model.config.model_type} has a bias, whose new rows LoRA does not "
            "train: use full fine-tuning"
        )
    return {name: [*tokens] for name in ends}


def load_lora(model: PreTrainedModel, folder: Path) -> PeftModel:
    """Load the adapters of a checkpoint onto `model`, trainable, and set the model's name as their base.

    Raises DamagedError if they are missing, damaged, or differ from their adapter_config.json.
    """
    file = folder / "adapter_model.safetensors"
    try:
        if not file.is_file():
            raise OSError("it is missing")
        adapted, differences = attach(model, str(folder), trainable=True)
    except (OSError, ValueError, SafetensorError) as error:
        raise DamagedError(f"{file.name}: {error}") from error
    except RuntimeError as error:
        if "size mismatch" not in str(error):
            raise
        raise DamagedError(f"{file.name}: tensor shapes differ from those of adapter_config.json") from error
    if differences:
        raise DamagedError(f"{file.name}: {differences}")
    adapted.peft_config["default"].base_model_name_or_path = model.name_or_path
    return adapted


def continues(config: RunConfig, model: ModelConfig) -> bool:
    """Whether a run continues to train the adapter that it starts from: the adapter's settings equal `model.lora`.

    Otherwise, with another start than PEFT's (`lora.init`), and in runs of behavior_version 1, the adapter is merged
    into its base, and a new one is trained.
    """
    saved = adapter_config(model.path)
    if saved is None or model.lora is None or model.lora.init != "default" or config.behavior_version < 2:
        return False
    saved = {"trainable_token_indices": None} | saved  # earlier versions of PEFT did not write this entry
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(load_config(model), trust_remote_code=model.trust_remote_code)
        grow(empty, model)
    wanted = add_lora(empty, model.lora, "lm", tokens=new_token_ids(model)).peft_config["default"].to_dict()
    return all(key in ABOUT or key not in saved or _plain(saved[key]) == _plain(value) for key, value in wanted.items())


def _plain(value: Any) -> Any:
    """Return a value of adapter_config.json, with lists of names sorted and without a reward model's head."""
    if isinstance(value, list | tuple | set):
        return sorted(str(item) for item in value if item not in ("score", "classifier")) or None
    return value


@torch.no_grad()
def set_start(
    adapted: PeftModel, lora: LoraConfig, published: PreTrainedModel | None = None, resumed: bool = False
) -> None:
    """Give new adapters the start that `lora.init` names, and add a frozen copy of it, START.

    PiSSA and OLoRA subtract the start from the base's weights, which are rounded to their dtype, so that both together
    are the published model. The adapters of a checkpoint contain both (`save`) and are separated again. LoftQ
    approximates what 4 bits lost of the `published` model. Raises ModelError for a layer that cannot start like this.
    """
    from peft.tuners.lora import LoraLayer

    config: Any = adapted.peft_config["default"]
    config.r, config.lora_alpha = lora.r, lora.alpha
    frozen = copy.deepcopy(config)
    frozen.modules_to_save = frozen.trainable_token_indices = None
    with torch.random.fork_rng(devices=[]):  # its random values are replaced
        adapted.add_adapter(START, frozen, autocast_adapter_dtype=False)
    frozen.init_lora_weights = lora.init  # for `save`
    layers: dict[str, Any] = {name: m for name, m in base_of(adapted).named_modules() if isinstance(m, LoraLayer)}
    for name, layer in layers.items():
        if START not in layer.lora_A:
            raise ModelError(f"model.lora.init: {lora.init} is for linear layers, but {name} is an embedding layer")
        base, (A, B) = layer.get_base_layer(), (part["default"].weight for part in (layer.lora_A, layer.lora_B))
        layer.r["default"], layer.scaling["default"] = lora.r, layer.scaling[START]
        if resumed and lora.is_subtracted:
            (A.data, start_A), (B.data, minus_B) = (part.data.chunk(2, dim) for dim, part in enumerate((A, B)))
            start_B = -minus_B
        else:
            weight = weight_of(base).float()
            if published is not None:
                weight = weight_of(published.get_submodule(name)).to(weight) - weight
            elif type(base).__name__ in CLASSES:
                raise ModelError(f"model.lora.init: {lora.init} changes weights, but those of {name} are quantised")
            if lora.r > min(weight.shape):
                raise ModelError(f"model.lora.init: {lora.init} needs a lora.r of at most {min(weight.shape)} ({name})")
            start_A, start_B = (each.to(A.dtype) for each in start_factors(weight, lora, layer.scaling[START]))
            if not resumed:
                A.data, B.data = start_A, start_B
        for part, own, start in ((layer.lora_A, A, start_A), (layer.lora_B, B, start_B)):
            part[START].weight.copy_(start)
            own.data = own.data.contiguous()  # the layout of START's, for products that are equal to the bit
        if lora.is_subtracted:
            product = layer.scaling[START] * (start_B.float() @ start_A.float())
            rest = base.weight.float() - (product.T if isinstance(base, Conv1D) else product)
            base.weight.data = rest.to(base.weight.dtype)
    for name, parameter in adapted.named_parameters():
        if f".{START}." in name:
            parameter.requires_grad_(False)


def start_factors(weight: Tensor, lora: LoraConfig, scaling: float) -> tuple[Tensor, Tensor]:
    """Return A (r, inputs) and B (outputs, r) for a weight W (outputs, inputs) = U S V' (SVD) = Q R.

    PiSSA (arXiv 2404.02948, eq. 2 and 3): A = √(S/scaling) V' and B = U √(S/scaling), of the r largest singular values;
    `pissa_niter_N` finds them by N subspace iterations. LoftQ (arXiv 2310.08659, eq. 6) does the same with the rounding
    error as W. OLoRA (arXiv 2406.01775): A = R and B = Q, of the first r columns of Q.
    """
    r = lora.r
    if lora.init == "olora":
        Q, R = torch.linalg.qr(weight)
        return R[:r], Q[:, :r]
    if lora.init.startswith("pissa_niter_"):
        U, S, V = torch.svd_lowrank(weight, r, niter=int(lora.init.rpartition("_")[2]))
        Vh = V.T
    else:
        U, S, Vh = torch.linalg.svd(weight, full_matrices=False)
    root_r = (S[:r] / scaling).sqrt()
    return root_r[:, None] * Vh[:r], U[:, :r] * root_r


@contextmanager
def as_at_start(policy: PeftModel) -> Iterator[None]:
    """Context with the policy as its run began: with the frozen START of its adapter, or without adapters."""
    if START not in policy.peft_config:
        with policy.disable_adapter():
            yield
        return
    policy.set_adapter(START)
    try:
        yield
    finally:
        policy.set_adapter("default")


def save(model: nn.Module, folder: Path, state_dict: dict[str, Tensor] | None = None) -> None:
    """Write a model in the format of transformers or PEFT. For a PEFT model, only the adapter is written, with the hash
    of its base's weights if posttrain wrote the base. `state_dict`: the weights, if the model is sharded.

    If the base lacks the adapter's start, an adapter of the published base is written: of twice the rank, with
    [A; A0] and [B, -B0] for A, B and a start of A0, B0."""
    if not is_adapted(model):
        return model.save_pretrained(str(folder), state_dict=state_dict or apart(model))  # pyright: ignore[reportCallIssue]
    name_base(folder, str(base_of(model).name_or_path))
    config: Any = model.peft_config["default"]
    written = copy.copy(config)
    start = getattr(model.peft_config.get(START), "init_lora_weights", "")
    if str(start).startswith(("pissa", "olora")):  # subtracted from the base (`set_start`)
        state_dict = _with_start(model.state_dict() if state_dict is None else state_dict)
        written.r, written.lora_alpha = 2 * config.r, config.lora_alpha * (math.sqrt(2) if config.use_rslora else 2)
    # With rows that are trained, the others are those of the base.
    embeddings = False if getattr(config, "trainable_token_indices", None) else "auto"
    how: dict[str, Any] = {"selected_adapters": ["default"], "save_embedding_layers": embeddings}
    model.peft_config["default"] = written
    try:
        model.save_pretrained(str(folder), state_dict=state_dict, **how)
    finally:
        model.peft_config["default"] = config


def _with_start(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights with both parts, the trained one first, in place of the trained A and B."""
    state = dict(state)
    for A in [name for name in state if ".lora_A.default." in name]:
        B = A.replace(".lora_A.", ".lora_B.")
        state[A] = torch.cat([state[A], state[A.replace(".default.", f".{START}.")]])
        state[B] = torch.cat([state[B], -state[B.replace(".default.", f".{START}.")]], dim=1)
    return state


def target_modules(model: PreTrainedModel, lora: LoraConfig) -> list[str] | str:
    """Return PEFT's target modules: the family's (`auto`), all linear layers but the head (`all-linear`), or a list."""
    if lora.target_modules == "all-linear":
        return "all-linear"
    if lora.target_modules == "auto":
        return list(FAMILIES.get(model.config.model_type, UNKNOWN).lora_targets) or linear_layers(model)
    _match("lora.target_modules", lora.target_modules, model)
    _refuse_ends(model, lora.target_modules)
    return list(lora.target_modules)


def _match(setting: str, targets: Sequence[str], model: PreTrainedModel) -> None:
    """Raise ModelError for names that match no module."""
    names = [name for name, _ in model.named_modules()]
    unmatched = [t for t in targets if not any(name == t or name.endswith(f".{t}") for name in names)]
    if unmatched:
        raise ModelError(
            f"{setting}: {', '.join(unmatched)} match no module of {model.config.model_type}; "
            f"its linear layers are {', '.join(linear_layers(model))}"
        )


def _refuse_ends(model: PreTrainedModel, targets: Sequence[str]) -> None:
    """Raise ModelError for adapters on the LM head, which is applied in chunks without them, or on tied embeddings."""
    head = model.get_output_embeddings()
    ends = {"the LM head": head}
    if head is not None and model.config.tie_word_embeddings:
        ends["the embedding layer, which shares its weights with the LM head"] = model.get_input_embeddings()
    for name, module in model.named_modules():
        what = next((what for what, end in ends.items() if end is module), None)
        if what and any(name == target or name.endswith(f".{target}") for target in targets):
            raise ModelError(f"lora.target_modules: {name} cannot have adapters here: it is {what}; remove it")


def linear_layers(model: PreTrainedModel) -> list[str]:
    """Return the last component of the names of the backbone's linear layers."""
    modules = backbone_of(model).named_modules()
    layers = {name.rpartition(".")[2] for name, m in modules if isinstance(m, nn.Linear | Conv1D)}
    return sorted(layers - {*routers(model)})


def routers(model: nn.Module) -> list[str]:
    """Return the last component of the names of the linear layers that route tokens to experts (Phi-MoE): they return
    several tensors, to which PEFT cannot add an adapter's."""
    found = (name for name, m in model.named_modules() if isinstance(m, nn.Linear) and "Router" in type(m).__name__)
    return sorted({name.rpartition(".")[2] for name in found})
