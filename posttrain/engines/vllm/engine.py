"""The engine that uses vLLM, in this process or in servers: pushed weights are tagged, and requests name the tag.

The ranks of a run share its servers. Each rank sends its prompts to the server whose number is the rank modulo the
number of servers. If there are more servers than ranks, a rank has several and distributes its prompts among them. A
server belongs to the first of its ranks, which starts it, pushes the weights to it, and replaces it if it dies.

All ranks call the methods together. If a server is lost, all ranks learn of it, and its owner restores it with the same
weights before the missing completions are requested again.
"""

import copy
import json
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn
from transformers import PreTrainedTokenizerBase

from posttrain.base.errors import ConfigError, EngineError, EngineLostError, ModelError, VitalSignError
from posttrain.base.log import log
from posttrain.batch import Example, Node, pack
from posttrain.config.schema.rollout import VllmConfig
from posttrain.engines.embedded import evaluating
from posttrain.engines.protocol import (
    Completed,
    Completion,
    Engine,
    Finished,
    Request,
    Sampling,
    StopTexts,
    in_batches,
    not_finite,
    seed_of,
)
from posttrain.engines.vllm.client import Address, Server, side_by_side
from posttrain.engines.vllm.core import Core, RawCompletion
from posttrain.engines.vllm.wire import Named
from posttrain.models.families import base_of, check_positions, positions_of
from posttrain.models.sharding import architecture_of, whole
from posttrain.parallel.ranks import ALONE, Ranks
from posttrain.runs.files import bits
from posttrain.scoring import Scorer

# Identifies a server: the first rank of its machine (0 if its address is configured), and its number on that machine.
Key = tuple[int, int]
Weights = Callable[[], Iterable[Named]]
Generate = Callable[[Sequence[Request], Sampling], list[list[RawCompletion]]]
Adapters = tuple[tuple[bool, tuple[str, ...]], ...]  # per layer: whether its adapters are off, and the active ones
Wrapped = BaseTunerLayer | ModulesToSaveWrapper
Prove = Callable[[Generate], None]  # checks that the weights are those of the last push

PROBE_TOKENS = 8
AT_ONCE = 1024  # maximum number of completions requested at a time, if the caller gives `finished`
# Maximum mean difference (nats) between the log-probabilities of engine and trainer that rounding explains.
ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.1}


