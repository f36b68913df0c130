"""CUDA graphs: work that a GPU repeats on the same addresses, launched by one call instead of kernel by kernel.

At 2k tokens, launching the thousands of kernels of a training pass takes longer than running them. `PackGraphs` replays
the backbone's passes over packs, forward and, with gradients, backward; heads and losses stay as they are. What differs
between packs (tokens, positions, ends, paths) is copied to fixed addresses. Gradients are added at fixed addresses too.

A pass is captured when a pack's sizes are met again, so the first passes, which compile kernels, run as usual. What is
captured is compared with an ordinary pass at once. If any bit differs, or if capturing fails, the run continues without
graphs, or without those of FlashAttention 4, and says so.
"""

import functools
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from posttrain.base.log import log
from posttrain.batch import Pack
from posttrain.config import RunConfig
from posttrain.models.attention import NARROWEST, PackedMask, lacking_for_triton, suits_paths
from posttrain.models.families import FAMILIES, UNKNOWN, backbone_of, base_of, head_size, trains_rows
from posttrain.models.nodes import Paths, rounded

MOST = 32  # passes of a kind (with gradients or not, with FlashAttention 4 or not) that are captured
FAILED: list[torch.cuda.CUDAGraph] = []  # kept, because the allocator refers to them
T = TypeVar("T")


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # one, because cuBLAS keeps a workspace for each


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Context that runs on another stream, as work must before it is captured."""
    if device.type != "cuda":
        yield
        return
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)


def capture(run: Callable[[], T], others: Iterable[torch.cuda.CUDAGraph]) -> tuple[torch.cuda.CUDAGraph, T]:
    """Capture what `run` launches, without running it. The graph shares the memory of `others`."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    pool: Any = next((other.pool() for other in others), None) or torch.cuda.graph_pool_handle()
    gc.collect()  # nodes of autograd that a reference cycle keeps belong to another stream
    is_done = False
    try:
        with torch.cuda.graph(graph, pool=pool):
            result = run()
        is_done = True
        return graph, result
    finally:
        if not is_done:  # if CUDA has ended the capture, PyTorch leaves its stream and its allocator as they were in it
            torch.cuda.set_stream(stream)
            with suppress(RuntimeError):  # raised if PyTorch has ended it
                torch._C._cuda_endAllocateToPool(stream.device_index, pool)
                torch._C._cuda_releasePool(stream.device_index, pool)
                FAILED.append(graph)


def addresses(weights: Iterable[Tensor]) -> list[tuple[Any, ...]]:
    """Return where the weights are; a graph reads them there."""
    return [(weight.data_ptr(), weight.dtype, weight.shape) for weight in weights]


def adapters_of(model: nn.Module) -> list[Any]:
    """Return the modules that have adapters."""
    return [module for module in model.modules() if hasattr(module, "merged_adapters") and hasattr(module, "scaling")]


def states_of(adapters: Iterable[Any]) -> tuple[Any, ...]:
    """Return which adapters are active and how much they add."""
    return tuple(
        (module.disable_adapters, *module.active_adapters, None, *module.merged_adapters, *module.scaling.items())
        for module in adapters
    )


def without_graphs(
    config: RunConfig, shape: PreTrainedConfig, dtype: torch.dtype, device: torch.device, ranks: int
) -> str | None:
    """Why a model's passes are not replayed as CUDA graphs; None if they may be."""
    if device.type != "cuda":
        return "they need a GPU"
    family, rollout, text = FAMILIES.get(shape.model_type, UNKNOWN), config.rollout, shape.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    ropes = {part.get("rope_type") for part in (rope, *rope.values()) if isinstance(part, dict)}
    by_rows = not family.packed or any(model.attention not in ("auto", "packed") for model in config.models)
    lacks_kernels = torch.cuda.is_available() and lacking_for_triton() is not None  # a plan may be for another machine
    head = head_size(text)
    colocated = config.method.samples_completions and rollout.engine == "vllm" and rollout.vllm.base_url is None
    reasons = {
        "training.cuda_graphs is false": not config.training.cuda_graphs,
        "there are several ranks": ranks > 1,
        "gradients are in CPU memory": config.training.optimizer == "adamw_cpu_offload",
        "attention runs without FlexAttention": dtype == torch.float32 or lacks_kernels,
        f"packs of {shape.model_type} are computed row by row": by_rows,
        f"{shape.model_type} has recurrent layers": family.recurrent,
        f"{shape.model_type} has experts": hasattr(text, "num_experts_per_tok"),
        "layers are dropped at random": getattr(text, "layerdrop", 0) > 0,
        "positions depend on the longest sequence": bool(ropes & {"dynamic", "longrope"}),
        "LoRA trains new tokens": any(model.lora is not None and model.new_tokens for model in config.models),
        f"heads of {head} are too narrow for FlexAttention": head < NARROWEST,
        "vLLM needs their memory": colocated,
    }
    return next((why for why, applies in reasons.items() if applies), None)


