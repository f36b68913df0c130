"""vLLM in this process: pushed weights are tagged with a mark, and requests name the mark."""

import gc
import json
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from posttrain.base.errors import ConfigError, ModelError, VitalSignError, is_out_of_memory
from posttrain.base.imports import installing, need
from posttrain.base.words import first_line
from posttrain.engines.cache import numbers_per_token
from posttrain.engines.protocol import Request, Sampling, StopTexts
from posttrain.models.families import head_size, positions_of

VERSIONS = ("0.32",)  # supported versions of vLLM, whose internals change between versions
MAX_ROWS = 256  # maximum number of live completions
CACHE_BYTES = 2 << 30  # maximum size of keys and values in main memory
CPU_BLOCK = 32  # tokens per shared block of the cache; with vLLM's default of 128, few prompts would be shared
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the model must be in this process to receive weights
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the newer runner has a different interface for logits processors
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # one token more than the model has positions: the last token needs none
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer's threads are in this process too
}
PATIENCE_S = 0.5  # seconds that a call waits for another call's step before it sends a heartbeat
ARGUMENT = "posttrain"  # the name under which processor.py finds a request's (sampling, seed, number)


@dataclass(frozen=True, slots=True)
class RawCompletion:
    """A completion before the engine adds the version of its weights."""

    tokens: list[int]
    logprobs: list[float]
    stopped: bool


def import_vllm() -> ModuleType:
    """Import vLLM. Raises ConfigError if it is not installed, does not load, or has an unsupported version."""
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    vllm = need("vllm", "vllm", "rollout.engine: vllm")
    if not vllm.__version__.startswith(VERSIONS):
        raise ConfigError(
            f"rollout.engine: vllm works with vLLM {' and '.join(VERSIONS)}, but {vllm.__version__} is installed: "
            f"{installing('vllm')}"
        )
    return vllm