class VllmEngine(Engine):
    """Engine that uses vLLM, with the sampling of the other engines: in float32 the same seed gives the same tokens.

    `load` copies the weights, with active adapters merged. If adapters are switched later, the weights are pushed
    again. Every push is verified: all of the model's weights arrived, the prefix cache was emptied, and a few sampled
    tokens have the same log-probabilities as in the trainer.

    All ranks call every method together; a rank without prompts calls `generate` too.

    Raises ModelError if vLLM cannot run the model, ConfigError if vLLM is not installed, EngineError if its server
    fails, VitalSignError if it does not serve the weights it was given.
    """

    def __init__(
        self,
        policy: nn.Module,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        version: int = 0,
        settings: VllmConfig | None = None,
        ranks: Ranks = ALONE,
    ):
        self.tokenizer, self._ranks = tokenizer, ranks
        self._scoring = threading.Lock()  # several servers may be checked at the same time
        with whole(policy):  # gathered weights have the dtype of the computation
            self.host = _host(settings or VllmConfig(), policy, tokenizer, ranks)
        self._run, self._pushes = ranks.gather(uuid.uuid4().hex[:12])[0], 0
        self._pushed: int | None = None  # fingerprint of the pushed weights with their adapters
        self._adapters: Adapters = ()
        try:
            self.load(policy, version)
        except BaseException:
            self.close()
            raise

    def load(self, policy: nn.Module, version: int) -> None:
        """Push the policy's weights if they have changed since the last push."""
        self.policy, self.version = policy, version
        with whole(policy):
            self._push()

    def close(self) -> None:
        """Stop the server, if we started one, and release memory."""
        self.host.close()

    @property
    def _sizes(self) -> tuple[int, int | None]:
        positions = positions_of(base_of(self.policy).config) or self.host.positions
        return self.host.vocabulary, min(self.host.positions, positions)

    def _completed(self, requests: list[Request], sampling: Sampling, finished: Finished | None) -> Completed:
        StopTexts(sampling.stop, self.tokenizer)  # refuses stop strings without a tokenizer
        check_positions(base_of(self.policy).config, max((request.longest for request in requests), default=0))
        if not requests and self._ranks.size == 1:
            return []
        if adapters_of(self.policy) != self._adapters:
            if self._ranks.size > 1:
                raise VitalSignError("adapters were switched on several ranks, but the weights were not pushed")
            self._push()
        at_once = max(1, len(requests) if finished is None else AT_ONCE // sampling.num_generations)
        batches = (requests[start : start + at_once] for start in range(0, max(1, len(requests)), at_once))

        def sample(batch: Sequence[Request]) -> Completed:
            return [
                [Completion(r.tokens, r.logprobs, "stop" if r.stopped else "length", self.version) for r in group]
                for group in self.host.generate(self._mark, batch, sampling)
            ]

        return in_batches(batches, sample, finished)

    @property
    def _mark(self) -> str:
        return f"{self._run}-{self._pushes}"

    def _push(self) -> None:
        now, adapters = fingerprint(self.policy), adapters_of(self.policy)
        if (now, adapters) == (self._pushed, self._adapters):
            return
        self._pushed = None
        self._pushes += 1
        if isinstance(self.host, Core):
            self.host.load(self._mark, weights_of(self.policy))
            self._prove(partial(self.host.generate, self._mark))
        else:
            self.host.load(self._mark, lambda: weights_of(self.policy), self._prove)
        self._pushed, self._adapters = now, adapters

    def _prove(self, generate: Generate) -> None:
        """Sample a few tokens, and compare their log-probabilities with the trainer's."""
        base = base_of(self.policy)
        prompt = [token % self.host.vocabulary for token in (3, 1, 4, 1)]
        count = min(PROBE_TOKENS, (self._sizes[1] or 0) - len(prompt) + 1)
        if count < 1:
            return
        [[sampled]] = generate([Request(0, prompt, 0, (count,))], Sampling(max_completion_length=count))
        logprob_N = torch.tensor(sampled.logprobs)
        if not logprob_N.isfinite().all():
            raise not_finite()
        [packed] = pack([Example((Node(prompt, children=(Node(sampled.tokens, trained=True),)),), 0)], 1 << 20)
        with self._scoring, torch.inference_mode(), evaluating(self.policy):
            trainer = Scorer(self.policy)(packed.to(base.device)).logprob_N.float().cpu()
        difference = (trainer - logprob_N).abs().mean().item()
        if not difference <= ROUNDING.get(base.dtype, ROUNDING[torch.bfloat16]):
            raise VitalSignError(
                f"vLLM does not serve the weights it was given: after the push of version {self.version} the "
                f"log-probabilities of tokens differ by {difference:.3g} nats from the trainer's. It holds stale "
                "weights, or computes this model differently: set rollout.engine: embedded, and report this model"
            )


def _host(
    settings: VllmConfig, policy: nn.Module, tokenizer: PreTrainedTokenizerBase | None, ranks: Ranks
) -> "Core | Servers":
    """Start vLLM in this process, or connect to servers."""
    base = base_of(policy)
    if settings.mode == "server":
        model: dict[str, Any] = {
            "architecture": architecture_of(base),
            "config": json.loads(json.dumps(base.config.to_dict(), default=str)),
            "dtype": str(base.dtype).removeprefix("torch."),
            "tokenizer": _files_of(tokenizer),
        }
        return Servers(settings, model, ranks)
    if ranks.size > 1:
        raise ConfigError(
            "rollout.vllm.mode: colocate does not work with several ranks, because vLLM would use their process group "
            "as its own: set rollout.vllm: {mode: server}"
        )
    return Core(
        base.config,
        type(base).__name__,
        base.dtype,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        tokenizer=tokenizer,
        beside_trainer=True,
    )


def _files_of(tokenizer: PreTrainedTokenizerBase | None) -> dict[str, str] | None:
    """Return the text files of a saved tokenizer, by name; None without a tokenizer."""
    if tokenizer is None:
        return None
    with TemporaryDirectory(prefix="posttrain-vllm-") as folder:
        tokenizer.save_pretrained(folder)
        files = [path for path in Path(folder).iterdir() if path.is_file()]
        return {path.name: path.read_text(encoding="utf-8") for path in files}


class Servers:
    """The servers of a run, as one rank sees them. `model` is the body of /model (wire.py). Raises EngineError if a
    server is absent at the start, runs another version, is silent, or is lost too often."""

    def __init__(self, settings: VllmConfig, model: Mapping[str, Any], ranks: Ranks):
        self._settings, self._model, self._ranks = settings, model, ranks
        urls, gpus = settings.base_url, settings.gpus
        machine = 0 if urls else ranks.index - ranks.local
        index, size = (ranks.index, ranks.size) if urls else (ranks.local, ranks.locals)
        count = len(urls) if urls else settings.servers
        self._mine: dict[Key, Server] = {
            (machine, k): Server(settings, urls[k] if urls else None, gpus[k] if gpus else None)
            for k in range(count)
            if k % size == index % count
        }
        self._owned = {key: server for key, server in self._mine.items() if key[1] % size == index}
        self._mark = ""
        self._weights: Weights = tuple  # the weights of the last `load`; `_prove` checks each push
        self._prove: Prove = lambda generate: None
        try:
            self._exchange(lambda: side_by_side(self._owned.values(), lambda server: server.start(model)))
        except BaseException:
            self.close()
            raise
        self.vocabulary = min(server.at.vocabulary for server in self._mine.values())
        self.positions = min(server.at.positions for server in self._mine.values())

    def load(self, mark: str, weights: Weights, prove: Prove) -> None:
        """Push the weights once to every server, and check each server with `prove`."""
        self._mark, self._weights, self._prove = mark, weights, prove
        self._bring_back(self._ranks.together(lambda: self._lost_in(self._owned, self._push)))

    def generate(self, mark: str, requests: Sequence[Request], sampling: Sampling) -> list[list[RawCompletion]]:
        """Return the completions of this rank's requests."""
        keys = [*self._mine]
        groups: list[list[RawCompletion] | None] = [None] * len(requests)

        def generate(server: Server) -> None:
            key = self._key(server)
            own = [i for i in range(len(requests)) if groups[i] is None and keys[i % len(keys)] == key]
            if not own:
                return
            try:
                completions = server.generate(mark, [requests[i] for i in own], sampling)
            except EngineLostError as error:
                number = sum(len(requests[i].limits) for i in own)
                what = f"{error}; {number} completions of {len(own)} prompts were in flight"
                raise EngineLostError(what) from error
            for i, group in zip(own, completions, strict=True):
                groups[i] = group

        while self._bring_back(self._ranks.together(lambda: self._lost_in(self._mine, generate))):
            pass
        return [group for group in groups if group is not None]

    def _lost_in(self, servers: Mapping[Key, Server], work: Callable[[Server], None]) -> dict[Key, str]:
        """Do the work for every server. Return those that were lost meanwhile, with the reasons."""

        def lost(server: Server) -> str | None:
            try:
                work(server)
            except EngineLostError as error:
                return str(error)
            return None

        reasons = side_by_side(servers.values(), lost)
        return {key: reason for key, reason in zip(servers, reasons, strict=True) if reason is not None}

    def close(self) -> None:
        for server in self._mine.values():
            server.close()

    def _key(self, server: Server) -> Key:
        return next(key for key, other in self._mine.items() if other is server)

    def _push(self, server: Server) -> None:
        server.load(self._mark, self._weights)
        self._prove(partial(server.generate, self._mark))

    def _exchange(self, work: Callable[[], object]) -> None:
        """Do the work of this rank as owner; then exchange the servers' addresses among all ranks."""

        def done() -> dict[Key, Address]:
            work()
            return {key: server.at for key, server in self._owned.items()}

        for addresses in self._ranks.together(done):
            for key, address in addresses.items():
                if key in self._mine:
                    self._mine[key].at = address

    def _bring_back(self, lost: Sequence[Mapping[Key, str]]) -> bool:
        """Replace the servers that any rank has lost, and push the weights to them. Return whether any was lost."""
        reasons = {key: reason for reported in lost for key, reason in reported.items()}
        if not reasons:
            return False
        mine = [server for key, server in self._owned.items() if key in reasons]
        self._exchange(lambda: side_by_side(mine, lambda server: self._replace(server, reasons[self._key(server)])))
        return True

    def _replace(self, server: Server, reason: str) -> None:
        while True:
            server.deaths += 1
            if server.deaths > self._settings.max_restarts:
                raise EngineError(
                    f"{reason}. The server was lost {server.deaths} times, but rollout.vllm.max_restarts is "
                    f"{self._settings.max_restarts}: check its memory and its log, then continue with --resume"
                )
            how = "restarting it" if server.is_ours else f"waiting {self._settings.timeout:g} s for it to return"
            log.warning("%s: %s, then the missing completions are requested again", reason, how)
            try:
                server.revive(self._model)
                self._push(server)
                log.warning("%s is back, with the weights %s", server.where, self._mark)
                return
            except EngineLostError as error:
                reason = str(error)


def adapters_of(policy: nn.Module) -> Adapters:
    """Return the active adapters of each layer; empty for a model without adapters."""
    layers = (module for module in policy.modules() if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper))
    return tuple((bool(layer.disable_adapters), tuple(layer.active_adapters)) for layer in layers)