def padded(pack: Pack) -> Pack:
    """Return the pack with tokens that see only themselves, so that few widths occur."""
    tokens = len(pack.tokens_T)
    more = torch.arange(tokens, rounded(tokens, 8), device=pack.tokens_T.device)
    if not len(more):
        return pack
    tails = {"tokens_T": torch.zeros_like(more), "position_T": torch.zeros_like(more), "end_T": more + 1}
    return replace(pack, **{name: torch.cat([getattr(pack, name), tail]) for name, tail in tails.items()})


class _Key(NamedTuple):
    width: int
    sizes: tuple[int, ...]  # keys, nodes and longest path for FlashAttention 4; empty: FlexAttention
    learns: bool  # whether there is a backward pass
    mode: tuple[Any, ...]  # training or evaluation, and the state of adapters

    @property
    def room(self) -> tuple[int, ...]:
        """What the memory of a pass depends on: its width, and how many keys are gathered."""
        return self.width, *(self.sizes[:1] or (0,))


@dataclass(slots=True)
class _Pass:
    """A captured pass, and the tensors at its addresses. Other passes write to `hidden_T` and `grad_T` too."""

    pack: Pack
    paths: Paths | None
    forward: torch.cuda.CUDAGraph
    hidden_T: Tensor
    backward: torch.cuda.CUDAGraph | None = None
    grad_T: Tensor | None = None  # the gradient of hidden_T