class Core:
    """A model in vLLM. It has no weights until the first `load`. Stop strings need a `tokenizer`. Several threads may
    call `generate`. Their requests run together, and any of the threads may run the next step."""

    def __init__(
        self,
        config: PreTrainedConfig,
        architecture: str,
        dtype: torch.dtype,
        *,
        gpu_memory_utilization: float,
        tokenizer: PreTrainedTokenizerBase | None = None,
        beside_trainer: bool = False,
    ):
        vllm = import_vllm()
        _check_model(vllm, config, architecture, beside_trainer)
        self.version: str = vllm.__version__
        self.tokenizer, self.mark = tokenizer, ""
        self._lock, self._calls = threading.RLock(), 0  # the engine's lock, and the number of calls so far
        self._outputs: dict[int, list[Any]] = {}  # outputs of each running call, from steps of other calls
        self.prefilled = 0  # number of prompt tokens that went through the model, for tests
        threads, set_num_threads = torch.get_num_threads(), torch.set_num_threads
        with TemporaryDirectory(prefix="posttrain-vllm-") as folder:
            settings = config.to_dict() | {"architectures": [architecture]}
            (Path(folder) / "config.json").write_text(json.dumps(settings, default=str), encoding="utf-8")
            try:
                self.engine = vllm.LLMEngine.from_engine_args(
                    vllm.EngineArgs(
                        model=folder,
                        skip_tokenizer_init=True,
                        load_format="dummy",
                        dtype=str(dtype).removeprefix("torch."),
                        generation_config="vllm",  # ignore the model's own defaults
                        enable_prefix_caching=True,  # a prompt is computed once for all its completions
                        logprobs_mode="processed_logits",
                        logits_processors=["posttrain.engines.vllm.processor:SamplingProcessor"],
                        async_scheduling=False,  # the processor reads the tokens sampled so far
                        max_num_seqs=MAX_ROWS,
                        disable_log_stats=True,
                        **_memory(config, dtype, gpu_memory_utilization),
                    )
                )
            except (ValueError, RuntimeError, AssertionError) as error:
                raise ModelError(f"vLLM cannot run this {config.model_type}: {first_line(error)}") from error
            finally:
                # vLLM replaces this function in the whole process, but the trainer must keep its threads.
                torch.set_num_threads = set_num_threads
                torch.set_num_threads(threads)
        setattr(import_module("vllm.v1.sample.sampler"), "batched_count_greater_than", _no_ranks)  # noqa: B010
        model_config = self.engine.model_config
        self.vocabulary: int = model_config.get_vocab_size()
        self.positions: int = model_config.max_model_len - 1

    @property
    def model(self) -> nn.Module:
        return self.engine.model_executor.driver_worker.model_runner.model

    def load(self, mark: str, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load all weights. Raises ModelError for unknown or missing names."""
        reload = import_module("vllm.model_executor.model_loader.reload")
        current = import_module("vllm.config").set_current_vllm_config
        with self._lock:
            self.mark = ""  # nothing is served until all weights are loaded
            model, config = self.model, self.engine.vllm_config
            wanted = {name for name, _ in model.named_parameters()}
            with torch.no_grad(), current(config), torch.device(config.device_config.device):
                reload.initialize_layerwise_reload(model)
                try:
                    loaded = set(model.load_weights(iter(weights)))  # pyright: ignore[reportCallIssue]
                except (KeyError, ValueError, AttributeError, RuntimeError) as error:
                    if is_out_of_memory(error):
                        raise
                    raise ModelError(f"vLLM rejects these weights: {first_line(error)}") from error
                reload.finalize_layerwise_reload(model, config.model_config)
                _repack_tied_head(model)
            missing = wanted - loaded
            if missing:
                raise ModelError(
                    f"vLLM was not given all weights of its model: {', '.join(sorted(missing)[:3])} are missing"
                )
            if not self.engine.reset_prefix_cache():
                raise VitalSignError(
                    "vLLM still has keys and values of the old weights: its prefix cache was not reset"
                )
            self.engine.set_weight_version(mark)
            self.mark = mark

    def generate(
        self, mark: str, requests: Sequence[Request], sampling: Sampling, tick: Callable[[], None] = lambda: None
    ) -> list[list[RawCompletion]]:
        """Return the completions of each request. `tick` is called after every step. Raises VitalSignError if the
        loaded weights are not those with the mark `mark`."""
        texts = StopTexts(sampling.stop, self.tokenizer)
        stops = set(sampling.stop_token_ids)
        groups: list[list[Any]] = [[None] * len(request.limits) for request in requests]
        call, waiting = self._begin(mark, requests, sampling, streamed=bool(texts))
        searches = {name: texts.search(requests[index].tokens) for name, (index, _) in waiting.items()}
        try:
            while waiting:
                for output in self._step(call):
                    if output.request_id not in waiting:
                        continue
                    index, number = waiting[output.request_id]
                    [sampled] = output.outputs
                    ids = list(sampled.token_ids)
                    search = searches[output.request_id]
                    end = None if search is None else search.first(ids)
                    if output.finished:
                        self._check_versions(sampled.weight_versions)
                        self.prefilled += len(requests[index].tokens) - (output.num_cached_tokens or 0)
                    elif end is None:
                        continue
                    else:
                        self._abort([output.request_id])
                    size = len(ids) if end is None else end
                    logprobs = [sampled.logprobs[i][token].logprob for i, token in enumerate(ids[:size])]
                    stopped = end is not None or ids[size - 1] in stops
                    groups[index][number] = RawCompletion(ids[:size], logprobs, stopped)
                    del waiting[output.request_id]
                tick()
        finally:
            if waiting:  # an error, or a signal: the next call must start with an empty engine
                self._abort(list(waiting))
            self._outputs.pop(call, None)
        return groups

    def _begin(
        self, mark: str, requests: Sequence[Request], sampling: Sampling, streamed: bool
    ) -> tuple[int, dict[str, tuple[int, int]]]:
        """Submit one vLLM request per completion. Return the call's number, and (prompt index, completion number) by
        vLLM's request name."""
        params_of = import_module("vllm.sampling_params")
        kind = params_of.RequestOutputKind.CUMULATIVE if streamed else params_of.RequestOutputKind.FINAL_ONLY
        common = replace(sampling, seed=0, max_completion_length=1, num_generations=1, stop_token_ids=(), stop=())
        waiting = {}
        with self._lock:
            if not mark or mark != self.mark:
                raise VitalSignError(
                    f"vLLM holds different weights ({self.mark or 'none'}) from those requested ({mark or 'none'})"
                )
            self._calls += 1
            self._outputs[self._calls] = []
            for index, request in enumerate(requests):
                for number, limit in enumerate(request.limits):
                    params = params_of.SamplingParams(
                        temperature=0.0,
                        max_tokens=limit,
                        ignore_eos=True,  # only the given stop tokens count
                        stop_token_ids=[token for token in sampling.stop_token_ids if token < self.vocabulary],
                        logprobs=0,
                        detokenize=False,
                        output_kind=kind,
                        extra_args={ARGUMENT: (common, request.seed & (1 << 64) - 1, number)},
                    )
                    name = f"{self._calls}-{index}-{number}"
                    self.engine.add_request(name, {"prompt_token_ids": list(request.tokens)}, params)
                    waiting[name] = (index, number)
            return self._calls, waiting

    def _step(self, call: int) -> list[Any]:
        """Return outputs of the call's requests, from other calls' steps or otherwise from a new step. Return nothing
        if another call's step is still running after PATIENCE_S."""
        if not self._lock.acquire(timeout=PATIENCE_S):
            return []
        try:
            if not self._outputs[call]:
                for output in self.engine.step():
                    self._outputs.get(int(output.request_id.partition("-")[0]), []).append(output)
            outputs, self._outputs[call] = self._outputs[call], []
            return outputs
        finally:
            self._lock.release()

    def _abort(self, names: list[str]) -> None:
        with self._lock:
            self.engine.abort_request(names)

    def _check_versions(self, spans: Sequence[Any] | None) -> None:
        served = {span.version for span in spans or ()}
        if served - {self.mark}:
            raise VitalSignError(f"vLLM sampled from the weights {', '.join(served)}, but was given {self.mark}")

    def close(self) -> None:
        """Shut vLLM down and release its memory."""
        if hasattr(self, "engine"):
            with self._lock:
                self.engine.engine_core.shutdown()
                del self.engine
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def _check_model(vllm: ModuleType, config: PreTrainedConfig, architecture: str, beside_trainer: bool) -> None:
    """Raise ModelError for a model that vLLM would refuse only during a step, or whose classes it would change in the
    trainer's process."""
    kind, platform = config.model_type, import_module("vllm.platforms").current_platform
    registered = vllm.ModelRegistry.models.get(architecture)
    if beside_trainer and getattr(registered, "module_name", "transformers").endswith("transformers"):
        raise ModelError(
            f"vLLM runs {kind} with transformers' classes and changes them in the whole process, including the "
            "trainer: set rollout.vllm: {mode: server}"
        )
    if platform.is_cpu():
        sizes = import_module("vllm.v1.attention.backends.cpu_attn").CPUAttentionBackend.get_supported_head_sizes()
        if head_size(config) not in sizes:
            raise ModelError(
                f"vLLM cannot run this {kind}: its heads have {head_size(config)} dimensions, but on a CPU vLLM "
                f"supports {', '.join(map(str, sizes))}: set rollout.engine: embedded or transformers"
            )


def _no_ranks(x: Tensor, values: Tensor) -> Tensor:
    """Replaces vLLM's function for the ranks of sampled tokens, which are not used and take 20 seconds to compile."""
    return torch.zeros_like(values[:, 0], dtype=torch.int64)


def _memory(config: PreTrainedConfig, dtype: torch.dtype, share: float) -> dict[str, Any]:
    """Return the arguments of vLLM's engine that depend on memory."""
    if not import_module("vllm.platforms").current_platform.is_cpu():
        return {"gpu_memory_utilization": share, "max_model_len": -1}  # -1: as many tokens as fit
    token_bytes = numbers_per_token(config) * dtype.itemsize
    longest = min((positions_of(config) or CACHE_BYTES) + 1, CACHE_BYTES // token_bytes - 2 * CPU_BLOCK)
    return {
        "kv_cache_memory_bytes": min(CACHE_BYTES, MAX_ROWS * (longest + 2 * CPU_BLOCK) * token_bytes),
        "max_model_len": longest,
        "block_size": CPU_BLOCK,
        "enforce_eager": True,  # compiling takes longer than a short run, and would copy the weights
    }


def _repack_tied_head(model: nn.Module) -> None:
    """Repack the copy of a tied head that vLLM uses on a CPU and does not update with the embedding."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if hasattr(module, "cpu_linear") and "Embedding" in type(method).__name__:
            method.process_weights_after_loading(module)  # pyright: ignore[reportOptionalMemberAccess]