@torch.no_grad()
def fingerprint(policy: nn.Module) -> int:
    """Return a checksum that almost surely changes when any bit of a weight changes."""
    return seed_of(*(int(bits(parameter).sum(dtype=torch.int64)) for parameter in policy.parameters()))


@torch.no_grad()
def weights_of(policy: nn.Module) -> Iterator[Named]:
    """Yield every weight of the model once, with active adapters merged into copies, which are made one at a time, on
    demand. The policy is not changed. Raises ModelError for quantised weights."""
    base = base_of(policy)
    if getattr(base, "is_quantized", False):
        raise ModelError(
            "vLLM needs unquantised weights, but this model's weights are quantised (load_in_4bit, or posttrain "
            "quantize): set rollout.engine: embedded"
        )
    wrapped = {name: module for name, module in base.named_modules() if isinstance(module, Wrapped)}
    done: set[str] = set()
    for name, parameter in base.named_parameters():
        owner = next((prefix for prefix in wrapped if name.startswith(f"{prefix}.")), None)
        if owner is None:
            yield name, parameter.detach()
        elif owner not in done:
            done.add(owner)
            for inner, tensor in _as_switched(wrapped[owner]).named_parameters():
                yield f"{owner}.{inner}", tensor.detach()


def _as_switched(module: Wrapped) -> nn.Module:
    """Return the layer without PEFT's wrapper, with active adapters merged."""
    if isinstance(module, ModulesToSaveWrapper):
        on = not module.disable_adapters and module.active_adapters
        return module.modules_to_save[module.active_adapters[0]] if on else module.original_module
    if not module.disable_adapters and module.active_adapters:
        module = copy.deepcopy(module)  # merging and unmerging the layer itself would round its weights
        module.merge()
    return module.get_base_layer()