class PackGraphs:
    """The backbone's passes over packs. `masters`: where the gradient of each trained weight is summed; empty: none."""

    NAME = "_posttrain_graphs"  # the model's attribute
    VARYING = ("tokens_T", "position_T", "end_T")

    def __init__(self, model: nn.Module, masters: Mapping[nn.Parameter, Tensor], eager_in_training: bool):
        """`eager_in_training`: whether passes in training mode sample random numbers that no graph can."""
        self._model, base = model, base_of(model)
        self._backbone, self._embeddings = backbone_of(base), base.get_input_embeddings()
        self._adapters, self._eager_in_training = adapters_of(model), eager_in_training
        inside = set(self._backbone.modules())
        others = {p for module in model.modules() if module not in inside for p in module._parameters.values()}
        self._trained = [p for p in self._backbone.parameters() if p in masters]
        self._outside = [p for p in self._trained if p in others]  # such as embeddings that are the head's weight too
        self._outside_masters = [masters[p] for p in self._outside]
        self._outside_grads: list[Tensor] = []  # their gradients of the last pass
        self._masters = [masters[p] for p in self._trained if p not in others]
        self._start = torch.zeros(0, requires_grad=bool(self._trained))  # an input that makes the hidden states learn
        self._weights = [*model.parameters(), *model.buffers()]
        self._addresses: list[tuple[Any, ...]] = []
        self._passes: dict[_Key, _Pass] = {}
        self._shared: dict[str, Tensor] = {}  # memory of all passes
        self._met: dict[_Key, tuple[int, Pack]] = {}  # how often, and the last pack
        self._waiting: weakref.ref[_Token] | None = None  # of the forward pass whose backward pass has not come yet
        self.is_off = trains_rows(self._embeddings)
        self._without_paths = False  # whether passes of FlashAttention 4 could not be captured
        text = base.config.get_text_config()
        self._takes_paths = suits_paths(head_size(text), getattr(text, "attn_logit_softcapping", None))
        self.replays = self.eager = 0  # passes that were replayed, and that were not
        self.kept: set[Tensor] = set()  # the masters whose gradients have fixed addresses
        model.__dict__[self.NAME] = self

    def states(self, pack: Pack) -> Tensor:
        """Return the last hidden states of a pack's tokens, with gradients if they are on: (T, D), and further rows, to
        which the pack is padded. The next pass may overwrite them."""
        pack = padded(pack)
        paths, learns = self._paths(pack), torch.is_grad_enabled() and self._start.requires_grad
        if (made := self._pass_for(pack, paths, learns)) is None:
            self.eager += 1
            return self._run(pack, paths)
        self.replays += 1
        torch._foreach_copy_(self._varying(made.pack, made.paths), self._varying(pack, paths))
        if learns:
            return _Replay.apply(self, made, self._start, *self._outside)
        made.forward.replay()
        return made.hidden_T

    def _pass_for(self, pack: Pack, paths: Paths | None, learns: bool) -> _Pass | None:
        """Return the captured pass that computes this pack, if there is one. It may be captured now."""
        is_off = self.is_off or (self._without_paths and paths is not None)
        if is_off or self._is_special() or (learns and self._waits()):
            return None
        if (now := addresses(self._weights)) != self._addresses:
            self.release()
            self._addresses = now
        sizes = () if paths is None else (len(paths.token_G), len(paths.query_M), paths.longest)
        key = _Key(len(pack.tokens_T), sizes, learns, self._mode())
        if key not in self._passes and not self._is_full(key):
            times, _ = self._met.get(key, (0, None))
            self._met[key] = times + 1, pack
            if times and not learns:  # those with gradients are captured between updates
                self._capture(key)
        return self._passes.get(key)

    def prepare(self) -> None:
        """Capture the passes with gradients that were met more than once, largest first: later ones fit into the memory
        of earlier ones. Call it before an update, while there are no gradients."""
        if self._waits():
            return
        mode, learning = self._mode(), [key for key in self._passes if key.learns]
        due = [key for key, (times, _) in self._met.items() if key.learns and times > 1 and key.mode == mode]
        if due and learning and max(due).room > max(learning).room:
            for key in learning:  # captured again after the larger one
                self._met[key] = 2, self._passes.pop(key).pack
            due += [key for key in learning if key.mode == mode]
        for key in sorted(due, reverse=True):
            if key in self._met and not (self.is_off or self._is_full(key)):
                self._capture(key)
        if self.is_off:
            for master in self.kept:
                master.grad = None
            self.kept.clear()

    def release(self) -> None:
        """Drop the graphs, and with them their memory."""
        for of in (self._passes, self._met, self._shared):
            of.clear()

    def forget(self) -> None:
        """Set the gradients of `kept` to 0."""
        if self.kept:
            torch._foreach_zero_([master.grad for master in self.kept if master.grad is not None])

    def _is_full(self, key: _Key) -> bool:
        kind = key.learns, bool(key.sizes)
        return sum((other.learns, bool(other.sizes)) == kind for other in self._passes) >= MOST

    def _mode(self) -> tuple[Any, ...]:
        return self._model.training, *states_of(self._adapters)

    def _is_special(self) -> bool:
        """Whether this pass cannot be captured: it samples random numbers that no graph can, calls hooks (NEFTune), or
        creates tensors that no other pass may change."""
        is_random = self._model.training and self._eager_in_training
        return is_random or bool(self._embeddings._forward_hooks) or torch.is_inference_mode_enabled()

    def _waits(self) -> bool:
        """Whether the backward pass of a replayed forward pass has not come yet, which needs that pass's memory."""
        return self._waiting is not None and self._waiting() is not None

    def _paths(self, pack: Pack) -> Paths | None:
        return PackedMask(pack).paths if self._takes_paths else None

    def _varying(self, pack: Pack, paths: Paths | None) -> list[Tensor]:
        return [*(getattr(pack, name) for name in self.VARYING), *([] if paths is None else [paths.numbers])]

    def _memory(self, use: str, like: Tensor) -> Tensor:
        """Return memory of this shape at addresses that all passes share."""
        if len(self._shared.get(use, ())) < len(like):
            self._shared[use] = like.new_empty(1 << (len(like) - 1).bit_length(), like.shape[1])  # so, few times
        return self._shared[use][: len(like)]

    def _run(self, pack: Pack, paths: Paths | None, out_T: Tensor | None = None) -> Tensor:
        """Return the hidden states of a pass; they are copied to `out_T` too."""
        inputs, mask = {"input_ids": pack.tokens_T[None], "position_ids": pack.position_T[None]}, PackedMask(pack)
        mask.paths = paths
        hidden_T = self._backbone(**inputs, use_cache=False, packed=mask).last_hidden_state[0]
        if out_T is not None:
            out_T.copy_(hidden_T.detach())
        return hidden_T

    def _backward(self, hidden_T: Tensor, grad_T: Tensor) -> None:
        """Add to the masters' gradients. Those of weights that are used outside too go to `_outside_grads`, because
        autograd sums them with the others in the weights' dtype, as in an ordinary pass."""
        hidden_T.backward(grad_T)
        for master, grad in zip(self._outside_masters, self._outside_grads, strict=True):
            grad.zero_() if master.grad is None else grad.copy_(master.grad)
            master.grad = None

    def _capture(self, key: _Key) -> None:
        _, pack = self._met.pop(key)
        try:
            self._passes[key] = self._captured(pack, key.learns)
            log.debug("captured a pass of %d tokens as a CUDA graph", key.width)
        except Exception as error:  # of PyTorch, Triton or a library that the model calls
            self.release()
            self._without_paths, self.is_off = bool(key.sizes), not key.sizes
            if key.learns:
                for tensor in (*self._masters, *self._outside_masters, *self._trained):
                    tensor.grad = None
                self.kept.clear()
            of = " of FlashAttention 4" if key.sizes else ""
            log.warning("training continues without CUDA graphs%s: %s", of, str(error).strip().partition("\n")[0])

    def _captured(self, pack: Pack, learns: bool) -> _Pass:
        """Capture a pass. Raises RuntimeError if PyTorch cannot, or if a replay differs from an ordinary pass."""
        pack = replace(pack, **{name: getattr(pack, name).clone() for name in self.VARYING})
        device, paths = pack.tokens_T.device, self._paths(pack)
        others = [made.forward for key, made in self._passes.items() if key.learns is learns]
        if learns and not self._outside_grads:
            self._outside_grads = [torch.zeros_like(weight) for weight in self._outside]
        with same_numbers(device):
            with beside(device):
                want = self._run(pack, paths)
                out_T = self._memory("hidden states", want)
                grad_T = self._memory("gradients", want).copy_(want.detach()) if learns else None  # any gradient
                if grad_T is not None:
                    self._backward(want, grad_T)
                want = want.detach()
            given = [master for master in self._masters if learns and master.grad is not None]
            outside = self._outside_grads if learns else []
            norms = norms_of(given, outside)
            for master in given:
                if master not in self.kept:
                    master.grad = torch.zeros_like(master)
            self.kept.update(given)
        with same_numbers(device):
            forward, hidden_T = capture(lambda: self._run(pack, paths, out_T), others)
            made = _Pass(pack, paths, forward, out_T, grad_T=grad_T)
            if grad_T is not None:
                made.backward, _ = capture(lambda: self._backward(hidden_T, grad_T), [forward])
                self.forget()
                for grad in outside:
                    grad.zero_()
        with same_numbers(device):
            forward.replay()
            if made.backward is not None:
                made.backward.replay()
        is_same = torch.equal(made.hidden_T, want) and torch.equal(norms_of(given, outside), norms)
        if learns:
            self.forget()
        if not is_same:
            raise RuntimeError("a replayed pass differs from an ordinary one")
        return made


def norms_of(masters: Iterable[Tensor], grads: Iterable[Tensor]) -> Tensor:
    """Return the norms of the masters' gradients, and of others."""
    grads = [*(master.grad for master in masters if master.grad is not None), *grads]
    return torch.stack(torch._foreach_norm(grads)) if grads else torch.zeros(0)


class _Token:
    """Lives as long as a replayed forward pass may still be followed by its backward pass."""


class _Replay(torch.autograd.Function):
    """A captured pass: its forward, and in backward the gradients of all weights."""

    @staticmethod
    def forward(ctx, graphs: PackGraphs, made: _Pass, start: Tensor, *outside: Tensor) -> Tensor:
        made.forward.replay()
        ctx.graphs, ctx.made, ctx.token = graphs, made, _Token()
        graphs._waiting = weakref.ref(ctx.token)
        return made.hidden_T.detach()

    @staticmethod
    def backward(ctx, *grad_outputs):
        made, [grad_T] = ctx.made, grad_outputs
        if ctx.graphs._waiting is None or ctx.graphs._waiting() is not ctx.token:
            raise RuntimeError("the memory of this pass was used again: a replayed pass has one backward pass")
        made.grad_T.copy_(grad_T)
        made.backward.replay()
        ctx.graphs._waiting = None
        return None, None, None, *(grad.clone() for grad in ctx.graphs._outside_grads)


@contextmanager
def same_numbers(device: torch.device) -> Iterator[None]:
    """Context that leaves the device's random numbers as they were."""
    module: Any = torch.cuda if device.type == "cuda" else torch
    state = module.get_rng_state()
    try:
        yield
    finally:
        module.set_rng_state(state)
